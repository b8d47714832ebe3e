"""Courses on vLLM's Model Runner V2 on a CPU, in a process where Triton interprets its kernels.

Accelerators have this runner, with asynchronous scheduling.
"""

import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import contract
from lightrft.core.samples import Completion
from lightrft.engine.base import Engine, Request, Sampling
from lightrft.engine.testing import outcome, start_engine
from lightrft.models.parallel.expert_parallel import routers
from lightrft.models.parallel.mesh import Mesh
from with_vllm import import_vllm


class Driver:
    """Without one vLLM takes Triton for absent."""

    is_active = staticmethod(lambda: False)


def import_it() -> None:
    """Import vLLM with this runner; Triton's driver comes first."""
    from triton.backends import Backend, backends

    backends["cpu"] = Backend(compiler=None, driver=Driver)
    import_vllm()
    import_module("vllm.v1.worker.cpu.model_runner")


def schedule_asynchronously() -> None:
    """Let steps overlap with scheduling, as they do on accelerators."""
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(config: VllmConfig) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(checked)


def outcomes(folder: str, *names: str) -> dict[str, Any]:
    """Run cases of the contract.

    Return the runner that was used, how many steps may be in flight, case -> traceback (empty if it
    passed), and how many of the model's tensors there are, and how many when vLLM has been shut
    down. Ranks of run_ranks() would keep them, as these leave the garbage collector frozen.
    """
    from lightrft.engine.vllm import shim

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    schedule_asynchronously()
    axis = Mesh("cpu").world
    engine = start_engine("vllm", folder, axis)
    bench = contract.Bench(engine, AutoModelForCausalLM.from_pretrained(folder))
    cases = {case.__name__: case for case in contract.CASES}
    core = engine._llm.llm_engine
    found: dict[str, Any] = {
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "in_flight": core.engine_core.engine_core.batch_queue_size,
        "outcomes": {name: outcome(cases[name], bench) for name in names},
    }
    model = engine._shim.model
    left = []
    destroy = shim.destroy_model_parallel
    tensors = [weakref.ref(tensor) for tensor in chain(model.parameters(), model.buffers())]
    del model, core

    def count_and_destroy() -> None:
        left.append(sum(tensor() is not None for tensor in tensors))
        destroy()

    shim.destroy_model_parallel = count_and_destroy  # which follows the shutdown of the workers
    engine.close()
    return found | {"tensors": len(tensors), "left": left}


def propose(self, input_batch, *args, dummy_run: bool = False, **options) -> Tensor:
    """Draft what vLLM's kernels would; the interpreter refuses the mask of one of them."""
    rows = [] if dummy_run else input_batch.idx_mapping.tolist()
    for index, row in enumerate(rows):
        length = int(self.req_states.total_len.gpu[row])
        text = self.req_states.all_token_ids.gpu[row, :length].tolist()
        starts = [start for start in range(length - 3) if text[start : start + 3] == text[-3:]]
        found = text[starts[-1] + 3 :] if starts else []
        draft = [*found, *text[-1:] * self.num_speculative_steps][: self.num_speculative_steps]
        self.drafts[index] = torch.tensor(draft)
    return self.drafts[: input_batch.num_reqs]


def start_drafting(folder: str, flags: dict[str, Any]) -> Engine:
    """Start an engine that measures the costs of its drafts once, for one sequence."""
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    from lightrft.engine.vllm import speculation

    NgramGPUSpeculator.propose = propose
    speculation.BATCH_SIZES = (1,)
    speculation.MEASUREMENTS = 1
    return start_engine("vllm", folder, Mesh("cpu").world, flags)


def set_cost(engine: Engine, cost: float) -> None:
    """Let drafts cost so much from now on; below 0 they are verified in each step."""
    from lightrft.engine.vllm.text_drafter import Costs

    engine._speculation._costs = Costs({1: cost})
    engine._speculation._schedule()


