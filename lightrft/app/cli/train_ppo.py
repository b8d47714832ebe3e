"""Train a policy against a reward with PPO, GRPO and related algorithms.

torchrun --nproc-per-node 2 -m lightrft train_ppo --config configs/quickstart.yaml
"""

from lightrft.app.cli import command

main = command("train_ppo", __doc__)
