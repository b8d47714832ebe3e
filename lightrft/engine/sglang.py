"""SGLang beside the trainer: the first of `engine_tp_size` consecutive ranks owns the engine and its processes."""

import asyncio
import atexit
import copy
import gc
import logging
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from loguru import logger
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from lightrft.algorithms.truncation import Truncation
from lightrft.engine.base import Engine, EngineError, EngineSetup, Part
from lightrft.engine.expected import Vocabulary, published_names, reads_images
from lightrft.engine.first_token import Done
from lightrft.engine.fused import FusedWeights, engine_names
from lightrft.engine.media import ImageReader
from lightrft.engine.proof import Fingerprints
from lightrft.engine.requests import Expanded, Request
from lightrft.engine.start import starting, warn_if_untested
from lightrft.engine.stops import StopStrings
from lightrft.engine.weights import Named
from lightrft.types import Completion

if not torch.accelerator.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read by SGLang at its import

import sglang  # noqa: E402  after its environment
from sglang.srt.entrypoints.engine import Engine as SGLang  # noqa: E402
from sglang.srt.layers import sampler  # noqa: E402
from sglang.srt.managers import mm_schedule  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process  # noqa: E402
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor  # noqa: E402
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: E402
from sglang.srt.utils import MultiprocessingSerializer  # noqa: E402
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # noqa: E402

IDLE_SECONDS = 60
"""So long may SGLang take to become idle after its last answer."""
SECONDS_TO_NOTICE = 1.0
"""So late may the death of one of SGLang's processes be seen in a call that waits for it."""
SPARE_TOKENS = 8
"""SGLang takes no prompt that comes closer than 6 tokens to its context length."""
LOOK_EVERY = 8
"""Tokens between two looks for stop strings, which end a request from outside; RARELY where there are none."""
RARELY = 2**30
CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Which cores each process of one engine has; another engine may have more processes."""


class _Shim:
    """SGLang's engine with its processes, and everything of it that another version may change."""

    def __init__(self, arguments: dict[str, Any]):
        if arguments["device"] != "cpu":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()  # handles of device memory then name devices as SGLang's processes do
        logging.getLogger("sglang.srt.entrypoints.engine").setLevel(logging.CRITICAL)  # it announces our handler as an error
        before = set(psutil.Process().children())
        with _settings_kept():
            os.environ.setdefault(CORES, _cores_of_each(arguments["tp_size"]))
            try:
                self.engine = _SGLang(**arguments, log_level="error", custom_sigquit_handler=_died)
                self.engine.tokenizer_manager.signal_handler_class = _NoHandlers
                self.flush_cache()  # its first call takes the handlers of signals, which are given back here
            except BaseException:
                _kill(set(psutil.Process().children()) - before)
                raise
        self.engine.loop = _Loop(self.engine.loop)
        signal.signal(signal.SIGQUIT, self.engine.loop.on_death)
        atexit.unregister(self.engine.shutdown)  # it kills every child of this process, the trainer's own among them
        atexit.register(self.shutdown)

    def generate(
        self, requests: list[Request], parameters: list[dict[str, Any]], processors: list[str | None]
    ) -> Iterator[dict[str, Any]]:
        """What is known of each request, now and then, with its `index`, and once when it ends. One message starts them all."""
        images = [[each.expanded.features | {"format": "processor_output"}] if each.expanded else [] for each in requests]
        return self.engine.generate(input_ids=[each.prompt for each in requests], sampling_params=parameters,
                                    image_data=images if any(images) else None, custom_logit_processor=processors,
                                    return_logprob=True, stream=True)

    def abort(self, answer: dict[str, Any]) -> None:
        """Ends the request that is answered; its last answer follows."""
        self.engine.tokenizer_manager.abort_request(rid=answer["meta_info"]["id"])

    def begin_weight_update(self) -> None:
        _checked(self.engine.begin_weight_update())

    def end_weight_update(self) -> None:
        _checked(self.engine.end_weight_update())

    def update_weights(self, payloads: list[str]) -> None:
        """One payload for each tensor-parallel rank."""
        _checked(self.engine.update_weights_from_tensor(payloads, load_format="flattened_bucket", flush_cache=False))

    def flush_cache(self) -> None:
        """Waits until the scheduler has nothing to do: it answers a moment before it is idle."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise EngineError(f"SGLang was not idle for {IDLE_SECONDS} s: its cache cannot be dropped")
            time.sleep(0.01)

    def release(self, tags: list[str]) -> None:
        """An idle scheduler is needed, and none of the tags released before: it would die."""
        self.flush_cache()
        self.engine.release_memory_occupation(tags=tags)

    def resume(self, tags: list[str]) -> None:
        self.engine.resume_memory_occupation(tags=tags)

    def destroy_weights(self) -> None:
        """Stands for a sleep of level 2 on a CPU, where SGLang keeps all: what is computed without a new stream is NaN."""
        self.ask("fill_with_nan")

    def ask(self, question: str, **arguments: Any) -> list[Any]:
        """The answers of SGLang's processes to one of QUESTIONS, by tensor-parallel rank."""
        with tempfile.TemporaryDirectory() as folder:
            torch.save((question, arguments), Path(folder, "question"))
            self.engine.collective_rpc(_answer.__name__, folder=folder)  # it brings numbers and strings only, and nothing back
            return [torch.load(Path(folder, str(rank))) for rank in range(self.engine.server_args.tp_size)]

    def shutdown(self) -> None:
        """Its own processes only."""
        self.engine.tokenizer_manager._subprocess_watchdog.stop()
        atexit.unregister(self.shutdown)
        _kill({psutil.Process(pid) for pid in self.engine.get_all_child_pids() if psutil.pid_exists(pid)})
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    @staticmethod
    def payload(bucket: list[Named]) -> tuple[Any, str]:
        """What must be kept until the update is done, as the payload refers to it, and the payload."""
        flat = FlattenedTensorBucket(named_tensors=[(name, tensor.detach()) for name, tensor in bucket])
        content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        return content, MultiprocessingSerializer.serialize(content, output_str=True)


