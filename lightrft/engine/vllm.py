"""vLLM inside this process: one engine per rank, or one per `engine_tp_size` consecutive ranks, next to the trainer."""

import atexit
import copy
import gc
import logging
import math
import os
import random
import uuid
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL.Image import Image
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lightrft.engine.base import EngineError, EngineSetup, Part
from lightrft.engine.experts import pack_experts, unpacked_experts
from lightrft.engine.first_token import Done
from lightrft.engine.fused import PARTS, FusedWeights, engine_names
from lightrft.engine.media import Clip, MediaReader, Video, metadata
from lightrft.engine.names import PublishedNames
from lightrft.engine.probe import Probe, logits_processor
from lightrft.engine.proof import Fingerprints
from lightrft.engine.requests import MEDIA, Expanded, Request, Sampling
from lightrft.engine.start import LibraryEngine
from lightrft.engine.weights import Named
from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import local_rank, seed_generators
from lightrft.types import Completion

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks share the cores
    "VLLM_LOGGING_LEVEL": "ERROR",  # its start-up warnings speak of choices made here
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Defaults, read by vLLM at its import; what the user has set stays."""
for variable, default in ENVIRONMENT.items():
    os.environ.setdefault(variable, default)
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # its import speaks before it has read the level

import vllm  # noqa: E402  after its environment
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import ModelConfig  # noqa: E402
from vllm.distributed.parallel_state import destroy_model_parallel  # noqa: E402
from vllm.inputs import MultiModalInput, TokensInput, TokensPrompt, tokens_input  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.model_executor.model_loader import register_model_loader  # noqa: E402
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

OTHER_TIMES = ("qwen2_vl", "qwen2_5_vl")
"""Families whose text goes on, behind a video that is longer than it is wide, elsewhere than in transformers."""

class _Shim:
    """Everything that is not vLLM's documented offline interface, so that a new version is checked here."""

    def __init__(self, llm: LLM, names: PublishedNames):
        """vLLM shuts itself down when its client is collected and at exit, and then destroys the trainer's process group."""
        self.llm = llm
        llm.llm_engine.engine_core._finalizer.detach()
        atexit.register(gc.unfreeze)  # it froze every object; unfrozen ones are collected in order, without complaints
        (self.model,) = llm.apply_model(lambda model: model)
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        parts = PARTS | getattr(self.model, "packed_modules_mapping", {})
        known = engine_names(names)
        known = {name: mapper.map_name(published) for name, published in known.items()} if mapper else known
        self.weights = FusedWeights(self.model, known, names.shapes, parts=parts, packs=_packs)

    def reload_weights(self, named_tensors: Iterator[Named]) -> None:
        """Full tensors under published names; vLLM slices, fuses and repacks them layer by layer.

        It must see the stream end: an exception in between leaves half of its layers without storage.
        """
        experts = unpacked_experts(self.model)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})
        pack_experts(experts)
        _renew_tied_layers(self.model)

    def with_media(self, token_ids: list[int], media: dict[str, list]) -> MultiModalInput:
        """The media processed, their placeholders expanded."""
        data = {MEDIA[name]: [_item(item) for item in items] for name, items in media.items() if items}
        (prompt,) = self.llm.renderer.render_cmpl([TokensPrompt(prompt_token_ids=token_ids, multi_modal_data=data)])
        return prompt

    def submit(self, name: str, prompt: TokensInput | MultiModalInput, parameters: SamplingParams) -> None:
        self.llm.llm_engine.add_request(name, prompt, parameters)

    def finished(self) -> Iterator[tuple[str, RequestOutput]]:
        """Name and output of each submitted request as it ends, until there are none."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                yield output.request_id, output

    def decode_with(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """It starts without a tokenizer, as only stop strings need one."""
        self.llm.llm_engine.output_processor.tokenizer = tokenizer

    def reset_caches(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise EngineError("vLLM did not drop its prefix cache: requests are still in it")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()  # the scheduler's; reload_weights clears only the runner's

    def num_cached_blocks(self) -> int:
        return len(self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)

    def destroy_weights(self) -> None:
        """Stands for a sleep of level 2 where vLLM has none: what is computed without a new stream is NaN."""
        _fill_with_nan(self.model)

    def shutdown(self) -> None:
        """Its workers and their groups only."""
        self.llm.collective_rpc("shutdown")
        destroy_model_parallel()

    @staticmethod
    @contextmanager
    def rank_in_environment() -> Iterator[None]:
        """While an engine starts: it reads its rank where torchrun writes it, also in a process without a launcher."""
        said = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(local_rank())}
        missing = {name: value for name, value in said.items() if name not in os.environ}
        os.environ.update(missing)
        try:
            yield
        finally:
            for name in missing:
                del os.environ[name]

    @staticmethod
    @contextmanager
    def own_shared_memory(axis: Axis) -> Iterator[None]:
        """While an engine starts on CPUs: a name of its own for the memory through which its ranks exchange tensors.

        vLLM's name is the same for every engine on the machine, so two runs meet in it, and what a killed run leaves
        behind stops the next one. Once all ranks have mapped it the name is taken away, and nothing can be left behind.
        """
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory

        name = axis.broadcast(f"lightrft-{uuid.uuid4().hex}")
        original = SharedMemory.make_group_name
        SharedMemory.make_group_name = staticmethod(lambda communicator: f"{name}-{communicator.unique_name}")
        try:
            yield
            axis.barrier()
        finally:
            SharedMemory.make_group_name = staticmethod(original)
            for file in Path("/dev/shm").glob(f"{name}*"):
                file.unlink(missing_ok=True)


class VLLMEngine(LibraryEngine):
    """Its sampler uses torch's global generator, which is seeded for the time of one call: a generator per request would
    sample row by row. Samples therefore repeat for the same requests, seed and state of the prefix cache.
    """

    def __init__(self, setup: EngineSetup):
        super().__init__("vllm", vllm.__version__, setup)

    def _start(self, setup: EngineSetup, config: PretrainedConfig) -> list[str]:
        if config.model_type in OTHER_TIMES:
            self.limits.pop("videos", None)
        self.reader = MediaReader(setup.model_path, self.vocabulary.placeholders, trust_remote_code=setup.trust_remote_code)
        memory = _Shim.own_shared_memory(setup.axis) if self.on_cpu else nullcontext()
        with _random_state_kept(self.device), memory, _Shim.rank_in_environment(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._llm = LLM(**_arguments(setup, config, self.limits))
        self._shim = _Shim(self._llm, self.names)
        return self._shim.weights.unknown

    def reset_cache(self) -> None:
        self._shim.reset_caches()

    def _expanded(self, request: Request) -> Expanded:
        self.reader.heard(request.multi_modal.get("audios", []))
        prompt = self._shim.with_media(request.token_ids, request.multi_modal)
        return Expanded(prompt["prompt_token_ids"], prompt)

    def _generate(self, requests: list[Request], seed: int, done: Done) -> None:
        samples: dict[int, dict[int, RequestOutput]] = {index: {} for index in range(len(requests))}
        with _random_state_kept(self.device), self._stance():
            seed_generators(seed, self.device)
            for index, request in enumerate(requests):
                self._submit(index, request)
            for name, output in self._shim.finished():
                index, sample = map(int, name.split("/"))
                samples[index][sample] = output
                if len(samples[index]) == requests[index].sampling.num_draws:
                    found = self._completions(samples.pop(index), requests[index].sampling)
                    with _random_state_kept(self.device):  # the engine's draws do not depend on who is told
                        done(index, found)

    def _submit(self, index: int, request: Request) -> None:
        """A request for each sample; the prompt is computed once, for the first, and in the prefix cache for the others."""
        if request.sampling.stop:
            self._shim.decode_with(self.vocabulary.tokenizer)
        parameters = self._parameters(request.sampling)
        prompt = tokens_input(request.token_ids)
        if request.expanded:
            prompt = {**request.expanded.features, "prompt_token_ids": request.prompt}
        for sample in range(request.sampling.num_draws):
            self._shim.submit(f"{index}/{sample}", prompt, parameters)

    def _parameters(self, sampling: Sampling) -> SamplingParams:
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens, temperature=min(sampling.temperature, 1.0),
            top_p=sampling.top_p, top_k=sampling.top_k,
            logit_bias=dict.fromkeys(sampling.banned_token_ids, -math.inf) or None,
            ignore_eos=True,  # a tokenizer's end token, which vLLM knows of some models: those that end are named next
            stop_token_ids=sorted(self.vocabulary.end_token_ids | set(sampling.stop_token_ids)),
            stop=list(sampling.stop), detokenize=bool(sampling.stop), skip_special_tokens=False, include_stop_str_in_output=True,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # a clone is checked again
        )
        parameters.temperature = sampling.temperature  # its check allows at most 2; it computes with any
        return parameters

    def _completions(self, outputs: dict[int, RequestOutput], sampling: Sampling) -> list[Completion]:
        found = []
        for _, output in sorted(outputs.items()):
            (sample,) = output.outputs
            found.append(Completion(list(sample.token_ids), list(sample.logprobs.logprobs), sample.finish_reason, self.version,
                                    output.num_cached_tokens or 0))
        return found if len(found) == sampling.n else [copy.deepcopy(found[0]) for _ in range(sampling.n)]

    def _stance(self) -> AbstractContextManager:
        """Nothing is compiled on a CPU: the sampler's one compiled function costs seconds there, and a C++ compiler."""
        return torch.compiler.set_stance("force_eager") if self.on_cpu else nullcontext()

    def _load_weights(self, named_tensors: Iterator[Named]) -> None:
        failures: list[Exception] = []
        with self._fatal("load_weights"), torch.no_grad():
            try:
                self._shim.reload_weights(self.names.published(_until_failure(named_tensors, failures)))
            except (ValueError, KeyError) as error:
                if not (unknown := self._shim.weights.unknown):
                    raise
                raise ValueError(f"{self.names.strangers(unknown, 'vllm')}. It said: {error!s:.300}") from error
        if failures:
            raise failures[0]

    def _fingerprints(self, dtype: torch.dtype, turn: int | None) -> Fingerprints:
        return self._shim.weights.fingerprints(dtype, self.axis.size, turn)

    def _held(self, prints: Fingerprints) -> tuple[torch.Tensor, torch.Tensor]:
        with self._stance():
            self._shim.weights.add_to(prints)
        return prints.numbers(self.device)

    def _num_cached(self) -> int:
        return self._shim.num_cached_blocks()

    def _parts(self, token_ids: list[int]) -> dict[str, torch.Tensor]:
        probe, logits = Probe(len(token_ids)), []
        seen = logits_processor(self._shim.model).register_forward_hook(lambda module, given, output: logits.append(output))
        try:
            with probe.attached(self._shim.model):
                self._generate([Request(token_ids, sampling=Sampling(max_tokens=1, temperature=0))], 0, lambda *_: None)
        finally:
            seen.remove()
        return probe.parts(logits[0][-1])

    def _sleep(self, level: int) -> None:
        if not self.on_cpu:
            self._llm.sleep(level)
        elif level == 2:
            self._shim.destroy_weights()

    def _wake(self, part: Part) -> None:
        if not self.on_cpu:
            self._llm.wake_up(tags=[part])

    def _close(self) -> None:
        self._shim.shutdown()
        del self._llm, self._shim
        gc.collect()


