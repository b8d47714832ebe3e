"""Plan a run without weights and without a device.

A plan has the layout, the bytes of a rank in each phase, seconds, and advice.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from lightrft.algorithms.policy_loss import policy_losses
from lightrft.config import sections
from lightrft.config.errors import ConfigError, refuse
from lightrft.config.facts import EXPERT_FAMILIES
from lightrft.config.references import reward_model_terms, teacher_terms
from lightrft.config.summary import nodes_to_replicate, summary
from lightrft.core.losses import reach_of
from lightrft.extras.tools import step_memory
from lightrft.extras.tools.shapes import model_config
from lightrft.extras.tools.step_time import (
    HOST_LINK,
    IMBALANCE,
    LINK,
    ModelSizes,
    StepWork,
    Traffic,
    num_experts,
    seconds,
)
from lightrft.models.parallel.peaks import DEVICES, Device
from lightrft.models.parallel.tensor_parallel import model_problems
from lightrft.strategy.backends.zero_state import ZERO_BUCKET

USABLE = 0.94
"""Share of a device's memory that a run can use.

The context, the buffers of collectives, and the allocator's gaps take the rest.
"""
ENGINE_OVERHEAD = 2e9
"""Bytes of an engine's activations and graphs, in the engine's share of the memory."""
LIVE = 1_000_000_000
"""DeepSpeed's stage3_max_reuse_distance: parameters used again within it stay gathered."""
PLAIN_BUCKET = 500_000_000
"""Gradient elements of a reduction of DeepSpeed without ZeRO."""
ROUNDED = 512
"""--max_tokens_per_microbatch is rounded down to a multiple of this."""
STATE_BYTES = {"adamw": 8, "muon": 4, "sgd": 0, "lion": 4, "adamw_8bit": 2 + 2 / 64}
"""Bytes of an optimizer's states for an element of an expert; scales are of 256 elements."""
STEP_FLAGS = tuple(
    """bf16 lora_rank target_modules load_in_4bit freeze_prefix reduce_gradients_once
    gather_parameters_once reduce_dtype gradient_checkpointing gradient_checkpointing_policy
    optimizer""".split()
)
"""Fields that change the bytes of a step."""
Bytes = dict[str, float]


@dataclass(slots=True)
class RunPlan:
    """Facts about a run that are known before it starts."""

    lines: list[str]
    """Algorithm, layout, engine and batches, and the layout as a picture."""
    parameters: int
    active_parameters: int
    """Parameters that compute a token: fewer with experts."""
    phases: dict[str, Bytes]
    """Phase -> bytes on a rank by what they are for."""
    capacity: float
    """Bytes of a device that can be used."""
    max_tokens: int
    """Largest --max_tokens_per_microbatch that fits; 0: none."""
    cache_tokens: float
    """Tokens in the cache of an engine; 0 without one."""
    recomputed: float
    """Share of a forward pass that the backward pass computes once more."""
    seconds: dict[str, float] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return all(sum(amounts.values()) <= self.capacity for amounts in self.phases.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "fits": self.fits,
            "totals": {name: sum(amounts.values()) for name, amounts in self.phases.items()},
        }