def _run_scheduler(*args: Any, **kwargs: Any) -> None:
    """A process of SGLang's that holds weights and generates."""
    gc.freeze()  # on a CPU every dropped cache is a collection; of all that was imported it would take half a second
    setattr(Scheduler, _answer.__name__, _answer)
    SamplingBatchInfo.from_schedule_batch = classmethod(_with_seeds(SamplingBatchInfo.from_schedule_batch.__func__))
    if not torch.accelerator.is_available():
        sampler.multinomial_with_seed = _draw
    run_scheduler_process(*args, **kwargs)


class _SGLang(SGLang):
    run_scheduler_process_func = staticmethod(_run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list, list]:
        """None: it is given token ids and gives token ids."""
        return [], []


def _with_seeds(make: Callable) -> Callable:
    """SGLang draws each request from a seed of its own only if every kernel is deterministic too; here it always does."""

    def from_schedule_batch(cls: type, batch: Any, vocab_size: int) -> SamplingBatchInfo:
        info = make(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
        return info

    return from_schedule_batch


def _draw(logprobs: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """[R, 1] int64: from each row of logprobs [R, V] the inverse of its cumulative distribution at a place that the row's seed
    and position alone decide. SGLang's own drawing needs its kernels.
    """
    places = [random.Random(f"{of_row} {at}").random() for of_row, at in zip(seed.tolist(), position.tolist(), strict=True)]
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not select beyond the last token
    return torch.searchsorted(cumulative, torch.minimum(torch.tensor(places)[:, None].double() * total, below_total), right=True)


class _Truncate(CustomLogitProcessor):
    """Before the temperature divides them: -inf for the logits of tokens that are not to be sampled.

    So log-probs are those of the part that is sampled; SGLang's own are of all tokens, and its top p is of all of them too.
    """

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        alike = defaultdict(list)
        for row, wanted in enumerate(custom_param_list):
            alike[wanted["top_k"], wanted["top_p"], tuple(wanted["banned"]), wanted["temperature"]].append(row)
        for (top_k, top_p, banned, temperature), rows in alike.items():
            part, scaled = Truncation(top_k, top_p, banned), logits[rows].float() / (temperature or 1.0)
            logits[rows] = logits[rows].masked_fill(part.outside(scaled, part.threshold(scaled)), -torch.inf)
        return logits


def _answer(self: Scheduler, folder: str) -> None:
    question, arguments = torch.load(Path(folder, "question"))
    answer = QUESTIONS[question](self, **arguments)
    torch.save(answer, Path(folder, str(torch.distributed.get_rank(self.tp_group.cpu_group))))


@torch.no_grad()
def _fill_with_nan(scheduler: Scheduler) -> None:
    for parameter in scheduler.tp_worker.model_runner.model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(torch.nan)


def _weights(scheduler: Scheduler, names: dict[str, str]) -> FusedWeights:
    """From version 0.5.22 on a layer knows its group, and not its place in it."""
    model = scheduler.tp_worker.model_runner.model
    for layer in model.modules():
        known = vars(layer)
        if "tp_group" in known and "tp_rank" not in known:
            group = layer.tp_group
            layer.tp_rank, layer.tp_size = (0, 1) if group is None else (group.rank_in_group, group.world_size)
    return FusedWeights(model, {name: place.replace(".attn.qkv.", ".attn.qkv_proj.") for name, place in names.items()})


def _known_weights(scheduler: Scheduler, names: dict[str, str]) -> list[str]:
    """Of `names` those whose place in the model is known."""
    unknown = set(_weights(scheduler, names).unknown)
    return [name for name in names if name not in unknown]


def _held(
    scheduler: Scheduler, names: dict[str, str], shapes: dict[str, torch.Size], dtype: torch.dtype, slices: int, turn: int | None
) -> list[Tensor]:
    weights = _weights(scheduler, names)
    prints = weights.fingerprints(shapes, dtype, slices, turn)
    weights.add_to(prints)
    return [numbers.cpu() for numbers in prints.numbers(next(scheduler.tp_worker.model_runner.model.parameters()).device)]


def _num_cached(scheduler: Scheduler) -> int:
    return scheduler.tree_cache.evictable_size() + len(mm_schedule.embedding_cache)


def _forget_images(scheduler: Scheduler) -> None:
    """What its tower made of them outlives the cache of prefixes, and new weights."""
    mm_schedule.embedding_cache.clear()


QUESTIONS = {"fill_with_nan": _fill_with_nan, "known_weights": _known_weights, "held": _held, "num_cached": _num_cached,
             "forget_images": _forget_images}
"""What SGLang's processes can be asked; they do it in their own memory."""


def _checked(answer: tuple[bool, str]) -> None:
    """SGLang does not raise: an update that was refused leaves the old weights."""
    success, message = answer
    if not success:
        raise EngineError(f"SGLang refused: {message}")


def _died(number: int, frame: Any) -> None:
    """SGLang's processes announce their end with SIGQUIT; its own handler would kill this process without a word."""
    raise EngineError("a process of SGLang died; what it said stands above")


class _NoHandlers:
    """For the event loop, which calls them beside those of this process: SGLang's would end it."""

    def __init__(self, tokenizer_manager: Any): ...

    def sigterm_handler(self, number: int | None = None, frame: Any = None) -> None: ...

    def running_phase_sigquit_handler(self, number: int | None = None, frame: Any = None) -> None: ...


class _Loop:
    """SGLang's event loop: the loop itself lets no exception of a signal's handler through, so it is left now and then."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.runs = self.dead = False

    def run_until_complete(self, awaitable: Awaitable) -> Any:
        task = asyncio.ensure_future(awaitable, loop=self.loop)
        self.runs = True
        try:
            while not task.done() and not self.dead:
                self.loop.run_until_complete(asyncio.wait({task}, timeout=SECONDS_TO_NOTICE))
        finally:
            self.runs = False
        if self.dead:
            _died(signal.SIGQUIT, None)
        return task.result()

    def on_death(self, number: int, frame: Any) -> None:
        self.dead = True
        if not self.runs:
            _died(number, frame)


def _cores_of_each(tp: int) -> str:
    """`0,1|2,3`: this process's cores, divided among `tp` processes; they share one where there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[rank::tp] or cores[:1])) for rank in range(tp))


def _kill(processes: set[psutil.Process]) -> None:
    family = {one for process in processes for one in (process, *process.children(recursive=True))}
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=30)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """SGLang's start changes the whole process: environment, signals, how children start, the state of `random`.

    And its processes must not see that torchrun started this one: they would wait for torchrun's store.
    """
    environment, handler, state = dict(os.environ), signal.getsignal(signal.SIGTERM), random.getstate()
    start_method = multiprocessing.get_start_method(allow_none=True)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        yield
    finally:
        own = {name: value for name, value in os.environ.items() if name.startswith("SGLANG") and name != CORES}
        os.environ.clear()
        os.environ.update(environment | own)
        multiprocessing.set_start_method(start_method, force=True)
        signal.signal(signal.SIGTERM, handler)
        random.setstate(state)


class SGLangEngine(Engine):
    """All ranks construct and close their engines together; the others of an axis get the first one's answers.

    Each sample is drawn from a seed of its own, so it repeats for the same request, place and seed, however requests are
    batched, up to the rounding of kernels that compute differently in other batches.
    """

    def __init__(self, setup: EngineSetup):
        warn_if_untested("sglang", sglang.__version__)
        config = AutoConfig.from_pretrained(setup.model_path, trust_remote_code=setup.trust_remote_code)
        trust = {"trust_remote_code": setup.trust_remote_code}
        self.names = published_names(config, **trust)
        super().__init__(self.names.shapes, sleep_level=setup.section.engine_sleep_level, axis=setup.axis,
                         max_model_len=setup.max_model_len, vocabulary=Vocabulary.of(setup.model_path, config, **trust))
        self.most_images = setup.section.limit_mm_image_per_prompt if reads_images(config) else 0
        self.images = ImageReader(setup.model_path, self.vocabulary.placeholders["image"], images_alone=True, **trust)
        self.on_cpu = setup.device.type == "cpu"
        self.bucket_bytes = setup.section.weight_sync_bucket_mb * 2**20
        self._asleep: set[str] = set()
        self._shim: _Shim | None = None
        multiprocessing.current_process().authkey = self.axis.broadcast(bytes(multiprocessing.current_process().authkey))
        arguments = _arguments(setup, config)
        with starting("sglang", setup):
            self._known = self._led(lambda: self._start(arguments))
        if len(self._known) < len(self.expected):
            logger.warning("--verify_weight_sync can find {} of {} weights in SGLang: the proof leaves the others out",
                           len(self._known), len(self.expected))
        self.weights_valid = not setup.from_stream

    def _start(self, arguments: dict[str, Any]) -> list[str]:
        """Which weights have a known place."""
        self._shim = _Shim(arguments)
        return self._shim.ask("known_weights", names=self._places(self.expected))[0]

    def _places(self, names: Iterable[str]) -> dict[str, str]:
        known = engine_names(self.names)
        return {name: known[name] for name in names}

    def reset_cache(self) -> None:
        with self._fatal("reset_cache"):
            self._led(lambda: self._forget())

    def _forget(self) -> None:
        self._shim.flush_cache()
        if self.most_images:
            self._shim.ask("forget_images")

    def _expanded(self, request: Request) -> Expanded:
        return self.images.expanded(request)

    def _generate(self, requests: list[Request], seed: int, done: Done) -> None:
        for index, completions in self._followed(lambda: self._answers(requests, seed)):
            done(index, completions)

    def _answers(self, requests: list[Request], seed: int) -> Iterator[tuple[int, list[Completion]]]:
        """Every sample is a request to SGLang of its own, after one that leaves the prompt of all of them in the cache."""
        shared = [index for index, request in enumerate(requests) if request.sampling.num_draws > 1]
        num_cached = dict(self._prefilled(requests, shared))
        draw = random.Random(seed)
        samples = [_Sample(index, requests[index], draw.getrandbits(63))
                   for index, request in enumerate(requests) for _ in range(request.sampling.num_draws)]
        missing = [request.sampling.num_draws for request in requests]
        for place, completion in self._sampled(samples):
            index = samples[place].index
            samples[place].completion = completion
            missing[index] -= 1
            if not missing[index]:
                found = [sample.completion for sample in samples if sample.index == index]
                found[0].num_cached_tokens = num_cached.get(index, found[0].num_cached_tokens)
                yield index, found if len(found) > 1 else [copy.deepcopy(found[0]) for _ in range(requests[index].sampling.n)]

    def _prefilled(self, requests: list[Request], shared: list[int]) -> Iterator[tuple[int, int]]:
        """Index and number of cached tokens of each of these requests."""
        if shared:
            parameters = [{"max_new_tokens": 0, "temperature": 0, "sampling_seed": 0}] * len(shared)
            for answer in self._shim.generate([requests[index] for index in shared], parameters, [None] * len(shared)):
                yield shared[answer["index"]], answer["meta_info"]["cached_tokens"]

    def _sampled(self, samples: list["_Sample"]) -> Iterator[tuple[int, Completion]]:
        """Place and completion of each sample as it ends. What was generated after a stop string is still there."""
        parameters = [self._parameters(sample) for sample in samples]
        processors = [_Truncate.to_str() if sample.request.sampling.truncation.active else None for sample in samples]
        for answer in self._shim.generate([sample.request for sample in samples], parameters, processors):
            place, reason = answer["index"], answer["meta_info"]["finish_reason"]
            if reason is not None:
                yield place, self._completion(answer, samples[place])
            elif (stop := samples[place].request.sampling.stop) and not samples[place].stopped:
                samples[place].stopped = StopStrings(self.vocabulary.tokenizer, stop).reached(answer["output_ids"], LOOK_EVERY)
                if samples[place].stopped:
                    self._shim.abort(answer)

    def _parameters(self, sample: "_Sample") -> dict[str, Any]:
        sampling = sample.request.sampling
        return {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": sample.seed,
            "stop_token_ids": sorted(self.vocabulary.end_token_ids | set(sampling.stop_token_ids)),
            "skip_special_tokens": False,
            "stream_interval": LOOK_EVERY if sampling.stop else RARELY,
            "custom_params": {"top_k": sampling.top_k, "top_p": sampling.top_p, "banned": list(sampling.banned_token_ids),
                              "temperature": sampling.temperature},
        }

    def _completion(self, answer: dict[str, Any], sample: "_Sample") -> Completion:
        about = answer["meta_info"]
        reason = about["finish_reason"]
        if reason["type"] == "abort" and not sample.stopped:
            raise EngineError(f"SGLang aborted a request: {reason.get('message')}")
        logprobs = [logprob for logprob, *_ in about["output_token_logprobs"]]
        return Completion(list(answer["output_ids"]), logprobs, reason["type"], self.version, about["cached_tokens"])

    def _load_weights(self, named_tensors: Iterator[Named]) -> None:
        with self._fatal("load_weights"):
            self._led(lambda: self._shim.begin_weight_update())
        try:
            for bucket in _buckets(self.names.published(named_tensors), self.bucket_bytes):
                with self._fatal("load_weights"):
                    self._send(bucket)
        finally:
            if self._failure is None:
                with self._fatal("load_weights"):
                    self._led(lambda: self._shim.end_weight_update())

    def _send(self, bucket: list[Named]) -> None:
        kept, payload = _Shim.payload(bucket)
        payloads = self.axis.gather(payload)
        self._led(lambda: self._shim.update_weights(payloads))
        del kept  # now, as every rank's is read

    def _fingerprints(self, dtype: torch.dtype, turn: int | None) -> Fingerprints:
        return Fingerprints(self.expected, dtype, slices=self.axis.size, bits=self._known, turn=turn)

    def _held(self, prints: Fingerprints) -> tuple[Tensor, Tensor]:
        """The first rank has all of it, the others nothing: they add up."""
        shapes = {name: self.expected[name] for name in self._known}
        asked = self._led(lambda: self._shim.ask("held", names=self._places(shapes), shapes=shapes,
                                                  dtype=prints.dtype, slices=self.axis.size, turn=prints.turn))
        held = [sum(of_ranks) for of_ranks in zip(*asked, strict=True)]
        return tuple(held) if self.axis.rank == 0 else tuple(map(torch.zeros_like, held))

    def _num_cached(self) -> int:
        return self._led(lambda: self._shim.ask("num_cached"))[0]

    def _sleep(self, level: int) -> None:
        """SGLang keeps no copy of the weights on the host unless it was started for that: level 1 then keeps them in place."""
        if level == 2 and self.on_cpu:
            self._led(lambda: self._shim.destroy_weights())
        tags = {"kv_cache", "cuda_graph"} | ({"weights"} if level == 2 or self.sleep_level == 1 else set())
        self._led(lambda: self._shim.release(sorted(tags - self._asleep)))
        self._asleep |= tags

    def _wake(self, part: Part) -> None:
        tags = self._asleep & ({"weights"} if part == "weights" else {"kv_cache", "cuda_graph"})
        if tags:
            self._led(lambda: self._shim.resume(sorted(tags)))
        self._asleep -= tags

    def _close(self) -> None:
        if self._shim is not None:
            self._shim.shutdown()

    def _led(self, call: Callable[[], Any]) -> Any:
        """What the first rank's `call` returned, on all ranks of the axis; and what it raised."""
        outcome, failure = None, None
        if self.axis.rank == 0:
            try:
                outcome = call()
            except Exception as error:
                failure = error
        outcome, problem = self.axis.broadcast((outcome, failure and f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        if problem is not None:
            raise EngineError(f"on the first rank of this engine: {problem}")
        return outcome


    def _followed(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """_led() for calls that return one thing after another."""
        items = make() if self.axis.rank == 0 else iter(())
        while True:
            more, item = self._led(lambda: next(((True, item) for item in items), (False, None)))
            if not more:
                return
            yield item


@dataclass(slots=True)
class _Sample:
    index: int
    """Of its request."""
    request: Request
    seed: int
    stopped: bool = False
    """A stop string has come, and the request was ended."""
    completion: Completion | None = None


def _arguments(setup: EngineSetup, config: PretrainedConfig) -> dict[str, Any]:
    section, on_cpu = setup.section, setup.device.type == "cpu"
    return (_on_cpu(setup, config) if on_cpu else _on_accelerator(setup)) | {
        "model_path": setup.model_path,
        "trust_remote_code": setup.trust_remote_code,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "load_format": "dummy" if setup.from_stream else "auto",
        "context_length": setup.max_model_len + SPARE_TOKENS,
        "tp_size": setup.axis.size,
        "random_seed": setup.seed,
        "device": setup.device.type,
        "sampling_backend": "pytorch",  # the one that draws from seeds
        "grammar_backend": "none",
        "sleep_on_idle": True,  # its processes would keep a core busy each while the trainer computes
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "enable_custom_logit_processor": True,
        "enable_weights_cpu_backup": section.engine_sleep_level == 1 and not on_cpu,
    }


def _on_accelerator(setup: EngineSetup) -> dict[str, Any]:
    return {
        "base_gpu_id": setup.device.index,
        "mem_fraction_static": setup.section.engine_mem_util,
        "disable_cuda_graph": setup.section.engine_enforce_eager,
        "enable_memory_saver": setup.section.enable_engine_sleep,
    }


def _on_cpu(setup: EngineSetup, config: PretrainedConfig) -> dict[str, Any]:
    tokens = int(setup.section.engine_kv_cache_gb * 2**30) // _cache_bytes_of_a_token(config, setup.dtype, setup.axis.size)
    if tokens < setup.max_model_len + SPARE_TOKENS:
        raise ValueError(f"--engine_kv_cache_gb {setup.section.engine_kv_cache_gb} holds {tokens} tokens, fewer than one "
                         f"sequence of {setup.max_model_len}: give more")
    return {
        "attention_backend": "torch_native",
        "mm_attention_backend": "sdpa",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_total_tokens": tokens,
        "mem_fraction_static": 0.8,
        "chunked_prefill_size": -1,
    }


def _cache_bytes_of_a_token(config: PretrainedConfig, dtype: torch.dtype, tp: int) -> int:
    """Keys and values of all layers, on one of `tp` ranks."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(1, heads // tp) * head_dim * dtype.itemsize


def _buckets(named_tensors: Iterator[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    bucket: list[Named] = []
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
