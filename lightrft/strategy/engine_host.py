"""Host the engine that shares the devices with the trainer: start it, refill it, let it sleep."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import chain

import torch
from loguru import logger
from torch import Tensor, nn

from lightrft.config.errors import ConfigError
from lightrft.config.sections import Config, EngineSection, longest_sequence
from lightrft.core.engine import Request, derived_seed
from lightrft.core.metrics import GB
from lightrft.core.samples import Completion
from lightrft.engine.base import Engine, EngineError
from lightrft.engine.loop import EngineLoop
from lightrft.engine.remote.wire import ADAPTERS_KEY, PRETRAIN
from lightrft.engine.requests import Sampling
from lightrft.models.lora import adapter_shapes, keep_adapters_apart
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import occupied_memory, release_cached_memory
from lightrft.models.weight_sync.adapters import Adapters
from lightrft.models.weight_sync.names import DRAFT
from lightrft.models.weight_sync.stream import unwrap
from lightrft.strategy.backends.base import Backend
from lightrft.strategy.phases import Phase
from lightrft.strategy.shared_session import SharedSession


class EngineStatus(Enum):
    """Status of the engine, in the words of scripts that read it."""

    SLEEPED = "sleeped"
    WAKEUP = "wakeup"


class EngineHost:
    """The engine of this rank, or this rank's share of one.

    strategy.setup_inference_engine(actor=actor)
    with strategy.engine_awake(actor):         # streams the newest weights in
        loop = strategy.open_generation(sampling)  # the sampler adds requests and steps the loop

    All ranks call every method together.
    """

    def __init__(self, strategy: Backend, *, always_full: bool):
        """Set up a host without an engine.

        `always_full`: every engine gets the stream of full_params(), also one that could hold
        adapters beside the weights, or divided experts.
        """
        self.strategy = strategy
        self.always_full = always_full

        self.actor: nn.Module | None = None
        """Model that the engine's weights came from last. None: they came from a folder, and the
        engine keeps them while it sleeps."""
        self.draft: nn.Module | None = None
        """Trained model that drafts for the engine; each stream contains it too."""
        self.kept_awake = 0
        """How many awake() contexts are open."""
        self.sleep_memory: dict[str, float] = {}
        """Metrics of the memory occupied before and after the last sleep, in 1e9 bytes."""
        self._engine: Engine | None = None
        self._axis: Axis | None = None
        self._may_sleep = True

    # -- the engine

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("there is no engine: call setup_inference_engine() first")
        return self._engine

    @property
    def is_started(self) -> bool:
        return self._engine is not None

    @property
    def name(self) -> str:
        """Return hf, vllm, ...: the package of the adapter; "none" without an engine."""
        if self._engine is None:
            return "none"
        folders = type(self._engine).__module__.split(".")
        return next(
            (name for name in ("remote", "hf", "vllm", "sglang") if name in folders), folders[0]
        )

    @property
    def status(self) -> EngineStatus:
        """Return WAKEUP if the engine can generate; SLEEPED if not, or without an engine."""
        able = self._engine is not None and self._engine.awake == {"weights", "kv_cache"}
        return EngineStatus.WAKEUP if able else EngineStatus.SLEEPED

    @property
    def version(self) -> int:
        """Return the version of the weights; 0 without an engine. Each stream raises it by one.

        invalidate_weights() may set it back.
        """
        return 0 if self._engine is None else self._engine.version

    def axis_of(self, section: EngineSection) -> Axis:
        """Return the ranks of this world that share an engine."""
        processes = self.strategy.processes
        elsewhere = processes is not None and processes.generates_elsewhere
        return self.strategy.mesh.engine(1 if elsewhere else section.engine_tp_size)

    def start(
        self,
        config: Config,
        engine_type: str | None = None,
        actor: nn.Module | None = None,
        *,
        draft: nn.Module | None = None,
        adapters: Adapters | None = None,
    ) -> Engine:
        """Build the engine of `config`.

        With an actor it receives the actor's weights and sleeps, if it may. The actor is
        remembered, because an engine may drop the weights while it sleeps. Without an actor the
        engine has the weights of --pretrain and stays awake. `draft` is the trained model of
        --speculative draft; each stream contains it too. `adapters` are those of an actor on other
        ranks.
        """
        # This import is inside, because only a run with an engine needs it.
        from lightrft.engine.build import build_engine, connect_engine

        strategy = self.strategy
        section = config.engine
        if engine_type is not None:
            section = replace(section, engine_type=engine_type)

        processes = strategy.processes
        build = build_engine
        trains_draft = draft is not None
        if processes is not None and processes.generates_elsewhere:
            build = partial(connect_engine, processes)
        if processes is not None and processes.generates:
            trains_draft = trains_draft or config.optim.draft_learning_rate > 0

        # vLLM and SGLang reserve a share of the free memory when they start.
        with self.strategy.memory.emptied():
            axis = self.axis_of(section)
            replica = strategy.mesh.world.rank // axis.size
            engine = build(
                section,
                model_path=config.model.pretrain,
                dtype=strategy.dtype,
                device=strategy.device,
                axis=axis,
                max_model_len=longest_sequence(config),
                # vLLM accepts only 32 bits.
                seed=derived_seed(strategy.seed, replica) % 2**31,
                trust_remote_code=config.model.trust_remote_code,
                # A folder does not have INT8 or FP8 weights.
                from_stream=actor is not None or section.rollout_quantization != "none",
                streams_draft=trains_draft,
                adapters=adapters if actor is None else self._adapters_of(actor, config),
            )

        self.adopt(engine, axis, may_sleep=section.enable_engine_sleep)
        self.draft = draft
        if actor is not None and engine.adapters is not None:
            strategy.adapters_apart = True
            keep_adapters_apart(unwrap(actor))
        elif actor is not None and config.model.lora_rank and config.model.bf16:
            if strategy.mesh.tp.size > 1:
                raise ConfigError(
                    "--lora_rank with --tp_size in bfloat16 needs an engine that holds adapters"
                    " (--lora_sync adapter): ranks that split a layer cannot round the merged"
                    " matrix as the engine does"
                )

        if actor is None:
            self.strategy.wakeup_inference_engine()
        else:
            self.strategy.update_engine_weights(actor)
            self.strategy.maybe_sleep_inference_engine()

        return engine

    def adopt(self, engine: Engine, axis: Axis, *, may_sleep: bool) -> None:
        """Host an engine that was built elsewhere and is shared by the ranks of `axis`."""
        self._engine = engine
        self._axis = axis
        self._may_sleep = may_sleep
        self.actor = None
        self.draft = None
        self.sleep_memory = {}

    def serve(self) -> None:
        """Build the engine of a rank that only generates, and serve it until training ends."""
        from lightrft.engine.remote.server import EngineServer

        processes = self.strategy.processes
        assert processes is not None
        announce = self.strategy.announce

        announce("")  # the training ranks load their models first
        pretrain = processes.store.get(PRETRAIN).decode()
        announce("start_engine")
        config = self.strategy.config
        adapters = processes.store.get(ADAPTERS_KEY).decode()
        self.start(
            replace(config, model=replace(config.model, pretrain=pretrain)),
            adapters=Adapters.from_json(adapters) if adapters else None,
        )

        update = config.rollout.weight_update
        device = self.strategy.device
        EngineServer(self.engine, processes, device, announce, weight_update=update).serve()

    def close(self) -> None:
        """Close the engine, if there is one."""
        engine = self._engine
        self._engine = None
        self.sleep_memory = {}
        if engine is not None:
            engine.close()

    # -- sleep and weights

    @contextmanager
    def awake(self, actor: nn.Module | None = None) -> Generator[Engine]:
        """Wake the engine with the newest weights of `actor`; it sleeps afterwards, if it may."""
        self.strategy.wakeup_inference_engine(actor)
        self.kept_awake += 1
        try:
            yield self.engine
        except BaseException:
            self.kept_awake -= 1
            # An engine that was left in the middle cannot sleep, and the first error is the cause.
            with suppress(EngineError):
                self.strategy.maybe_sleep_inference_engine()
            raise

        self.kept_awake -= 1
        self.strategy.maybe_sleep_inference_engine()

    def wake(self, actor: nn.Module | None = None) -> None:
        """Wake the weights, stream the newest ones of `actor` in, then wake the cache.

        Without an actor the engine keeps the weights that it has. If they are not valid, the last
        actor's are streamed again. Cached memory is freed first. An engine that is awake stays
        awake.
        """
        engine = self.engine
        self.actor = actor if actor is not None else self.actor

        source = actor if engine.weights_valid else self.actor
        if source is None:
            self.strategy.enter(Phase.REFIT)
            self._wake_weights()
        else:
            self.strategy.update_engine_weights(source)

        # With --offload_idle this frees the actor's memory for the cache.
        self.strategy.enter(Phase.GENERATE)
        with self.strategy.trace.phase("wake"):
            engine.wake("kv_cache")

    def sleep(self) -> None:
        """End the engine's phases, and let it sleep with --enable_engine_sleep.

        Weights that no actor can bring again are kept in host memory.
        """
        with self.strategy.trace.phase("sleep"):
            engine = self.engine
            if self._may_sleep and engine.awake:
                awake = occupied_memory(self.strategy.device) / GB
                engine.sleep(level=1 if self.actor is None else None)
                asleep = occupied_memory(self.strategy.device) / GB

                logger.debug("the engine sleeps: {:.2f} GB occupied, now {:.2f}", awake, asleep)
                self.sleep_memory = {
                    "memory/engine_awake_gb": awake,
                    "memory/engine_asleep_gb": asleep,
                }

        self.strategy.memory.phases.leave_engine()

    def update_weights(self, actor: nn.Module) -> None:
        """Stream the actor's weights in under the next version, and drop what is cached.

        The cache stays asleep or awake. A weight passes five stages, each an iterator:

        1. models/weight_sync/stream.py, buckets(): group parameters to gather at once.
        2. models/parallel/device.py, ahead(): on an accelerator, gather the next bucket while the
           engine loads this one.
        3. models/weight_sync/stream.py, stream(): yield (name, full tensor) one by one.
        4. engine/base.py, _checked(): check names and shapes, and take fingerprints.
        5. The engine's adapter: copy the tensor to its address, or rename it for a loader.

        Adapters, if there are any, are merged between 3 and 4, unless the engine holds them beside
        the weights: then only they are streamed, once the engine has the weights. For an INT8 or
        FP8 engine, matrices are quantised between 3 and 4. A trained draft follows the actor. At
        the end the engine compares the fingerprints with its own weights.
        """
        self.actor = actor
        self.strategy.enter(Phase.REFIT, actor)
        self._wake_weights()

        quantization = self.engine.quantization
        if self.engine.adapters is not None and not self.always_full:
            weights = self.strategy.adapter_params(actor, base=not self.engine.has_base)
        elif quantization is not None:
            # They are rounded once, from the weights that the optimizer updates.
            weights = self.strategy.full_params(actor, torch.float32)
        elif self.strategy.mesh.ep.size > 1 and not self.always_full and self._divides_experts():
            weights = self.strategy.expert_params(actor)
        else:
            weights = self.strategy.full_params(actor)

        if quantization is not None:
            weights = quantization.of_stream(weights)
        if self.draft is not None:
            weights = chain(weights, self._draft_weights(self.draft))
        with self.strategy.trace.phase("weight_sync"):
            self.engine.load_weights(weights, self.version + 1)
            self.strategy.sync_and_clear_cache()

        if self.status is EngineStatus.WAKEUP:
            self.strategy.enter(Phase.GENERATE)

    def _divides_experts(self) -> bool:
        """Return True if the ranks of each engine divide the experts as the trainer's do."""
        assert self._axis is not None
        size = self.strategy.mesh.ep.size
        alike = self.engine.takes_local_experts and self._axis.size == size
        # All ranks gather the same shards, or all would wait.
        return all(self.strategy.mesh.world.gather(alike))

    def invalidate_weights(self, version: int | None = None) -> None:
        """Mark the weights as outdated, so that the engine needs a new stream.

        `version`, if given, is the new version. Weights that came from a folder stay valid.
        """
        if self._engine is None or self.actor is None:
            return

        self._engine.weights_valid = False
        if version is not None:
            self._engine.version = version

    def _wake_weights(self) -> None:
        """Wake the weights alone, so that weights and cache never compete for memory."""
        with self.strategy.trace.phase("wake"):
            release_cached_memory(self.strategy.device)
            self.engine.wake("weights")

    def _adapters_of(self, actor: nn.Module, config: Config) -> Adapters | None:
        """Return the adapters of an actor, or None if it has none, or streams merged weights."""
        shapes = adapter_shapes(unwrap(actor)) if not self.always_full else {}
        return Adapters(shapes, 1 + config.rollout.max_staleness) if shapes else None

    def _draft_weights(self, draft: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.strategy.full_params(draft):
            yield DRAFT + name, tensor

    # -- generation

    def open(self, sampling: Sampling, *, shared: bool = False) -> EngineLoop | SharedSession:
        """Return a loop for requests of this rank; a sleeping engine is woken, and stays awake.

        With `shared` a rank can add requests while others add none.
        """
        if self.status is EngineStatus.SLEEPED:
            self.strategy.wakeup_inference_engine()

        assert self._axis is not None
        loop = self.engine.open(self.replica_sampling(sampling))
        ranks = self.strategy.mesh.model_parallel
        if shared or self._axis.size > 1 or ranks.size > 1:
            return SharedSession(loop, self._axis, ranks)
        return loop

    def generate(
        self, sampling: Sampling, requests: list[Request], *, sleep_after: bool = False
    ) -> list[list[Completion]]:
        """Return the completions of this rank's requests, in order.

        The number of requests may differ by rank and may be 0. The seed must be equal on all ranks;
        replicas derive different ones from it. A sleeping engine is woken. With `sleep_after` it
        sleeps afterwards, if it may, but not inside awake().
        """
        session = self.strategy.open_generation(sampling)
        session.add(requests)
        by_index = dict(session.to_the_end())

        if sleep_after and not self.kept_awake:
            self.strategy.maybe_sleep_inference_engine()

        return [by_index[index] for index in range(len(requests))]

    def replica_sampling(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with a seed that the ranks of one engine share, and no other."""
        assert self._axis is not None
        replica = self.strategy.mesh.world.rank // self._axis.size
        return replace(sampling, seed=derived_seed(sampling.seed, replica))
