"""What the engines of this project promise beyond the contract of every engine.

The cases of lightrft/engine/testing.py hold for any engine, also for one of a user. Those here are
about errors and verification, about ranks that share an engine, and about what vLLM, SGLang and hf
do besides. Every adapter passes both, in every layout. One start serves all cases: each leaves the
engine awake with the original weights.
"""

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)

from lightrft.core.engine import derived_seed
from lightrft.core.samples import Completion
from lightrft.engine import testing
from lightrft.engine.base import Engine, EngineError, Request, Sampling
from lightrft.engine.loop import EngineLoop
from lightrft.engine.testing import (
    GREEDY_RUN,
    MAX_MODEL_LEN,
    TRIAL_IDS,
    EngineBench,
    distribution,
    outcome,
    perturbed,
    start_engine,
)
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import current_device, select_device
from lightrft.models.parallel.mesh import Mesh
from lightrft.models.weight_sync.verify import FULL_EVERY, PRODUCT_ROUNDS
from tiny import VOCABULARY

PROMPTS = TRIAL_IDS
GREEDY = GREEDY_RUN
LENGTH = GREEDY.max_tokens


@dataclass
class Bench(EngineBench):
    """The bench of the package, with greedy responses from transformers' own generation."""

    @property
    def axis(self) -> Axis:
        return self.engine.axis

    @cached_property
    def expected(self) -> list[list[int]]:
        """What greedy() must return with the original weights."""
        return reference_greedy(self.model)

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        return self.engine.generate([Request(prompt) for prompt in prompts], sampling)

    def greedy(self, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
        return [samples[0].token_ids for samples in self.generate(prompts, GREEDY)]


Case = Callable[[Bench], None]


def run_contract(
    engine_type: str, tp: int, chosen: list[Case], folder: str, tied_folder: str
) -> dict[str, str]:
    """On every rank: chosen case -> traceback, empty when it passed.

    Replicas after the first have only those OF_REPLICAS.
    """
    mesh = Mesh(select_device().type, tp=1)
    results: dict[str, str] = {}
    for path, group, options in (
        (folder, CASES, {}),
        (tied_folder, STREAM_ONLY_CASES, {"from_stream": True}),
        (tied_folder, BFLOAT16_CASES, {"from_stream": True, "dtype": torch.bfloat16}),
    ):
        cases = [
            case
            for case in group
            if case in chosen and (mesh.world.rank < tp or case in OF_REPLICAS)
        ]
        if not cases:
            continue

        engine = start_engine(engine_type, path, mesh.engine(tp), **options)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(current_device())
        model.generation_config = GenerationConfig.from_model_config(model.config)
        bench = Bench(engine, model)
        for case in cases:
            results[case.__name__] = outcome(case, bench)
        engine.close()

    return results


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


def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float
) -> torch.Tensor:
    """[len(tokens)] float32."""
    return sampled_logprobs(model, prompt, tokens, Sampling(temperature=temperature))


def sampled_logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], sampling: Sampling
) -> torch.Tensor:
    """Log-probs [len(tokens)] as transformers would sample; ids without a token are impossible."""
    banned = (*sampling.banned_token_ids, *unknown_ids(model))
    table = distribution(model, prompt, tokens, replace(sampling, banned_token_ids=banned))
    return table[range(len(tokens)), tokens]


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's test; cells with an expected count below 5 are one cell."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).clamp_min(1e-9)
    statistic = ((counts - expected).square() / expected).sum()
    return torch.special.gammaincc(
        torch.tensor((len(counts) - 1) / 2).double(), statistic / 2
    ).item()


# -- cases on an engine that read the checkpoint


def _broken_stream_is_refused(bench: Bench, stream: list, message: str) -> None:
    """The error names the parameter, and nothing is generated with half a model.

    A complete stream repairs the engine.
    """
    with pytest.raises(ValueError, match=message):
        bench.engine.load_weights(stream, 9)
    with pytest.raises(EngineError, match="load_weights"):
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

    with pytest.raises(ZeroDivisionError):
        bench.engine.load_weights(broken(), 9)
    with pytest.raises(EngineError, match="load_weights"):
        bench.greedy()
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


