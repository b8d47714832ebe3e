"""The interface of a generation engine, the same for all engines."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from torch import Tensor

from lightrft.config.errors import ConfigError
from lightrft.config.sections import EngineSection
from lightrft.core.engine import MEDIA_NAMES, Request, derived_seed
from lightrft.core.samples import Completion, Expanded
from lightrft.engine.loop import EngineLoop
from lightrft.engine.media import digest, read
from lightrft.engine.model_info import Vocabulary
from lightrft.engine.requests import Sampling, out_of_vocabulary
from lightrft.engine.stops import StopStrings
from lightrft.models.parallel.collectives import Axis
from lightrft.models.weight_sync.adapters import Adapters
from lightrft.models.weight_sync.names import PublishedNames
from lightrft.models.weight_sync.verify import FULL_EVERY, Fingerprints

if TYPE_CHECKING:
    from lightrft.models.weight_sync.quantized import Quantization

Half = Literal["weights", "kv_cache"]


class EngineError(RuntimeError):
    """An engine was used wrongly or has failed; after a failure it cannot be used again."""


class NotFiniteError(EngineError):
    """The weights or activations are broken. The engine itself is not: others can be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Settings that an adapter starts this rank's engine with."""

    section: EngineSection
    model_path: str
    """Hugging Face folder or hub name."""
    dtype: torch.dtype
    device: torch.device
    axis: Axis
    """Consecutive ranks that share this engine's weights."""
    max_model_len: int
    """Most tokens that prompt and response may have together."""
    seed: int = 0
    trust_remote_code: bool = False
    from_stream: bool = False
    """Do not read the checkpoint: load_weights() brings the first weights before generate()."""
    streams_draft: bool = False
    """Each weight stream also brings the weights of --draft_pretrain, with the prefix DRAFT. The
    first ones come from the folder."""
    adapters: Adapters | None = None
    """Adapters that the engine holds beside the weights. None: streams bring merged weights."""


