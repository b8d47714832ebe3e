"""Train a policy against a reward with PPO, GRPO and related algorithms.

torchrun --nproc-per-node 2 -m lightrft.cli.train_ppo --config configs/quickstart.yaml
"""

from lightrft.cli import command

main = command("train_ppo", __doc__, __name__)
