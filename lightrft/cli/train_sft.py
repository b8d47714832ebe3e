"""Train a model on the answers of a data set (supervised fine-tuning).

torchrun --nproc-per-node 2 -m lightrft.cli.train_sft --config configs/quickstart_sft.yaml
"""

from lightrft.cli import run_command


def main(argv: list[str] | None = None) -> None:
    run_command("train_sft", __doc__, argv)


if __name__ == "__main__":
    main()
