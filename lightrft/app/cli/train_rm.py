"""Train a reward model on pairs of answers, of which one is preferred.

torchrun --nproc-per-node 2 -m lightrft train_rm --config configs/quickstart_rm.yaml
"""

from lightrft.app.cli import command

main = command("train_rm", __doc__)
