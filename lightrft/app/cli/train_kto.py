"""Train a policy on single answers, each of which is good or bad (KTO).

torchrun --nproc-per-node 2 -m lightrft train_kto --config configs/quickstart_kto.yaml
"""

from lightrft.app.cli import command

main = command("train_kto", __doc__)
