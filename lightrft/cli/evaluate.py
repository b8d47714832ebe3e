"""Evaluate a model, a run or a checkpoint on held-out prompts and benchmarks; write evaluation.json
and responses.jsonl.

python -m lightrft.cli.evaluate --fsdp --pretrain runs/quickstart/model --eval_data
runs/quickstart/data/test.jsonl
"""

from lightrft.cli import command

main = command("evaluate", __doc__, __name__)
