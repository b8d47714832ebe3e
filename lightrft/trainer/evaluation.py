"""Evaluation as a run of its own: a model generates responses to held-out prompts, and they are scored."""

import json
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from lightrft.config.sections import Config
from lightrft.engine.requests import derived_seed
from lightrft.observe.metrics import Metrics
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.sampler import Sampler
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.evaluate import evaluate
from lightrft.types import Prompt


class Evaluation:
    """Scores the greedy response to each prompt of --eval_data, and --eval_n_samples sampled ones."""

    def __init__(
        self, config: Config, strategy: StrategyBase, prompts: Sequence[Prompt], sampler: Sampler, rewards: RewardRunner
    ):
        self.config, self.strategy, self.prompts = config, strategy, prompts
        self.sampler, self.rewards = sampler, rewards

    def run(self) -> dict[str, float]:
        """Return the metrics, which rank 0 also writes to save_path/evaluation.json."""
        config, strategy, metrics = self.config, self.strategy, Metrics()
        strategy.announce("evaluate")
        with strategy.engine_awake():
            groups = self.sampler.answer(self.prompts, seed=derived_seed(config.train.seed, "evaluation"))
        evaluate(groups, self.rewards, metrics, strategy.mesh.data)
        result = {name.removeprefix("eval/"): value for name, value in metrics.reduce(strategy.mesh.data).items()}
        if strategy.is_rank_0():
            file = Path(config.train.save_path) / "evaluation.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result, indent=2) + "\n")
            found = f"accuracy {result['accuracy']:.3f}" if "accuracy" in result else f"mean reward {result['reward']:.4g}"
            logger.info("{}: {} of {} prompts -> {}", config.model.pretrain, found, int(result["num_samples"]), file)
        return result
