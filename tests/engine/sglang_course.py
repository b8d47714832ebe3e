"""What is SGLang's own, beyond the contract.

One course on a tensor-parallel engine ends with the death of the engine.
"""

import json
import math
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, Gemma3Config

from engine.contract import STREAM_ONLY_CASES, Bench, p_value
from lightrft.config import ConfigError, EngineSection
from lightrft.engine.base import EngineError, EngineSetup, Request, Sampling
from lightrft.engine.testing import outcome, start_engine
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.mesh import Mesh

SECONDS_TO_DIE = 30
LOAD_FILES = "/dev/shm/sglang_loads_"


def course(folder: str) -> dict[str, str]:
    """Two ranks share an engine of a tied model. Case -> traceback, empty when it passed."""
    mesh = Mesh("cpu")
    # torchrun's: an engine that sees it waits forever
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    before = _settings()
    too_small = _refusal(folder, mesh)
    bench = Bench(
        start_engine("sglang", folder, mesh.engine(2), from_stream=True),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    # the last one closes the engine
    results = {case.__name__: outcome(case, bench) for case in STREAM_ONLY_CASES[:-1]}
    results["a_cache_for_less_than_one_sequence_is_refused"] = too_small
    after = _settings()
    results["the_process_keeps_its_settings"] = "" if after == before else f"{before}\n{after}"

    for case in (
        no_name_in_shared_memory,
        a_stream_comes_in_buckets,
        a_forgotten_stream_is_seen,
        a_long_wait_for_stop_strings_is_cut,
        a_death_is_told,
    ):
        results[case.__name__] = outcome(case, bench)

    return results


def weights_before_a_stream() -> dict[str, float]:
    """Return the weights of a model that SGLang loads without a folder.

    A process of SGLang's loads it. It has a persistent buffer, and every number in it was 1.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    from lightrft.engine.sglang import scheduler

    model = torch.nn.Module()
    seen = {}
    model.weight = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    model.register_buffer("scale", torch.ones(()))
    loader._get_quantization_config = lambda *_: None
    loader._initialize_model = lambda *_: model
    made = SimpleNamespace(dtype=torch.float32)

    def process() -> None:
        loaded = loader.DummyModelLoader(LoadConfig()).load_model(
            model_config=made, device_config=DeviceConfig("cpu")
        )
        seen.update((name, tensor.item()) for name, tensor in loaded.state_dict().items())

    scheduler.run_scheduler_process = process
    scheduler.run_scheduler()
    return seen


def drawn_by_noise() -> tuple[int, int, float]:
    """Return how many tokens an accelerator's draws share with SGLang's formula in float64, how
    many there are, and the p-value of their distribution.

    Both have the same hash. Some log-probs are -inf.
    """
    from sglang.srt.layers import sampler

    from lightrft.engine.sglang import sampling

    def hashes(seed: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Murmur3 of seed, position and token, as SGLang's kernel computes it."""
        seed = seed.long()[:, None]
        bits = torch.zeros(len(seed), len(tokens), dtype=torch.int64)
        for part in (seed & 0xFFFFFFFF, seed >> 32, position[:, None], tokens[None]):
            part = part * 0xCC9E2D51 & 0xFFFFFFFF
            part = (part << 15 | part >> 17) & 0xFFFFFFFF
            bits = bits ^ part * 0x1B873593 & 0xFFFFFFFF
            bits = ((bits << 13 | bits >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
        bits = bits ^ 16
        for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
            bits = (bits ^ bits >> shift) * factor & 0xFFFFFFFF
        return (bits ^ bits >> 16).to(torch.uint32)

    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, 400, generator=generator)
    logits[:, ::7] = -torch.inf
    logprobs = logits.log_softmax(-1).expand(40_000, -1)
    seed = torch.arange(40_000) // 100 * 2**33 + 5
    position = torch.arange(40_000) % 100
    with pytest.MonkeyPatch.context() as patch:
        # SGLang's draw is the largest of -log(-log(1 - u)), and ours of -log(-log1p(-u)).
        patch.setattr(sampler, "murmur_hash32", lambda *of: 2**32 - 1 - hashes(*of).long())
        patch.setattr(sampling, "murmur_hash32", hashes)
        expected = sampler.multinomial_with_seed(logprobs, seed, position)
        found = sampling.draw_by_noise(logprobs, seed, position)
    counts = found.flatten().bincount(minlength=400)
    p = p_value(counts, logprobs[0].exp())
    return int((found == expected).sum()), len(found), p


def drawn_of_one_at_the_ends() -> list[int]:
    """Return the tokens that are drawn where only token 2 is allowed, and all hashes are equal.

    They are the smallest and the largest one.
    """
    from lightrft.engine.sglang import sampling

    logprobs = torch.full((1, 4), -torch.inf)
    logprobs[0, 2] = 0.0
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for number in (0, 2**32 - 1):
            hashes = torch.full((1, 4), number, dtype=torch.uint32)
            patch.setattr(sampling, "murmur_hash32", lambda *_, hashes=hashes: hashes)
            draw = sampling.draw_by_noise(logprobs, torch.tensor([5]), torch.tensor([0]))
            found.append(draw.item())
    return found


def truncated_by_groups() -> list[bool]:
    """Return whether masks of three steps are right, and whether the rows were listed once.

    In the second step the batch is the same, and in the third one it has another row. A batch
    with one sampling needs no list.
    """
    from lightrft.engine.sglang.sampling import Truncate

    def parameters(top_k: int, temperature: float) -> dict:
        own = {"top_k": top_k, "top_p": 1.0, "min_p": 0.0, "banned": [3], "size": 90}
        return own | {"temperature": temperature}

    processor = Truncate()
    generator = torch.Generator().manual_seed(1)
    rows = [parameters(5, 0.7), parameters(2, 0.7), parameters(5, 0.7)]
    right, groups = [], []
    for batch in (rows, list(rows), [*rows, parameters(7, 0.1)], rows[:1] * 2):
        logits = torch.randn(len(batch), 100, generator=generator)
        allowed = logits.clone()
        allowed[:, 3] = allowed[:, 90:] = -torch.inf
        counts = (processor(logits.clone(), batch) > -torch.inf).sum(1).tolist()
        masked = processor(logits, batch)
        for row, own in enumerate(batch):
            best = allowed[row].topk(own["top_k"])
            expected = torch.full((100,), -torch.inf).scatter(0, best.indices, best.values)
            right.append(torch.equal(masked[row], expected) and counts[row] == own["top_k"])
        groups.append(processor.groups)
    assert len(groups[0]) == 2 and groups[0] is groups[1]
    assert len(groups[2]) == 3 and groups[3][0][2] == slice(None)
    return right


def shares_of_free_memory(utilizations: list[float]) -> list[float | str]:
    """Return the share of memory that SGLang is started with, or the refusal.

    The accelerator has 80 GB, and the other rank has 60 GB free.
    """
    from lightrft.engine.sglang import arguments

    axis = Axis("engine", 2, 0, None)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "free_memory", lambda device: (70 * 10**9, 80 * 10**9))
        patch.setattr(Axis, "gather", lambda self, value: [value, 60 * 10**9])
        for share in utilizations:
            setup = EngineSetup(
                section=EngineSection(engine_mem_util=share),
                model_path="",
                dtype=torch.float32,
                device=torch.device("cuda", 0),
                axis=axis,
                max_model_len=8,
            )
            try:
                found.append(arguments.arguments(setup, None)["mem_fraction_static"])
            except ConfigError as error:
                found.append(str(error))
    return found


def arguments_of_the_user(given: str) -> dict | str:
    """Return what SGLang is started with on an accelerator in bfloat16, or the refusal."""
    from lightrft.engine.sglang import arguments

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "free_memory", lambda device: (70 * 10**9, 80 * 10**9))
        setup = EngineSetup(
            section=EngineSection(engine_args=given),
            model_path="",
            dtype=torch.bfloat16,
            device=torch.device("cuda", 0),
            axis=Axis("engine", 1, 0, None),
            max_model_len=8,
        )
        try:
            return arguments.arguments(setup, None)
        except ConfigError as error:
            return str(error)


