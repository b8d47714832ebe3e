"""Code inside SGLang's scheduler processes, where the weights are: changes, and queries."""

import gc
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.model_loader import loader
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor, nn

from lightrft.config.tables import table
from lightrft.engine.probe import Probe, logits_processor
from lightrft.engine.sglang.sampling import draw, draw_by_noise, with_seeds
from lightrft.models.parallel.gloo import share_gloo_device
from lightrft.models.weight_sync.fused_layout import FUSED_LAYERS, FusedWeights
from lightrft.models.weight_sync.verify import Fingerprints, destroy_weights

CALLED_OTHERWISE: dict[str, str] = table("engine/names")["sglang"]
OF_HYBRIDS: dict[str, list[str]] = table("engine/names")["sglang_hybrids"]


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run a scheduler process of SGLang with the changes of this module."""
    # On a CPU, dropping a cache collects garbage. That takes half a second if all imported objects
    # are scanned.
    gc.freeze()
    share_gloo_device()
    setattr(Scheduler, answer_question.__name__, answer_question)
    SamplingBatchInfo.from_schedule_batch = classmethod(
        with_seeds(SamplingBatchInfo.from_schedule_batch.__func__)
    )
    loader.initialize_dummy_weights = _with_buffers_kept(loader.initialize_dummy_weights)
    sampler.multinomial_with_seed = draw_by_noise if torch.accelerator.is_available() else draw
    run_scheduler_process(*args, **kwargs)


def _with_buffers_kept(fill: Callable) -> Callable:
    """Keep the original buffers when SGLang fills a model with random weights.

    Buffers are not streamed.
    """

    def fill_parameters(model: nn.Module) -> None:
        saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
        fill(model)
        for buffer, values in saved:
            buffer.copy_(values)

    return fill_parameters


def answer_question(self: Scheduler, folder: str) -> None:
    question, arguments = torch.load(Path(folder, "question"))
    answer = QUESTIONS[question](self, **arguments)
    torch.save(answer, Path(folder, str(torch.distributed.get_rank(self.tp_group.cpu_group))))


def _weights(
    scheduler: Scheduler, addresses: dict[str, str], shapes: dict[str, torch.Size]
) -> FusedWeights:
    """Locate the weights.

    From version 0.5.22 on layers only have a group, so they get tp_rank and tp_size here.
    """
    model = scheduler.tp_worker.model_runner.model
    layers = dict(model.named_modules(remove_duplicate=False))
    for layer in layers.values():
        attributes = vars(layer)
        if "tp_group" in attributes and "tp_rank" not in attributes:
            group = layer.tp_group
            layer.tp_rank, layer.tp_size = (
                (0, 1) if group is None else (group.rank_in_group, group.world_size)
            )

    names = {name: _address(address, layers) for name, address in addresses.items()}
    return FusedWeights(model, names, shapes, fused_layers=FUSED_LAYERS | OF_HYBRIDS)


def _address(name: str, layers: Collection[str]) -> str:
    """Return the name of a weight in SGLang's model."""
    for published, called in CALLED_OTHERWISE.items():
        path, other = (each.rpartition(".")[0] for each in (name, name.replace(published, called)))
        if path not in layers and other.rpartition(".")[0] in layers:
            name = name.replace(published, called)

    # Qwen3.5's blocks hold the layers of attention themselves.
    block, inside, _ = name.partition(".self_attn.")
    if inside and f"{block}.self_attn" not in layers:
        name = name.replace(".self_attn.", ".")
    return name


def _engine_fingerprints(
    scheduler: Scheduler,
    addresses: dict[str, str],
    shapes: dict[str, torch.Size],
    dtype: torch.dtype,
    round: int | None,
) -> list[Tensor]:
    prints = Fingerprints(shapes, dtype, bits=addresses, round=round)
    _weights(scheduler, addresses, shapes).add_to(prints)
    device = next(scheduler.tp_worker.model_runner.model.parameters()).device
    return [numbers.cpu() for numbers in prints.numbers(device)]


def _num_cached(scheduler: Scheduler) -> int:
    return scheduler.tree_cache.evictable_size() + len(mm_schedule.embedding_cache)


def _forget_images(scheduler: Scheduler) -> None:
    """Drop the image embeddings: they survive a reset of the prefix cache and new weights."""
    mm_schedule.embedding_cache.clear()


def _pause(scheduler: Scheduler, salt: str) -> dict[str, int]:
    """Make no step from now on; return how many tokens each request has, by name.

    SGLang's own message may arrive later. Requests that have not begun get `salt`.
    """
    scheduler._engine_paused = True
    for request in scheduler.waiting_queue:
        if not request.output_ids:
            request.cache_salt = salt

    running = scheduler.collect_inflight_reqs()
    prompts = {scheduler.chunked_req} - {None}
    requests = (*scheduler.waiting_queue, *prompts, *running)
    counts = {request.rid: len(request.output_ids) for request in requests}
    if scheduler.enable_overlap:
        # A step in flight reads and samples with the old weights. SGLang takes up the result when
        # it goes on.
        torch.accelerator.synchronize()
        for batch, _ in scheduler.result_queue:
            for request in batch.reqs:
                is_middle_of_prompt = request.inflight_middle_chunks > 0
                counts[request.rid] = counts.get(request.rid, 0) + (not is_middle_of_prompt)
    return counts


_watches: list[tuple[Probe, list[Tensor], list[Any]]] = []
"""Active observations: probe, logits, handles."""


def _watch(scheduler: Scheduler, num_tokens: int) -> None:
    """Record the outputs of the model's modules until _seen() is called."""
    model = scheduler.tp_worker.model_runner.model
    probe = Probe(num_tokens)
    logits = []
    head = logits_processor(model).register_forward_hook(
        lambda module, inputs, output: logits.append(output.next_token_logits)
    )
    _watches.append((probe, logits, [head, *probe.attach(model)]))


def _seen(scheduler: Scheduler) -> dict[str, Tensor]:
    """End the recording; return Probe.recorded() of this rank, with the first pass's logits."""
    probe, logits, handles = _watches.pop()
    for handle in handles:
        handle.remove()
    return probe.recorded(logits[0][-1])


QUESTIONS = {
    "destroy_weights": lambda scheduler: destroy_weights(scheduler.tp_worker.model_runner.model),
    "unknown_weights": lambda scheduler, **names: _weights(scheduler, **names).unknown,
    "held": _engine_fingerprints,
    "num_slots": lambda scheduler: scheduler.max_running_requests,
    "num_cached": _num_cached,
    "forget_images": _forget_images,
    "pause": _pause,
    "watch": _watch,
    "seen": _seen,
}
"""Queries and actions, by name, that SGLang's processes run where the memory is."""
