"""Train a policy on pairs of answers, of which one is preferred (direct preference optimisation).

torchrun --nproc-per-node 2 -m lightrft train_dpo --config configs/quickstart_dpo.yaml
"""

from lightrft.app.cli import command

main = command("train_dpo", __doc__)
