"""Server of reward models, for `--reward http://host:port` of other runs.

rewards/remote.py describes the requests. All ranks compute: rank 0 receives the requests, collects
what is waiting, and sends it to the others.
"""

import base64
import hmac
import json
import math
import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from loguru import logger
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.roles.padded import IDS, LENGTHS
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.app.run.interruption import SERVER_STOPS, Interruption
from lightrft.app.run.listener import listener_of_rank_0
from lightrft.config.references import REWARD_KEY
from lightrft.config.sections import DataSection, ServerSection
from lightrft.config.values import check_text
from lightrft.data.loader import share_of
from lightrft.data.rendering.template import chat_template
from lightrft.data.rendering.tokens import consecutive_tokens, without_ends
from lightrft.rewards.steps import StepRewards
from lightrft.strategy.strategy import StrategyBase

POLL_SECONDS = 0.5
"""Longest time between two looks of all ranks at signals, while there are no requests."""

CONNECTION_SECONDS = 600.0
"""Time limit of a connection without a request."""
RECEIVE_SECONDS = 60.0
"""Time limit for a request that has begun."""
MAX_CONNECTIONS = 256
CHUNK = 1 << 16
MAX_REQUEST = 64 << 20
"""Number of bytes of the largest request."""
LETTERS_PER_TOKEN = 64
"""A text with more letters for each token that fits is not even tokenized."""

Text = tuple[str, str]
"""Prompt and response."""
Tokens = tuple[list[int], list[int]]
"""The tokens of both."""
Job = dict[str, list[Tokens]]
"""Label of a model -> the texts of a request, as the model reads them."""
Reward = float | dict[str, float]


Waiting = queue.Queue[tuple[Job, Future[list[Reward]]]]


@dataclass(frozen=True)
class ServedModel:
    """Reward model that reads text with its own tokenizer."""

    label: str
    model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    weight: float = 1.0
    steps: StepRewards | None = None
    """Rewards of the steps of a response, for a process reward model; the reward is the sum."""

    def tokens(self, texts: Sequence[Text]) -> list[Tokens]:
        """Tokenize as training does. Raises ValueError for a text that has more tokens than fit."""
        most = self.model.max_tokens
        for prompt, response in texts:
            if len(prompt) + len(response) > LETTERS_PER_TOKEN * most:
                raise ValueError(
                    f"a text has {len(prompt) + len(response)} letters, more than"
                    f" {LETTERS_PER_TOKEN} for each token of --max_tokens_per_microbatch {most}"
                    " here"
                )

        tokens = [self._tokens(*text) for text in texts]
        longest = max((len(prompt) + len(response) for prompt, response in tokens), default=0)
        if longest > most:
            raise ValueError(
                f"a text has {longest} tokens, more than --max_tokens_per_microbatch {most} here"
            )

        return tokens

    def scores(self, tokens: Sequence[Tokens]) -> list[float]:
        """Return the weighted reward of each text.

        All ranks call it together, with any number of texts.
        """
        ids = [torch.tensor(prompt + response) for prompt, response in tokens]
        padded = (
            pad_sequence(ids, batch_first=True) if ids else torch.zeros(0, 1, dtype=torch.int64)
        )
        rows = self.model.get_scores(
            {IDS: padded, LENGTHS: torch.tensor([len(row) for row in ids], dtype=torch.int64)}
        )

        return [
            self.weight * self._reward(row[: len(both)], response)
            for row, both, (_, response) in zip(rows, ids, tokens, strict=True)
        ]

    def _tokens(self, prompt: str, response: str) -> Tokens:
        """Tokenize as training does.

        The tokens that begin a text are added unless it has them, and the end token follows it. In
        a prompt that the chat template has rendered, the template's end token does.
        """
        end = self.tokenizer.eos_token
        template_end = ""
        if self.tokenizer.chat_template:
            template_end = chat_template(DataSection(), self.tokenizer).closing.token
        is_chat = bool(template_end) and template_end in prompt + response
        texts = [prompt, response] if response else ["", prompt]
        texts[1] = without_ends(texts[1], [end, template_end]) + (template_end if is_chat else end)
        prompt_ids, answer_ids = consecutive_tokens(
            self.tokenizer, texts, special_tokens=not is_chat
        )

        return prompt_ids, answer_ids

    def _reward(self, scores: torch.Tensor, response: list[int]) -> float:
        if self.steps is None:
            return float(scores[-1])
        return math.fsum(
            reward
            for reward in self.steps(response, scores[-len(response) :])
            if reward is not None
        )


