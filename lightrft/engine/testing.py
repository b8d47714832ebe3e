"""The contract of every engine, as test cases that can be run against an engine of your own.

    for case, failure in run_contract("my_engine.py:MyEngine"): ...

or `python -m lightrft.engine.testing my_engine.py:MyEngine`. Samples are compared with transformers.
One start of the engine serves many cases, so each of them leaves it awake with the original
weights. After a case that fails, the engine is started again.
"""

import argparse
import copy
import inspect
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.utils.logging import disable_progress_bar

from lightrft.config import EngineSection
from lightrft.core.samples import Completion
from lightrft.engine.base import Engine, Request, Sampling
from lightrft.engine.build import build_engine
from lightrft.engine.model_info import Vocabulary
from lightrft.models.launch.rendezvous import join_process_group
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import current_device

TRIAL_IDS = [[50, 55, 43, 53, 56, 61], [*range(1, 10)], [200], [50, 55, 43, 53, 56, 61], [61, 60]]
"""Prompts; two of them are equal."""
TRIALS = [Request(prompt) for prompt in TRIAL_IDS]
GREEDY_RUN = Sampling(temperature=0, max_tokens=8)
"""The sampling of most cases."""
MAX_MODEL_LEN = 384
MAX_GAP = 1e-5
"""Largest difference between two log-probs of a token, in float32."""
SOLE_RANK = Axis("engine", 1, 0, None)
Groups = list[list[Completion]]


@dataclass
class EngineBench:
    """An engine, and the model that its responses are compared with."""

    engine: Engine
    model: PreTrainedModel
    """The original weights in plain transformers."""

    def __post_init__(self) -> None:
        self.loaded = self.model
        """The weights that the engine has to have."""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.model.name_or_path, self.model.config)

    def load(self, model: PreTrainedModel, version: int = 0) -> None:
        """Stream the weights of a model into the engine, and expect them from now on."""
        self.loaded = model
        self.engine.load_weights(model.named_parameters(), version)

    def check(self, requests: list[Request] = TRIALS, sampling: Sampling = GREEDY_RUN) -> Groups:
        """Generate, and check the number of samples, their ends, and what compare() checks."""
        outputs = self.engine.generate(requests, sampling)
        for request, samples in zip(requests, outputs, strict=True):
            own = request.sampling or sampling
            assert len(samples) == own.n, f"a prompt has {len(samples)} samples, and not {own.n}"
            ends = self.vocabulary.end_token_ids | {*own.stop_token_ids}
            for sample in samples:
                self.compare(request.token_ids, sample, own)
                last = [index for index, token in enumerate(sample.token_ids, 1) if token in ends]
                right = (last[0], "stop") if last else (own.max_tokens, "length")
                found = (len(sample.token_ids), sample.finish_reason)
                assert found == right, f"length and end of a response are {found}, not {right}"
        return outputs

    def compare(self, prompt: list[int], sample: Completion, sampling: Sampling) -> None:
        """Compare log-probs with transformers, and the tokens of a greedy sample."""
        tokens = sample.token_ids
        own = sampling.resolved(self.vocabulary.never_sampled)
        table = distribution(self.loaded, prompt, tokens, own)
        assert own.temperature or tokens == table.argmax(-1).tolist(), "greedy responses differ"
        gap = (torch.tensor(sample.logprobs) - table[range(len(tokens)), tokens]).abs().max()
        assert gap <= MAX_GAP, f"log-probs at temperature {own.temperature} differ by {gap:.2g}"


Case = Callable[[EngineBench], None]


def run_contract(engine_type: str, folder: str = "") -> Iterator[tuple[str, str]]:
    """Run all cases against an engine on this device; yield the name of each and its outcome().

    `folder` has a small text model with at least 256 tokens. Without it, tiny random models are
    made. Libraries such as vLLM need torch's default process group, which the command makes.
    """
    with tempfile.TemporaryDirectory() as made:
        for cases, tie in ((ENGINE_CASES, False), (STREAM_ONLY_CASES, True)):
            path = folder or write_tiny_model(f"{made}/{tie}", tie)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            model.to(current_device())
            start = partial(start_engine, engine_type, path, SOLE_RANK, from_stream=tie)
            bench = EngineBench(start(), model)
            for case in cases:
                failure = outcome(case, bench)
                yield case.__name__, failure
                if failure:
                    bench.engine.close()
                    bench = EngineBench(start(), model)
            bench.engine.close()


def outcome(case: Callable[[Any], None], bench: Any) -> str:
    """Return in one line why the case fails, and then the traceback; empty if it passes."""
    try:
        case(bench)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return f"failed: {kind}{' '.join(str(error).split())}\n{traceback.format_exc()}"
    return ""


def start_engine(
    engine_type: str, folder: str, axis: Axis, flags: dict | None = None, **options: object
) -> Engine:
    """Start an engine with little memory; `options` are other fields of EngineSetup."""
    few = {"engine_kv_cache_gb": 0.05, "micro_rollout_batch_size": 3}
    section = EngineSection(engine_type=engine_type, **few | (flags or {}))
    setup = {"dtype": torch.float32, "device": current_device(), "max_model_len": MAX_MODEL_LEN}
    return build_engine(section, model_path=folder, axis=axis, **setup | options)


