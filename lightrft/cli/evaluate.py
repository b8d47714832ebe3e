"""Evaluate a model, a run or a checkpoint on held-out prompts and benchmarks; write evaluation.json
and responses.jsonl.

python -m lightrft.cli.evaluate --fsdp --pretrain runs/quickstart/model --eval_data
runs/quickstart/data/test.jsonl
"""

from lightrft.cli import run_command


def main(argv: list[str] | None = None) -> None:
    run_command("evaluate", __doc__, argv)


if __name__ == "__main__":
    main()
