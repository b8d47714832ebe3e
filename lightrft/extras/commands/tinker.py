"""Train and sample a model at the requests of Tinker clients: the SDK `tinker` and its cookbook.

torchrun --nproc_per_node 2 -m lightrft tinker --pretrain Qwen/Qwen3-0.6B --port 8000

A client gets the address as `base_url`. See docs/tinker.md.
"""

from lightrft.app.cli import command

main = command("tinker", __doc__)