def reserved_arguments_without_a_refusal() -> list[str]:
    """Return the reserved arguments that SGLang does not have."""
    from lightrft.engine.sglang.arguments import SGLANG_RESERVED

    return [
        name
        for name in SGLANG_RESERVED
        if "no such argument" in arguments_of_the_user(json.dumps({name: 1}))
    ]


def answer_to_an_image(folder: str) -> str:
    """Of an engine that is not launched."""
    from lightrft.engine.sglang import SGLangEngine

    Gemma3Config(image_token_index=7).save_pretrained(folder)
    SGLangEngine._on_first_rank = lambda *_: []
    engine = start_engine(
        "sglang",
        folder,
        Axis("engine", 1, 0, None),
        {"engine_kv_cache_gb": 0.125},
        from_stream=True,
    )
    with pytest.raises(ValueError) as refusal:
        engine._with_checked_media(0, Request([7], {"images": [Image.new("RGB", (8, 8))]}))
    return str(refusal.value)


def _settings() -> dict:
    """What SGLang's start might change in a process, except for SGLang's own variables."""
    handlers = {str(number): signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SGLANG")
    }
    return handlers | {
        "start": multiprocessing.get_start_method(allow_none=True),
        "environment": environment,
    }


def _refusal(folder: str, mesh: Mesh) -> str:
    try:
        start_engine("sglang", folder, mesh.engine(2), max_model_len=500_000)
    except ValueError as error:
        return "" if "--engine_kv_cache_gb" in str(error) else str(error)
    return "it started"


