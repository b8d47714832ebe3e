"""Courses on vLLM's Model Runner V2 on a CPU, in a process where Triton interprets its kernels.

Accelerators have this runner, with asynchronous scheduling.
"""

import os
import weakref
from importlib import import_module
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import contract
from lightrft.core.samples import Completion
from lightrft.engine.base import Request, Sampling
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


def with_and_without_drafts(folder: str) -> dict[str, list[Completion]]:
    """Return the samples of one engine with drafts in each step ("drafts"), and with none
    ("plain").

    It verifies the drafts of --speculative ngram.
    """
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    from lightrft.engine.vllm import speculation
    from lightrft.engine.vllm.text_drafter import Costs

    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [9, 1, 2]]
    NgramGPUSpeculator.propose = propose
    speculation.BATCH_SIZES = (1,)
    speculation.MEASUREMENTS = 1
    flags = {"speculative": "ngram", "num_draft_tokens": 3}
    engine = start_engine("vllm", folder, Mesh("cpu").world, flags)

    found: dict[str, list[Completion]] = {}
    for name, cost in (("drafts", -1.0), ("plain", float("inf"))):
        engine._speculation._costs = Costs({1: cost})
        engine._speculation._schedule()
        engine.reset_cache()
        found[name] = []
        for sampling in (
            Sampling(temperature=0, max_tokens=24),
            Sampling(n=2, temperature=0.3, max_tokens=12, seed=3),
        ):
            found[name] += chain(*engine.generate([Request(each) for each in prompts], sampling))

    engine.close()
    return found


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
