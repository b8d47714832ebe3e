"""Supervised fine-tuning on the answers of a data set.

torchrun --nproc-per-node 2 -m lightrft.cli.train_sft --config configs/quickstart_sft.yaml
"""

from lightrft.cli.door import enter
from lightrft.trainer.build import sft_trainer


def main(argv: list[str] | None = None) -> None:
    enter("train_sft", lambda config, strategy: sft_trainer(config, strategy).fit, __doc__, argv)


if __name__ == "__main__":
    main()
