"""Serve a model over HTTP: the OpenAI-compatible server that agents have in training, alone.

lightrft serve --pretrain runs/guess_number/model --port 8000

Requests with the header `x-session-id` continue a session, whose turns are never tokenized again.
"""

from lightrft.app.cli import command

main = command("serve", __doc__)
