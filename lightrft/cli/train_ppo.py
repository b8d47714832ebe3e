"""Train a policy against a reward with PPO, GRPO and related algorithms.

torchrun --nproc-per-node 2 -m lightrft.cli.train_ppo --config configs/quickstart.yaml
"""

from lightrft.cli import run_command


def main(argv: list[str] | None = None) -> None:
    run_command("train_ppo", __doc__, argv)


if __name__ == "__main__":
    main()
