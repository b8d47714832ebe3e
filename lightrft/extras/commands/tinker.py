"""Train and sample a model at the requests of Tinker clients: the SDK `tinker` and its cookbook.

torchrun --nproc_per_node 2 -m lightrft tinker --pretrain Qwen/Qwen3-0.6B --port 8000

A client gets the address as `base_url`. See docs/tinker.md.
"""

from functools import partial

from lightrft.app.cli import run_command

main = partial(run_command, "tinker", __doc__)
