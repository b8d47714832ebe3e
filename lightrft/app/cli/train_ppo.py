"""Train a policy against a reward with PPO, GRPO and related algorithms.

torchrun --nproc-per-node 2 -m lightrft train_ppo --config configs/quickstart.yaml
"""

from functools import partial

from lightrft.app.cli import run_command

main = partial(run_command, "train_ppo", __doc__)