def write_tiny_model(folder: str, tie: bool) -> str:
    """Write a random model with 384 tokens, and none of a tokenizer; return the folder.

    The folder advises a temperature for chats, which an engine should not follow.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32, "vocab_size": 384}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, **layers, initializer_range=0.08, tie_word_embeddings=tie)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.3, eos_token_id=258)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def distribution(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], sampling: Sampling
) -> torch.Tensor:
    """Return the log-probs [len(tokens), V] from which transformers would sample these tokens."""
    logits = model(torch.tensor([prompt + tokens], device=model.device)).logits
    logits = logits[0, len(prompt) - 1 : -1].float().cpu()
    logits[:, list(sampling.banned_token_ids)] = -torch.inf
    if sampling.temperature:
        logits = MinPLogitsWarper(sampling.min_p)(None, logits / sampling.temperature)
        logits = TopKLogitsWarper(sampling.top_k)(None, logits) if sampling.top_k else logits
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return torch.log_softmax(logits, -1)


def perturbed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return a copy with other weights."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(model.device)
    return other


# -- cases on an engine that read the checkpoint


def greedy_equals_transformers(bench: EngineBench) -> None:
    bench.check()


def logprobs_are_of_the_sampling_distribution(bench: EngineBench) -> None:
    """Check several temperatures in requests that run together; greedy samples have raw log-probs."""
    pairs = ((0.0, 1.0), (0.7, 1.0), (1.3, 1.0), (1.4, 0.8))
    samplings = [Sampling(n=2, max_tokens=16, temperature=t, top_p=p) for t, p in pairs]
    requests = [Request(prompt, sampling=own) for prompt in TRIAL_IDS for own in samplings]
    bench.check(requests, Sampling(seed=3))


def a_part_of_the_vocabulary_is_sampled_and_normalised(bench: EngineBench) -> None:
    """With one token in it, that token comes."""
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.6}, {"top_k": 7, "top_p": 0.9}):
        bench.check(sampling=Sampling(n=3, max_tokens=12, seed=9, **options))


def tokens_far_below_the_most_likely_one_never_come(bench: EngineBench) -> None:
    """With min p, alone and before top k and top p."""
    for options in ({"min_p": 0.5}, {"min_p": 1.0}, {"min_p": 0.2, "top_k": 30, "top_p": 0.9}):
        bench.check(sampling=Sampling(n=3, max_tokens=12, seed=9, **options))


def banned_tokens_never_come(bench: EngineBench) -> None:
    """Not even the most likely; the probabilities of the others sum to 1 without them."""
    banned = tuple(samples[0].token_ids[0] for samples in bench.check())
    for sampling in (GREEDY_RUN, Sampling(n=3, max_tokens=12, top_p=0.9)):
        bench.check(sampling=replace(sampling, banned_token_ids=banned))


def n_samples_per_prompt_in_order(bench: EngineBench) -> None:
    outputs = bench.check(sampling=Sampling(n=4, max_tokens=8, seed=8))
    texts = {tuple(sample.token_ids) for samples in outputs for sample in samples}
    assert len(texts) == 4 * len(TRIAL_IDS), "samples must differ, also those of equal prompts"


def requests_have_samplings_of_their_own(bench: EngineBench) -> None:
    own = [None, GREEDY_RUN, Sampling(n=3, max_tokens=4, top_k=5), None, replace(GREEDY_RUN, n=2)]
    requests = [Request(prompt, sampling=each) for prompt, each in zip(TRIAL_IDS, own, strict=True)]
    bench.check(requests, Sampling(n=2, max_tokens=9, seed=6))


def stop_ids_end_a_response(bench: EngineBench) -> None:
    """The token is the response's last one."""
    stop = bench.check()[0][0].token_ids[:4][-1]
    outputs = bench.check(sampling=replace(GREEDY_RUN, stop_token_ids=(stop,)))
    assert outputs[0][0].finish_reason == "stop", f"no response ends with the token {stop}"


def the_end_token_ends_a_response(bench: EngineBench) -> None:
    """It is made as likely as a token that is likely; the response keeps it."""
    eager = copy.deepcopy(bench.model)
    head = eager.get_output_embeddings().weight.data
    head[list(bench.vocabulary.end_token_ids)] = head[bench.check()[0][0].token_ids[0]].clone()
    bench.load(eager)
    outputs = bench.check(sampling=Sampling(n=8, max_tokens=30, seed=2))
    reasons = {sample.finish_reason for samples in outputs for sample in samples}
    assert "stop" in reasons, "no response ends with the end token"
    bench.load(bench.model)


def the_length_limit_holds(bench: EngineBench) -> None:
    bench.check(sampling=replace(GREEDY_RUN, max_tokens=1))
    bench.check([Request([3] * (MAX_MODEL_LEN - 2))], replace(GREEDY_RUN, max_tokens=2))


