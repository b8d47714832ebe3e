"""Server of reward models, for `--reward http://host:port` of other runs.

rewards/remote.py describes the requests. All ranks compute: rank 0 receives the requests, collects
what is waiting, and sends it to the others.
"""

import asyncio
import base64
import json
import math
import os
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from loguru import logger
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.app.run.interruption import SERVER_STOPS, Interruption
from lightrft.config.references import REWARD_KEY
from lightrft.config.sections import DataSection, ServerSection
from lightrft.config.values import check_text
from lightrft.core.samples import Answer, Prompt, TokenIds
from lightrft.data.conversations import flat_columns
from lightrft.data.loader import share_of
from lightrft.data.rendering.template import chat_template
from lightrft.data.rendering.tokens import consecutive_tokens, without_ends
from lightrft.extras import http_server
from lightrft.rewards.steps import StepRewards
from lightrft.strategy.strategy import StrategyBase

LETTERS_PER_TOKEN = 64
"""A text with more characters for each token that fits is not even tokenized."""

Text = tuple[str, str]
"""Prompt and response."""
Tokens = tuple[list[int], list[int]]
"""The tokens of both."""
Job = dict[str, list[Tokens]]
"""Label of a model -> the texts of a request, as the model reads them."""
Reward = float | dict[str, float]


@dataclass(frozen=True)
class ServedModel:
    """Reward model that reads text with its own tokenizer."""

    label: str
    model: RewardModel
    tokenizer: Tokenizer
    weight: float = 1.0
    steps: StepRewards | None = None
    """Rewards of the steps of a response, for a process reward model; the reward is the sum."""

    def tokens(self, texts: Sequence[Text]) -> list[Tokens]:
        """Tokenize as training does. Raises ValueError for a text that has more tokens than fit."""
        most = self.model.max_tokens
        for prompt, response in texts:
            if len(prompt) + len(response) > LETTERS_PER_TOKEN * most:
                raise ValueError(
                    f"a text has {len(prompt) + len(response)} characters, more than"
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
        texts = [
            (Prompt(0, "", prompt), Answer(TokenIds(response), [True] * len(response)))
            for prompt, response in tokens
        ]
        columns = flat_columns(texts)
        rows = self.model.get_flat_scores(columns).split(columns["lengths"].tolist())
        scored = zip(rows, tokens, strict=True)
        return [self.weight * self._reward(row, response) for row, (_, response) in scored]

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
        rewards = self.steps(response, scores[-len(response) :])
        return math.fsum(reward for reward in rewards if reward is not None)


@dataclass(eq=False)
class RewardServer:
    """Answers requests until the process is interrupted. All ranks build it and call serve()."""

    strategy: StrategyBase
    models: Sequence[ServedModel]
    section: ServerSection

    def __post_init__(self) -> None:
        """Listen at the address on rank 0. Raises ValueError on all ranks if it is in use."""
        self._waiting: queue.Queue[tuple[Job, Future[list[Reward]]]] = queue.Queue()
        self._authorization = authorization(os.environ.get(REWARD_KEY, ""))
        self._listener = http_server.listener_of_rank_0(self.section, self.strategy.mesh.world)

    def serve(self) -> None:
        """Answer requests; raise Interrupted on all ranks when one of them is asked to stop."""
        self.strategy.announce("")
        with Interruption(self.strategy.mesh.world, SERVER_STOPS) as interruption:
            if self._listener is not None:
                routes = [
                    Route("/{path:path}", self._ready, methods=["GET"]),
                    Route("/{path:path}", self._answer, methods=["POST"]),
                ]
                address = http_server.start_answering(Starlette(routes=routes), self._listener)
                labels = ", ".join(each.label for each in self.models)
                logger.info("serving {} at {}", labels, address)
            while True:
                self._answer_waiting()
                interruption.safe_point()

    async def _ready(self, _: Request) -> JSONResponse:
        return JSONResponse({"status": "ready"})

    async def _answer(self, request: Request) -> Response:
        """Return the rewards of the texts in a request, or what is wrong with it."""
        response, _ = await http_server.answered(
            self._rewarded(request),
            lambda refusal: JSONResponse({"error": refusal.message}, refusal.status),
        )
        return response

    async def _rewarded(self, request: Request) -> Response:
        presented = request.headers.get("authorization", "")
        http_server.check_key(presented, self._authorization, f"that of the server's {REWARD_KEY}")
        texts = _texts(json.loads(await http_server.content_of(request, http_server.MAX_REQUEST)))
        job = await asyncio.to_thread(self._tokens, texts)
        answer: Future[list[Reward]] = Future()
        self._waiting.put((job, answer))
        return JSONResponse({"rewards": await asyncio.wrap_future(answer) if texts else []})

    def _tokens(self, texts: list[Text]) -> Job:
        return {each.label: each.tokens(texts) for each in self.models}

    def _answer_waiting(self) -> None:
        """Answer all requests that wait now, in one computation."""
        waiting = self._take() if self._listener is not None else []
        joined = {
            model.label: [text for job, _ in waiting for text in job[model.label]]
            for model in self.models
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
            jobs = [self._waiting.get(timeout=http_server.POLL_SECONDS)]
        except queue.Empty:
            return []
        while not self._waiting.empty():
            jobs.append(self._waiting.get())
        return jobs

    def _rewards(self, job: Job) -> list[Reward]:
        data = self.strategy.mesh.data
        rows = share_of(data.rank, data.size, _size(job))
        local = {
            model.label: model.scores(job[model.label][rows.start : rows.stop])
            for model in self.models
        }
        shares = data.gather(local)
        columns = {label: [score for share in shares for score in share[label]] for label in local}
        if len(columns) == 1:
            return next(iter(columns.values()))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _size(job: Job) -> int:
    """Return the number of texts of a request."""
    return len(next(iter(job.values())))


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
