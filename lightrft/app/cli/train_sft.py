"""Train a model on the answers of a data set (supervised fine-tuning).

torchrun --nproc-per-node 2 -m lightrft train_sft --config configs/quickstart_sft.yaml
"""

from lightrft.app.cli import command

main = command("train_sft", __doc__)
