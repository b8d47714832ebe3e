"""Judge a model's greedy responses to held-out prompts; writes save_path/evaluation.json.

python -m lightrft.cli.evaluate --fsdp --pretrain runs/quickstart/model --eval_data runs/quickstart/data/test.jsonl
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from loguru import logger

from lightrft.cli.door import enter
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


def build(config: Config, strategy: StrategyBase) -> Callable[[], None]:
    tokenizer = load_tokenizer(config.model)
    expand = load_expander(config, tokenizer, engine=True)
    prompts = load_prompts(config.data, tokenizer, source="eval_data", measure=expand and expand.measure)
    return partial(run, config, strategy, prompts, *evaluation(config, strategy, prompts))


def run(config: Config, strategy: StrategyBase, prompts: list[Prompt], sampler: Sampler, judge: Judge) -> None:
    metrics = Metrics()
    strategy.announce("evaluate")
    with strategy.engine_awake():
        groups = sampler.answer(prompts)
    evaluate(groups, judge, metrics)
    result = {name.removeprefix("eval/"): value for name, value in metrics.reduce(strategy.mesh.data).items()}
    if strategy.is_rank_0():
        file = Path(config.train.save_path) / "evaluation.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=2) + "\n")
        accuracy, count = result["accuracy"], int(result["num_samples"])
        logger.info(f"{config.model.pretrain}: accuracy {accuracy:.3f} of {count} prompts -> {file}")


def main(argv: list[str] | None = None) -> None:
    enter("evaluate", build, __doc__, argv)


if __name__ == "__main__":
    main()
