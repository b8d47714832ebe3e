"""Train a reward model on pairs of answers, of which one is preferred.

torchrun --nproc-per-node 2 -m lightrft.cli.train_rm --config configs/quickstart_rm.yaml
"""

from lightrft.cli import run_command


def main(argv: list[str] | None = None) -> None:
    run_command("train_rm", __doc__, argv)


if __name__ == "__main__":
    main()