@contextmanager
def tampered(engine: Engine, tamper: Callable[[dict[str, torch.Tensor]], None]) -> Iterator[None]:
    """Inside, the engine takes over something else than what came.

    The fingerprints of what came are known by then.
    """
    load = engine._load_weights

    def load_changed(named_tensors: Iterator) -> None:
        changed = {name: tensor.detach().clone() for name, tensor in named_tensors}
        tamper(changed)
        load(iter(changed.items()))

    engine._load_weights = load_changed
    try:
        yield
    finally:
        del engine._load_weights


def _is_noticed(
    bench: Bench,
    tamper: Callable[[dict[str, torch.Tensor]], None],
    name: str,
    round: int | None = None,
) -> None:
    """The error names the weight, and nothing is generated with it.

    The next stream is verified as a whole.
    """
    bench.engine.verify_round = round
    with (
        tampered(bench.engine, tamper),
        pytest.raises(EngineError, match=f"{name} in the engine differs from the weight"),
    ):
        bench.load(bench.model, 9)
    with pytest.raises(EngineError, match="load_weights"):
        bench.greedy()
    assert bench.engine.verify_round is None


def _is_repaired(bench: Bench) -> None:
    """By a complete stream."""
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


def flipped_elements_are_named(bench: Bench, names: Iterable[str]) -> None:
    """One element of each weight gets the other sign.

    In bfloat16 it is the largest one, because products with a packed weight are rounded there.
    """

    def flip(name: str, tensors: dict[str, torch.Tensor]) -> None:
        flat = tensors[name].view(-1)
        flat[len(flat) * 2 // 3 if flat.dtype == torch.float32 else flat.abs().argmax()] *= -1

    for name in names:
        _is_noticed(bench, partial(flip, name), name)
    bench.load(bench.model)


def one_wrong_element_is_named(bench: Bench) -> None:
    flipped_elements_are_named(bench, bench.engine.expected)
    assert bench.greedy() == bench.expected


def a_weight_that_stays_the_old_one_is_named(bench: Bench) -> None:
    old = perturbed(bench.model, 41)
    for name in (
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ):
        _is_noticed(
            bench,
            lambda tensors, name=name: tensors.update({name: old.get_parameter(name).detach()}),
            name,
        )

    _is_repaired(bench)


def swapped_weights_are_named(bench: Bench) -> None:
    """Of one fused layer, of one shape in two layers; rows and columns of one weight."""
    layers = "model.layers.0.", "model.layers.1."
    for first, second in (
        ("self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        for one, other in (
            (layers[0] + first, layers[0] + second),
            (layers[0] + second, layers[1] + second),
        ):
            _is_noticed(
                bench, partial(_swap, f"{one}.weight", f"{other}.weight"), f"({one}|{other}).weight"
            )

    for name in (
        "model.embed_tokens.weight",
        layers[1] + "self_attn.o_proj.weight",
        layers[0] + "mlp.down_proj.weight",
    ):
        for dim in (0, 1):
            _is_noticed(
                bench,
                lambda tensors, name=name, dim=dim: tensors.update(
                    {name: tensors[name].roll(1, dim)}
                ),
                name,
            )

    _is_repaired(bench)


def later_syncs_verify_samples(bench: Bench) -> None:
    """One wrong element is named in the round that covers its row, and in a full verification.

    A weight that stays the old one is named in that round too, or in any round if it lies as it
    came.
    """
    name = "model.layers.1.mlp.up_proj.weight"
    old = perturbed(bench.model, 43)

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        row = tensors[name][1]
        row[row.abs().argmax()] *= -1

    def stay(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = old.get_parameter(name).detach()

    by_product = [
        round
        for round in range(1, FULL_EVERY)
        if name in bench.engine._fingerprints(torch.float32, round).products
    ]
    round = by_product[0] if by_product else 1
    assert len(by_product) <= FULL_EVERY // PRODUCT_ROUNDS
    for tamper in (flip, stay):
        _is_noticed(bench, tamper, name, round)
        _is_noticed(bench, tamper, name, 0)
    if not by_product:
        _is_noticed(bench, stay, name, (round + 1) % FULL_EVERY)
    _is_repaired(bench)
    bench.engine.verify_round = (round + 1) % FULL_EVERY
    with tampered(bench.engine, flip):
        bench.load(bench.model)
    assert bench.engine.verify_round == (round + 2) % FULL_EVERY
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


def _swap(one: str, other: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors[one], tensors[other] = tensors[other], tensors[one]


def a_stale_prefix_cache_is_noticed(bench: Bench) -> None:
    """An engine that keeps no prefixes between calls has nothing to forget."""
    bench.generate([[(7 * position) % 250 for position in range(200)]], GREEDY)
    if type(bench.engine).__name__ == "HFEngine":
        return
    bench.engine.reset_cache = lambda: None
    with pytest.raises(EngineError, match="blocks of the old weights"):
        bench.load(bench.model)
    del bench.engine.reset_cache
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


def a_sleep_of_level_2_drops_the_weights(bench: Bench) -> None:
    bench.engine.sleep(2)
    bench.engine.wake("weights")
    bench.engine.wake("kv_cache")
    with pytest.raises(EngineError, match="load_weights"):
        bench.greedy()
    bench.load(bench.model)
    assert bench.greedy() == bench.expected


def illegal_orders_raise(bench: Bench) -> None:
    engine = bench.engine
    engine.sleep()
    engine.sleep()  # idempotent
    with pytest.raises(EngineError, match="sleeping"):
        bench.greedy()
    with pytest.raises(EngineError, match='wake\\("weights"\\)'):
        bench.load(bench.model)
    with pytest.raises(EngineError, match='before wake\\("weights"\\)'):
        engine.wake("kv_cache")
    engine.wake("weights")
    engine.wake("weights")
    with pytest.raises(EngineError, match="sleeping"):
        bench.greedy()
    bench.load(bench.model)
    engine.wake("kv_cache")
    assert bench.greedy() == bench.expected


def impossible_requests_are_refused(bench: Bench) -> None:
    for prompts, sampling, message in (
        ([[1], []], Sampling(max_tokens=4), "request 1 has no tokens"),
        ([[1] * (MAX_MODEL_LEN - 6)], Sampling(max_tokens=7), "max_model_len"),
        ([[1]], Sampling(n=0), "n and max_tokens"),
        ([[1]], Sampling(max_tokens=0), "n and max_tokens"),
        ([[1]], Sampling(temperature=-1), "temperature"),
        ([[1]], Sampling(top_p=0.0), "top_p"),
        ([[1]], Sampling(min_p=1.5), "min_p"),
        ([[1]], Sampling(top_k=-1), "top_k"),
        ([[1]], Sampling(stop=("",)), "stop strings"),
        ([[1]], Sampling(first_token_temperature=0.0), "first_token_temperature"),
        ([[1]], Sampling(stop_token_ids=(9999,)), "token 9999 is not in the vocabulary"),
        ([[1], [2, 9999]], Sampling(max_tokens=4), "request 1 contains the token 9999"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.generate(prompts, sampling)

    with pytest.raises(ValueError, match="supports only text"):
        bench.engine.generate([Request([1], multi_modal={"images": []})], Sampling(max_tokens=4))
    with pytest.raises(ValueError, match="request 1 does not fit.*max_model_len"):
        bench.engine.generate(
            [Request([1]), Request([1], sampling=Sampling(max_tokens=MAX_MODEL_LEN))],
            Sampling(max_tokens=4),
        )

    loop = bench.engine.open(GREEDY)
    loop.add([Request([1])])
    with pytest.raises(ValueError, match="contains the token 9999"):
        loop.add([Request([9999])])
    assert len(list(loop.to_the_end())) == 1
    assert bench.greedy() == bench.expected


def a_prompt_is_computed_once_for_all_its_samples(bench: Bench) -> None:
    """A short prompt is computed once too, as most tasks have short ones.

    vLLM shares whole blocks, and on CPUs a block has 128 tokens by default. There the samples share
    the last block as well, and each computes only the last token of the prompt.
    """
    shares_all = type(bench.engine).__name__ == "VLLMEngine" and current_device().type == "cpu"
    for length in (60, 64, 65, 200):
        prompt = [(11 * position) % 250 for position in range(length)]
        bench.engine.reset_cache()
        samples = bench.generate([prompt], Sampling(n=4, max_tokens=4, seed=1))[0]
        least = length - 1 if shares_all else length / 2
        assert sum(sample.num_cached_tokens >= least for sample in samples) == 3
        for sample in samples:
            expected = reference_logprobs(bench.model, prompt, sample.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-5)


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


def _interrupted(bench: Bench, tokens: int, by_itself: int) -> int:
    """Return the length of responses that something interrupts after some steps.

    SGLang decodes by itself meanwhile, so the responses have to be longer.
    """
    return by_itself if type(bench.engine).__name__ == "SGLangEngine" else tokens


def responses_go_on_with_new_weights(bench: Bench) -> None:
    """Each token has the log-prob and the version of the weights that sampled it.

    Requests that wait have only the new version.
    """
    longest = _interrupted(bench, 40, by_itself=100)
    sampling = Sampling(temperature=1.0, max_tokens=longest, n=2, seed=7)
    hot = replace(sampling, first_token_temperature=4.0)
    requests = [
        Request(prompt, sampling=hot if number > 2 else sampling)
        for number, prompt in enumerate(PROMPTS)
    ]
    models = {3: bench.model, 4: perturbed(bench.model, 21), 5: perturbed(bench.model, 22)}
    bench.load(bench.model, 3)
    loop = bench.engine.open(Sampling())
    loop.add(requests)
    found = dict(sum([loop.step() for _ in range(5)], []))

    for version in (4, 5):
        with loop.interrupted():
            bench.load(models[version], version)
        assert loop.running
        found |= dict(sum([loop.step() for _ in range(3)], []))

    while loop.running:
        found |= dict(loop.step())
    bench.load(bench.model)
    assert sorted(found) == list(range(len(requests)))
    ended = [(request, sample) for index, request in enumerate(requests) for sample in found[index]]
    versions = [set(sample.weight_versions) for _, sample in ended]
    assert (
        len(ended) == 10
        and set.union(*versions) == {3, 4, 5}
        and any(len(of_sample) > 1 for of_sample in versions)
    )

    for request, sample in ended:
        assert sample.finish_reason == "stop" or len(sample.token_ids) == longest
        assert sorted(sample.weight_versions) == sample.weight_versions and len(
            sample.weight_versions
        ) == len(sample.token_ids)

        first = request.sampling.first_token_temperature or 1.0
        for version in set(sample.weight_versions):
            expected = reference_logprobs(models[version], request.token_ids, sample.token_ids, 1.0)
            expected[:1] = reference_logprobs(
                models[version], request.token_ids, sample.token_ids, first
            )[:1]
            tokens = torch.tensor(sample.weight_versions) == version
            torch.testing.assert_close(
                torch.tensor(sample.logprobs)[tokens], expected[tokens], rtol=0, atol=1e-4
            )


def responses_go_on_over_the_cache_that_they_have(bench: Bench) -> None:
    """Weights are loaded between two steps, twice, and no token is computed again.

    Later tokens are what the new weights predict from keys and values that other weights have
    computed. Requests that come after a load share none of these.
    """
    ends = tuple(bench.engine.vocabulary.end_token_ids)
    longest = _interrupted(bench, 24, by_itself=250)
    greedy = Sampling(temperature=0, max_tokens=longest, banned_token_ids=ends)
    drawn = replace(greedy, n=2, temperature=1.0, seed=4)
    prompt = [(7 * position) % 250 for position in range(100)]
    samplings = [greedy, drawn]
    models = {3: bench.model, 4: perturbed(bench.model, 51), 5: perturbed(bench.model, 52)}
    bench.load(bench.model, 3)
    loop = bench.engine.open(Sampling())
    loop.add([Request([*prompt, row], sampling=each) for row, each in enumerate(samplings)])
    found = {}

    for version, least in ((4, 3), (5, 6)):
        while _num_sampled_first(bench, loop) < least:
            found |= dict(loop.step())
        with pytest.raises(EngineError, match="not consumed"):
            bench.load(models[version], version)
        loop.load_weights(models[version].named_parameters(), version)
        with _num_computed(bench.engine) as computed:
            found |= dict(loop.step())
        # The two prompts have three samples.
        assert not computed or 0 < sum(computed) <= 3

    later = loop.add([Request([*prompt, 0], sampling=greedy), Request(prompt, sampling=greedy)])
    while loop.running:
        found |= dict(loop.step())
    bench.load(bench.model)

    for index, prompt_of in zip(later, ([*prompt, 0], prompt), strict=True):
        (sample,) = found[index]
        assert set(sample.weight_versions) == {5} and sample.num_cached_tokens < 2 * len(prompt)
        expected = sampled_logprobs(models[5], prompt_of, sample.token_ids, greedy)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-4)

    for row, sampling in enumerate(samplings):
        for sample in found[row]:
            versions = sample.weight_versions
            assert versions == sorted(versions)
            assert set(versions) == {3, 4, 5} or row  # hf may begin one batch after another
            assert len(versions) == len(sample.token_ids) == longest
            expected = logits_over_one_cache(models, [*prompt, row], sample.token_ids, versions)
            expected[:, list(ends)] = -torch.inf
            if sampling is greedy:
                assert sample.token_ids == expected.argmax(-1).tolist()
            logprobs = torch.log_softmax(expected, -1)[range(longest), sample.token_ids]
            found_logprobs = torch.tensor(sample.logprobs)
            torch.testing.assert_close(found_logprobs, logprobs, rtol=0, atol=1e-4)

            if len(set(versions)) > 1:
                last = torch.tensor(versions) == 5
                anew = sampled_logprobs(models[5], [*prompt, row], sample.token_ids, sampling)
                assert (anew - found_logprobs)[last].abs().max() > 1e-2, (
                    "with weights this similar, the case shows nothing"
                )


@torch.no_grad()
def logits_over_one_cache(
    models: dict[int, PreTrainedModel], prompt: list[int], tokens: list[int], versions: list[int]
) -> torch.Tensor:
    """[len(tokens), vocabulary] float32: logits of each token by the model of the version.

    All models read and write one cache. Each reads the tokens that no model has read before. Ids
    without a token are impossible.
    """
    cache = DynamicCache(config=next(iter(models.values())).config)
    whole = prompt + tokens
    logits = []
    start = 0
    for index, version in enumerate(versions):
        end = len(prompt) + index
        model = models[version]
        ids = torch.tensor([whole[start:end]], device=model.device)
        output = model(ids, past_key_values=cache, use_cache=True)
        logits.append(output.logits[0, -1].float().cpu())
        start = end

    stacked = torch.stack(logits)
    stacked[:, unknown_ids(model)] = -torch.inf
    return stacked


def _num_sampled_first(bench: Bench, loop: EngineLoop) -> int:
    """Return how many tokens the first sample has; SGLang decodes by itself between two looks."""
    with bench.engine.between_steps(loop):
        return bench.engine._num_sampled(0)[0]


@contextmanager
def _num_computed(engine: Engine) -> Iterator[list[int]]:
    """Count the tokens of each forward pass; SGLang computes in other processes."""
    counts: list[int] = []
    kind = type(engine).__name__
    if kind == "SGLangEngine":
        yield counts
        return

    model = engine._shim.model if kind == "VLLMEngine" else engine.model
    hook = model.register_forward_pre_hook(
        lambda module, args, options: counts.append(options["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield counts
    finally:
        hook.remove()


def an_abort_returns_all_samples_of_a_request(bench: Bench) -> None:
    """Their first tokens have a temperature of their own; the engine can be used afterwards."""
    fire = Sampling(
        n=3, max_tokens=_interrupted(bench, 48, by_itself=120), first_token_temperature=5.0
    )
    prompt = PROMPTS[0]
    loop = bench.engine.open(fire)
    loop.add([Request(prompt)])
    loop.step(), loop.step(), loop.step()
    with pytest.raises(EngineError, match="not consumed"):
        bench.greedy()
    (samples,) = loop.abort().values()
    assert len(samples) == 3 and any(sample.token_ids for sample in samples)

    for sample in samples:
        assert len(sample.logprobs) == len(sample.token_ids) < fire.max_tokens
        if sample.token_ids:
            first, rest = (
                reference_logprobs(bench.model, prompt, sample.token_ids, temperature)
                for temperature in (5.0, 1.0)
            )
            torch.testing.assert_close(
                torch.tensor(sample.logprobs), torch.cat([first[:1], rest[1:]]), rtol=0, atol=1e-5
            )

    assert bench.greedy() == bench.expected


def continuing_costs_a_hit_in_the_cache(bench: Bench) -> None:
    """All keys and values of an aborted request are used again, except for the last block.

    The last block has 32 tokens in vLLM on a CPU.
    """
    prompt = [(13 * position) % 250 for position in range(300)]
    ends = tuple(bench.engine.vocabulary.end_token_ids)
    whole = Sampling(
        temperature=0, max_tokens=_interrupted(bench, 32, by_itself=80), banned_token_ids=ends
    )
    expected = bench.generate([prompt], whole)[0][0].token_ids
    bench.engine.reset_cache()
    loop = bench.engine.open(whole)
    loop.add([Request(prompt)])
    for _ in range(4):
        loop.step()
    ((begun,),) = loop.abort().values()
    assert begun.finish_reason == "abort" and begun.num_cached_tokens == 0
    rest = replace(whole, max_tokens=whole.max_tokens - len(begun.token_ids))
    ((continued,),) = bench.generate([prompt + begun.token_ids], rest)
    assert begun.token_ids + continued.token_ids == expected
    if type(bench.engine).__name__ != "HFEngine":
        assert continued.num_cached_tokens > 280


def stop_strings_end_a_response(bench: Bench) -> None:
    """The token that completes the text is the last one.

    The text may begin anywhere within a token.
    """
    tokenizer = bench.engine.vocabulary.tokenizer
    prompts = [[40 + first, second] for first in range(4) for second in (50, 90)]
    long = Sampling(temperature=0, max_tokens=24)
    free = [samples[0].token_ids for samples in bench.generate(prompts, long)]
    pairs = [
        tokens[at : at + 2]
        for tokens in free
        for at in range(3, 23)
        if all(33 <= t < 127 for t in tokens[at : at + 2])
    ]
    assert pairs, "no two letters in a row: other prompts are needed"
    stop = (tokenizer.decode(pairs[0]), "never said")

    outputs = bench.generate(prompts, replace(long, stop=stop))
    for tokens, (sample,) in zip(free, outputs, strict=True):
        ends = [at + 2 for at in range(23) if tokens[at : at + 2] == pairs[0]]
        assert sample.token_ids == tokens[: ends[0] if ends else 24]
        assert len(sample.logprobs) == len(sample.token_ids)
        assert sample.finish_reason == ("stop" if ends else "length")

    special = bench.generate(
        prompts[:1], replace(long, stop=("<eos>",), banned_token_ids=tuple(free[0][:2]))
    )[0][0]
    assert special.finish_reason == ("stop" if 258 in special.token_ids else "length")


def ids_without_a_token_never_come(bench: Bench) -> None:
    """Nearly uniform samples have all other ids.

    The cases of log-probs show that both sides normalise without the unknown ones.
    """
    unknown = set(unknown_ids(bench.model))
    hot = Sampling(n=8, max_tokens=30, seed=8, temperature=50.0)
    sampled = {
        token
        for samples in bench.generate(PROMPTS, hot)
        for sample in samples
        for token in sample.token_ids
    }
    assert len(unknown) > 50 and not unknown & sampled
    assert len(sampled) > VOCABULARY - len(unknown) - 20


def the_first_token_has_a_temperature_of_its_own(bench: Bench) -> None:
    """The log-prob is taken at that temperature; what follows is at the temperature of the call.

    So it is beside requests without a temperature for the first token.
    """
    prompt = PROMPTS[0]
    fire = Sampling(n=24, max_tokens=3, temperature=0.7, seed=5, first_token_temperature=30.0)
    samplings = [fire, GREEDY, replace(fire, n=1, max_tokens=1), replace(fire, temperature=0)]
    requests = [
        Request(PROMPTS[1] if index == 1 else prompt, sampling=sampling)
        for index, sampling in enumerate(samplings)
    ]
    finished = list(stream(bench.engine, requests, fire))
    assert sorted(index for index, _ in finished) == [0, 1, 2, 3]
    outputs = [completions for _, completions in sorted(finished, key=lambda each: each[0])]
    assert [len(samples) for samples in outputs] == [24, 1, 1, 24]
    assert outputs[1][0].token_ids == bench.expected[1]

    for index in (0, 2, 3):
        for sample in outputs[index]:
            assert len(sample.token_ids) == len(sample.logprobs)
            assert (
                len(sample.token_ids) == requests[index].sampling.max_tokens
                or sample.finish_reason == "stop"
            )
            first = reference_logprobs(bench.model, prompt, sample.token_ids, 30.0)[:1]
            rest = reference_logprobs(
                bench.model, prompt, sample.token_ids, requests[index].sampling.temperature
            )[1:]
            torch.testing.assert_close(
                torch.tensor(sample.logprobs), torch.cat([first, rest]), rtol=0, atol=1e-5
            )

    assert len({sample.token_ids[0] for sample in outputs[0]}) > 15, (
        "at this temperature all tokens are about as likely"
    )
    usual = bench.generate([prompt], replace(fire, first_token_temperature=None))[0]
    likelihood = [
        sum(
            reference_logprobs(bench.model, prompt, sample.token_ids[:1], 1.0).item()
            for sample in samples
        )
        / 24
        for samples in (usual, outputs[0])
    ]
    assert likelihood[0] > likelihood[1] + 0.2, (
        "without it the first token is as likely as the others"
    )


def a_response_has_its_smallest_length(bench: Bench) -> None:
    """Nothing that ends a response is sampled before, and log-probs are normalised over the rest.

    Afterwards the response may end at once.
    """
    ends = tuple(range(0, 384, 2))  # half of all tokens
    sampling = Sampling(
        n=8, max_tokens=9, min_tokens=5, temperature=0.9, seed=3, stop_token_ids=ends
    )
    samplings = [
        sampling,
        replace(sampling, top_p=0.8, top_k=20),
        replace(sampling, temperature=0.0),
        replace(sampling, first_token_temperature=20.0),
        replace(sampling, max_tokens=3),
        replace(sampling, min_tokens=0),
    ]
    requests = [Request(PROMPTS[0], sampling=each) for each in samplings]

    outputs = bench.engine.generate(requests, sampling)
    ends = {*ends, *bench.engine.vocabulary.end_token_ids}
    for varied, samples in zip(samplings, outputs, strict=True):
        for sample in samples:
            least = min(varied.min_tokens, varied.max_tokens)
            assert len(sample.token_ids) == len(sample.logprobs) >= least
            ended = [
                position for position, token in enumerate(sample.token_ids, 1) if token in ends
            ]
            assert ended == ([len(sample.token_ids)] if sample.finish_reason == "stop" else [])
            early = replace(varied, banned_token_ids=tuple(ends))
            expected = sampled_logprobs(bench.model, PROMPTS[0], sample.token_ids, varied)
            expected[:least] = sampled_logprobs(bench.model, PROMPTS[0], sample.token_ids, early)[
                :least
            ]

            if varied.first_token_temperature:
                first = replace(early, temperature=varied.first_token_temperature)
                expected[:1] = sampled_logprobs(bench.model, PROMPTS[0], sample.token_ids, first)[
                    :1
                ]

            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-4)

    assert {len(sample.token_ids) for sample in outputs[0]} > {6} and all(
        len(sample.token_ids) == 3 for sample in outputs[4]
    )
    assert min(len(sample.token_ids) for sample in outputs[5]) < 5, (
        "without it responses end earlier"
    )


def no_requests_no_answers(bench: Bench) -> None:
    assert bench.generate([], GREEDY) == []


def ranks_may_have_different_numbers_of_requests(bench: Bench) -> None:
    """Replicas are independent: one may have nothing to do. Ranks of one engine still agree."""
    replica = dist.get_rank() // bench.axis.size
    prompts = [[10 + replica, index] for index in range(3 * replica)]
    assert bench.greedy(prompts) == reference_greedy(bench.model, prompts)


def the_seed_of_a_sample_decides(bench: Bench) -> None:
    """Other requests, and their order, do not matter.

    Neither do other draws of random numbers, even on one rank of an engine alone.
    """

    def sample(rows: list[int], seed: int) -> dict[int, list[list[int]]]:
        np.random.seed(seed + dist.get_rank())
        requests = [
            Request(PROMPTS[row], seeds=(derived_seed(row, 0), derived_seed(row, 1)))
            for row in rows
        ]

        drawn = {}
        for index, completions in stream(
            bench.engine, requests, Sampling(n=2, max_tokens=LENGTH, seed=seed)
        ):
            drawn[rows[index]] = [each.token_ids for each in completions]
            for _ in range(dist.get_rank() + seed):
                np.random.rand(), torch.rand(1), random.random()

        return drawn

    drawn = sample([0, 1, 2, 3, 4], seed=1)
    assert len({tuple(tokens) for samples in drawn.values() for tokens in samples}) == 10
    assert sample([4, 3, 2, 1, 0], seed=2) == drawn and sample([2], seed=3)[2] == drawn[2]
    assert all(other == drawn for other in bench.axis.gather(drawn))
    with pytest.raises(ValueError, match="request 0 has 2 seeds for 3 samples"):
        bench.engine.generate([Request([1], seeds=(1, 2))], Sampling(n=3, max_tokens=2))


def ranks_of_one_engine_get_the_same_tokens(bench: Bench) -> None:
    mine = bench.generate(PROMPTS, Sampling(n=3, max_tokens=LENGTH, seed=4))
    assert all(other == mine for other in bench.axis.gather(mine))


def ranks_of_one_engine_must_ask_the_same(bench: Bench) -> None:
    if bench.axis.size == 1:
        return

    with pytest.raises(ValueError, match="same requests"):
        bench.generate([[1, 2, 3 + bench.axis.rank]], GREEDY)
    with pytest.raises(ValueError, match="same requests"):
        bench.generate([[1, 2, 3]], Sampling(temperature=0, seed=bench.axis.rank))
    with pytest.raises(ValueError, match="same requests"):
        bench.engine.generate(
            [Request([1], sampling=replace(GREEDY, max_tokens=1 + bench.axis.rank))], GREEDY
        )

    assert bench.greedy() == bench.expected


def the_trainers_process_group_still_works(bench: Bench) -> None:
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == dist.get_world_size()


# -- cases on an engine of a tied model that reads no checkpoint


def nothing_before_the_first_stream(bench: Bench) -> None:
    with pytest.raises(EngineError, match="load_weights"):
        bench.greedy()


def a_wrong_element_of_a_tied_model_is_named(bench: Bench) -> None:
    one_wrong_element_is_named(bench)


def a_tied_model_sleeps(bench: Bench) -> None:
    for level in (1, 2):
        bench.engine.sleep(level)
        bench.engine.wake("weights")
        bench.load(bench.model)
        bench.engine.wake("kv_cache")
        assert bench.greedy() == bench.expected


def a_closed_engine_says_so(bench: Bench) -> None:
    bench.engine.close()
    bench.engine.close()  # idempotent
    with pytest.raises(EngineError, match="closed"):
        bench.greedy()


# -- cases on a bfloat16 engine of the tied model


def logits_are_float32_in_a_bfloat16_engine(bench: Bench) -> None:
    """Log-probs are those of the last hidden states times the head in float32, as in the trainer.

    Rounded to bfloat16, they would be wrong by more than 0.01.
    """
    sharp = copy.deepcopy(bench.model).bfloat16()
    with torch.no_grad():
        sharp.model.norm.weight += 11  # factors near 1 in all families, some stored less 1
    bench.load(sharp)

    head = sharp.get_output_embeddings().weight.detach().float().cpu()
    gaps = []
    for prompt in PROMPTS:
        logits = head @ bench.engine.module_outputs(prompt)["model.norm"][-1].clone()
        assert logits.max() > 16
        logits[unknown_ids(bench.model)] = -torch.inf

        bench.engine.reset_cache()
        sampling = Sampling(n=8, max_tokens=1, temperature=2.0)
        for sample in bench.generate([prompt], sampling)[0]:
            expected = torch.log_softmax(logits / sampling.temperature, 0)[sample.token_ids[0]]
            gaps.append(abs(sample.logprobs[0] - expected.item()))

    assert max(gaps) < 1e-3, gaps


_here = [
    case
    for name, case in inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    if case.__module__ == __name__
    and list(inspect.signature(case).parameters) == ["bench"]
    and not name.startswith("_")
]
# A decorator's own code lies in another file.
_in_order = sorted(_here, key=lambda case: inspect.unwrap(case).__code__.co_firstlineno)
_first_stream_only = _in_order.index(nothing_before_the_first_stream)
CASES = testing.ENGINE_CASES + _in_order[:_first_stream_only]
_first_bfloat16 = _in_order.index(logits_are_float32_in_a_bfloat16_engine)
_of_streams = _in_order[_first_stream_only:_first_bfloat16]
STREAM_ONLY_CASES = [*_of_streams[:1], *testing.STREAM_ONLY_CASES, *_of_streams[1:]]
"""The first one needs an engine without weights; the last one closes it."""
BFLOAT16_CASES = _in_order[_first_bfloat16:]
OF_REPLICAS = [
    testing.greedy_equals_transformers,
    testing.new_weights_are_used,
    testing.a_step_sleeps_streams_and_wakes,
    testing.n_samples_per_prompt_in_order,
    ranks_may_have_different_numbers_of_requests,
    the_seed_of_a_sample_decides,
    testing.the_callers_generators_are_left_alone,
    the_trainers_process_group_still_works,
    nothing_before_the_first_stream,
    testing.a_tied_model_comes_by_stream,
    a_tied_model_sleeps,
    a_closed_engine_says_so,
]
"""Those that an engine beside another one could disturb: weights, requests, draws, the process
group, and its end."""
