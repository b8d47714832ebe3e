"""The contract of an engine, as test cases that can be run against an adapter of a user.

    results = run_contract("my_engine.py:Adapter")  # case -> traceback, or empty

or `python -m lightrft.engine.testing my_engine.py:Adapter`. Tokens and log-probs are compared with
plain transformers. Each case leaves the engine awake with the original weights, the last one
closes it. tests/engine/contract.py has further cases that only the built-in engines need to pass.
"""

import copy
import inspect
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
)

from lightrft.config import EngineSection
from lightrft.core.engine import derived_seed
from lightrft.core.samples import Completion
from lightrft.engine.base import Engine, EngineError, Request, Sampling
from lightrft.engine.build import build_engine
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import collective_backend, current_device, select_device
from lightrft.models.parallel.mesh import Mesh

PROMPTS = [
    [50, 55, 43, 53, 56, 61],
    [1, 2, 3, 4, 5, 6, 7, 8, 9],
    [200],
    [50, 55, 43, 53, 56, 61],
    [61, 60],
]
LENGTH = 8
"""Tokens of most responses."""
GREEDY = Sampling(temperature=0, max_tokens=LENGTH)
MAX_MODEL_LEN = 384
SHAPE = Qwen3Config(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=192,
    vocab_size=384,
    initializer_range=0.08,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    pad_token_id=256,
    bos_token_id=257,
    eos_token_id=258,
    dtype=torch.float32,
)
"""Shape of the model that run_contract() makes."""


@dataclass
class Bench:
    engine: Engine
    model: PreTrainedModel
    """The same weights in plain transformers."""
    axis: Axis
    rank: int

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        return self.engine.generate([Request(prompt) for prompt in prompts], sampling)

    def greedy(self, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
        return [samples[0].token_ids for samples in self.generate(prompts, GREEDY)]

    @cached_property
    def expected(self) -> list[list[int]]:
        """What greedy() must return with the original weights."""
        return reference_greedy(self.model)

    def load(self, model: PreTrainedModel, version: int = 0) -> None:
        self.engine.load_weights(model.named_parameters(), version)


Case = Callable[[Bench], None]


def run_contract(engine_type: str) -> dict[str, str]:
    """Run all cases in this process, which becomes the one rank of a process group.

    `engine_type` is the adapter as `--engine_type` names it. Returns case -> traceback, which is
    empty for a case that passed.
    """
    device = select_device()
    dist.init_process_group(
        collective_backend(device), store=dist.HashStore(), rank=0, world_size=1
    )
    axis = Mesh(device.type, tp=1).engine(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SHAPE).save_pretrained(folder)
        engine = start(engine_type, folder, axis)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        model.generation_config = GenerationConfig.from_model_config(model.config)
        bench = Bench(engine, model, axis, rank=0)
        results = {case.__name__: outcome(case, bench) for case in CASES}
    dist.destroy_process_group()
    return results


@contextmanager
def raises(kind: type[Exception], match: str = "") -> Iterator[None]:
    """Demand an error of this kind, with a message in which the pattern `match` is found."""
    try:
        yield
    except kind as error:
        assert re.search(match, str(error)), f"{match!r} is not in: {error}"
    else:
        raise AssertionError(f"this should have been a {kind.__name__}")


def start(
    engine_type: str, folder: str, axis: Axis, flags: dict[str, Any] | None = None, **options
) -> Engine:
    chosen = {"engine_kv_cache_gb": 0.05, "micro_rollout_batch_size": 3} | (flags or {})
    section = EngineSection(engine_type=engine_type, **chosen)
    setup = {
        "dtype": torch.float32,
        "device": current_device(),
        "max_model_len": MAX_MODEL_LEN,
        "seed": 0,
        "trust_remote_code": False,
    }
    return build_engine(section, model_path=folder, axis=axis, **setup | options)


def outcome(case: Case, bench: Bench) -> str:
    try:
        case(bench)
    except BaseException:
        return traceback.format_exc()
    return ""


def unknown_ids(model: PreTrainedModel) -> list[int]:
    """Ids of a model that the tokenizer does not have; none without a tokenizer."""
    return _unknown_ids(model.name_or_path, model.config.get_text_config().vocab_size)


@cache
def _unknown_ids(folder: str, size: int) -> list[int]:
    if not Path(folder, "tokenizer.json").is_file():
        return []
    known = AutoTokenizer.from_pretrained(folder).get_vocab().values()
    return sorted(set(range(size)) - set(known))


def reference_greedy(
    model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, max_tokens: int = LENGTH
) -> list[list[int]]:
    outputs = []
    never = {"suppress_tokens": unknown} if (unknown := unknown_ids(model)) else {}
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        full = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            **never,
        )
        outputs.append(full[0, len(prompt) :].tolist())

    return outputs


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float
) -> torch.Tensor:
    """[len(tokens)] float32."""
    logits = _logits(model, prompt, tokens)
    return torch.log_softmax(logits / (temperature or 1.0), -1).gather(
        1, torch.tensor(tokens)[:, None]
    )[:, 0]


