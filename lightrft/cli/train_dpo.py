"""Train a policy on pairs of answers, of which one is preferred (direct preference optimisation).

torchrun --nproc-per-node 2 -m lightrft.cli.train_dpo --config configs/quickstart_dpo.yaml
"""

from lightrft.cli import enter


def main(argv: list[str] | None = None) -> None:
    enter("train_dpo", __doc__, argv)


if __name__ == "__main__":
    main()