class RewardServer:
    """Answers requests until the process is interrupted. All ranks build it and call serve()."""

    def __init__(
        self, strategy: StrategyBase, models: Sequence[ServedModel], section: ServerSection
    ):
        """Listen at the address on rank 0. Raises ValueError on all ranks if it is in use."""
        self.strategy = strategy
        self.models = models
        self._waiting: Waiting = queue.Queue()
        self._http = listener_of_rank_0(
            lambda *address: _Listener(address, self._waiting, models), section, strategy.mesh.world
        )

    def serve(self) -> None:
        """Answer requests; raise Interrupted on all ranks when one of them is asked to stop."""
        interruption = Interruption(self.strategy.mesh.world, SERVER_STOPS)
        self.strategy.announce("")
        if self._http is not None:
            threading.Thread(
                target=self._http.serve_forever, name="reward-server", daemon=True
            ).start()
            host, port = self._http.server_address[:2]
            logger.info(
                "serving {} at http://{}:{}",
                ", ".join(each.label for each in self.models),
                host,
                port,
            )

        try:
            with interruption:
                while True:
                    self._answer_waiting()
                    interruption.safe_point()
        finally:
            if self._http is not None:
                self._http.shutdown()
                self._http.server_close()

    def _answer_waiting(self) -> None:
        """Answer all requests that wait now, in one computation."""
        waiting = self._take() if self._http is not None else []
        joined = {
            each.label: [text for job, _ in waiting for text in job[each.label]]
            for each in self.models
        }
        job = self.strategy.mesh.world.broadcast(joined)
        if not _size(job):
            return

        self.strategy.announce("score")
        rewards = self._rewards(job)
        for request, answer in waiting:
            answer.set_result(rewards[: _size(request)])
            rewards = rewards[_size(request) :]

        self.strategy.announce("")  # waiting has no time limit

    def _take(self) -> list[tuple[Job, Future[list[Reward]]]]:
        try:
            jobs = [self._waiting.get(timeout=POLL_SECONDS)]
        except queue.Empty:
            return []
        while not self._waiting.empty():
            jobs.append(self._waiting.get())
        return jobs

    def _rewards(self, job: Job) -> list[Reward]:
        data = self.strategy.mesh.data
        own = share_of(data.rank, data.size, _size(job))
        parts = {
            each.label: each.scores(job[each.label][own.start : own.stop]) for each in self.models
        }
        shares = data.gather(parts)
        columns = {label: [score for share in shares for score in share[label]] for label in parts}
        if len(columns) == 1:
            return next(iter(columns.values()))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _size(job: Job) -> int:
    """Return the number of texts of a request."""
    return len(next(iter(job.values())))


class _Listener(ThreadingHTTPServer):
    """HTTP server that puts requests into a queue, and waits for the answers.

    Each connection has a thread.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], waiting: Waiting, models: Sequence[ServedModel]):
        super().__init__(address, _Handler)
        self.waiting = waiting
        self.models = models
        self.authorization = authorization(os.environ.get(REWARD_KEY, ""))
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("the connection to {} has ended: {!r}", client_address, sys.exc_info()[1])


class _Unreadable(Exception):
    """Raised for a request that is answered with an error; it has the status and the problem."""


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_SECONDS

    def handle_one_request(self) -> None:
        """Wait for a request, and read it within a time limit, or close the connection."""
        if not self.rfile.peek(1):
            self.close_connection = True
            return
        self._limit = threading.Timer(RECEIVE_SECONDS, self._give_up)
        self._limit.daemon = True
        self._limit.start()
        try:
            super().handle_one_request()
        finally:
            self._limit.cancel()

    def do_GET(self) -> None:
        self._send(200, {"status": "ready"})

    def do_POST(self) -> None:
        try:
            content = self._content()
            self._limit.cancel()  # the answer may take longer than a request may
            texts = _texts(json.loads(content))
            job = {each.label: each.tokens(texts) for each in self.server.models}
        except _Unreadable as error:
            status, problem = error.args
            return self._send(status, {"error": problem})
        except RecursionError:
            return self._send(400, {"error": "the request is JSON of too many brackets"})
        except ValueError as error:
            return self._send(400, {"error": str(error)})

        answer: Future[list[Reward]] = Future()
        self.server.waiting.put((job, answer))
        self._send(200, {"rewards": answer.result() if texts else []})

    def _content(self) -> bytes:
        """Return the body of a request of a client with the key."""
        written = self.headers.get("Content-Length", "")
        length = int(written) if written.isdecimal() and len(written) < 20 else None
        if problem := self._problem(length):
            self.close_connection = True
            # Many clients read no answer before they have sent everything.
            for _ in range(0, length or 0, CHUNK):
                if not self.rfile.read(min(CHUNK, length)):
                    break
            raise problem

        content = self.rfile.read(length)
        if len(content) < length:
            self.close_connection = True
            raise _Unreadable(
                400,
                f"the request has {len(content)} bytes, and not {length} as it says"
                " (Content-Length)",
            )

        return content

    def _problem(self, length: int | None) -> _Unreadable | None:
        expected = self.server.authorization
        received = self.headers.get("Authorization", "")
        # In constant time, so that a key cannot be guessed letter by letter.
        if expected and not hmac.compare_digest(
            received.encode(errors="replace"), expected.encode()
        ):
            return _Unreadable(401, f"the request needs the key of the server's {REWARD_KEY}")
        if length is None:
            return _Unreadable(
                411, "the request does not say how many bytes it has (Content-Length)"
            )

        if length > MAX_REQUEST:
            return _Unreadable(
                413,
                f"the request has {length} bytes, more than {MAX_REQUEST}: send fewer texts at"
                " once",
            )

        return None

    def _give_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log nothing: a run sends thousands of requests."""


def authorization(key: str) -> str:
    """Return the header that a client sends with a key, or with `user:password`.

    It is empty without a key.
    """
    if not key:
        return ""
    return f"Basic {base64.b64encode(key.encode()).decode()}" if ":" in key else f"Bearer {key}"


def _texts(request: Any) -> list[Text]:
    """Return prompt and response of each text of a request.

    Raise ValueError if it has another form.
    """
    if not isinstance(request, dict):
        raise ValueError("the request is not a JSON object")

    check_text(json.dumps(request, ensure_ascii=False))
    prompts, responses, queries = (request.get(name) for name in ("prompts", "responses", "query"))
    if responses is None and _is_texts(queries):  # others send prompts and labels beside it
        return [(query, "") for query in queries]
    if not (_is_texts(prompts) and _is_texts(responses) and len(prompts) == len(responses)):
        raise ValueError(
            "the request needs `prompts` and `responses`, two lists of texts of one length, or"
            " `query`, one list"
        )

    return list(zip(prompts, responses, strict=True))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