def with_and_without_drafts(folder: str) -> dict[str, list[Completion]]:
    """Return the samples of one engine with drafts in each step ("drafts"), and with none
    ("plain").

    It verifies the drafts of --speculative ngram.
    """
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [9, 1, 2]]
    engine = start_drafting(folder, {"speculative": "ngram", "num_draft_tokens": 3})

    found: dict[str, list[Completion]] = {}
    for name, cost in (("drafts", -1.0), ("plain", float("inf"))):
        set_cost(engine, cost)
        engine.reset_cache()
        found[name] = []
        for sampling in (
            Sampling(temperature=0, max_tokens=24),
            Sampling(n=2, temperature=0.3, max_tokens=12, seed=3),
        ):
            found[name] += chain(*engine.generate([Request(each) for each in prompts], sampling))

    engine.close()
    return found


def account_of_fillers(folder: str) -> tuple[float, int, int]:
    """Return the tokens that a draft is expected to bring after a text without repetitions, and how
    many steps had drafts, of how many.

    A draft costs half of a step, and pays as long as it is expected to bring as much.
    """
    engine = start_drafting(folder, {"speculative": "ngram", "num_draft_tokens": 3})
    set_cost(engine, 0.5)
    account = engine._speculation
    engine.reset_cache()
    ((sample,),) = engine.generate([Request([9, 1, 2])], Sampling(temperature=2.0, max_tokens=16))
    expected = account._accepted / account._count
    engine.close()
    steps = len(sample.token_ids) - sample.drafts.num_accepted
    return expected, sample.drafts.count, steps


def recorded_experts(folder: str) -> dict[str, int]:
    """Count the tokens and layers of a mixture that have a record of the chosen experts, and the
    records that are what transformers chooses.

    The ranks share the engine, and each has all records.
    """
    long = list(range(5, 75))
    counts = {"samples": 0, "cached": 0, "records": 0, "equal": 0}
    engine = start_engine("vllm", folder, Mesh("cpu").world, {"router_replay": True})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: dict[int, Tensor] = {}
    for number, router in routers(model).items():
        router.register_forward_hook(
            lambda _, __, output, number=number: chosen.update({number: output[2]})
        )

    sampling = Sampling(n=2, temperature=1, max_tokens=4, seed=3)
    loop = engine.open(sampling)
    loop.add([Request(long), Request([9, 1, 2])])
    ended = []
    while loop.running:
        ended += loop.step()
    loop.add([Request(long, sampling=Sampling(max_tokens=9))])
    for _ in range(3):
        loop.step()
    ended += loop.abort().items()
    for index, completions in ended:
        for completion in completions:
            tokens = ([9, 1, 2] if index == 1 else long) + completion.token_ids
            model(torch.tensor([tokens]))
            wanted = torch.stack([chosen[number] for number in sorted(chosen)], 1)[:-1]
            found = torch.from_numpy(completion.experts.astype("int64"))
            assert len(found) == len(wanted), (len(found), len(wanted))
            same = (wanted.sort(-1).values == found.sort(-1).values).all(-1)
            counts["samples"] += 1
            counts["cached"] += completion.num_cached_tokens
            counts["records"] += same.numel()
            counts["equal"] += int(same.sum())

    engine.close()
    return counts


class Allocations(TorchDispatchMode):
    """Records the memory that is allocated, with the place in vLLM that did it.

    vLLM's buffers in host memory are left out: on a GPU they are not in the pool of the weights.
    """

    def __init__(self):
        super().__init__()
        self.made: dict[int, tuple[Tensor, str]] = {}
        """Storage -> bytes of it as its first tensor, and where it was made."""

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        result = function(*args, **kwargs)
        for tensor in _tensors(result):
            if _storage(tensor) not in given | self.made.keys():
                memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                frames = traceback.extract_stack()
                places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "vllm" in f[0]]
                self.made[_storage(tensor)] = memory, " ".join(places[-2:])
        return result

    @contextmanager
    def of_loading(self) -> Iterator[None]:
        """Record what vLLM's worker allocates while it loads models, samplers and the rest."""
        from vllm.v1.worker import gpu_worker
        from vllm.v1.worker.gpu import buffer_utils

        load = gpu_worker.Worker.load_model

        def load_recorded(worker: Any, **options: Any) -> None:
            with self:
                load(worker, **options)

        gpu_worker.Worker.load_model = load_recorded
        for name in ("UvaBuffer", "NonUvaBuffer", "UvaBackedTensor"):
            kind = getattr(buffer_utils, name)
            kind.__init__ = _unseen(kind.__init__)
        yield
        gpu_worker.Worker.load_model = load


