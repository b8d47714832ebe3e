"""The contract of a generation engine: what every trainer may ask, whatever engine it is."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightrft.config import EngineSection
from lightrft.engine.first_token import Finished, first_token_apart
from lightrft.engine.media import MEDIA, digest, read
from lightrft.engine.model_info import Vocabulary
from lightrft.engine.requests import Expanded, Request, Sampling, derived_seed, strange
from lightrft.engine.stops import StopStrings
from lightrft.parallel.collectives import Axis
from lightrft.types import Completion
from lightrft.weight_sync.verify import ROUNDS, Fingerprints

Part = Literal["weights", "kv_cache"]


class EngineError(RuntimeError):
    """The engine was used wrongly, or it broke; a broken engine is not used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an adapter needs to start its engine on this rank."""

    section: EngineSection
    model_path: str
    """Hugging Face folder or hub name."""
    dtype: torch.dtype
    device: torch.device
    axis: Axis
    """The consecutive ranks that share this engine's weights."""
    max_model_len: int
    """Longest prompt and response together, in tokens."""
    seed: int = 0
    trust_remote_code: bool = False
    from_stream: bool = False
    """Do not read the checkpoint: the first weights come by load_weights(), before the first generate()."""


class Engine(ABC):
    """Generates with its own copy of the actor's weights, and gives its memory back while it sleeps.

    Life of a step: wake("weights"), load_weights(stream, version), wake("kv_cache"), generate(...), sleep().
    All calls are idempotent where that has a meaning; an illegal order raises EngineError.
    Ranks that share an engine (its `axis`) make the same calls with the same arguments.
    """

    media: ClassVar[tuple[str, ...]] = tuple(MEDIA)
    """What this engine generates from, beside text, where its model can."""

    def __init__(self, expected: dict[str, torch.Size], *, sleep_level: int = 2, axis: Axis | None = None,
                 max_model_len: int | None = None, vocabulary: Vocabulary | None = None):
        self.expected = expected
        """Hugging Face name -> full shape of every tensor that one weight stream must bring."""
        self.sleep_level = sleep_level
        self.axis = axis or Axis("engine", 1, 0, None)
        self.max_model_len = max_model_len
        self.vocabulary = vocabulary
        """Without one token ids are not checked, nothing is banned by itself, and there are no stop strings."""
        self.limits: dict[str, int] = {}
        """The media that it generates from, and the most of each in one prompt; empty: text only."""
        self.model_reads: tuple[str, ...] = ()
        """The media that its model reads, where the engine may take fewer of them."""
        self.version = 0
        """Version of the weights in use; completions carry it."""
        self.awake: set[Part] = {"weights", "kv_cache"}
        self.weights_valid = True
        """False from a sleep of level 2, or a broken stream, until the next complete one."""
        self.verify_dtype: torch.dtype | None = None
        """Streamed weights must be found in the engine, compared in this dtype, its own; None: they are not verified."""
        self.verify_round: int | None = None
        """The part of the weights that the next sync verifies; None: all of them."""
        self.places_verified = False
        """The sync before this one was verified, so weights are where they are looked for, and may be copied there."""
        self.closed = False
        self._failure: BaseException | None = None

    # -- the five verbs

    def generate(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return `n` completions for each request, in the order of the requests; see stream()."""
        completions = dict(self.stream(requests, sampling))
        return [completions[index] for index in range(len(requests))]

    def stream(self, requests: list[Request], sampling: Sampling) -> Finished:
        """Yield (index, its `n` completions) of each request once it has them all, in any order, while others still run.

        Log-probs are those of the distribution that was sampled: without banned tokens, at the temperature asked for, of the
        top p of the top k; raw (T = 1) when greedy. The seed of a sample alone decides its noise: not how requests are batched,
        nor what else draws random numbers. ValueError, before anything is generated, when a request cannot be answered; the
        engine stays usable then. It is of no use any more when the caller stops reading before the end.
        """
        self._check_usable()
        if self.awake != {"weights", "kv_cache"}:
            raise EngineError(f"generate() on a sleeping engine: awake is {sorted(self.awake) or 'nothing'}; call wake() first")
        if not self.weights_valid:
            raise EngineError("generate() without weights (sleep level 2, or a broken stream): call load_weights() first")
        placeholders = self.vocabulary.placeholder_token_ids if self.vocabulary else ()
        own = [replace(each, sampling=(each.sampling or sampling).resolved(placeholders)) for each in requests]
        own = [each if each.seeds else replace(each, seeds=_seeds(sampling.seed, place, each)) for place, each in enumerate(own)]
        return self._stream(self._readable(own, sampling))

    def _stream(self, requests: list[Request]) -> Finished:
        if not requests:
            return
        with self._fatal("generate"):
            self._failure = EngineError("its completions were not read to the end")
            for index, samples in first_token_apart(self._generate, requests):
                yield index, self._cut(samples, requests[index].sampling.stop)
            self._failure = None

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over a complete set of weights: exactly the expected names and shapes, full tensors.

        A wrong, missing or repeated name raises ValueError and leaves the engine unusable until a complete stream came.
        Caches computed with the old weights are dropped. EngineError, on all ranks of the engine, when what it computes with
        afterwards is not what was streamed, or a cache is left. The first sync, and one after a failure, is verified
        as a whole, others in rounds, each of a part (weight_sync/verify.py).
        """
        self._check_usable()
        if "weights" not in self.awake:
            raise EngineError('load_weights() on a sleeping engine: call wake("weights") first')
        self.weights_valid = False
        round, self.verify_round = self.verify_round, None
        self.places_verified = round is not None
        stream = self._checked(named_tensors)
        sent = self._fingerprints(self.verify_dtype, round) if self.verify_dtype else None
        self._load_weights(stream if sent is None else sent.watch(stream))
        for name, _ in stream:  # the end of the stream is where missing names are found
            raise EngineError(f"{type(self).__name__} stopped reading the weight stream at {name}")
        self.reset_cache()
        if sent is not None:
            self._verify(sent)
            self.verify_round = 0 if round is None else (round + 1) % ROUNDS
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

    def parts(self, token_ids: list[int]) -> dict[str, Tensor]:
        """What each part of the model gives for these tokens, see Probe; the prefix cache is dropped. For the doctor."""
        self._check_usable()
        self._readable([Request(token_ids, sampling=Sampling(max_tokens=1), seeds=(0,))], Sampling(max_tokens=1))
        self.reset_cache()
        with self._fatal("parts"):
            return self._parts(token_ids)

    def close(self) -> None:
        """Free everything; every later call but close() raises."""
        if not self.closed:
            self.closed = True
            self._close()

    # -- what an adapter implements

    @abstractmethod
    def _generate(self, requests: list[Request]) -> Finished:
        """Yield (index, completions) of each request, once. Every request has its sampling and a seed for each sample.

        Stop strings should end a sample; what an engine generates beyond them is cut off.
        """

    def _expanded(self, request: Request) -> Expanded:
        """A prompt with media as the model reads it; ValueError when it cannot. Called for those that have a limit."""
        raise NotImplementedError(f"{type(self).__name__} says that it takes media")

    @abstractmethod
    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _sleep(self, level: int) -> None: ...

    @abstractmethod
    def _wake(self, part: Part) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    # -- what an adapter implements so that one can look into it

    def _parts(self, token_ids: list[int]) -> dict[str, Tensor]:
        """Probe.parts(); here for an engine whose model is out of reach: nothing."""
        return {}

    # -- what an adapter implements to verify its weights

    def _fingerprints(self, dtype: torch.dtype, round: int | None) -> Fingerprints:
        """Empty ones; here for an engine that keeps every weight as it came."""
        return Fingerprints(self.expected, dtype, slices=self.axis.size, round=round)

    def _held(self, prints: Fingerprints) -> tuple[Tensor, Tensor]:
        """prints.numbers() of all that this rank's part of the engine computes with, read now and where it lies."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it holds")

    def _wrong(self, sent: Fingerprints) -> list[str]:
        """Names of what is not, in all ranks of the engine together, what was sent; here by numbers that add up."""
        held = self._held(self._fingerprints(sent.dtype, sent.round))
        return sent.wrong([self.axis.sum(numbers) for numbers in held])

    @abstractmethod
    def _num_cached(self) -> int:
        """Blocks of prefixes that the next request could still use."""

    # -- shared checks

    def _verify(self, sent: Fingerprints) -> None:
        """EngineError unless the engine has what was sent, and nothing computed before."""
        problems = []
        if wrong := self._wrong(sent):
            problems.append(f"{wrong[0]} in the engine is not what was sent ({len(wrong)} of {len(self.expected)} differ)")
        if cached := self._num_cached():
            problems.append(f"{cached} blocks of the prefix cache are of the old weights")
        for rank, problem in enumerate(self.axis.gather("; ".join(problems))):
            if problem:
                raise EngineError(f"weight sync, rank {rank} of the engine: {problem}")

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

    def _readable(self, requests: list[Request], sampling: Sampling) -> list[Request]:
        """The requests, those with media as the model reads them.

        Raises on every rank of the engine, before any of them enters it: one rank alone inside would wait forever.
        """
        readable: list[Request] = []
        problem = sampling.problem(self.vocabulary.size if self.vocabulary else None)
        try:
            readable += [] if problem else (self._checked_request(index, request) for index, request in enumerate(requests))
        except ValueError as error:
            problem = str(error)
        if self.axis.size > 1:
            media = [""] * len(requests) if problem else map(digest, readable)
            contents = [(each.token_ids, seen, each.sampling, each.seeds) for each, seen in zip(requests, media, strict=True)]
            question = hashlib.sha256(repr((problem, contents, sampling)).encode()).hexdigest()
            if len(set(self.axis.gather(question))) > 1:
                raise ValueError("the ranks that share an engine must generate for the same requests with the same sampling")
        if problem:
            raise ValueError(problem)
        return readable

    def _checked_request(self, index: int, request: Request) -> Request:
        """ValueError when it cannot be answered."""
        problem = self._media_problem(request)
        try:
            if not problem and any(request.multi_modal.values()):
                request = replace(request, multi_modal=read(request.multi_modal))
                request = replace(request, expanded=self._expanded(request))
        except ValueError as error:
            problem = f"has media that cannot be read: {error}"
        if problem := problem or self._problem_of(request):
            raise ValueError(f"request {index} {problem}")
        return request

    def _media_problem(self, request: Request) -> str | None:
        if others := sorted(request.multi_modal.keys() - self.limits):
            return f"carries {', '.join(others)}: {self._reads()}"
        for name, limit in self.limits.items():
            count = len(request.multi_modal.get(name, []))
            places = self.vocabulary.num_placeholders(request.token_ids, MEDIA[name])
            if count > limit:
                return f"has {count} {name}, more than --limit_mm_{MEDIA[name]}_per_prompt {limit}"
            if count != places:
                return f"has {count} {name} and {places} placeholders for {name}"
        return None

    def _reads(self) -> str:
        """What this engine takes, and which one takes more of what its model knows."""
        more = [name for name in self.model_reads if name not in self.limits]
        message = f"this engine generates from {' and '.join(['text', *self.limits])} only"
        return f"{message}; --engine_type hf reads {' and '.join(more)} too" if more else message

    def _problem_of(self, request: Request) -> str | None:
        length, new, limit = len(request.prompt), request.sampling.max_tokens, self.max_model_len or math.inf
        size = self.vocabulary.size if self.vocabulary else None
        if not length:
            return "has no tokens"
        if length + new > limit:
            return f"can never fit: {length} prompt tokens and max_tokens {new} exceed max_model_len {limit}"
        if (token := strange(request.token_ids, size)) is not None:
            return f"has the token {token}, which is not in the vocabulary of {size}"
        if problem := request.sampling.problem(size):
            return problem
        if len(request.seeds) != request.sampling.n:
            return f"has {len(request.seeds)} seeds for {request.sampling.n} samples"
        return self._tokenizer_problem() if request.sampling.stop else None

    def _tokenizer_problem(self) -> str | None:
        try:
            return None if self.vocabulary and self.vocabulary.tokenizer else "has stop strings, which need a tokenizer"
        except ValueError as error:
            return f"cannot be answered: {error}"

    def _cut(self, samples: list[Completion], stop: tuple[str, ...]) -> list[Completion]:
        return [StopStrings(self.vocabulary.tokenizer, stop).cut(sample) for sample in samples] if stop else samples

    def _check_usable(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise EngineError(f"the engine broke earlier and cannot be used: {self._failure!r}") from self._failure

    def _fatal(self, verb: str) -> "_Fatal":
        return _Fatal(self, verb)


def _seeds(seed: int, place: int, request: Request) -> tuple[int, ...]:
    """Derive those of a request that came without."""
    return tuple(derived_seed(seed, place, sample) for sample in range(request.sampling.n))


class _Fatal:
    """An exception inside the engine ends its life: its state is unknown afterwards."""

    def __init__(self, engine: Engine, verb: str):
        self.engine, self.verb = engine, verb

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            self.engine._failure = error
            if isinstance(error, Exception):
                raise EngineError(f"{type(self.engine).__name__}.{self.verb} failed: {error}") from error
