"""Train a process reward model on answers whose steps are judged, each as right or wrong.

torchrun --nproc-per-node 2 -m lightrft train_prm --config configs/quickstart_prm.yaml
"""

from lightrft.app.cli import command

main = command("train_prm", __doc__)