def _logits(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocabulary] float32 on the host; ids without a token are impossible."""
    logits = (
        model(torch.tensor([prompt + tokens], device=model.device))
        .logits[0, len(prompt) - 1 : -1]
        .float()
        .cpu()
    )
    logits[:, unknown_ids(model)] = -torch.inf
    return logits


def perturbed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(
                parameter.device
            )
    return other


def greedy_equals_transformers(bench: Bench) -> None:
    assert bench.greedy() == bench.expected


def logprobs_are_of_the_sampling_distribution(bench: Bench) -> None:
    for temperature in (1.0, 0.7, 1.3, 0.0):
        sampling = Sampling(n=2, max_tokens=16, temperature=temperature, seed=3)
        for prompt, samples in zip(PROMPTS, bench.generate(PROMPTS, sampling), strict=True):
            for sample in samples:
                assert len(sample.logprobs) == len(sample.token_ids)
                expected = reference_logprobs(bench.model, prompt, sample.token_ids, temperature)
                torch.testing.assert_close(
                    torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-5
                )


def new_weights_are_used(bench: Bench) -> None:
    before = bench.greedy()
    for version, seed in ((1, 11), (2, 12)):
        other = perturbed(bench.model, seed)
        bench.load(other, version)
        assert bench.greedy() == reference_greedy(other) != before
        assert {
            sample.weight_version
            for samples in bench.generate(PROMPTS, GREEDY)
            for sample in samples
        } == {version}

    bench.load(bench.model)
    assert bench.greedy() == before


def _broken_stream_is_refused(bench: Bench, stream: list, message: str) -> None:
    """The error names the parameter, and nothing is generated with half a model.

    A complete stream repairs the engine.
    """
    with raises(ValueError, match=message):
        bench.engine.load_weights(stream, 9)
    with raises(EngineError, match="load_weights"):
        bench.greedy()
    assert bench.engine.version == 0
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


def missing_weights_are_named(bench: Bench) -> None:
    stream = list(bench.model.named_parameters())
    _broken_stream_is_refused(bench, stream[:5] + stream[6:], stream[5][0])
    _broken_stream_is_refused(bench, stream[:-1], stream[-1][0])
    _broken_stream_is_refused(bench, [], stream[0][0])


def unknown_weights_are_named(bench: Bench) -> None:
    stream = list(bench.model.named_parameters())
    _broken_stream_is_refused(
        bench,
        stream[:4] + [("model.layers.7.x.weight", torch.zeros(3))] + stream[4:],
        "model.layers.7.x.weight is not",
    )


def repeated_weights_are_named(bench: Bench) -> None:
    stream = list(bench.model.named_parameters())
    _broken_stream_is_refused(bench, stream[:4] + stream[3:], f"{stream[3][0]} came twice")


def wrong_shapes_are_named(bench: Bench) -> None:
    stream = list(bench.model.named_parameters())
    name, tensor = stream[3]
    _broken_stream_is_refused(
        bench, stream[:3] + [(name, tensor[:-1])] + stream[4:], f"{name} has shape"
    )


def a_stream_that_raises_is_repaired(bench: Bench) -> None:
    def broken():
        yield from list(bench.model.named_parameters())[:6]
        raise ZeroDivisionError("the source broke")

    with raises(ZeroDivisionError):
        bench.engine.load_weights(broken(), 9)
    with raises(EngineError, match="load_weights"):
        bench.greedy()
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


def any_order_of_the_stream_will_do(bench: Bench) -> None:
    other = perturbed(bench.model, 21)
    stream = list(other.named_parameters())
    random.Random(4).shuffle(stream)
    bench.engine.load_weights(iter(stream), 0)
    assert bench.greedy() == reference_greedy(other)
    bench.load(bench.model)


def the_engine_has_its_own_copy(bench: Bench) -> None:
    other = perturbed(bench.model, 31)
    bench.load(other)
    expected = reference_greedy(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert bench.greedy() == expected
    bench.load(bench.model)


def sleeping_keeps_or_drops_the_weights(bench: Bench) -> None:
    engine = bench.engine
    before = bench.greedy()
    engine.sleep(1)
    engine.wake("weights")
    engine.wake("kv_cache")
    assert bench.greedy() == before
    engine.sleep(2)
    engine.wake("weights")
    engine.wake("kv_cache")
    with raises(EngineError, match="load_weights"):
        bench.greedy()
    bench.load(bench.model)
    assert bench.greedy() == before


def a_step_sleeps_streams_and_wakes(bench: Bench) -> None:
    for version in range(1, 3):
        other = perturbed(bench.model, version)
        bench.engine.sleep()
        bench.engine.wake("weights")
        bench.load(other, version)
        bench.engine.wake("kv_cache")
        assert bench.greedy() == reference_greedy(other)
    bench.load(bench.model)


def illegal_orders_raise(bench: Bench) -> None:
    engine = bench.engine
    engine.sleep()
    engine.sleep()  # idempotent
    with raises(EngineError, match="sleeping"):
        bench.greedy()
    with raises(EngineError, match='wake\\("weights"\\)'):
        bench.load(bench.model)
    with raises(EngineError, match='before wake\\("weights"\\)'):
        engine.wake("kv_cache")
    engine.wake("weights")
    engine.wake("weights")
    with raises(EngineError, match="sleeping"):
        bench.greedy()
    bench.load(bench.model)
    engine.wake("kv_cache")
    assert bench.greedy() == bench.expected


def n_samples_per_prompt_in_order(bench: Bench) -> None:
    outputs = bench.generate(PROMPTS, Sampling(n=4, max_tokens=LENGTH, seed=8))
    assert [len(samples) for samples in outputs] == [4] * len(PROMPTS)
    texts = [tuple(sample.token_ids) for samples in outputs for sample in samples]
    assert len(set(texts)) == len(texts), "samples must differ, also those of equal prompts"
    for expected, samples in zip(
        bench.expected, bench.generate(PROMPTS, replace(GREEDY, n=3)), strict=True
    ):
        assert [sample.token_ids for sample in samples] == [expected] * 3


def stop_ids_end_a_response(bench: Bench) -> None:
    free = bench.greedy()
    stop = next(tokens[3] for tokens in free if tokens[3] not in tokens[:3])
    outputs = bench.generate(PROMPTS, replace(GREEDY, stop_token_ids=(stop, 383)))
    for tokens, (sample,) in zip(free, outputs, strict=True):
        stopped = stop in tokens
        assert sample.token_ids == (tokens[: tokens.index(stop) + 1] if stopped else tokens)
        assert sample.finish_reason == ("stop" if stopped else "length")
    assert any(stop in tokens for tokens in free)


def the_end_token_ends_a_response(bench: Bench) -> None:
    """The weights make the end token likely; the response keeps the token and the log-prob."""
    eager = copy.deepcopy(bench.model)
    end = eager.config.eos_token_id
    with torch.no_grad():
        eager.lm_head.weight[end] = eager.lm_head.weight.mean(0) * 4
    bench.load(eager)
    samples = [
        sample
        for group in bench.generate(PROMPTS, Sampling(n=16, max_tokens=30, seed=2))
        for sample in group
    ]

    reasons = {sample.finish_reason for sample in samples}
    for sample in samples:
        assert end not in sample.token_ids[:-1]
        assert (sample.token_ids[-1] == end) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or len(sample.token_ids) == 30

    assert "stop" in reasons
    bench.load(bench.model)


def the_length_limit_holds(bench: Bench) -> None:
    for limit in (1, 5):
        for (sample,) in bench.generate(PROMPTS, Sampling(max_tokens=limit, temperature=0)):
            assert (len(sample.token_ids), sample.finish_reason) == (limit, "length")
    longest = [3] * (MAX_MODEL_LEN - 2)
    (sample,) = bench.generate([longest], Sampling(max_tokens=2, temperature=0))[0]
    assert len(sample.token_ids) == 2


def stream(
    engine: Engine, requests: list[Request], sampling: Sampling
) -> Iterator[tuple[int, list[Completion]]]:
    """Yield the requests as they end."""
    loop = engine.open(sampling)
    loop.add(requests)
    return loop.to_the_end()


def each_request_comes_as_it_ends(bench: Bench) -> None:
    """Three prompts of one length that run together: those that end first come first."""
    requests = [Request([7, index]) for index in (3, 1, 2)]
    stops = tuple(range(0, 384, 12))  # about one token in twelve
    for seed in range(2):
        sampling = Sampling(n=2, max_tokens=36, seed=seed, stop_token_ids=stops)
        bench.engine.reset_cache()

        given: dict[int, list[Completion]] = {}
        for index, completions in stream(bench.engine, requests, sampling):
            given[index] = completions
            torch.rand(3)  # draws of the caller change no sample

        assert sorted(given) == [0, 1, 2]
        outputs = [given[index] for index in range(3)]
        longest = [max(len(sample.token_ids) for sample in samples) for samples in given.values()]
        assert longest == sorted(longest)
        bench.engine.reset_cache()
        assert bench.engine.generate(requests, sampling) == outputs


def no_requests_no_answers(bench: Bench) -> None:
    assert bench.generate([], GREEDY) == []


def the_seed_decides(bench: Bench) -> None:
    def sample(seed: int) -> list[list[Completion]]:
        bench.engine.reset_cache()
        return bench.generate(PROMPTS, Sampling(n=3, max_tokens=LENGTH, seed=seed))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def the_seed_of_a_sample_decides(bench: Bench) -> None:
    """Other requests, and their order, do not matter.

    Neither do other draws of random numbers, even on one rank of an engine alone.
    """

    def sample(rows: list[int], seed: int) -> dict[int, list[list[int]]]:
        np.random.seed(seed + bench.rank)
        requests = [
            Request(PROMPTS[row], seeds=(derived_seed(row, 0), derived_seed(row, 1)))
            for row in rows
        ]

        drawn = {}
        for index, completions in stream(
            bench.engine, requests, Sampling(n=2, max_tokens=LENGTH, seed=seed)
        ):
            drawn[rows[index]] = [each.token_ids for each in completions]
            for _ in range(bench.rank + seed):
                np.random.rand(), torch.rand(1), random.random()

        return drawn

    drawn = sample([0, 1, 2, 3, 4], seed=1)
    assert len({tuple(tokens) for samples in drawn.values() for tokens in samples}) == 10
    assert sample([4, 3, 2, 1, 0], seed=2) == drawn and sample([2], seed=3)[2] == drawn[2]
    assert all(other == drawn for other in bench.axis.gather(drawn))
    with raises(ValueError, match="request 0 has 2 seeds for 3 samples"):
        bench.engine.generate([Request([1], seeds=(1, 2))], Sampling(n=3, max_tokens=2))


def the_callers_generators_are_left_alone(bench: Bench) -> None:
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(5)
    before = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    bench.generate(PROMPTS, Sampling(n=2, max_tokens=4))
    assert (
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),
        random.getstate(),
    ) == before


def ranks_of_one_engine_get_the_same_tokens(bench: Bench) -> None:
    mine = bench.generate(PROMPTS, Sampling(n=3, max_tokens=LENGTH, seed=4))
    assert all(other == mine for other in bench.axis.gather(mine))


def a_closed_engine_says_so(bench: Bench) -> None:
    bench.engine.close()
    bench.engine.close()  # idempotent
    with raises(EngineError, match="closed"):
        bench.greedy()


CASES = [
    case
    for name, case in inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    if list(inspect.signature(case).parameters) == ["bench"] and not name.startswith("_")
]
CASES.sort(key=lambda case: case.__code__.co_firstlineno)
"""All cases, in the order of this file; the last one closes the engine."""


def main(argv: list[str]) -> int:
    """Print how each case went; return 1 if one failed, else 0."""
    if len(argv) != 1:
        sys.stderr.write("python -m lightrft.engine.testing my_engine.py:Adapter\n")
        return 2

    results = run_contract(argv[0])
    for case, problem in results.items():
        sys.stdout.write(f"{'failed' if problem else 'passed'}  {case}\n{problem}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
