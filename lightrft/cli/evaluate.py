"""Judge a model's greedy responses to held-out prompts; writes save_path/evaluation.json.

python -m lightrft.cli.evaluate --fsdp --pretrain runs/quickstart/model --eval_data runs/quickstart/data/test.jsonl
"""

import json
from pathlib import Path

from loguru import logger

from lightrft.cli.door import enter
from lightrft.config import Config
from lightrft.data.prompts import load_prompts
from lightrft.models.load import load_tokenizer
from lightrft.observe.metrics import Metrics
from lightrft.strategy import StrategyBase
from lightrft.trainer.build import evaluation
from lightrft.trainer.evaluate import evaluate


def run(config: Config, strategy: StrategyBase) -> None:
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.data, tokenizer, held_out=True)
    sampler, judge = evaluation(config, strategy, tokenizer)
    metrics = Metrics()
    evaluate(sampler, judge, prompts, metrics)
    result = {name.removeprefix("eval/"): value for name, value in metrics.reduce(strategy.mesh.data).items()}
    if strategy.is_rank_0():
        file = Path(config.train.save_path) / "evaluation.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=2) + "\n")
        logger.info(f"{config.model.pretrain}: accuracy {result['accuracy']:.3f} on {int(result['num_samples'])} prompts -> {file}")


def main(argv: list[str] | None = None) -> None:
    enter("evaluate", run, __doc__, argv)


if __name__ == "__main__":
    main()
