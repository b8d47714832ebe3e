"""Measure the time of sampling with vLLM on a CPU.

It measures the sampler alone, and generation for prompts that several samples share.

    python scripts/bench/sampling.py sampler
    python scripts/bench/sampling.py generation --model runs/laptop/model --pairs 3

`sampler` draws tokens with their log-probs from random logits and compares with vLLM's own
functions, and with exponentials and sums of blocks of rows that are still in the cache (`in_blocks`,
which lightrft does not do). `generation` compares with vLLM's defaults: blocks of 128 tokens, of which a prompt is
shared by whole ones only, and vLLM's sampler. The two run one after the other in processes of their
own. All seconds are CPU seconds of one thread.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lightrft.models.logits.truncation import HOST_BLOCK
from lightrft.models.parallel.device import exponentials

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import parser_of

CASES = ((64, 112), (32, 32_000), (64, 152_000), (512, 49_152))
"""Rows x vocabulary of the sampler's cases."""
VERSIONS = ("defaults", "lightrft")


def seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the CPU seconds of a call, the least of several."""
    function()
    found = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return min(found)


def in_blocks(logits: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens [R] of logits [R, V] with their log-probs, as lightrft does.

    Some rows at a time become exponentials, whose sums are taken before the next rows come. Nothing
    divides them: only what is drawn needs the sum of its row. V is a multiple of TOKEN_BLOCK.
    """
    from lightrft.engine.vllm.on_cpu import TOKEN_BLOCK

    gumbel_max = torch.ops._C.fused_gumbel_argmax
    found = []
    for rows in logits.split(max(1, HOST_BLOCK // logits.shape[1])):
        exponentials(rows.sub_(rows.amax(-1, keepdim=True)), out=rows)
        found.append(rows.unflatten(1, (-1, TOKEN_BLOCK)).sum(2))

    sums = torch.cat(found)
    tokens = TOKEN_BLOCK * gumbel_max(sums.log(), seeds[0])[:, None] + torch.arange(TOKEN_BLOCK)
    inside = logits.gather(1, tokens)
    chosen = gumbel_max(inside.log(), seeds[1])[:, None]
    return tokens.gather(1, chosen), (inside.gather(1, chosen) / sums.sum(1, keepdim=True)).log()


def sampler() -> None:
    """Print a line for each case."""
    from vllm.v1.sample.sampler import Sampler

    from lightrft.engine.vllm.on_cpu import NUM_SEEDS, TOKEN_BLOCK, use_fast_sampling

    torch.set_num_threads(1)

    for rows, vocabulary in CASES:
        logits = 3 * torch.randn(rows, vocabulary)
        generators = {row: torch.Generator().manual_seed(row) for row in range(rows)}
        fast = Sampler(logprobs_mode="processed_logprobs")
        own = Sampler(logprobs_mode="processed_logprobs")
        use_fast_sampling(fast)

        def sample(with_sampler: Sampler, logits=logits, generators=generators) -> None:
            tokens, values = with_sampler.topk_topp_sampler.forward(
                logits.clone(), generators, None, None
            )
            with_sampler.gather_logprobs(values, 0, tokens)

        with torch.compiler.set_stance("force_eager"):
            times = {
                name: seconds(lambda each=each: sample(each), 6)
                for name, each in zip(VERSIONS, (own, fast), strict=True)
            }
        if vocabulary % TOKEN_BLOCK == 0:
            seeds = torch.randint(NUM_SEEDS, (2, rows))
            times["in_blocks"] = seconds(lambda x=logits, s=seeds: in_blocks(x.clone(), s), 6)

        print(
            json.dumps(
                {"rows": rows, "vocabulary": vocabulary}
                | times
                | {"ratio": times["defaults"] / times["lightrft"]}
            )
        )


def generate(arguments: argparse.Namespace, version: str) -> None:
    """Print the CPU seconds of one generation after another one that warms up."""
    import torch.distributed as dist
    from transformers import AutoConfig

    from lightrft.config import EngineSection
    from lightrft.core.engine import Request
    from lightrft.engine.build import build_engine
    from lightrft.engine.requests import Sampling
    from lightrft.engine.vllm import adapter
    from lightrft.models.parallel.mesh import Mesh

    torch.set_num_threads(1)

    if version == "defaults":
        own = adapter.arguments
        adapter.arguments = lambda *given: own(*given) | {"block_size": 128}
        adapter.share_last_blocks = lambda cache: False
        adapter.use_fast_sampling = lambda sampler: None

    section = EngineSection(engine_type="vllm", engine_kv_cache_gb=2)
    size = AutoConfig.from_pretrained(arguments.model).vocab_size
    rng = random.Random(0)
    prompts = [
        [rng.randrange(size // 2) for _ in range(arguments.prompt_tokens)]
        for _ in range(2 * arguments.prompts)
    ]

    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        engine = build_engine(
            section,
            model_path=arguments.model,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=1024,
            axis=Mesh("cpu").world,
        )

        for part in (prompts[: arguments.prompts], prompts[arguments.prompts :]):
            began = time.process_time()
            sampling = Sampling(n=arguments.samples, max_tokens=arguments.new_tokens, seed=1)
            engine.generate([Request(ids) for ids in part], sampling)
            taken = time.process_time() - began

        print(json.dumps({"seconds": taken}))
        engine.close()
        dist.destroy_process_group()


def generation(arguments: argparse.Namespace) -> None:
    """Print a line for each pair of runs, and the ratios of all."""
    ratios = []
    for _ in range(arguments.pairs):
        times = {}
        for version in VERSIONS:
            command = [sys.executable, __file__, "generation", *sys.argv[2:], "--version", version]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            times[version] = json.loads(output.splitlines()[-1])["seconds"]
        ratios.append(times["defaults"] / times["lightrft"])
        print(json.dumps(times | {"ratio": ratios[-1]}), flush=True)

    print(
        json.dumps({"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)})
    )


def main() -> None:
    flags = {
        "--model": ("runs/laptop/model", "folder of a model"),
        "--prompts": 16,
        "--samples": 8,
        "--prompt_tokens": 55,
        "--new_tokens": 8,
        "--pairs": 3,
    }
    parser = parser_of(__doc__, flags)
    parser.add_argument("part", choices=("sampler", "generation"))
    parser.add_argument("--version", choices=VERSIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.part == "sampler":
        sampler()
    elif arguments.version:
        generate(arguments, arguments.version)
    else:
        generation(arguments)


if __name__ == "__main__":
    main()
