"""Contract cases on vLLM's Model Runner V2 on a CPU.

Accelerators have this runner, with asynchronous scheduling; Triton's kernels run in the interpreter
here.

    python tests/engine/runner_v2.py FOLDER CASE [CASE ...]

Prints a JSON object: the runner that was used, how many steps may be in flight, case -> traceback
(empty if it passed), and how many of the model's tensors exist when vLLM has been shut down.

    python tests/engine/runner_v2.py FOLDER experts

Prints how many tokens and layers of a mixture have a record of the chosen experts, and how many
records are what transformers chooses.

    python tests/engine/runner_v2.py FOLDER

Prints a JSON object with the samples of an engine that verifies the drafts of --speculative ngram,
and the samples without drafts: tokens, log-probs, and the number of accepted tokens.
"""

import json
import os
import sys
import tempfile
import weakref
from itertools import chain
from pathlib import Path

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | os.environ
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from triton.backends import Backend, backends  # noqa: E402  after its environment


class Driver:
    """Without one vLLM takes Triton for absent."""

    is_active = staticmethod(lambda: False)


backends["cpu"] = Backend(compiler=None, driver=Driver)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402  after the driver
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

from engine import contract  # noqa: E402
from lightrft.engine.base import Request, Sampling  # noqa: E402
from lightrft.engine.vllm import shim, speculation  # noqa: E402
from lightrft.engine.vllm.text_drafter import Costs  # noqa: E402
from lightrft.models.parallel.expert_parallel import routers  # noqa: E402
from lightrft.models.parallel.mesh import Mesh  # noqa: E402


def schedule_asynchronously() -> None:
    """Let steps overlap with scheduling, as they do on accelerators."""
    check = CpuPlatform.check_and_update_config

    def checked(config: VllmConfig) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(checked)


def main(folder: str, *names: str) -> None:
    schedule_asynchronously()
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        axis = Mesh("cpu").world
        engine = contract.start("vllm", folder, axis)
        bench = contract.Bench(engine, AutoModelForCausalLM.from_pretrained(folder), axis, 0)
        runner = type(
            engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        ).__module__
        in_flight = engine._llm.llm_engine.engine_core.engine_core.batch_queue_size
        outcomes = {name: contract.outcome(getattr(contract, name), bench) for name in names}
        model = engine._shim.model
        left = []
        destroy = shim.destroy_model_parallel
        tensors = [weakref.ref(tensor) for tensor in chain(model.parameters(), model.buffers())]
        del model

        def count_and_destroy() -> None:
            left.append(sum(tensor() is not None for tensor in tensors))
            destroy()

        shim.destroy_model_parallel = count_and_destroy  # which follows the shutdown of the workers
        engine.close()
        print(
            "\n"
            + json.dumps(
                {
                    "runner": runner,
                    "in_flight": in_flight,
                    "outcomes": outcomes,
                    "tensors": len(tensors),
                    "left": left,
                }
            )
        )


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


def with_and_without_drafts(folder: str) -> None:
    """Print the samples of one engine with drafts in each step, and with none."""
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [9, 1, 2]]
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        NgramGPUSpeculator.propose = propose
        speculation.BATCH_SIZES = (1,)
        speculation.MEASUREMENTS = 1
        flags = {"speculative": "ngram", "num_draft_tokens": 3}
        engine = contract.start("vllm", folder, Mesh("cpu").world, flags)

        found = {}
        for name, cost in (("drafts", -1.0), ("plain", float("inf"))):
            engine._speculation._costs = Costs({1: cost})
            engine._speculation._schedule()
            engine.reset_cache()
            found[name] = []
            for sampling in (
                Sampling(temperature=0, max_tokens=24),
                Sampling(n=2, temperature=0.3, max_tokens=12, seed=3),
            ):
                samples = chain(*engine.generate([Request(each) for each in prompts], sampling))
                found[name] += [
                    (each.token_ids, each.logprobs, each.drafts.num_accepted) for each in samples
                ]

        engine.close()
        print("\n" + json.dumps(found))


def recorded_experts(folder: str) -> None:
    """Print how many records of chosen experts there are, and how many equal transformers'.

    The ranks of the environment share the engine, and each has all records.
    """
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    long = list(range(5, 75))
    counts = {"samples": 0, "cached": 0, "records": 0, "equal": 0}
    with tempfile.TemporaryDirectory() as temporary:
        store = os.environ.get("STORE", temporary)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}/store", rank=rank, world_size=ranks
        )
        engine = contract.start("vllm", folder, Mesh("cpu").world, {"router_replay": True})
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
        print("\n" + json.dumps(counts))


if sys.argv[2:] == ["experts"]:
    recorded_experts(sys.argv[1])
else:
    main(*sys.argv[1:]) if sys.argv[2:] else with_and_without_drafts(sys.argv[1])
