"""Train a policy by PPO, GRPO and their family against a reward.

torchrun --nproc-per-node 2 -m lightrft.cli.train_ppo --config configs/quickstart.yaml
"""

from lightrft.cli.door import enter
from lightrft.config import Config
from lightrft.strategy import StrategyBase
from lightrft.trainer.build import ppo_trainer


def train(config: Config, strategy: StrategyBase) -> None:
    ppo_trainer(config, strategy).fit()


def main(argv: list[str] | None = None) -> None:
    enter("train_ppo", train, __doc__, argv)


if __name__ == "__main__":
    main()
