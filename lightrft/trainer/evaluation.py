"""An evaluation as a run of its own: a model's responses to held-out prompts, judged."""

import json
from pathlib import Path

from loguru import logger

from lightrft.config import Config
from lightrft.data.prompts import load_prompts
from lightrft.models.load import load_tokenizer
from lightrft.observe.metrics import Metrics
from lightrft.rollout.rewards import Judge
from lightrft.rollout.sampler import Sampler
from lightrft.strategy import StrategyBase
from lightrft.trainer.build import evaluation, load_expander
from lightrft.trainer.evaluate import evaluate
from lightrft.types import Prompt


class Evaluation:
    """Judges the greedy response to each prompt of --eval_data, and --eval_n_samples others."""

    def __init__(self, config: Config, strategy: StrategyBase):
        tokenizer = load_tokenizer(config.model)
        expand = load_expander(config, tokenizer, engine=True)
        self.prompts: list[Prompt] = load_prompts(config.data, tokenizer, source="eval_data", measure=expand and expand.measure)
        self.config, self.strategy = config, strategy
        self.sampler: Sampler
        self.judge: Judge
        self.sampler, self.judge = evaluation(config, strategy)

    def run(self) -> dict[str, float]:
        """Return the numbers, which rank 0 also writes to save_path/evaluation.json."""
        config, strategy, metrics = self.config, self.strategy, Metrics()
        strategy.announce("evaluate")
        with strategy.engine_awake():
            groups = self.sampler.answer(self.prompts)
        evaluate(groups, self.judge, metrics)
        result = {name.removeprefix("eval/"): value for name, value in metrics.reduce(strategy.mesh.data).items()}
        if strategy.is_rank_0():
            file = Path(config.train.save_path) / "evaluation.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result, indent=2) + "\n")
            accuracy, count = result["accuracy"], int(result["num_samples"])
            logger.info(f"{config.model.pretrain}: accuracy {accuracy:.3f} of {count} prompts -> {file}")
        return result
