"""Train a process reward model on answers whose steps are judged, each as right or wrong.

torchrun --nproc-per-node 2 -m lightrft.cli.train_prm --config configs/quickstart_prm.yaml
"""

from lightrft.cli import run_command


def main(argv: list[str] | None = None) -> None:
    run_command("train_prm", __doc__, argv)


if __name__ == "__main__":
    main()