def _tensors(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "meta"]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _unseen(function: Callable) -> Callable:
    def call(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return call


def plant() -> None:
    """Let vLLM's layer of logits compute with a tensor that is neither parameter nor buffer."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    begin, forward = LogitsProcessor.__init__, LogitsProcessor.forward

    def begin_planted(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.planted = [torch.ones(1)]

    LogitsProcessor.__init__ = begin_planted
    LogitsProcessor.forward = lambda self, *args: forward(self, *args) * self.planted[0]


def lost_in_a_sleep(
    folder: str, flags: dict[str, Any], planted: bool = False
) -> tuple[list[str], int, int, int]:
    """Return what samples need of the memory that a sleep of level 2 loses, and counts.

    It is what vLLM's worker allocates while it loads, except for parameters and buffers: vLLM saves
    buffers, and lightrft streams parameters or saves them. Numbers of all of it, and of the cache,
    become NaN or huge in a sleep. Samples and all tokens that are drafted must stay the same. The
    counts are those of plain tensors, of tokens that are drafted, and of those that are accepted.
    """
    if planted:
        plant()
    allocations = Allocations()
    with allocations.of_loading():
        engine = start_drafting(folder, flags)
    if engine._speculation:
        set_cost(engine, -1.0)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    models = [model for model in (engine._shim.model, engine._shim.draft_model) if model]
    buffers = [buffer for model in models for buffer in model.buffers()]
    kept = {_storage(tensor) for model in models for tensor in model.parameters()}
    kept |= set(map(_storage, buffers))
    plain = [made for storage, made in allocations.made.items() if storage not in kept]
    caches = engine._shim.worker.model_runner.kv_caches
    memories = [memory for memory, _ in allocations.made.values()]
    always = [memory for storage, (memory, _) in allocations.made.items() if storage in kept]
    # Otherwise log-probs that are no numbers end the engine.
    engine._cut = lambda samples, stop: samples
    drafted: list[list[int]] = []
    speculator = engine._shim.worker.model_runner.speculator
    if speculator:
        propose = speculator.propose

        def propose_recorded(*args: Any, **options: Any) -> Tensor:
            tokens = propose(*args, **options)
            drafted.extend(tokens.tolist())
            return tokens

        speculator.propose = propose_recorded

    def drawn() -> list[Completion]:
        engine.reset_cache()
        drafted.clear()
        prompts = [Request([5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]), Request([9, 1, 2])]
        samplings = Sampling(temperature=0, max_tokens=8), Sampling(n=2, max_tokens=2, seed=3)
        return list(chain(*chain(*(engine.generate(prompts, each) for each in samplings))))

    def is_enough_without(lost: list[tuple[Tensor, str]]) -> bool:
        saved = [memory.clone() for memory in memories]
        values = [buffer.clone() for buffer in buffers]
        engine.on_cpu = False  # vLLM's workers do nothing then, and lightrft what it does on a GPU
        engine.sleep(2)
        with torch.inference_mode():
            for memory in always + caches + [memory for memory, _ in lost]:
                memory.fill_(_huge(memory.dtype))
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
        engine.wake("weights")
        engine.load_weights(_stream(weights), 1)
        engine.wake("kv_cache")
        engine.on_cpu = True
        found = [(sample.token_ids, sample.logprobs, sample.drafts) for sample in drawn()]
        same = (found, drafted) == expected
        for memory, value in zip(memories, saved, strict=True):
            memory.copy_(value)
        return same

    def needed(part: list[tuple[Tensor, str]]) -> list[str]:
        if is_enough_without(part):
            return []
        half = len(part) // 2
        return needed(part[:half]) + needed(part[half:]) if half else [place for _, place in part]

    first = drawn()
    samples = [(sample.token_ids, sample.logprobs, sample.drafts) for sample in first]
    expected = samples, drafted.copy()
    lost = needed(plain) if is_enough_without([]) else ["a parameter, a buffer or the cache"]
    engine.close()
    accepted = sum(sample.drafts.num_accepted for sample in first)
    return lost, len(plain), sum(map(len, expected[1])), accepted


def _stream(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of a model, with the biases of routers, which are buffers."""
    biases = (named for named in model.named_buffers() if named[0].endswith("correction_bias"))
    return chain(model.named_parameters(), biases)


def _huge(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
