"""The training loop around the steps.

It handles metrics, evaluation, checkpoints, resuming, interruption, and the final model.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from loguru import logger
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase as Tokenizer

import lightrft
from lightrft.algorithms.roles.operations import count_parameters
from lightrft.algorithms.roles.role import DistributedRole
from lightrft.app.observe.pending_metrics import PendingMetrics
from lightrft.app.observe.progress import progress_lines
from lightrft.app.observe.report import write_report
from lightrft.app.observe.sinks import Observer, read_rows
from lightrft.app.observe.timeline import extend_timeline
from lightrft.app.run.digests import Digests
from lightrft.app.run.health import Health
from lightrft.app.run.interruption import Interrupted, Interruption
from lightrft.app.run.model_card import held_out_results, push, write_card
from lightrft.app.run.resume_check import changed_settings, identity
from lightrft.app.run.run_folder import RunFolder, checkpoints_of, copy_records
from lightrft.config.errors import ConfigError
from lightrft.config.sections import Config
from lightrft.core.metrics import Metrics, Trace
from lightrft.core.samples import Prompt
from lightrft.core.step import StepRecord
from lightrft.data.prompt_set import PromptSet
from lightrft.data.rendering.template import turn_end_ids
from lightrft.models.parallel.device import device_name, machine
from lightrft.models.weight_files import weights_of
from lightrft.strategy.backends.optim import kept_settings
from lightrft.strategy.checkpoint.hf_export import end_generation_at
from lightrft.strategy.checkpoint.manifest import Kinds
from lightrft.strategy.strategy import StrategyBase
from lightrft.versions import installed_versions


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Data of a run: tokenized rows, the tokenizer, and the number of steps."""

    tokenizer: Tokenizer
    prompts: PromptSet
    total_steps: int
    eval_prompts: Sequence[Prompt] = ()
    """Held-out prompts with the answers to learn. Empty without --eval_data, and in runs that
    generate responses: these load held-out sets elsewhere, each with its own rewards."""


CLIENT_STATE: Kinds = {"step": int, "run": str, "identity": dict}
"""What a trainer writes into a checkpoint beside models and items."""


