"""Server of reward models, for `--reward http://host:port` of other runs; rewards/remote.py describes the requests.

All ranks compute: rank 0 receives the requests, collects those that wait, and sends them to the others.
"""

import base64
import hmac
import json
import math
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from loguru import logger
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lightrft.config.references import REWARD_KEY
from lightrft.config.sections import DataSection, ServerSection
from lightrft.data.loader import share_of
from lightrft.data.rendering.template import chat_template
from lightrft.data.rendering.tokens import consecutive_tokens, without_ends
from lightrft.rewards.steps import StepRewards
from lightrft.roles.padded import IDS, LENGTHS
from lightrft.roles.reward_model import RewardModel
from lightrft.run.interruption import Interruption
from lightrft.strategy.strategy_base import StrategyBase

POLL_SECONDS = 0.5
"""Longest time between two looks of all ranks at signals, while there are no requests."""

Text = tuple[str, str]
"""Prompt and response."""
Reward = float | dict[str, float]


@dataclass(frozen=True)
class ServedModel:
    """Reward model that reads text with its own tokenizer."""

    label: str
    model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    weight: float = 1.0
    steps: StepRewards | None = None
    """Rewards of the steps of a response, whose sum is the reward, for a process reward model."""

    def problem(self, texts: Sequence[Text]) -> str:
        """Return the reason why a text cannot be scored; empty if all can."""
        longest = max((sum(map(len, self._tokens(*text))) for text in texts), default=0)
        most = self.model.max_tokens
        return f"a text has {longest} tokens, more than --max_tokens_per_microbatch {most} here" if longest > most else ""

    def scores(self, texts: Sequence[Text]) -> list[float]:
        """Return the weighted reward of each text. All ranks call it together, with any number of texts."""
        tokens = [self._tokens(*text) for text in texts]
        ids = [torch.tensor(prompt + response) for prompt, response in tokens]
        padded = pad_sequence(ids, batch_first=True) if ids else torch.zeros(0, 1, dtype=torch.int64)
        rows = self.model.get_scores({IDS: padded, LENGTHS: torch.tensor([len(row) for row in ids], dtype=torch.int64)})
        return [
            self.weight * self._reward(row[: len(both)], response)
            for row, both, (_, response) in zip(rows, ids, tokens, strict=True)
        ]

    def _tokens(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """Tokenize as training does, with the tokens that begin a text, unless it has them, and the end token after it.

        In a prompt that the chat template has rendered, that is the template's.
        """
        end, template_end = self.tokenizer.eos_token, ""
        if self.tokenizer.chat_template:
            template_end = chat_template(DataSection(), self.tokenizer).closing.token
        is_chat = bool(template_end) and template_end in prompt + response
        texts = [prompt, response] if response else ["", prompt]
        texts[1] = without_ends(texts[1], [end, template_end]) + (template_end if is_chat else end)
        prompt_ids, answer_ids = consecutive_tokens(self.tokenizer, texts, special_tokens=not is_chat)
        return prompt_ids, answer_ids

    def _reward(self, scores: torch.Tensor, response: list[int]) -> float:
        if self.steps is None:
            return float(scores[-1])
        return math.fsum(reward for reward in self.steps(response, scores[-len(response) :]) if reward is not None)


class RewardServer:
    """Answers requests until the process is interrupted. All ranks build it and call serve()."""

    def __init__(self, strategy: StrategyBase, models: Sequence[ServedModel], section: ServerSection):
        """Listen at the address on rank 0. Raises ValueError on all ranks if it is in use."""
        self.strategy, self.models = strategy, models
        self._waiting: queue.Queue[tuple[list[Text], Future[list[Reward]]]] = queue.Queue()
        self._http, problem = None, ""
        if strategy.is_rank_0():
            try:
                self._http = _Listener((section.host, section.port), self._waiting, models)
            except OSError as error:
                problem = f"--host {section.host} --port {section.port}: {error.strerror or error}"
        if problem := strategy.mesh.world.broadcast(problem):
            raise ValueError(problem)

    def serve(self) -> None:
        """Answer requests; raise Interrupted on all ranks when one of them is asked to stop."""
        interruption = Interruption(self.strategy.mesh.world)
        self.strategy.announce("")
        if self._http is not None:
            threading.Thread(target=self._http.serve_forever, name="reward-server", daemon=True).start()
            host, port = self._http.server_address[:2]
            logger.info("serving {} at http://{}:{}", ", ".join(each.label for each in self.models), host, port)
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
        texts = self.strategy.mesh.world.broadcast([text for texts, _ in waiting for text in texts])
        if not texts:
            return
        self.strategy.announce("score")
        rewards = self._rewards(texts)
        for request, answer in waiting:
            answer.set_result(rewards[: len(request)])
            rewards = rewards[len(request) :]
        self.strategy.announce("")  # waiting has no time limit

    def _take(self) -> list[tuple[list[Text], "Future[list[Reward]]"]]:
        try:
            jobs = [self._waiting.get(timeout=POLL_SECONDS)]
        except queue.Empty:
            return []
        while not self._waiting.empty():
            jobs.append(self._waiting.get())
        return jobs

    def _rewards(self, texts: list[Text]) -> list[Reward]:
        data = self.strategy.mesh.data
        own = share_of(data.rank, data.size, len(texts))
        parts = {each.label: each.scores(texts[own.start : own.stop]) for each in self.models}
        shares = data.gather(parts)
        columns = {label: [score for share in shares for score in share[label]] for label in parts}
        if len(columns) == 1:
            return next(iter(columns.values()))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class _Listener(ThreadingHTTPServer):
    """HTTP server that puts requests into a queue, and waits for their answers."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], waiting: "queue.Queue[tuple[list[Text], Future[list[Reward]]]]",
        models: Sequence[ServedModel],
    ):  # fmt: skip
        super().__init__(address, _Handler)
        self.waiting, self.models, self.authorization = waiting, models, authorization(os.environ.get(REWARD_KEY, ""))


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, {"status": "ready"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        expected, received = self.server.authorization, self.headers.get("Authorization", "")
        if expected and not hmac.compare_digest(received.encode(), expected.encode()):
            return self._send(401, {"error": f"the request needs the key of the server's {REWARD_KEY}"})
        try:
            texts = _texts(json.loads(body))
        except ValueError as error:
            return self._send(400, {"error": str(error)})
        if problem := next(filter(None, (each.problem(texts) for each in self.server.models)), ""):
            return self._send(400, {"error": problem})
        answer: Future[list[Reward]] = Future()
        self.server.waiting.put((texts, answer))
        self._send(200, {"rewards": answer.result() if texts else []})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log nothing: a run sends thousands of requests."""


def authorization(key: str) -> str:
    """Return the header that a client sends with a key, or with `user:password`; empty without a key."""
    if not key:
        return ""
    return f"Basic {base64.b64encode(key.encode()).decode()}" if ":" in key else f"Bearer {key}"


def _texts(request: Any) -> list[Text]:
    """Return prompt and response of each text of a request. Raise ValueError if it has another form."""
    if not isinstance(request, dict):
        raise ValueError("the request is not a JSON object")
    prompts, responses, queries = (request.get(name) for name in ("prompts", "responses", "query"))
    if prompts is None and responses is None and _is_texts(queries):
        return [(query, "") for query in queries]
    if not (_is_texts(prompts) and _is_texts(responses) and len(prompts) == len(responses)):
        raise ValueError("the request needs `prompts` and `responses`, two lists of texts of one length, or `query`, one list")
    return list(zip(prompts, responses, strict=True))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