@dataclass(eq=False, repr=False)
class Engine(ABC):
    """Generates with a copy of the actor's weights, and releases the memory while it sleeps.

    The calls of a step are wake("weights"), load_weights(stream, version), wake("kv_cache"),
    open(sampling), which returns the loop that the step generates with, and sleep(). Calls are
    idempotent where that is meaningful; an illegal order raises EngineError. Ranks that share an
    engine (`axis`) make the same calls with the same arguments.
    """

    media: ClassVar[tuple[str, ...]] = tuple(MEDIA_NAMES)
    """Media that this engine supports in prompts, if the model does."""
    quantizes: ClassVar[bool] = False
    """True if the engine can compute with the formats of --rollout_quantization."""
    keeps_policy = False
    """True if a request goes on with the weights that began it, when others are loaded under it."""

    expected: dict[str, torch.Size]
    """Hugging Face name -> full shape of every tensor that a weight stream must bring."""
    _: KW_ONLY
    sleep_level: int = 2
    axis: Axis = Axis("engine", 1, 0, None)
    max_model_len: int | None = None
    vocabulary: Vocabulary | None = None
    """Vocabulary of the model. None: token ids are not checked, nothing is banned by default, and
    stop strings are an error."""
    adapters: Adapters | None = None
    """Adapters that the engine holds beside the weights. None: streams bring merged weights.
    Otherwise they bring the adapters, and the weights only if the engine has lost them."""

    def __post_init__(self) -> None:
        self.quantization: Quantization | None = None
        """How streams quantise weights for the engine. None: they bring them as they are."""
        self.has_base = False
        """True if the engine has the weights that adapters belong to, so that the next stream need
        not bring them. Without adapters it stays False: each stream brings all weights."""
        self._sent_base: Fingerprints | None = None
        """Fingerprints of these weights, as they were sent."""
        self.limits: dict[str, int] = {}
        """Medium -> most items in one prompt; empty: text only."""
        self.model_reads: tuple[str, ...] = ()
        """Media that the model supports; the engine may support fewer."""
        self.version = 0
        """Version of the weights in use; completions carry it."""
        self.awake: set[Half] = {"weights", "kv_cache"}
        self.weights_valid = True
        """False after a sleep of level 2 or a broken stream, until the next complete stream."""
        self.verify_dtype: torch.dtype | None = None
        """Dtype of the engine, for comparing the weights with the streamed ones. None: they are not
        verified."""
        self.verify_round: int | None = None
        """Round of the next verification: a sample, or all weights in round 0.

        None: all of them, because the previous sync was not verified.
        """
        self.addresses_verified = False
        """True if the previous sync was verified. The addresses of the weights are known then, and
        weights can be copied there."""
        self.closed = False
        self._failure: BaseException | None = None

    # -- what a run calls

    def open(self, sampling: Sampling) -> EngineLoop:
        """Return a loop that takes requests while others decode.

        `sampling` is for requests that bring none. Log-probs are taken under the sampled
        distribution: without banned tokens, at the requested temperature, restricted to the top p
        of the top k; greedy ones are raw (T = 1). A sample's noise depends only on the seed, not on
        batching, on drafts of --speculative, or on other random numbers. Adding an invalid request
        raises ValueError before any request begins, and the engine stays usable.
        """
        self._check_can_generate()
        return EngineLoop(self, sampling)

    def generate(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return `n` completions for each request, in the order of the requests.

        For errors see open().
        """
        loop = self.open(sampling)
        loop.add(requests)
        completions = dict(loop.to_the_end())
        return [completions[index] for index in range(len(requests))]

    def load_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        loop: EngineLoop | None = None,
    ) -> None:
        """Load a complete set of weights: full tensors with exactly the expected names and shapes.

        A wrong, missing or repeated name raises ValueError, and the engine refuses to generate
        until a complete stream has arrived. Caches of the old weights are dropped. Raises
        EngineError on all ranks of the engine if the engine's weights differ from the streamed
        ones, or a cache is left.

        The first sync, every FULL_EVERY-th one, and one after a failure are verified completely.
        The others verify a sample (models/weight_sync/verify.py). Adapters are always verified
        completely; every FULL_EVERY-th sync of adapters also compares the other weights with those that were
        sent once.

        While requests run, only their loop may load, with EngineLoop.load_weights(), and passes
        itself as `loop`. Then the caches stay, but later requests do not use them.
        """
        self._check_usable(loop)
        if "weights" not in self.awake:
            raise EngineError('load_weights() on a sleeping engine: call wake("weights") first')

        self.weights_valid = False
        # It stays None if this sync fails, so that the next one verifies everything.
        round = self.verify_round
        self.verify_round = None
        self.addresses_verified = round is not None

        sent: list[Fingerprints] = []
        if self.verify_dtype is not None and not self.has_base:
            sent.append(self._fingerprints(self.verify_dtype, round))
        if self.verify_dtype is not None and self.adapters is not None:
            self._sent_base = sent[0] if sent else self._sent_base
            sent.append(Fingerprints(self.adapters.shapes, self.verify_dtype))

        failures: list[Exception] = []
        stream = self._checked(named_tensors, sent, failures)
        self._load_weights(stream)

        for name, _ in stream:  # missing names are detected at the end of the stream
            raise EngineError(
                f"{type(self).__name__} stopped consuming the weight stream at {name}"
            )
        if failures:
            raise failures[0]

        if loop is None:
            self.reset_cache()
        else:
            self._leave_cache()
        if sent:
            if self.has_base and not round and self._sent_base is not None:
                sent.append(self._sent_base)
                self.has_base = False  # until that is verified
            self._verify(*sent, empty_cache=loop is None)
            self.verify_round = ((round or 0) + 1) % FULL_EVERY

        self.version = version
        self.weights_valid = True
        self.has_base = self.adapters is not None

    def sleep(self, level: int | None = None) -> None:
        """Release memory.

        Level 1 keeps the weights in host memory. Level 2 drops them, so a new stream is needed.
        """
        self._check_usable()
        if not self.awake:
            return
        level = level or self.sleep_level
        with self._fatal("sleep"):
            self._sleep(level)
        self.awake = set()
        if level == 2:
            self.weights_valid = False
            self.has_base = False

    def wake(self, half: Half) -> None:
        """Wake a half: "weights" first, and "kv_cache" after the stream.

        Cache and stream then never compete for memory.
        """
        self._check_usable()
        if half in self.awake:
            return
        if half == "kv_cache" and "weights" not in self.awake:
            raise EngineError('wake("kv_cache") before wake("weights")')
        with self._fatal("wake"):
            self._wake(half)
        self.awake.add(half)

    @abstractmethod
    def reset_cache(self) -> None:
        """Drop every cached prefix and encoder output."""

    def prepare(self, request: Request) -> Request:
        """Read and expand a request's media ahead, so that add() need not take the time.

        Another thread may call it while the engine does nothing else. Requests stay as they are if
        ranks share the engine, because each of these ranks reads all media itself. So do requests
        with media that cannot be read; add() reports them.
        """
        reads = self.axis.size == 1 and any(request.multi_modal.values())
        with suppress(ValueError):
            if reads and not self._media_problem(request):
                return self._with_media(request)
        return request

    @abstractmethod
    def prompts_at_once(self, n: int) -> int:
        """Return how many prompts with n samples each decode at the same time."""

    def problem(self, request: Request) -> str | None:
        """Return why add() would refuse a request, or None; media are not looked at."""
        return self._problem_of(request if request.seeds else _seeded(request, 0, 0))

    def check_media(self, media: Iterable[str]) -> None:
        """Raise ConfigError if the engine does not support one of the media of the data."""
        for name in media:
            if name not in self.limits:
                raise ConfigError(f"--{name}_key: {self._reads()}")

    @classmethod
    def adapter_problem(
        cls, setup: EngineSetup, names: PublishedNames, media: Collection[str]
    ) -> str | None:
        """Return why the engine cannot hold the adapters of `setup` beside the weights, or None.

        `names` are those of the model's weights; `media` are what the model reads besides text.
        """
        return "this engine takes merged weights only"

    @property
    def takes_local_experts(self) -> bool:
        """Return True if the next stream may bring each rank its local experts alone.

        Stacked experts are DTensors then, divided evenly and in order over the engine's ranks.
        """
        return False

    def module_outputs(self, token_ids: list[int]) -> dict[str, Tensor]:
        """Return the output of each module for these tokens, for the doctor; see Probe.

        The prefix cache is dropped.
        """
        self._check_usable()
        sampling = Sampling(max_tokens=1)
        self._validated([Request(token_ids, sampling=sampling, seeds=(0,))], sampling)
        self.reset_cache()
        with self._fatal("module_outputs"):
            return self._module_outputs(token_ids)

    def close(self) -> None:
        """Free everything; every later call except close() raises an error."""
        if not self.closed:
            self.closed = True
            self._close()

    # -- what a loop calls

    def begin_requests(self, requests: list[Request], loop: EngineLoop) -> list[Request]:
        """Complete a loop's next requests with sampling, seeds and media; all ranks check them."""
        self._check_can_generate(loop)
        banned = self.vocabulary.never_sampled if self.vocabulary else ()
        ends = self.vocabulary.end_token_ids if self.vocabulary else ()
        resolved = []
        for index, request in enumerate(requests, loop.num_requests):
            sampling = cast(Sampling, request.sampling or loop.sampling).resolved(banned, ends)
            request = replace(request, sampling=sampling)
            seed = loop.sampling.seed
            resolved.append(request if request.seeds else _seeded(request, seed, index))

        return self._validated(resolved, loop.sampling)

    @contextmanager
    def generating(self, loop: EngineLoop) -> Generator[None]:
        """Guard an action of a loop.

        An exception inside, or requests that are left in the loop, make the engine unusable.
        """
        self._check_can_generate(loop)
        with self._fatal("generate"):
            yield
        self._failure = loop.unread if loop.running else None

    @contextmanager
    def between_steps(self, loop: EngineLoop) -> Generator[None]:
        """Guard a load of weights under a loop's requests; the engine makes no step meanwhile.

        An exception inside makes the engine unusable.
        """
        self._check_can_generate(loop)
        with self._fatal("load_weights"), self._paused():
            yield

    def _check_can_generate(self, loop: EngineLoop | None = None) -> None:
        """Raise EngineError if the engine cannot generate; a loop whose requests run always may."""
        if loop is not None and self._failure is loop.unread:
            return
        self._check_usable()
        if self.awake != {"weights", "kv_cache"}:
            raise EngineError(
                f"generate() on a sleeping engine (awake: {sorted(self.awake) or 'nothing'}): call"
                " wake() first"
            )
        if not self.weights_valid:
            raise EngineError(
                "generate() without weights (sleep level 2, or a broken stream): call"
                " load_weights() first"
            )

    def _cut(self, samples: list[Completion], stop: tuple[str, ...]) -> list[Completion]:
        """Return the samples up to the stop texts.

        Raises NotFiniteError for a log-prob that is no number: the samples would be nonsense.
        """
        for sample in samples:
            if not math.isfinite(sum(sample.logprobs)):
                raise NotFiniteError(
                    "the engine gave a sampled token a log-prob that is not finite, so its weights"
                    " or activations are broken: `lightrft doctor` names the first part that"
                    " differs from the trainer's"
                )
        if stop:
            stops = StopStrings(cast(Vocabulary, self.vocabulary).tokenizer, stop)
            return [stops.cut(sample) for sample in samples]
        return samples

    # -- hooks of an adapter

    @abstractmethod
    def _add(self, key: int, request: Request) -> None:
        """Begin a request that has sampling, a seed for each sample, and expanded media.

        Stop strings should end a sample; the caller cuts off what an engine generates after them.
        """

    @abstractmethod
    def _step(self) -> Iterable[tuple[int, list[Completion]]]:
        """Continue the requests that were added; return key and completions of the ended ones."""

    @abstractmethod
    def _abort(self, key: int) -> list[Completion]:
        """End a request that runs; return the completions so far.

        Unfinished ones have the finish reason `abort`.
        """

    @abstractmethod
    def _num_sampled(self, key: int) -> list[int]:
        """Return how many tokens each of the `n` samples of a request has, inside _paused()."""

    def _paused(self) -> AbstractContextManager[None]:
        """Return a context without a step: the last one is complete, with all of its results.

        The default is for engines that compute only in _step().
        """
        return nullcontext()

    @abstractmethod
    def _leave_cache(self) -> None:
        """Keep the caches for the requests that run; those that begin later share none of it."""

    def _expanded(self, request: Request) -> Expanded:
        """Return a prompt with expanded media; raises ValueError if the model cannot read it.

        It is called only for media in `limits`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} declares support for media but does not implement it"
        )

    @abstractmethod
    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _sleep(self, level: int) -> None: ...

    @abstractmethod
    def _wake(self, half: Half) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    # -- hooks of an adapter for inspection

    def _compute(self, token_ids: list[int]) -> None:
        """Compute these tokens and one more, from the model's own logits: nothing is banned."""
        self._add(0, Request(token_ids, sampling=Sampling(max_tokens=1, temperature=0), seeds=(0,)))
        while not list(self._step()):
            pass

    def _module_outputs(self, token_ids: list[int]) -> dict[str, Tensor]:
        """Return Probe.recorded(), or nothing: this default is for engines that hide the model."""
        return {}

    # -- hooks of an adapter to verify its weights

    def _fingerprints(self, dtype: torch.dtype, round: int | None) -> Fingerprints:
        """Return empty fingerprints; the default suits engines that keep weights as streamed."""
        return Fingerprints(self.expected, dtype, round=round)

    def _engine_fingerprints(self, prints: Fingerprints) -> tuple[Tensor, Tensor]:
        """Return prints.numbers() of all weights on this rank, read in place when called."""
        raise NotImplementedError(f"{type(self).__name__} does not implement reading its weights")

    def _adapter_fingerprints(self, prints: Fingerprints) -> tuple[Tensor, Tensor]:
        """Return prints.numbers() of the newest adapters on this rank, read when called."""
        raise NotImplementedError(f"{type(self).__name__} holds no adapters")

    @abstractmethod
    def _num_cached(self) -> int:
        """Return how many cached prefix blocks the next request could use."""

    # -- checks of a weight stream

    def _checked(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        sent: Collection[Fingerprints] = (),
        failures: list[Exception] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream unchanged, comparing each name and shape with the expected ones.

        The fingerprints of the tensors are added to `sent`. With `failures`, an error is put there
        and ends the stream, so that the engine finishes in order and can load the next one.
        """
        adapters = {} if self.adapters is None else self.adapters.shapes
        missing = ({} if self.has_base else self.expected) | adapters
        try:
            for name, tensor in named_tensors:
                shape = missing.pop(name, None)
                if tensor.shape != shape:
                    raise ValueError(
                        f"weight stream: {self._problem_of_weight(name, tensor, shape)}"
                    )
                for prints in sent:
                    prints.add_sent(name, tensor)
                yield name, tensor
                # Otherwise the next tensor would be gathered beside this one.
                del tensor

            if missing:
                raise ValueError(
                    f"weight stream: {len(missing)} weights are missing, the first is"
                    f" {next(iter(missing))}"
                )
        except Exception as error:
            if failures is None:
                raise
            failures.append(error)

    def _problem_of_weight(self, name: str, tensor: Tensor, shape: torch.Size | None) -> str:
        """Say what is wrong with a weight without this shape; None: it is not expected any more."""
        if shape is not None:
            return f"{name} has shape {tuple(tensor.shape)}, the engine expects {tuple(shape)}"
        if name in self.expected and self.has_base:
            return f"{name} came among adapters, and the engine has it already"
        if name in self.expected or (self.adapters and name in self.adapters.shapes):
            return f"{name} came twice"
        return f"{name} is not a weight of the engine's model"

    def _verify(self, *sent: Fingerprints, empty_cache: bool) -> None:
        """Raise EngineError unless the engine has the sent weights.

        Sums over the ranks of the engine are compared. With `empty_cache`, the engine must also
        have no cache of earlier weights.
        """
        problems = []
        for prints in sent:
            if self.adapters is not None and prints.shapes is self.adapters.shapes:
                numbers = self._adapter_fingerprints(Fingerprints(prints.shapes, prints.dtype))
            else:
                numbers = self._engine_fingerprints(self._fingerprints(prints.dtype, prints.round))
            if wrong := prints.wrong([self.axis.sum(each) for each in numbers], self.axis):
                problems.append(
                    f"{wrong[0]} in the engine differs from the weight that was sent "
                    f"({len(wrong)} of {len(prints.shapes)} differ)"
                )

        if empty_cache and (cached := self._num_cached()):
            problems.append(f"the prefix cache still contains {cached} blocks of the old weights")
        # All ranks raise together; one rank alone would leave the others waiting.
        for rank, problem in enumerate(self.axis.gather("; ".join(problems))):
            if problem:
                raise EngineError(f"weight sync, rank {rank} of the engine: {problem}")

    # -- checks of requests

    def _validated(self, requests: list[Request], sampling: Sampling) -> list[Request]:
        """Return the requests with expanded media.

        Raises ValueError on every rank of the engine before any rank enters it, because a single
        rank inside would wait forever.
        """
        readable: list[Request] = []
        problem = sampling.problem(self.vocabulary.size if self.vocabulary else None)
        try:
            for index, request in enumerate(() if problem else requests):
                if request.multi_modal or self.limits:
                    request = self._with_checked_media(index, request)
                if of_request := self._problem_of(request):
                    raise ValueError(f"request {index} {of_request}")
                readable.append(request)
        except ValueError as error:
            problem = str(error)

        # Ranks compare digests, not requests: prompts and media can be large.
        if self.axis.size > 1:
            media = [""] * len(requests) if problem else map(digest, readable)
            contents = [
                (request.token_ids, items, request.sampling, request.seeds)
                for request, items in zip(requests, media, strict=True)
            ]
            question = hashlib.sha256(repr((problem, contents, sampling)).encode()).hexdigest()
            if len(set(self.axis.gather(question))) > 1:
                raise ValueError(
                    "the ranks that share an engine must generate for the same requests with the"
                    " same sampling"
                )

        if problem:
            raise ValueError(problem)
        return readable

    def _problem_of(self, request: Request) -> str | None:
        length = len(request.prompt)
        sampling = cast(Sampling, request.sampling)
        limit = self.max_model_len or math.inf
        size = self.vocabulary.size if self.vocabulary else None

        # The first broken rule is reported, and later ones may rely on the rules before them.
        if not length:
            return "has no tokens"
        if length + sampling.max_tokens > limit:
            return (
                f"does not fit: {length} prompt tokens and max_tokens {sampling.max_tokens} exceed"
                f" max_model_len {limit}"
            )
        if (token := out_of_vocabulary(request.token_ids, size)) is not None:
            return f"contains the token {token}, which is not in the vocabulary of {size}"
        if problem := sampling.problem(size):
            return problem

        if len(request.seeds) != sampling.n:
            return f"has {len(request.seeds)} seeds for {sampling.n} samples"
        return self._tokenizer_problem() if sampling.stop else None

    def _tokenizer_problem(self) -> str | None:
        try:
            if self.vocabulary and self.vocabulary.tokenizer:
                return None
            return "has stop strings, which need a tokenizer"
        except ValueError as error:
            return f"cannot be processed: {error}"

    def _with_checked_media(self, index: int, request: Request) -> Request:
        """Return the request with expanded media; raises ValueError if they are invalid."""
        if problem := self._media_problem(request):
            raise ValueError(f"request {index} {problem}")
        if not any(request.multi_modal.values()) or request.expanded is not None:
            return request
        try:
            return self._with_media(request)
        except ValueError as error:
            raise ValueError(f"request {index} has media that cannot be read: {error}") from error

    def _with_media(self, request: Request) -> Request:
        request = replace(request, multi_modal=read(request.multi_modal))
        return replace(request, expanded=self._expanded(request))

    def _media_problem(self, request: Request) -> str | None:
        if others := sorted(request.multi_modal.keys() - self.limits):
            return f"carries {', '.join(others)}: {self._reads()}"
        for name, limit in self.limits.items():
            count = len(request.multi_modal.get(name, []))
            vocabulary = cast(Vocabulary, self.vocabulary)
            expected = vocabulary.num_placeholders(request.token_ids, MEDIA_NAMES[name])
            if count > limit:
                return f"has {count} {name}, more than --limit_mm_{MEDIA_NAMES[name]}_per_prompt {limit}"
            if count != expected:
                return f"has {count} {name} and {expected} placeholders for {name}"
        return None

    def _reads(self) -> str:
        """Say which media the engine supports, and which the hf engine supports besides."""
        more = [name for name in self.model_reads if name not in self.limits]
        message = f"this engine supports only {' and '.join(['text', *self.limits])}"
        return (
            f"{message}; --engine_type hf also supports {' and '.join(more)}" if more else message
        )

    # -- checks of the engine

    def _check_usable(self, loop: EngineLoop | None = None) -> None:
        """Raise EngineError for a closed or failed engine, and while other loops' requests run."""
        if self.closed:
            raise EngineError("the engine is closed")
        is_unread = loop is not None and self._failure is loop.unread
        if self._failure is not None and not is_unread:
            raise EngineError(
                f"the engine failed earlier and cannot be used: {self._failure!r}"
            ) from self._failure

    @contextmanager
    def _fatal(self, verb: str) -> Generator[None]:
        """Make the engine unusable after an exception: nobody knows what state it is in then."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._failure = error
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"{type(self).__name__}.{verb} failed: {error}") from error


def _seeded(request: Request, seed: int, index: int) -> Request:
    """Derive the seeds of a request that has none."""
    samples = range(cast(Sampling, request.sampling).n)
    return replace(request, seeds=tuple(derived_seed(seed, index, each) for each in samples))