@dataclass(eq=False)
class Trainer(ABC):
    """Runs the training loop: calls `step` from the first (or the resumed) step to the last.

    Steps count from 1.
    """

    config: Config
    strategy: StrategyBase
    learning_roles: dict[str, DistributedRole]
    """Roles that learn, by the names of their models in checkpoints. The last one is the run's
    model."""
    training_data: InitVar[TrainingData]
    _: KW_ONLY
    observer: Observer
    run_folder: RunFolder
    items: dict[str, Stateful] = field(default_factory=dict)
    """Further objects whose state goes into checkpoints; see Checkpoints.save()."""

    def __post_init__(self, training_data: TrainingData) -> None:
        self.trace: Trace = self.strategy.trace
        self.tokenizer = training_data.tokenizer
        self.total_steps = training_data.total_steps
        self.prompts = training_data.prompts
        self.learned_rows = self.prompts
        """All data that the parameters depend on."""
        self.eval_prompts = training_data.eval_prompts
        self.metrics = Metrics()
        self._measured: Counter[str] = Counter()
        """How many steps since the last row, and how many of them had each phase."""
        self._operations = 0.0
        """Operations of the role that are already in the metrics."""
        self.interruption = Interruption(self.strategy.mesh.world)
        self.interruption.at_once = True
        self.folder = self.run_folder.path
        self.checkpoints = self.run_folder.checkpoints
        self.health = Health(self.config, self.strategy.dtype, logs=self.strategy.is_rank_0())

        *_, (role_name, self.role) = self.learning_roles.items()
        self.models: dict[str, tuple[nn.Module, Optimizer | None, LRScheduler | None]] = {
            name: (role.module, role.optimizer, role.scheduler)
            for name, role in self.learning_roles.items()
        }
        """What a checkpoint contains, by name. A trainer with more models adds them."""
        if self.role.average is not None:
            name = "ema" if role_name == "actor" else f"{role_name}_ema"
            self.models[name] = (self.role.average, None, None)

        unreported = PendingMetrics(self.metrics, self.strategy.mesh.world)
        self.items = {"unreported_metrics": unreported, **self.items}
        self.digests: Digests | None = None
        """What compares this run with others, once it has started."""
        self.done = 0
        """How many steps the parameters have learned from."""
        self.saved = 0
        """How many steps the newest checkpoint covers."""
        self.resumed = 0
        """How many steps were done when this process began."""
        self.nothing_left = False
        """True if the resumed run had already finished."""
        self.described = False
        """True once this process may describe the run. A run that it could not resume keeps the
        `run.json` that it has."""

    @abstractmethod
    def step(self, number: int) -> StepRecord:
        """Do one step and add to `self.metrics`; return what was learned from.

        A checkpoint can hold the state before it and after it, but nothing in between.
        """

    @abstractmethod
    def evaluate(self) -> None:
        """Add `eval/*` metrics of the held-out data to `self.metrics`."""

    def enough(self) -> bool:
        """Return True if the step just done should be the last; all ranks return the same."""
        return False

    def fit(self) -> None:
        """Train to the end, from the newest checkpoint if configured.

        An interruption writes a checkpoint and is raised again. Raises RuntimeError at the end of a
        run that learned nothing because no gradient was ever finite.
        """
        began = time.perf_counter()
        status = "failed"
        # The context covers all that is written too: a launcher may send its signal later.
        with self.interruption:
            try:
                self._start()
                self.interruption.at_once = self.done == 0
                with progress_lines(self.progress, shown=self.strategy.is_rank_0()):
                    self._loop()

                self.strategy.announce("checkpoint")
                self.observer.writer.flush()
                self.strategy.finish_ckpt()
                if not self.nothing_left:
                    self.strategy.announce("save_model")
                    self.save_models()
                    self._publish()
                    self._check_end()

                status = "finished"
            except (Interrupted, KeyboardInterrupt) as error:
                status = "interrupted"
                if isinstance(error, Interrupted):  # the second signal leaves no time to save
                    self.strategy.announce("checkpoint")
                    self._save_interrupted()
                raise
            finally:
                with ExitStack() as ending:  # all callbacks run, even when one of them fails
                    ending.callback(self.run_folder.release)
                    ending.callback(self._log_end, status)
                    if self.described:
                        ending.callback(self._describe_run, status, time.perf_counter() - began)
                    ending.callback(self.observer.close, status)

    def progress(self) -> str:
        """Return where the run is, for a line of the log; another thread may ask."""
        return f"step {self.done + 1}: {self.trace.current.replace('/', ', ') or 'between phases'}"

    def models_to_save(self) -> dict[str, nn.Module]:
        """Return the models to write at the end of a run, by folder name."""
        models = {"model": self.role.module}
        if self.role.average is not None:
            models["model_ema"] = self.role.average
        *others, _ = self.learning_roles.items()
        return models | {name: role.module for name, role in others}

    def save_models(self) -> None:
        """Save the trained models as Hugging Face folders; all ranks call it."""
        adapter_only = self.config.train.save_adapter_only and self.config.model.lora_rank
        for name, model in self.models_to_save().items():
            alone = adapter_only and name in ("model", "model_ema")
            save = self.strategy.save_adapter if alone else self.strategy.save_model
            save(model, self.tokenizer, self.folder / name)

    def _publish(self) -> None:
        """Write the model's card, and upload the model if the configuration says so."""
        if not self.strategy.is_rank_0():
            return

        folder = self.folder / "model"
        repository = self.config.train.push_to_hub
        results = held_out_results(read_rows(self.folder / "metrics.jsonl"))
        write_card(
            folder, self.config, steps=self.done, results=results, version=lightrft.__version__
        )

        if repository:
            self.strategy.announce("push_to_hub")
            push(folder, repository)

    def _start(self) -> None:
        # A model that is saved has to stop generating where the run's responses stop.
        stops = self.config.rollout.stop_token_ids
        ends = turn_end_ids(self.config.data, self.tokenizer).union(stops)
        for model in self.models_to_save().values():
            end_generation_at(self.strategy.unwrap_model(model), ends)
            if model is not self.role.average:  # it has the same class as the model itself
                self.strategy.rehearse_save(model, self.tokenizer)

        resumed = None
        train = self.config.train
        if train.load_checkpoint:
            self.strategy.announce("load_checkpoint")
            resumed = self._resume(self.checkpoints)
            if resumed is None:
                self.strategy.print(
                    f"no checkpoint in {self.checkpoints}: starting from the beginning"
                )

        if resumed is None and (train.load_checkpoint or train.overwrite):
            self.run_folder.set_aside()
        if resumed is None and train.fork_from:
            resumed = self._fork(Path(train.fork_from).expanduser(), train.at)
        self.nothing_left = self._has_ended()
        if not self.nothing_left:
            self.described = True
            if self.strategy.is_rank_0():
                self.config.write(self.folder / "config.yaml")
            self._describe_run("running", 0.0)

        if self.config.observe.digests and not self.nothing_left:
            writer = self.observer.writer
            self.digests = Digests(self.learning_roles, self.strategy.mesh, self.folder, writer)
            self.digests.start(resumed)
        self.observer.start(asdict(self.config), self.total_steps, resumed)

    def _has_ended(self) -> bool:
        """Return True if the resumed run was already complete; all ranks return the same."""
        before = self.strategy.mesh.world.broadcast(self.run_folder.description())
        if self.done < self.total_steps or before.get("status") != "finished":
            return False
        self.strategy.print(
            f"this run is complete: all {self.total_steps} steps are done, and the model in"
            f" {self.folder / 'model'} is not changed; --num_episodes and --max_steps make a run"
            " longer"
        )
        return True

    def _loop(self) -> None:
        train = self.config.train
        saves = train.save_steps > 0 or train.save_minutes or train.load_checkpoint
        saved_at = time.monotonic()
        for number in range(self.done + 1, self.total_steps + 1):
            record = self.step(number)
            digests = None if self.digests is None else self.digests.of_rank(record)
            self.role.update_average(self.config.train.ema_beta)
            self.done = number
            self.interruption.at_once = False

            last = number == self.total_steps or self.enough()
            evaluates = self.config.data.eval_data or train.eval_generate
            if evaluates and _due(number, train.eval_steps, last):
                with self.trace.phase("evaluate"):
                    self.evaluate()

            self._report(number, last)
            # Ranks wait for each other in each collective, so all of it travels in one.
            minutes = (time.monotonic() - saved_at) / 60
            overdue = train.save_minutes is not None and minutes >= train.save_minutes
            state = self.interruption.received, digests, overdue
            of_ranks = self.strategy.mesh.world.gather(state)
            signals, digests_of_ranks, overdue_of_ranks = zip(*of_ranks, strict=True)
            if self.digests is not None:
                self.digests.write(number, digests_of_ranks)
            due = train.save_steps > 0 and number % train.save_steps == 0
            if saves and (last or due or any(overdue_of_ranks)):
                saved_at = time.monotonic()
                with self.trace.phase("checkpoint", idle=True):
                    self.save()
                self.interruption.safe_point()  # a signal may have come meanwhile

            self.strategy.finish_ckpt(wait=False)
            # A checkpoint can hold the state between steps, so this is where a signal counts.
            self.interruption.heed(signals)
            if last:
                break

    def _report(self, number: int, last: bool) -> None:
        """Reduce the metrics over all ranks, once, and send them to the sinks."""
        self._write_timeline(number)
        data = self.strategy.mesh.data
        for name, value in (self.trace.step() | self.strategy.engine_memory).items():
            add = self.metrics.max if name.startswith("memory/") else self.metrics.mean
            add(name, value)
            self._measured[name] += 1

        self._measured["perf/steps"] += 1
        self.metrics.sum("perf/steps", float(data.rank == 0))
        self.metrics.sum("perf/train_flops", self.role.operations - self._operations)
        self._operations = self.role.operations
        if self.strategy.skipped_steps:
            self.metrics.max("train/skipped_steps", self.strategy.skipped_steps)

        if not _due(number, self.config.observe.logging_steps, last):
            return

        # Seconds are means over the steps of the row, even if only some steps have the phase.
        steps = self._measured.pop("perf/steps")
        for name, count in self._measured.items():
            if name.startswith("time/") and count < steps:
                self.metrics.mean(name, 0.0, float(steps - count))

        self._measured.clear()
        row = self.metrics.reduce(data)
        if "rollout/tokens" in row:
            row["perf/tokens_per_second"] = (
                row["rollout/tokens"] / row["perf/steps"] / row["time/step"]
            )

        self.observer.log(number, row)
        if self.health.check_step(number, row):
            # A sudden mismatch may mean wrong weights in the engine, so all are verified next time.
            self.strategy.engine.verify_round = None

    def _write_timeline(self, number: int) -> None:
        """Add the spans of all ranks to the timeline, in the first steps of this process."""
        spans = self.trace.take_spans()
        if number - self.resumed <= self.config.observe.trace_steps:
            spans_of_ranks = self.strategy.mesh.world.gather(spans)
            if self.strategy.is_rank_0():
                self.observer.writer.submit(
                    partial(extend_timeline, self.folder / "trace.json", number, spans_of_ranks)
                )

    # -- checkpoints

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return the identity to compare checkpoints with. All ranks call it together."""
        models = {
            name: self.strategy.unwrap_model(model) for name, (model, *_) in self.models.items()
        }
        # One rank reads the weights' files, and the others take the digests from it.
        digests = {}
        if self.strategy.is_rank_0():
            digests = {name: weights_of(model.name_or_path) for name, model in models.items()}
        digests = self.strategy.mesh.world.broadcast(digests)
        weights = {name: digest for name, digest in digests.items() if digest}
        model = self.strategy.unwrap_model(self.role.module).config
        probabilities = self.prompts.probabilities

        return identity(self.config, model, self.learned_rows, weights, probabilities=probabilities)

    def save(self) -> None:
        """Save a checkpoint of the state after `self.done` steps."""
        self.saved = self.done
        # A checkpoint must not be ahead of the metrics that lead up to it.
        self.observer.writer.flush()

        train = self.config.train
        self.strategy.save_ckpt(
            self.models,
            self.checkpoints,
            tag=f"step{self.done}",
            max_num=train.max_ckpt_num,
            max_mem=train.max_ckpt_mem,
            client_state={"step": self.done, "run": self.run_folder.id, "identity": self.identity},
            items=self.items,
            hf_model=self.role.module if train.save_hf_ckpt else None,
            tokenizer=self.tokenizer,
            async_save=train.async_save,
        )

    def _fork(self, origin: Path, at: int | None) -> int:
        """Return the step after which this run leaves the run in the folder `origin`.

        The rows up to this step are copied, so that both runs can be compared from their first step
        on.
        """
        folder = checkpoints_of(origin)
        step = self._resume(folder, tag=None if at is None else f"step{at}")
        if step is None:
            raise ConfigError(
                f"--fork_from {origin}: there is no checkpoint in {folder}; write some with"
                " --save_steps"
            )

        self.saved = 0  # an interruption writes the first checkpoint of this run
        if self.strategy.is_rank_0():
            copy_records(origin, self.folder)
        return step

    def _resume(self, folder: Path, tag: str | None = None) -> int | None:
        """Return the step to continue after, or None if no checkpoint can be used."""
        # A checkpoint has the optimizer's settings too, but the flags of this run decide.
        with ExitStack() as settings:
            for _, optimizer, scheduler in self.models.values():
                if optimizer is not None:
                    settings.enter_context(kept_settings(optimizer, scheduler))
            path, state = self.strategy.load_ckpt(
                self.models, folder, tag, items=self.items, check=self._check, needs=CLIENT_STATE
            )

        if path is None:
            return None

        step = state.get("step")
        if path.name != f"step{step}":
            raise ConfigError(
                f"{path} says that it was written after step {step!r:.50}: it is damaged"
            )

        self.done = self.saved = self.resumed = step
        self.strategy.print(f"resuming after step {self.done} from {path}")
        return self.done

    def _check(self, path: Path, state: dict[str, Any]) -> None:
        forks = path.parent.resolve() != self.checkpoints.resolve()
        flag = "--fork_from" if forks else "--load_checkpoint"
        try:
            changed = changed_settings(state["identity"], self.identity, fork=forks)
        except ConfigError as error:
            raise ConfigError(
                f"{flag}: {path} belongs to another run:\n{error}\nundo these changes,"
                " or set another --ckpt_path"
            ) from error
        if changed and self.strategy.is_rank_0():
            logger.warning("resuming from {} with changes: {}", path, "; ".join(changed))

    def _save_interrupted(self) -> None:
        if self.saved != self.done:
            self.save()
        self.strategy.finish_ckpt()
        self.strategy.print(
            f"saved step {self.done} in {self.checkpoints}; resume with the same command and"
            " --load_checkpoint"
        )

    def _check_end(self) -> None:
        scheduler = self.role.scheduler
        taken = scheduler.last_epoch if scheduler else 0
        self.health.check_end(self.done, taken=taken, skipped=self.strategy.skipped_steps)

    def _describe_run(self, status: str, seconds: float) -> None:
        """Write `run.json`, which describes the run for people and for the report."""
        if not self.strategy.is_rank_0():
            return

        num_parameters, num_active = self.parameter_counts
        self.run_folder.describe(
            {
                "command": self.config.command,
                "status": status,
                "steps": self.done,
                "total_steps": self.total_steps,
                "engine": self.strategy.engine_name,
                "engine_tp_size": self.config.engine.engine_tp_size,
                "strategy": type(self.strategy).__name__,
                "world_size": self.strategy.mesh.world.size,
                "rollout_ranks": self.config.rollout.rollout_ranks,
                "parameters": num_parameters,
                "active_parameters": num_active,
                "weight_bytes": num_parameters * (2 if self.config.model.bf16 else 4),
                "device": device_name(),
                "seconds": round(seconds, 2),
                "forked_from": self.config.train.fork_from,
                "machine": machine(),
                "warnings": self.health.warnings,
                "versions": {"lightrft": lightrft.__version__} | installed_versions(),
            }
        )

    @cached_property
    def parameter_counts(self) -> tuple[int, int]:
        """Count the parameters of the trained model over all ranks: all, and active ones.

        Only active parameters take part in the computation of a token.
        """
        module = self.role.module
        shape = self.strategy.full_shape
        shapes = ((name, shape(each)) for name, each in module.named_parameters())
        return count_parameters(shapes, module.hf_model.config)

    def _log_end(self, status: str) -> None:
        """Log the folder, and write the report unless the run failed.

        After a failure the other ranks wait to learn of it, and a report takes time.
        """
        if not self.strategy.is_rank_0() or self.done == 0:
            return

        if status == "finished":
            model = f"model in {self.folder / 'model'}"
        else:
            model = f"files in {self.folder}"
        logger.info("{} after step {}: {}", status, self.done, model)
        if status == "failed":
            return

        try:
            logger.info("report: {}", write_report(self.folder))
        except Exception as error:  # a finished run does not fail because of its report
            logger.warning(
                f"the report of {self.folder} could not be written: {type(error).__name__}: {error}"
            )


def _due(number: int, every: int, last: bool) -> bool:
    return last or (every > 0 and number % every == 0)
