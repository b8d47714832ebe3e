"""Access to vLLM's internals in this process; they may change between versions."""

import atexit
import copy
import gc
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL.Image import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.device_allocator import cumem
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed import parallel_state
from vllm.distributed.aux_output_connector import worker as auxiliary
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.inputs import MultiModalInput, TokensInput, TokensPrompt
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import RequestStatus

from lightrft.config.tables import table
from lightrft.core.engine import ABORTED
from lightrft.core.samples import Completion, Drafts
from lightrft.engine.media import MEDIA_NAMES, Clip, Video, metadata
from lightrft.engine.vllm.adapter_slots import AdapterSlots
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import local_rank
from lightrft.models.weight_sync import fused_layout
from lightrft.models.weight_sync.adapters import Adapters
from lightrft.models.weight_sync.expert_layout import is_experts, pack_experts, unpacked_experts
from lightrft.models.weight_sync.names import NamedTensor, PublishedNames

PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
"""Weight methods of vLLM that leave weights as loaded, except for kernels that are handled here."""

BY_LOADER: dict[str, str] = table("engine/names")["vllm"]
"""Names that Granite's mixtures replace while they load."""


@dataclass(eq=False)
class VLLMShim:
    """Every access to vLLM beyond the documented offline interface; check it for each version."""

    llm: LLM
    names: PublishedNames
    draft_names: PublishedNames | None
    """Names of the draft model's weights in a stream. None: streams bring none of them, except
    for embeddings and an output layer that both models share."""
    adapters: InitVar[Adapters | None]

    def __post_init__(self, adapters: Adapters | None) -> None:
        """Detach vLLM's finalizer.

        It would destroy the trainer's process group when vLLM's client is collected, or at exit.
        """
        llm = self.llm
        llm.llm_engine.engine_core._finalizer.detach()
        for name in ("layerwise", "inplace"):
            logger = logging.getLogger(f"vllm.model_executor.model_loader.reload.{name}")
            logger.addFilter(_is_shown)
        # vLLM froze all objects; unfrozen ones are collected in order, without warnings.
        atexit.register(gc.unfreeze)

        (self.model,) = llm.apply_model(lambda model: model)
        (self.draft_model,) = llm.collective_rpc("get_draft_model")
        """Model that drafts, or None."""
        self._draft_weights: dict[str, torch.Tensor] = {}
        self.tokenizer: Tokenizer | None = None
        """Tokenizer to search for stop strings with. vLLM starts without one."""
        self.cache: KVCacheManager = (
            llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        )
        self._samples: dict[str, _Sample] = {}
        """Name of a sample that runs -> what it has."""
        self._num_submitted = 0

        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        fused_layers = fused_layout.FUSED_LAYERS | getattr(self.model, "packed_modules_mapping", {})
        names = self.names
        loaded = fused_layout.engine_names(names)
        rename = mapper.map_name if mapper else _by_loader
        loaded = {name: rename(published) for name, published in loaded.items()}
        self._stale_copies = _stale_copies(self.model)
        self.experts = [layer for layer in self.model.modules() if is_experts(layer)]
        self.weights = fused_layout.FusedWeights(
            self.model,
            loaded,
            names.shapes,
            fused_layers=fused_layers,
            packs=_packs,
            keeps=lambda piece: names.is_alone(piece.name) and _keeps(piece.layer, piece.attribute),
        )

        self.slots: AdapterSlots | None = None
        if adapters is not None:
            manager = self.worker.model_runner.lora_manager._adapter_manager
            self.slots = AdapterSlots(manager, adapters, names)

    def limit_vocabulary(self, size: int) -> None:
        """Give all ids from `size` on the logit -inf, so that none of them is sampled.

        The logits keep the full width, because vLLM takes it for the top k of requests without one.
        """

        def limit(_: torch.nn.Module, __: Any, logits: torch.Tensor | None) -> None:
            if logits is not None:
                logits[..., size:] = -torch.inf

        for model in filter(None, (self.model, self.draft_model)):
            for layer in model.modules():
                if isinstance(layer, LogitsProcessor):
                    layer.register_forward_hook(limit)

    def reload_weights(self, named_tensors: Iterator[NamedTensor], *, direct: bool) -> None:
        """Load full tensors under transformers' names; vLLM slices, fuses and repacks by layer.

        With `direct`, tensors that vLLM would only slice and copy are copied directly to where they
        belong. vLLM buffers, counts and wraps each tensor, and for a small one that takes longer
        than the copy. The reload restores the memory of layers that it loads nothing into.

        The stream must be complete: an exception on the way leaves half of the layers without
        storage. Caches stay: vLLM's own verb would clear the runner's encoder outputs, and those of
        a prompt that is half computed are still needed.
        """
        targets = self.weights.copy_targets() if direct else {}
        excluded = self.weights.direct_layers() if direct and self.experts else ()
        packed = unpacked_experts(self.experts, excluded) if self.experts else []
        config = self.llm.llm_engine.vllm_config
        with set_current_vllm_config(config):
            reload_weights(
                config,
                self.model,
                weights_iterator=_copy_targeted(named_tensors, targets, self.names),
                weights_path=None,
                is_checkpoint_format=True,
            )

        if packed:
            pack_experts(packed)
        if self._stale_copies:
            _renew_copies(self._stale_copies)

    def reload_draft_weights(self, named_tensors: Iterator[NamedTensor]) -> None:
        """Load full tensors of the draft model under transformers' names; see reload_weights()."""
        config = self.llm.llm_engine.vllm_config
        with set_current_vllm_config(config):
            initialize_layerwise_reload(self.draft_model)
            self.draft_model.load_weights(_copy_targeted(named_tensors, {}, self.draft_names))
            finalize_layerwise_reload(
                self.draft_model, config.speculative_config.draft_model_config
            )
        _renew_copies(_stale_copies(self.draft_model))

    def with_media(self, token_ids: list[int], media: dict[str, list]) -> MultiModalInput:
        """Return the prompt with processed media and expanded placeholders."""
        data = {
            MEDIA_NAMES[name]: [_item(item) for item in items]
            for name, items in media.items()
            if items
        }
        prompt = TokensPrompt(prompt_token_ids=token_ids, multi_modal_data=data)
        return self.llm.renderer.render_cmpl([prompt])[0]

    def prepare(
        self, prompt: TokensInput | MultiModalInput, parameters: SamplingParams
    ) -> EngineCoreRequest:
        """Check a request once, before submit() begins samples of it."""
        engine = self.llm.llm_engine
        return engine.input_processor.process_inputs(
            "",
            prompt,
            parameters,
            supported_tasks=engine.get_supported_tasks(),
            lora_request=self.slots and self.slots.newest,
        )

    def load_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Load adapters of a new policy; those that requests still use stay."""
        core = self.llm.llm_engine.engine_core.engine_core
        of_requests = (request.lora_request for request in core.scheduler.requests.values())
        used = {each.lora_int_id for each in of_requests if each is not None}
        self.slots.load(tensors, used)

    def submit(self, name: str, request: EngineCoreRequest, seed: int) -> None:
        """Begin a sample of a prepared request.

        It goes to the core of the engine. vLLM's own path around the core checks each sample, and
        makes objects of each token for callers who want text while it grows.
        """
        self._num_submitted += 1
        sample = copy.copy(request)
        # A step in flight may still bring tokens of an aborted sample with the same name.
        sample.request_id = f"{name}-{self._num_submitted}"
        sample.sampling_params = copy.copy(request.sampling_params)
        sample.sampling_params.seed = seed

        text = None
        if sample.sampling_params.stop:
            text = IncrementalDetokenizer.from_new_request(self.tokenizer, sample)
        length = len(sample.prompt_token_ids)
        self._samples[name] = _Sample(sample.request_id, length, Completion([], [], ""), text)
        self.llm.llm_engine.engine_core.add_request(sample)

    def step(self) -> dict[str, Completion]:
        """Compute one step; return the samples that have ended, by name."""
        core = self.llm.llm_engine.engine_core
        ended = {}
        for output in core.get_output().outputs:
            name = output.request_id.rpartition("-")[0]
            sample = self._samples.get(name)
            if sample is None or sample.request_id != output.request_id:
                continue  # it was aborted

            sample.take(output)
            if sample.completion.finish_reason:
                ended[name] = self._samples.pop(name).completion
                if sample.experts:
                    sample.set_experts()
                if not output.finished:  # vLLM's core knows no stop strings
                    core.abort_requests([output.request_id])

        return ended

    def finish_step(self) -> dict[str, Completion]:
        """Finish the steps in flight, without a new one; return the samples that have ended.

        With asynchronous scheduling, as on CUDA, step() begins a step before it returns the results
        of the one before. The old weights compute and sample a step in flight, so that the results
        have to be in before other weights are loaded and tokens are counted.
        """
        core = self.llm.llm_engine.engine_core.engine_core
        ended: dict[str, Completion] = {}
        if core.batch_queue:
            core.pause_scheduler("keep", clear_cache=False)
            while core.batch_queue:
                ended |= self.step()
            core.resume_scheduler()
        return ended

    def num_sampled(self, name: str) -> int:
        """Return how many tokens of a submitted sample have come."""
        return len(self._samples[name].completion.token_ids)

    def leave_cache(self, salt: str) -> None:
        """Give requests that vLLM has not begun another salt than the blocks in the cache have."""
        for request in self.llm.llm_engine.engine_core.engine_core.scheduler.waiting:
            if request.status is RequestStatus.WAITING:  # others were begun and are continued
                request.cache_salt = salt
                request.mm_features = [
                    replace(feature, identifier=f"{salt} {feature.mm_hash}")
                    for feature in request.mm_features
                ]
                request.block_hashes.clear()
                request.update_block_hashes()

    def abort(self, name: str) -> Completion:
        """End a submitted sample; return the tokens so far."""
        sample = self._samples.pop(name)
        self.llm.llm_engine.engine_core.abort_requests([sample.request_id])
        sample.completion.finish_reason = ABORTED
        if sample.experts:
            sample.set_experts()
        return sample.completion

    @property
    def worker(self) -> Any:
        """Return vLLM's worker in this process."""
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @torch.inference_mode()
    def zero_cache(self) -> None:
        """Set the cache to zeros, as at the start, after vLLM has allocated it anew.

        Otherwise it has what was in that memory before, such as the trainer's float32 numbers. Read
        as bfloat16 some of these are NaN, and a kernel may multiply what follows a sequence by 0
        (vllm-project/vllm#45542).
        """
        for cache in self.worker.model_runner.kv_caches:
            cache.zero_()

    def keep_draft_weights(self) -> None:
        """Copy the draft model's own weights to host memory, before a sleep that drops all weights.

        They are copied once: weights that no stream brings never change.
        """
        if not self._draft_weights:
            self._draft_weights = {
                name: weight.detach().cpu().clone()
                for name, weight in self._unshared_draft_weights().items()
            }

    def restore_draft_weights(self) -> None:
        with torch.no_grad():
            for name, weight in self._unshared_draft_weights().items():
                if name in self._draft_weights:
                    weight.copy_(self._draft_weights[name])

    def _unshared_draft_weights(self) -> dict[str, torch.nn.Parameter]:
        streamed = set(map(id, self.model.parameters()))
        named = self.draft_model.named_parameters()
        return {name: weight for name, weight in named if id(weight) not in streamed}

    def shutdown(self) -> None:
        """Shut down vLLM's workers and vLLM's process groups, but no others.

        The models are released first. vLLM frees the memory pools of weights and cache here, and it
        can start again in this process only if nothing is left in them. The records of reloaded
        layers would keep the layers.
        """
        for model in filter(None, (self.model, self.draft_model)):
            _forget_reloads(model)
        if CuMemAllocator.instance is not None:
            _map_memory_before_it_is_freed(CuMemAllocator.instance)
        del model, self.model, self.draft_model, self.weights, self.experts, self.slots
        del self._stale_copies, self.cache
        self.llm.collective_rpc("shutdown")
        destroy_model_parallel()
        _forget_world()

    @staticmethod
    @contextmanager
    def rank_in_environment() -> Iterator[None]:
        """Set RANK and LOCAL_RANK while an engine starts, even in a process without a launcher.

        The engine reads them. Afterwards all variables are as before. On a CPU vLLM overwrites
        LOCAL_WORLD_SIZE and sets VLLM_DIST_IDENT: a second engine in the same process would warn
        that it does not know it.
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "VLLM_DIST_IDENT")
        before = {name: os.environ.get(name) for name in names}
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("LOCAL_RANK", str(local_rank()))

        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    @staticmethod
    @contextmanager
    def experts_on_all_ranks() -> Iterator[None]:
        """Let each rank of an engine return the chosen experts, while it starts.

        vLLM has one scheduler for several ranks, and returns them on the first one alone. Here each
        rank has a scheduler of its own, which insists on them, and all ranks have chosen the same.
        """
        original = auxiliary.get_tp_group
        auxiliary.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
        try:
            yield
        finally:
            auxiliary.get_tp_group = original

    @staticmethod
    @contextmanager
    def unique_shared_memory(axis: Axis) -> Iterator[None]:
        """Give the shared memory of an engine's ranks a unique name, while it starts on CPUs.

        The ranks exchange tensors there. vLLM uses the same name for every engine on the machine,
        so two runs collide, and the remains of a killed run block the next one. The name is
        unlinked as soon as all ranks have mapped the memory, so nothing can be left behind.
        """
        from vllm.distributed.device_communicators.cpu_communicator import (
            _CPUSHMDistributed as SharedMemory,
        )

        name = axis.broadcast(f"lightrft-{uuid.uuid4().hex}")
        original = SharedMemory.make_group_name
        SharedMemory.make_group_name = staticmethod(
            lambda communicator: f"{name}-{communicator.unique_name}"
        )
        try:
            yield
            axis.barrier()
        finally:
            SharedMemory.make_group_name = staticmethod(original)
            for file in Path("/dev/shm").glob(f"{name}*"):
                file.unlink(missing_ok=True)


@dataclass(slots=True)
class _Sample:
    """A request in vLLM's core, and what has been sampled for it."""

    request_id: str
    num_prompt_tokens: int
    completion: Completion
    """Tokens so far. The finish reason is empty while the sample runs."""
    text: IncrementalDetokenizer | None
    """Decoded tokens, if stop strings are searched for in them."""
    experts: list[np.ndarray] = field(default_factory=list)
    """Experts that the tokens of each step chose, the prompt's first, with --router_replay."""

    def take(self, output: EngineCoreOutput) -> None:
        """Take the tokens of a step, up to the one that completes a stop string."""
        completion = self.completion
        if output.prefill_stats is not None and not completion.token_ids:
            completion.num_cached_tokens = output.prefill_stats.num_cached_tokens

        completion.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            completion.logprobs += output.new_logprobs.logprobs[:, 0].tolist()

        if output.routed_experts is not None:
            self.experts.append(output.routed_experts)
        if output.finish_reason is not None:
            completion.finish_reason = str(output.finish_reason)
            if output.spec_decode_metrics is not None:
                completion.drafts = _drafts_of(output.spec_decode_metrics)
        if self.text is not None and self.text.update(output.new_token_ids, False):
            completion.finish_reason = "stop"
            # A verified draft may go on after the stop string.
            del completion.token_ids[self.text.num_output_tokens() :]
            del completion.logprobs[self.text.num_output_tokens() :]

    def set_experts(self) -> None:
        """Give the completion the experts of all tokens but the last, which no step has read."""
        read = self.num_prompt_tokens + len(self.completion.token_ids) - 1
        self.completion.experts = np.concatenate(self.experts)[:read]


