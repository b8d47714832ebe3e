"""Train a process reward model on answers whose steps are judged, each as right or wrong.

torchrun --nproc-per-node 2 -m lightrft train_prm --config configs/quickstart_prm.yaml
"""

from functools import partial

from lightrft.app.cli import run_command

main = partial(run_command, "train_prm", __doc__)