def the_seed_decides(bench: EngineBench) -> None:
    def sample(seed: int) -> Groups:
        bench.engine.reset_cache()
        return bench.engine.generate(TRIALS, Sampling(n=3, max_tokens=8, seed=seed))

    assert sample(1) == sample(1), "samples of one seed differ"
    assert sample(1) != sample(2), "another seed gives the same samples"


def the_callers_generators_are_left_alone(bench: EngineBench) -> None:
    def states() -> tuple:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = states()
    bench.engine.generate(TRIALS, Sampling(n=2, max_tokens=4))
    assert states() == before, "generating draws from torch's, numpy's or Python's generator"


def requests_are_admitted_while_others_decode(bench: EngineBench) -> None:
    """Each gets the tokens that it gets alone, because seeds decide about them."""
    sampling = Sampling(n=2, max_tokens=16)
    requests = [replace(request, seeds=(row, row + 9)) for row, request in enumerate(TRIALS)]
    loop = bench.engine.open(sampling)
    ended = []
    for request in requests:
        loop.add([request])
        ended += loop.step()
    for row, samples in [*ended, *loop.to_the_end()]:
        (alone,) = bench.engine.generate([requests[row]], sampling)
        same = [each.token_ids for each in samples] == [each.token_ids for each in alone]
        assert same, "a request gets other tokens beside others than alone"


def an_abort_keeps_what_was_sampled(bench: EngineBench) -> None:
    long = replace(GREEDY_RUN, max_tokens=120)
    loop = bench.engine.open(long)
    loop.add(TRIALS)
    for _ in range(5):
        loop.step()
    begun = [(row, sample) for row, (sample,) in loop.abort().items() if sample.token_ids]
    assert begun and not loop.running, "an abort must end all requests, and return their tokens"
    for row, sample in begun:
        bench.compare(TRIAL_IDS[row], sample, long)


def new_weights_are_used(bench: EngineBench) -> None:
    for version in (1, 2):
        bench.load(perturbed(bench.model, 10 + version), version)
        versions = {samples[0].weight_version for samples in bench.check()}
        assert versions == {version}, f"samples name the versions {versions}, and not {version}"
    bench.load(bench.model)


def no_prefix_of_the_old_weights_survives(bench: EngineBench) -> None:
    """Check a prompt of several cache blocks."""
    request = Request([(7 * position) % 250 for position in range(200)])
    for model in (perturbed(bench.model, 5), bench.model):
        bench.load(model)
        ((sample,),) = bench.check([request])
        assert sample.num_cached_tokens == 0, "a prefix is in the cache right after new weights"
        bench.check([request])


def any_order_of_the_stream_will_do(bench: EngineBench) -> None:
    bench.loaded = perturbed(bench.model, 21)
    stream = sorted(bench.loaded.named_parameters(), key=lambda named: named[0][::-1])
    bench.engine.load_weights(stream, 0)
    bench.check()
    bench.load(bench.model)


def the_engine_has_its_own_copy(bench: EngineBench) -> None:
    """Check that later changes of a stream's tensors do not reach the engine."""
    stream = [(name, weight.detach().clone()) for name, weight in bench.model.named_parameters()]
    bench.engine.load_weights(stream, 0)
    for _, tensor in stream:
        tensor.zero_()
    bench.check()
    bench.load(bench.model)


def a_sleep_of_level_1_keeps_the_weights(bench: EngineBench) -> None:
    bench.engine.sleep(1)
    bench.engine.wake("weights")
    bench.engine.wake("kv_cache")
    bench.check()


def a_step_sleeps_streams_and_wakes(bench: EngineBench) -> None:
    for model in (perturbed(bench.model, 1), bench.model):
        bench.engine.sleep()
        bench.engine.wake("weights")
        bench.load(model)
        bench.engine.wake("kv_cache")
        bench.check()


# -- cases on an engine that reads no checkpoint, of a tied model


def a_tied_model_comes_by_stream(bench: EngineBench) -> None:
    for model in (bench.model, perturbed(bench.model, 2), bench.model):
        bench.load(model)
        bench.check()


STREAM_ONLY_CASES: list[Case] = [a_tied_model_comes_by_stream]
ENGINE_CASES: list[Case] = [
    case
    for case in list(vars(sys.modules[__name__]).values())
    if inspect.isfunction(case)
    and [*inspect.signature(case).parameters] == ["bench"]
    and case not in STREAM_ONLY_CASES
]


def main(argv: list[str]) -> int:
    """Run the contract, and write a line for each case; return 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="python -m lightrft.engine.testing")
    parser.add_argument("engine", help="file.py:Class or module:Class, as for --engine_type")
    parser.add_argument("--model", default="", help="folder of a small model; default: random ones")
    options = parser.parse_args(argv)
    join_process_group(current_device(), timedelta(minutes=5), arrival=timedelta(minutes=5))
    disable_progress_bar()
    failed = False
    for case, failure in run_contract(options.engine, options.model):
        failed |= bool(failure)
        sys.stdout.write(f"{case}: {(failure or 'passed').splitlines()[0]}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