def no_name_in_shared_memory(bench: Bench) -> None:
    """Its processes have files of 16 kB open there, whose names would outlive them."""
    if bench.axis.rank == 0:
        links = [
            link
            for pid in bench.engine._shim.engine.get_all_child_pids()
            for link in Path(f"/proc/{pid}/fd").iterdir()
        ]
        opened = [path for link in links if LOAD_FILES in (path := os.readlink(link))]
        assert opened and all(path.endswith("(deleted)") for path in opened)


def a_stream_comes_in_buckets(bench: Bench) -> None:
    """Smaller ones than the largest tensor, so that each of these travels alone."""
    bench.engine._bucket_bytes = lambda: 20_000
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


def a_forgotten_stream_is_seen(bench: Bench) -> None:
    """A sleep of level 2 destroys the weights, though SGLang keeps them on a CPU.

    So a caller who forgets to ask whether they are valid sees it too.
    """
    bench.engine.sleep(2)
    bench.engine.wake("weights")
    bench.engine.wake("kv_cache")
    bench.engine.weights_valid = True
    # Otherwise such log-probs end the engine (test_base.py), and the next cases need it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.engine, "_cut", lambda samples, stop: samples)
        sample = bench.generate([[1, 2, 3]], Sampling(temperature=0, max_tokens=2))[0][0]
    assert all(math.isnan(value) for value in sample.logprobs)
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


def a_long_wait_for_stop_strings_is_cut(bench: Bench) -> None:
    """SGLang has no tokenizer here: requests are watched from outside and ended."""
    from lightrft.engine.sglang.samples import Samples  # where SGLang is installed

    begun = bench.generate([[5, 6]], Sampling(temperature=0, max_tokens=200))[0][0].token_ids
    text = bench.engine.vocabulary.tokenizer.decode(begun[3:5])
    generated = []
    plain = Samples._completion
    Samples._completion = lambda its, answer, sample: (
        generated.append(len(answer["output_ids"])) or plain(its, answer, sample)
    )
    sample = bench.generate([[5, 6]], Sampling(temperature=0, max_tokens=200, stop=(text,)))[0][0]
    Samples._completion = plain
    assert sample.finish_reason == "stop" and text in bench.engine.vocabulary.tokenizer.decode(
        sample.token_ids
    )
    assert sample.token_ids == begun[: len(sample.token_ids)] and len(sample.token_ids) <= 5
    if bench.axis.rank == 0:
        assert generated[0] < 100


def a_death_is_told(bench: Bench) -> None:
    """A process of SGLang's is killed in the middle of a call.

    All ranks that share the engine say so soon.
    """
    if bench.axis.rank == 0:
        scheduler = psutil.Process(bench.engine._shim.engine.get_all_child_pids()[0])
        threading.Timer(1.0, scheduler.kill).start()

    begun = time.monotonic()
    requests = [
        Request([index % 250, 7], sampling=Sampling(n=4, max_tokens=240)) for index in range(2000)
    ]
    with pytest.raises(EngineError, match="a process of SGLang died"):
        bench.engine.generate(requests, Sampling())
    assert time.monotonic() - begun < SECONDS_TO_DIE
    with pytest.raises(EngineError, match="failed earlier"):
        bench.greedy()
    bench.engine.close()
    assert not [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name().startswith("sglang")
    ]
