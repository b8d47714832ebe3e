"""Train a policy on single answers, each of which is good or bad (KTO).

torchrun --nproc-per-node 2 -m lightrft.cli.train_kto --config configs/quickstart_kto.yaml
"""

from lightrft.cli import run_command


def main(argv: list[str] | None = None) -> None:
    run_command("train_kto", __doc__, argv)


if __name__ == "__main__":
    main()