def _drafts_of(metrics: RequestSpecDecodeMetrics) -> Drafts:
    """Return the drafts that were verified for a sample; steps without a draft do not count."""
    num_accepted = sum(j * count for j, count in enumerate(metrics.histogram))
    return Drafts(sum(metrics.histogram), metrics.num_draft_tokens, num_accepted)


def _item(item: Image | Video | Clip) -> Image | tuple:
    """Convert a media item to vLLM's form."""
    if isinstance(item, Video):
        return item.frames, metadata(item) | {
            "video_backend": "lightrft",
            "do_sample_frames": False,
        }
    return (item.waveform, item.sampling_rate) if isinstance(item, Clip) else item


def _copy_targeted(
    named_tensors: Iterator[NamedTensor],
    targets: Mapping[str, list[fused_layout.CopyTarget]],
    names: PublishedNames,
) -> Iterator[NamedTensor]:
    """Copy the tensors that have targets; yield the others under published names."""
    held: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name in targets:
            for target in targets[name]:
                target.copy(tensor)
        elif name in names.renamed:
            yield names.renamed[name], tensor
        else:
            yield from names.publish(name, tensor, held)
        # Otherwise the next tensor would be gathered beside this one.
        del tensor


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for warnings of vLLM's reload about layers that it loads nothing into.

    The stream is checked elsewhere. Tied output layers, layers without weights, and layers whose
    tensors are copied directly get nothing.
    """
    return not (
        "Failed to load weights" in record.msg
        or record.msg.startswith("Following weights were not loaded")
    )


def _keeps(layer: torch.nn.Module, attribute: str) -> bool:
    """Return True if vLLM's postprocessing left a parameter in the original layout.

    Experts count too if they are packed in a known way.
    """
    method = type(getattr(layer, "quant_method", None)).__name__
    if method not in PLAIN or attribute not in layer._parameters:
        return False
    created = get_layerwise_info(layer).restore_metadata[0].get(attribute)
    now = layer._parameters[attribute]
    if created is None:  # vLLM records no biases
        return attribute == "bias"
    return (now.shape, now.stride(), now.dtype) == (created.shape, created.stride(), created.dtype)


def _by_loader(name: str) -> str:
    """Return the name that a weight gets in the loading of a model without a table of names."""
    for published, loaded in BY_LOADER.items():
        name = name.replace(published, loaded)
    return name


def _packs(layer: torch.nn.Module) -> bool:
    """Return True if the layer multiplies with a packed copy of the weight, as on CPUs.

    It mostly keeps only that copy. In INT8 and FP8, every form is packed but the turned matrix.
    """
    if fused_layout.SCALE_NAME not in layer._parameters:
        return "cpu_linear" in vars(layer)
    created = get_layerwise_info(layer).restore_metadata[0]["weight"]
    sizes = zip(layer.weight.shape, reversed(created.shape), strict=False)
    return layer.weight.stride(0) > 1 or not all(size >= before for size, before in sizes)


def _stale_copies(model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return pairs of layers: a reload renews the copy of a weight in the second one only.

    Tied output layers need the packed copy of the layer that loads the weight: a reload packs it
    for that layer only. Where vLLM packs convolutions on a CPU, Mamba 2 computes with the memory
    that they had before.
    """
    first: dict[int, torch.nn.Module] = {}
    pairs = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and _packs(layer):
            pairs.append((layer, first.setdefault(id(weight), layer)))
        if fused_layout.CONVOLUTION_VIEW in layer._buffers and fused_layout.UNPACKED in vars(
            layer.conv1d
        ):
            pairs.append((layer, layer.conv1d))
    return [(layer, renewed) for layer, renewed in pairs if layer is not renewed]


