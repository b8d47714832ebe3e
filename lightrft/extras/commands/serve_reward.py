"""Serve trained reward models over HTTP, for --reward http://host:port of train_ppo and evaluate.

lightrft serve_reward --reward_pretrain runs/quickstart/rm/model --port 8000
"""

from lightrft.app.cli import command

main = command("serve_reward", __doc__)
