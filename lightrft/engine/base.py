"""The contract of a generation engine: what every trainer may ask, whatever engine it is."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightrft.types import Completion

Part = Literal["weights", "kv_cache"]


class EngineError(RuntimeError):
    """The engine was used wrongly, or it broke; a broken engine is not used again."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete."""

    token_ids: list[int]
    multi_modal: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample every request of one call."""

    n: int = 1
    """Samples of each prompt; they share its prefill."""
    max_tokens: int = 1024
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    """Equal inside one engine's tensor-parallel group, different between replicas and steps."""
    stop_token_ids: tuple[int, ...] = ()
    """These end a response, as the tokenizer's end token does; the token itself is kept."""


class Engine(ABC):
    """Generates with its own copy of the actor's weights, and gives its memory back while it sleeps.

    Life of a step: wake("weights"), load_weights(stream, version), wake("kv_cache"), generate(...), sleep().
    All calls are idempotent where that has a meaning; an illegal order raises EngineError.
    """

    def __init__(self, expected: dict[str, torch.Size], *, sleep_level: int = 2):
        self.expected = expected
        """Hugging Face name -> full shape of every tensor that one weight stream must bring."""
        self.sleep_level = sleep_level
        self.version = 0
        """Version of the weights in use; completions carry it."""
        self.awake: set[Part] = {"weights", "kv_cache"}
        self.weights_valid = True
        """False from a sleep of level 2, or a broken stream, until the next complete one."""
        self._failure: BaseException | None = None

    # -- the five verbs

    def generate(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in the order of the requests.

        Log-probs are those of the sampling distribution: at the temperature asked for, and raw (T = 1) when greedy.
        """
        self._check_usable()
        if self.awake != {"weights", "kv_cache"}:
            raise EngineError(f"generate() on a sleeping engine: awake is {sorted(self.awake) or 'nothing'}; call wake() first")
        if not self.weights_valid:
            raise EngineError("generate() without weights: they were dropped by sleep(level 2) or a broken stream; call load_weights() first")
        if not requests:
            return []
        with self._fatal("generate"):
            return self._generate(requests, sampling)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over a complete set of weights: exactly the expected names and shapes, full tensors.

        A wrong, missing or repeated name raises ValueError and leaves the engine unusable until a complete stream came.
        Caches computed with the old weights are dropped.
        """
        self._check_usable()
        if "weights" not in self.awake:
            raise EngineError('load_weights() on a sleeping engine: call wake("weights") first')
        self.weights_valid = False
        self._load_weights(self._checked(named_tensors))
        self.reset_cache()
        self.version = version
        self.weights_valid = True

    def sleep(self, level: int | None = None) -> None:
        """Give memory back. Level 1 keeps the weights on the host, level 2 drops them: a stream must follow."""
        self._check_usable()
        if not self.awake:
            return
        level = level or self.sleep_level
        with self._fatal("sleep"):
            self._sleep(level)
        self.awake = set()
        if level == 2:
            self.weights_valid = False

    def wake(self, part: Part) -> None:
        """Wake "weights" first, then, after the stream, "kv_cache": cache and stream never compete for memory."""
        self._check_usable()
        if part in self.awake:
            return
        if part == "kv_cache" and "weights" not in self.awake:
            raise EngineError('wake("kv_cache") before wake("weights")')
        with self._fatal("wake"):
            self._wake(part)
        self.awake.add(part)

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget every cached prefix and encoder output."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; the engine is not used afterwards."""

    # -- what an adapter implements

    @abstractmethod
    def _generate(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]: ...

    @abstractmethod
    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _sleep(self, level: int) -> None: ...

    @abstractmethod
    def _wake(self, part: Part) -> None: ...

    # -- shared checks

    def _checked(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the stream on, comparing every name and shape with the expected ones."""
        missing = dict(self.expected)
        for name, tensor in named_tensors:
            shape = missing.pop(name, None)
            if shape is None:
                reason = "came twice" if name in self.expected else "is not a weight of the engine's model"
                raise ValueError(f"weight stream: {name} {reason}")
            if tensor.shape != shape:
                raise ValueError(f"weight stream: {name} has shape {tuple(tensor.shape)}, the engine expects {tuple(shape)}")
            yield name, tensor
        if missing:
            raise ValueError(f"weight stream: {len(missing)} weights never came, the first is {next(iter(missing))}")

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine broke earlier and cannot be used: {self._failure!r}") from self._failure

    def _fatal(self, verb: str) -> "_Fatal":
        return _Fatal(self, verb)


class _Fatal:
    """An exception inside the engine ends its life: its state is unknown afterwards."""

    def __init__(self, engine: Engine, verb: str):
        self.engine, self.verb = engine, verb

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.engine._failure = error
            if isinstance(error, Exception):
                raise EngineError(f"{type(self.engine).__name__}.{self.verb} failed: {error}") from error