@dataclass
class Planner:
    """Bytes of one resolved configuration on `ranks` devices."""

    config: sections.Config
    command: str
    ranks: int
    device: Device
    ranks_per_node: int
    shape: PretrainedConfig

    def __post_init__(self) -> None:
        config = self.config
        strategy = config.strategy
        generating = config.rollout.rollout_ranks
        self.generates = self.command == "train_ppo"
        self.training = self.ranks - (generating if self.generates else 0)

        self.tp = strategy.tp_size
        self.ep = strategy.ep_size
        self.sp = max(strategy.sp_size, strategy.cp_size)
        self.shards = self.training // (self.tp * strategy.dp_replicate)
        self.replicas = self.training // (self.sp * self.tp)
        self.engines = max((generating or self.ranks) // config.engine.engine_tp_size, 1)
        self.local = (
            step_memory.of_tensor_parallel(self.shape, self.tp) if self.tp > 1 else self.shape
        )
        self.width = 2 if config.model.bf16 else 4
        counts = step_memory.parameter_counts(self.shape)
        self.sizes = ModelSizes(self.shape, *counts, self.width)
        self.of_rank = step_memory.num_parameters(self.local)
        self.visited = (
            step_memory.of_expert_parallel(self.local, self.ep) if self.ep > 1 else self.local
        )
        """The model with the experts that a rank gathers and computes."""
        self.elsewhere = self.of_rank - step_memory.num_parameters(self.visited)
        """Number of parameters of the experts that other ranks compute."""
        self.trained = step_memory.trained_parameters(self.local, config.model)
        self.gradient_width = 2 if config.model.bf16 and strategy.reduce_dtype == "bf16" else 4
        """Bytes of a gradient that ranks reduce, and of one that DeepSpeed keeps."""
        self.longest = config.data.prompt_max_len + config.rollout.generate_max_len
        self.capacity = self.device.memory * USABLE

    def plan(self) -> RunPlan:
        tokens = self.config.train.max_tokens_per_microbatch
        step = self.step(tokens)
        plan = RunPlan(
            [*summary(self.config, self.command, self.ranks), *self.picture()],
            self.sizes.parameters,
            self.sizes.active,
            self.phases(step, tokens),
            self.capacity,
            self.max_tokens(step, tokens),
            self.cache_tokens() if self.generates else 0.0,
            self.recomputed(),
        )
        if self.generates:
            plan.seconds = self.seconds(plan.cache_tokens)
            if self.config.strategy.offload_idle:
                # Out and back around log-probs, and once more around training.
                of_node = min(self.ranks, self.ranks_per_node)
                moved = 4 * (step.parameters + step.optimizer) * of_node
                plan.seconds["offload"] = moved / HOST_LINK
        plan.advice = self.advice(plan)

        return plan

    def step(self, tokens: int) -> step_memory.StepBytes:
        """Return the bytes of a step of the model that learns, with tokens of one rank."""
        model = self.config.model
        options = {name: getattr(self.config, name) for name in STEP_FLAGS} | {"fsdp": True}
        tokens = -(-tokens // self.sp)
        step = step_memory.step_bytes(self.visited, options, world=self.shards, tokens=tokens)
        if model.gradient_checkpointing and model.gradient_checkpointing_policy == "offload":
            # A trace counts the copies on the host too.
            text = self.sizes.text
            inputs = tokens * text.num_hidden_layers * text.hidden_size * self.width
            step = step.plus(-inputs, step_memory.StepBytes(0, 0, 0, 1, 1, 1))
        if self.ep == 1:
            return step

        # The shards of all experts are divided over all ranks, however many of them a rank gathers.
        width = self.width if model.lora_rank else 4
        gradient = 0 if model.lora_rank or options["reduce_gradients_once"] else 4
        moments = 0 if model.lora_rank else STATE_BYTES[options["optimizer"]]
        held = width + gradient + moments
        share = step_memory.StepBytes(width, gradient, moments, 0, held, held)
        return step.plus(self.elsewhere / self.shards, share)

    def states(self, step: step_memory.StepBytes) -> Bytes:
        """Return the bytes of what the model that learns keeps between micro-batches."""
        if self.config.strategy.fsdp_cpu_offload:
            return {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
        if self.config.strategy.strategy == "deepspeed":
            return self.states_of_zero(self.of_rank, self.trained)
        return {name: getattr(step, name) for name in ("parameters", "gradients", "optimizer")}

    def states_of_zero(self, parameters: float, trained: float) -> Bytes:
        """Return what DeepSpeed keeps: masters besides parameters.

        At stage 1 it also keeps gradients of the micro-batch besides the sum.
        """
        stage = self.config.strategy.zero_stage
        share = trained / self.training
        masters = 4 * (share if stage else trained if self.config.model.bf16 else 0)
        return {
            "parameters": self.width * parameters / (self.training if stage == 3 else 1) + masters,
            "gradients": self.gradient_width * (share if stage >= 2 else trained * (1 + stage)),
            "optimizer": 8 * (share if stage else trained),
        }

    def work_of_zero(self, head: float) -> float:
        """Return the most that DeepSpeed needs at a time beside states and activations.

        That is the head, or a bucket of gradients. A bucket is copied before it is reduced over the
        ranks. ZeRO-3 keeps up to LIVE parameters from the forward pass for the backward pass, which
        ends with the embeddings.
        """
        stage = self.config.strategy.zero_stage
        bucket = 0.0
        if stage:
            bucket = self.gradient_width * ZERO_BUCKET * (1 + self.config.strategy.overlap_comm)
        copied = {0: min(PLAIN_BUCKET, self.trained), 1: 0}.get(
            stage, 2 * min(ZERO_BUCKET, self.trained)
        )

        reduced = bucket + self.gradient_width * copied
        if stage < 3:
            return max(bucket + head, reduced)

        embeddings = 2 * self.width * self.sizes.table
        return max(bucket + head + self.width * min(LIVE, self.of_rank), reduced + embeddings)

    def parameters_of(self, name: str) -> float:
        """Return the number of parameters of another model on the ranks that share its layers."""
        return step_memory.num_parameters(model_config(name)) / self.tp

    def draft(self) -> float:
        """Return the bytes of the model that drafts; all parameters are trained."""
        count = self.parameters_of(self.config.engine.draft_pretrain)
        if self.config.strategy.strategy == "deepspeed":
            return sum(self.states_of_zero(count, count).values())
        return 16 * count / self.shards

    def others(self, states: Bytes) -> Bytes:
        """Return the bytes of models beside the actor."""
        algorithm = self.config.algorithm
        model = self.config.model
        frozen = self.width / self.shards
        models = {}
        if self.command == "train_ppo":
            # An actor with adapters is its own reference, unless that moves.
            if sections.needs_reference(algorithm) and sections.moves_reference(algorithm):
                models["reference"] = 4 * self.of_rank / self.shards
            elif sections.needs_reference(algorithm) and not model.lora_rank:
                models["reference"] = frozen * self.of_rank
            if sections.needs_critic(algorithm):
                models["critic"] = sum(states.values())
            if self.config.optim.draft_learning_rate > 0:
                models["draft"] = self.draft()
            for _, term in reward_model_terms(model):
                models[f"reward model {term.label}"] = frozen * self.parameters_of(term.name)
            for label, path in teacher_terms(model.teacher_pretrain):
                models[f"teacher {label}".rstrip()] = frozen * self.parameters_of(path)
        elif self.command == "train_kto" or (self.command == "train_dpo" and self.live_reference):
            models["reference"] = frozen * self.of_rank

        return {} if self.config.strategy.fsdp_cpu_offload else models

    @property
    def live_reference(self) -> bool:
        """Return whether train_dpo keeps a reference."""
        section = self.config.preference
        return section.dpo_loss not in sections.REFERENCE_FREE and not section.precompute_reference

    def of_sequences(self) -> bool:
        """Return whether the loss knows gradients after whole sequences; see LocalGradients."""
        if self.command == "train_ppo":
            return reach_of(policy_losses[self.config.algorithm.policy_loss]) == "sequence"
        return self.command in ("train_dpo", "train_kto")

    def phases(self, step: step_memory.StepBytes, tokens: int) -> dict[str, Bytes]:
        states = self.states(step)
        others = self.others(states)
        idle = self.config.strategy.offload_idle
        resident = {} if idle else others
        head = step_memory.head_bytes(
            self.shape,
            -(-tokens // self.sp),
            self.tp,
            self.width,
            of_sequences=self.of_sequences() and self.sp == 1 and not self.config.model.lora_rank,
        )
        resident_states = step.parameters + step.gradients + step.optimizer
        block = max(step.peak, step.at_head + head) - resident_states - step.activations
        if self.config.strategy.strategy == "deepspeed":
            block = self.work_of_zero(head)

        work = {"activations": step.activations, "head, gathered layers": block}
        phases = {"train": states | work | resident}
        parameters = {"parameters": states["parameters"]} if idle else states

        if self.generates:
            gathered = self.width * (self.of_rank - self.elsewhere)
            layers = 2 * gathered / self.sizes.text.num_hidden_layers
            work = {"head, gathered layers": head + layers}
            phases["log-probs"] = parameters | resident | work
            if not self.config.rollout.rollout_ranks:
                weights = self.engine_weights()
                # Two buckets exist at a time; see models/weight_sync/stream.py.
                bucket = self.config.engine.weight_sync_bucket_mb * 1e6 or self.device.memory / 8
                work = {"engine's weights": weights, "buckets": 2 * bucket}
                phases["weight sync"] = parameters | resident | work
                engine = {
                    "engine's weights": weights,
                    "engine's cache": self.cache_bytes(),
                    "engine's work": ENGINE_OVERHEAD,
                }
                phases["generate"] = ({} if idle else states | resident) | engine

        return phases

    def engine_weights(self) -> float:
        """Return the bytes of an engine's weights on one of its ranks."""
        tp = self.config.engine.engine_tp_size
        if self.config.engine.rollout_quantization == "none":
            return self.width * self.sizes.parameters / tp
        # Embeddings and head keep their width. Norms, biases and scales are too few to count.
        tables = 1 if self.shape.tie_word_embeddings else 2
        return (self.sizes.parameters + (self.width - 1) * tables * self.sizes.table) / tp

    def max_tokens(self, step: step_memory.StepBytes, tokens: int) -> int:
        """Return the largest micro-batch that fits into the phase of training.

        Bytes grow in proportion to tokens.
        """
        used = sum(self.phases(step, tokens)["train"].values())
        other = 2 * tokens if used <= self.capacity else max(tokens // 2, self.sp)
        # Two sizes give the line, and the line gives the size where the capacity ends.
        slope = (sum(self.phases(self.step(other), other)["train"].values()) - used) / (
            other - tokens
        )
        most = tokens + (self.capacity - used) / slope
        return max(int(most) // ROUNDED * ROUNDED, 0)

    def cache_bytes(self) -> float:
        """Return the bytes of an engine's cache on one of its ranks."""
        share = self.config.engine.engine_mem_util * self.device.memory
        return max(share - self.engine_weights() - ENGINE_OVERHEAD, 0.0)

    def cache_tokens(self) -> float:
        of_engine = self.cache_bytes() * self.config.engine.engine_tp_size
        return of_engine / self.sizes.cache_bytes()

    def seconds(self, cache_tokens: float) -> dict[str, float]:
        config = self.config
        algorithm = config.algorithm
        rollout = config.rollout
        samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        # Old log-probs are computed only if a step has several updates.
        passes = samples // config.train.train_batch_size * config.train.max_epochs > 1
        passes += sections.needs_reference(algorithm) + sections.needs_critic(algorithm)
        passes += len(config.model.reward_pretrain)
        work = StepWork(
            samples,
            config.data.prompt_max_len // 2,
            rollout.generate_max_len // 2,
            passes,
            config.train.max_epochs,
            self.recomputed(),
        )
        of_a_replica = self.sp * self.tp

        found = seconds(
            self.sizes,
            work,
            self.device,
            training=of_a_replica * min(self.replicas, config.train.train_batch_size),
            scoring=of_a_replica * min(self.replicas, samples),
            engines=min(self.engines, rollout.rollout_batch_size),
            engine_tp=config.engine.engine_tp_size,
            cache_tokens=cache_tokens,
            imbalance=IMBALANCE if self.ep > 1 else 1.0,
        )
        if config.strategy.strategy == "fsdp":
            # Transfers run beside the products, so the slower of both takes the time.
            for phase, transfers in self.transfer_seconds(work).items():
                found[phase] = max(found[phase], transfers)
        if self.ep > 1:
            for phase, visits in self.visit_seconds(work).items():
                found[phase] += visits

        return found

    def recomputed(self) -> float:
        """Return the share of a forward pass that the backward pass computes once more."""
        model = self.config.model
        if model.gradient_checkpointing and model.gradient_checkpointing_policy == "selective":
            return 2 * self.sizes.active / self.sizes.token_flops(self.longest // 2)
        return float(model.gradient_checkpointing)

    def received(self, parameters: int) -> float:
        """Return how many of these parameters FSDP2 moves for a rank, as if all ranks shared them.

        Only the ranks with the same experts share these. Adapters are no experts.
        """
        if self.ep == 1 or parameters < self.of_rank:
            return parameters
        moved = self.elsewhere / (self.ep - 1)
        shared = (1 - self.ep / self.shards) / (1 - 1 / self.shards)
        return parameters - self.elsewhere - moved * (1 - shared)

    def visit_seconds(self, work: StepWork) -> dict[str, float]:
        """Return the seconds while tokens go to experts and back; nothing runs beside them."""
        tokens = work.samples * (work.prompt + work.response) / self.training
        forward = tokens * self.sizes.visit_bytes(self.ep) / self.rate(self.ep)
        return {
            "log-probs": work.passes * forward,
            "train": work.epochs * forward * (3 if work.recomputed else 2),
        }

    def transfer_seconds(self, work: StepWork) -> dict[str, float]:
        """Return the seconds of FSDP2's transfers in the phases that gather the model."""
        config = self.config
        strategy = config.strategy
        updates = work.epochs * -(-work.samples // config.train.train_batch_size)
        rows = -(-work.samples * work.epochs // (updates * self.replicas))
        tokens = rows * (work.prompt + work.response)
        microbatches = updates * -(-tokens // config.train.max_tokens_per_microbatch)

        traffic = Traffic(
            microbatches,
            updates,
            gathered=self.width * self.received(self.of_rank),
            reduced=self.gradient_width * self.received(self.trained),
            gathers_once=strategy.gather_parameters_once,
            reduces_once=strategy.reduce_gradients_once,
        )
        # Replicas sum the shards of all experts.
        summed = replace(traffic, reduced=self.gradient_width * self.trained)
        scored = -(-work.samples // self.replicas) * (work.prompt + work.response)
        gathers = work.passes * -(-scored // config.train.max_tokens_per_microbatch)
        others = (self.shards - 1) / self.shards
        shards_rate = self.rate(self.shards * self.tp)

        return {
            "log-probs": gathers * traffic.gathered * others / shards_rate,
            "train": traffic.of_updates(self.shards) / shards_rate
            + summed.between_replicas(self.shards, strategy.dp_replicate)
            / self.rate(self.training),
        }

    def rate(self, ranks: int) -> float:
        """Return the bytes per second between so many consecutive ranks."""
        on_one_node = ranks <= self.ranks_per_node
        return LINK * (self.device.link if on_one_node else self.device.network)

    def idle_ranks(self) -> list[str]:
        """Return what a step has too little of to give work to every rank."""
        hints = []
        rows = self.config.train.train_batch_size
        prompts = self.config.rollout.rollout_batch_size

        if rows < self.replicas:
            few = f"{rows} of {self.replicas} replicas of data: raise it, or use fewer ranks"
            hints.append(f"--train_batch_size {rows} gives work to {few}")

        if self.generates and prompts < self.engines:
            few = f"--rollout_batch_size {prompts} gives prompts to {prompts} of {self.engines}"
            hints.append(f"{few} engines: raise it, or --engine_tp_size, or use fewer ranks")

        return hints

    def picture(self) -> list[str]:
        """Return which ranks share data, if several do, and how often the model exists."""
        size = self.sp * self.tp
        groups = self.config.strategy.dp_replicate
        copies = "the model is there once" if groups == 1 else f"the model is there {groups} times"
        divided = self.shards * self.tp
        prefix = "" if groups == 1 else "each "
        ranks = "on one rank" if divided == 1 else f"divided over {divided} ranks"
        where = f"{copies}, {prefix}{ranks}"

        if self.ep > 1:
            where += f"; each {self.ep} consecutive ranks divide the experts of a layer"
        if size == 1:
            return [where]

        # Four rows show the pattern; a mesh may have many more.
        rows = [
            " ".join(f"{rank:>4}" for rank in range(row * self.tp, (row + 1) * self.tp))
            for row in range(min(self.sp, 4))
        ]
        lines = [
            where,
            (
                f"{size} ranks share the same data, {self.training // size} times; the first of"
                f" them, {self.sp} sequence parts (down) x {self.tp} tensor parts (across):"
            ),
            *rows,
        ]
        if self.sp > len(rows):
            lines.append("   ...")

        return lines

    def advice(self, plan: RunPlan) -> list[str]:
        """Return what to change.

        These are flags that make a run fit, and places where devices would be idle.
        """
        hints = self.idle_ranks()
        config = self.config
        if not plan.fits:
            hint = (
                "no combination of flags that was tried fits: use more ranks, a smaller model,"
                " or --fsdp_cpu_offload"
            )
            if changes := self.suggest_changes():
                hint = f"it fits with {' '.join(changes)}"
            hints.append(hint)

        nodes = nodes_to_replicate(config, self.ranks, self.ranks_per_node)
        shards_alone = config.strategy.strategy == "fsdp" and self.sp == self.tp == self.ep == 1
        if shards_alone and self.shards > 1 and self.fits_with({"dp_replicate": self.training}):
            hints.append(
                "the model fits on every device: --dp_replicate 0 sends only gradients between them"
            )
        elif nodes and self.fits_with({"dp_replicate": nodes}):
            hints.append(
                f"the model fits on one node: --dp_replicate {nodes} gathers parameters within each"
                f" of the {nodes} nodes and sends only gradients between them"
            )

        if "generate" in plan.phases and plan.cache_tokens < self.longest:
            hints.append(
                "the engine's cache does not hold one sequence of full length: a larger"
                " --engine_tp_size or --engine_mem_util, or fewer tokens"
            )

        return hints

    def suggest_changes(self) -> list[str]:
        """Return the fewest flags that make every phase fit; none if all together do not suffice.

        No flag of them can be left out.
        """
        changes: dict[str, Any] = {}
        for name, value in self.changes():
            changes[name] = value
            if self.fits_with(changes):
                for other in list(changes):
                    without = {key: changes[key] for key in changes if key != other}
                    changes = without if self.fits_with(without) else changes
                return [
                    f"--{name}" if value is True else f"--{name} {value}"
                    for name, value in changes.items()
                ]

        return []

    def changes(self) -> Iterator[tuple[str, Any]]:
        """Yield flags in the order of what they cost in speed.

        A flag that was tried before gets a stronger value.
        """
        config = self.config
        yield "gradient_checkpointing", True
        if not config.strategy.fsdp_cpu_offload:
            yield "offload_idle", True
        yield from (("ep_size", size) for size in (2, 4, 8) if self.divides_experts(size))
        for size in (2, 4, 8) if self.generates else ():
            if self.ranks % size == 0 and size > config.engine.engine_tp_size:
                yield "engine_tp_size", size

        tokens = config.train.max_tokens_per_microbatch
        # A micro-batch holds at least one whole sequence.
        while (tokens := tokens // 2) >= self.longest:
            yield "max_tokens_per_microbatch", tokens
        heads = self.sizes.text.num_attention_heads
        for size in (2, 4, 8):
            if size > self.sp and heads % size == 0 and self.training % size == 0:
                yield "sp_size", size

    def divides_experts(self, size: int) -> bool:
        """Return whether --ep_size can be raised to this size."""
        text = self.sizes.text
        possible = text.model_type in EXPERT_FAMILIES and self.config.strategy.fsdp
        if not possible or self.tp > 1 or size <= self.ep:
            return False
        return self.shards % size == 0 and num_experts(text) % size == 0

    def fits_with(self, changes: dict[str, Any]) -> bool:
        config = deepcopy(self.config)
        for name, value in changes.items():
            getattr(config, sections.section_of_field()[name]).put(name, value)
        other = replace(self, config=config)
        tokens = config.train.max_tokens_per_microbatch
        phases = other.phases(other.step(tokens), tokens)
        # A cache that does not hold one full sequence would stop the engine.
        enough_cache = "generate" not in phases or other.cache_tokens() >= self.longest

        fits = all(sum(amounts.values()) <= self.capacity for amounts in phases.values())
        return enough_cache and fits


def plan_of(
    config: sections.Config,
    command: str,
    ranks: int,
    device: str,
    *,
    ranks_per_node: int,
    model_file: str = "",
) -> RunPlan:
    """Return the plan of a resolved configuration.

    Raise ConfigError if the shape of the model is not known, if --tp_size does not divide it, and
    for media.
    """
    if media := sections.media_columns(config.data):
        flags = ", ".join(f"--{medium}_key {column}" for medium, column in media.items())
        raise ConfigError(
            f"{flags}: runs with images, videos or sound cannot be planned, as the number of their"
            " tokens is known only from the data. The plan of a text model of the same size,"
            " without these flags, shows what the language model takes"
        )

    shape = model_config(config.model.pretrain, model_file)
    tp = config.strategy.tp_size
    refuse(model_problems(shape, tp) if tp > 1 else [])
    family = f"models of type {shape.model_type} cannot be planned"
    unplanned = f"--pretrain {config.model.pretrain}: {family}"
    if type(shape) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{unplanned}, only those of text")

    planner = Planner(config, command, ranks, DEVICES[device], ranks_per_node, shape)
    if planner.sizes.active < planner.sizes.parameters and not config.model.bf16:
        missing = "torch has no shapes of their experts' products in float32"
        raise ConfigError(f"{unplanned} without --bf16: {missing}")

    return planner.plan()
