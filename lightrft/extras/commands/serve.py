"""Serve a model over HTTP: the OpenAI-compatible server that agents have in training, alone.

lightrft serve --pretrain runs/guess_number/model --port 8000

Requests with the header `x-session-id` continue a session, whose turns are never tokenized again.
"""

from functools import partial

from lightrft.app.cli import run_command

main = partial(run_command, "serve", __doc__)