def _renew_copies(stale: list[tuple[torch.nn.Module, torch.nn.Module]]) -> None:
    for layer, renewed in stale:
        if fused_layout.UNPACKED in vars(renewed):
            layer.conv_weights.copy_(getattr(renewed, fused_layout.UNPACKED))
        else:
            layer.cpu_linear = renewed.cpu_linear


def _forget_world() -> None:
    """Destroy vLLM's groups of all ranks, but not the trainer's.

    The next engine in this process makes new ones.
    """
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


def _map_memory_before_it_is_freed(allocator: CuMemAllocator) -> None:
    """Let memory that sleeps be mapped again, one block after another, just before it is freed.

    vLLM unmaps what it frees, and a sleep has unmapped it already. The second time is an error of
    CUDA for every block, keeps the addresses, and no engine can start in this process afterwards
    (vllm-project/vllm#36651).
    """

    def free(address: int) -> tuple[int, ...]:
        block = allocator.pointer_to_data[address]
        if block.is_asleep:
            cumem.create_and_map(block.handle)
            block.is_asleep = False
        return allocator._python_free_callback(address)

    cumem.init_module(allocator.python_malloc_callback, free)
    # The module keeps no reference: without this one, freeing would call an object that is gone.
    allocator.python_free_callback = free


def _forget_reloads(model: torch.nn.Module) -> None:
    for layer in model.modules():
        LAYERWISE_INFO.pop(layer, None)
