"""Evaluate a model, a run or a checkpoint on held-out prompts and benchmarks; write evaluation.json
and responses.jsonl.

python -m lightrft evaluate --fsdp --pretrain runs/quickstart/model --eval_data
runs/quickstart/data/test.jsonl
"""

from lightrft.app.cli import command

main = command("evaluate", __doc__)
