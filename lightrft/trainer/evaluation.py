"""Evaluation as a run of its own: a model generates responses to held-out prompts, and they are scored."""

import json
from pathlib import Path

from loguru import logger

from lightrft.checkpoint.final_model import with_merged_pretrain
from lightrft.config.sections import Config
from lightrft.data.prompts import load_prompts
from lightrft.engine.requests import derived_seed
from lightrft.models.load import load_tokenizer
from lightrft.observe.metrics import Metrics
from lightrft.rewards.runner import RewardRunner
from lightrft.rollout.sampler import Sampler
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.build import build_rewards, evaluation, load_expander
from lightrft.trainer.evaluate import evaluate
from lightrft.types import Prompt


class Evaluation:
    """Scores the greedy response to each prompt of --eval_data, and --eval_n_samples sampled ones."""

    def __init__(self, config: Config, strategy: StrategyBase):
        loaded = with_merged_pretrain(config, strategy.mesh.world)
        tokenizer = load_tokenizer(loaded.model)
        expand = load_expander(loaded, tokenizer, engine=True)
        self.rewards: RewardRunner = build_rewards(loaded, strategy)
        self.prompts: list[Prompt] = load_prompts(
            config.data, tokenizer, source="eval_data", row_problem=self.rewards.row_problem, measure=expand and expand.measure
        )
        self.rewards.check(self.prompts)
        self.config, self.strategy = config, strategy
        self.sampler: Sampler = evaluation(loaded, strategy, self.rewards)

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
