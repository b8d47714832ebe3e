"""Train a policy on single answers, each of which is good or bad (KTO).

torchrun --nproc-per-node 2 -m lightrft train_kto --config configs/quickstart_kto.yaml
"""

from functools import partial

from lightrft.app.cli import run_command

main = partial(run_command, "train_kto", __doc__)
