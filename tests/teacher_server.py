"""A small OpenAI-compatible server for one test.

In a process of its own, a real model scores the tokens of prompts.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from json_server import JsonHandler


@contextmanager
def teacher_server(
    folder: str, *, busy: int = 0, short: bool = False, key: str = ""
) -> Iterator[str]:
    """Serve a model, and yield the URL.

    The first `busy` requests are answered with 503. With `short` it returns one log-prob too few.
    With a `key` it answers only requests that bring it.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(server, folder, busy, short, key), daemon=True
    )
    process.start()
    server.socket.close()

    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        process.kill()
        process.join()


def _serve(server: ThreadingHTTPServer, folder: str, busy: int, short: bool, key: str) -> None:
    torch.set_num_threads(1)
    Handler.model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    Handler.tokenizer = AutoTokenizer.from_pretrained(folder)
    Handler.busy = busy
    Handler.short = short
    Handler.key = key
    server.serve_forever()


class Handler(JsonHandler):
    model: Any
    tokenizer: Any
    busy: int
    short: bool
    key: str

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "teacher"}]} if self.path == "/v1/models" else None)

    def do_POST(self) -> None:
        request = self.read_json()
        asked = {
            "model": "teacher",
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
            "temperature": 1.0,
        }
        right = self.path == "/v1/completions" and request == asked | {"prompt": request["prompt"]}
        self._answer(self._score(request["prompt"]) if right else None)

    def _score(self, ids: list[int]) -> dict[str, Any]:
        tokens = torch.tensor(ids)
        with torch.no_grad():
            logits = self.model(tokens[None]).logits[0, :-1, : len(self.tokenizer)]
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].tolist()
        found = [None, *logprobs][: len(ids) - self.short]

        return {
            "choices": [
                {
                    "logprobs": {
                        "token_logprobs": found,
                        "tokens": [self.tokenizer.decode([token]) for token in ids],
                    }
                }
            ]
        }

    def _answer(self, content: dict[str, Any] | None) -> None:
        cls = type(self)
        cls.busy -= 1
        right = not cls.key or self.headers["Authorization"] == f"Bearer {cls.key}"
        code = 503 if cls.busy >= 0 else 401 if not right else 200 if content else 400
        self.send_json(content if code == 200 else {"error": "not so"}, code)