def _item(item: Image | Video | Clip) -> Image | tuple:
    """As vLLM takes it."""
    if isinstance(item, Video):
        return item.frames, metadata(item) | {"video_backend": "lightrft", "do_sample_frames": False}
    return (item.waveform, item.sampling_rate) if isinstance(item, Clip) else item


def _arguments(setup: EngineSetup, config: PretrainedConfig, limits: dict[str, int]) -> dict:
    section, on_cpu = setup.section, setup.device.type == "cpu"
    memory = {"kv_cache_memory_bytes": int(section.engine_kv_cache_gb * 2**30)} if on_cpu else {}
    latent = on_cpu and getattr(config.get_text_config(), "kv_lora_rank", None)  # MLA: its kernel takes heads for tokens there
    kernels = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}} if latent else {}
    media = {
        "limit_mm_per_prompt": {medium: limits.get(name, 0) for name, medium in MEDIA.items()},
        "mm_processor_cache_gb": 0,  # what would stay in it are the images of the last step
        "mm_device_do_normalize": False,  # its numbers lie in the model, and come in no stream
    }
    return memory | kernels | (media if limits else {}) | {
        "model": setup.model_path,
        "trust_remote_code": setup.trust_remote_code,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "load_format": "dummy" if setup.from_stream else "auto",
        "max_model_len": setup.max_model_len,
        "tensor_parallel_size": setup.axis.size,
        "distributed_executor_backend": "external_launcher",
        "seed": setup.seed,
        "gpu_memory_utilization": 0.1 if on_cpu else section.engine_mem_util,
        "enforce_eager": on_cpu or section.engine_enforce_eager,
        "enable_sleep_mode": not on_cpu and section.enable_engine_sleep,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "skip_tokenizer_init": not limits,  # token ids in, token ids out; its processors of media want one all the same
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


@register_model_loader("dummy")
class _NoWeights(DummyModelLoader):
    """Before the first stream: random weights, as vLLM has them, but buffers as the model makes them, which no stream brings."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        made = [(buffer, buffer.clone()) for buffer in model.buffers()]
        super().load_weights(model, model_config)
        for buffer, values in made:
            buffer.copy_(values)


@RMSNorm.register_oot(name="RMSNorm")
class _HostRMSNorm(RMSNorm):
    """vLLM's kernel for CPUs, which it has and does not choose: five to ten times as fast as torch, operation by operation.

    Its vectors have up to 16 numbers. In bfloat16 it would round otherwise than transformers does.
    """

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        weight, plain = self.weight.data, self.has_weight and self.variance_size_override is None
        if not plain or not x.dtype == weight.dtype == torch.float32 or x.shape[-1] % 16:
            return self.forward_native(x, residual)
        if residual is None:
            normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            torch.ops._C.rms_norm.default(normed, x.contiguous(), weight, self.variance_epsilon)
            return normed
        if not x.is_contiguous() or not residual.is_contiguous():
            return self.forward_native(x, residual)
        torch.ops._C.fused_add_rms_norm.default(x, residual, weight, self.variance_epsilon)
        return x, residual


def _until_failure(named_tensors: Iterator[Named], failures: list[Exception]) -> Iterator[Named]:
    """The stream, which seems to end where it breaks: vLLM then ends its reload in order and can take the next one."""
    try:
        yield from named_tensors
    except Exception as error:
        failures.append(error)


def _packs(layer: torch.nn.Module) -> bool:
    """On CPUs a layer multiplies with a packed copy of its weight, and mostly keeps nothing else."""
    return "cpu_linear" in vars(layer)


def _renew_tied_layers(model: torch.nn.Module) -> None:
    """Reloading packs a tied weight anew for the layer that loads it; a tied output layer takes that packed copy over."""
    first: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and _packs(layer) and first.setdefault(id(weight), layer) is not layer:
            layer.cpu_linear = first[id(weight)].cpu_linear


def _fill_with_nan(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(torch.nan)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """The caller's generators (torch on host and device, numpy, random) come out as they went in."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
