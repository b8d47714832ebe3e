"""Every engine passes the contract, alone or beside a replica that answers alone, and (vLLM,
SGLang) cut over two ranks.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine import contract
from engine.contract import BFLOAT16_CASES, CASES, OF_REPLICAS, STREAM_ONLY_CASES, run_contract
from lightrft.engine import testing
from ranks import run_ranks
from sglang_environment import in_sglang_environment
from tiny import byte_tokenizer, tiny_hybrid, tiny_model
from with_vllm import load_vllm


class Layout(NamedTuple):
    engine: str
    ranks: int
    ranks_per_engine: int
    cases: list = CASES + STREAM_ONLY_CASES
    """Those on an engine that reads no checkpoint, or computes in bfloat16, need another start."""
    make: Callable[..., str] = tiny_model


SAMPLING_DEFAULTS = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.2,
    "repetition_penalty": 1.5,
}
"""What a model's folder advises for chats. If an engine took it, log-probs and responses of all
cases would be others: training says how it samples."""
ALL = CASES + STREAM_ONLY_CASES + BFLOAT16_CASES
OF_TWO_RANKS = [
    testing.greedy_equals_transformers,
    testing.logprobs_are_of_the_sampling_distribution,
    testing.new_weights_are_used,
    testing.no_prefix_of_the_old_weights_survives,
    contract.missing_weights_are_named,
    contract.wrong_shapes_are_named,
    contract.a_stream_that_raises_is_repaired,
    contract.a_weight_that_stays_the_old_one_is_named,
    contract.a_stale_prefix_cache_is_noticed,
    testing.a_sleep_of_level_1_keeps_the_weights,
    contract.a_sleep_of_level_2_drops_the_weights,
    testing.a_step_sleeps_streams_and_wakes,
    contract.impossible_requests_are_refused,
    testing.requests_have_samplings_of_their_own,
    testing.requests_are_admitted_while_others_decode,
    contract.responses_go_on_with_new_weights,
    contract.responses_go_on_over_the_cache_that_they_have,
    testing.an_abort_keeps_what_was_sampled,
    contract.stop_strings_end_a_response,
    contract.ids_without_a_token_never_come,
    contract.ranks_may_have_different_numbers_of_requests,
    contract.the_seed_of_a_sample_decides,
    testing.the_callers_generators_are_left_alone,
    contract.ranks_of_one_engine_get_the_same_tokens,
    contract.ranks_of_one_engine_must_ask_the_same,
    contract.the_trainers_process_group_still_works,
]
"""Those in which ranks that share an engine could part: by their part of the weights, requests that
come and go, errors, and draws. The others pass in an engine of one rank."""
OF_PARTS = [
    contract.one_wrong_element_is_named,
    contract.swapped_weights_are_named,
    contract.later_syncs_verify_samples,
]
"""Verification of each rank's part of the weights; SGLang passes them alone, and takes long."""
OF_HYBRIDS = [
    testing.greedy_equals_transformers,
    testing.new_weights_are_used,
    testing.no_prefix_of_the_old_weights_survives,
    contract.one_wrong_element_is_named,
    testing.a_sleep_of_level_1_keeps_the_weights,
    contract.a_sleep_of_level_2_drops_the_weights,
    testing.stop_ids_end_a_response,
    contract.a_prompt_is_computed_once_for_all_its_samples,
    contract.each_request_comes_as_it_ends,
    testing.requests_are_admitted_while_others_decode,
    contract.responses_go_on_with_new_weights,
    contract.responses_go_on_over_the_cache_that_they_have,
    testing.an_abort_keeps_what_was_sampled,
    contract.continuing_costs_a_hit_in_the_cache,
    testing.a_tied_model_comes_by_stream,
    contract.logits_are_float32_in_a_bfloat16_engine,
]
"""Those that meet the state of a layer: weights, padding, and rows that come, go, and go on. What
is sampled from logits does not depend on the layers before them."""
LAYOUTS = {
    "hf": Layout("hf", 1, 1, ALL),
    "hf-hybrid": Layout("hf", 1, 1, OF_HYBRIDS, tiny_hybrid),
    "hf-2-replicas": Layout("hf", 2, 1, OF_REPLICAS),
    "vllm-2-replicas": Layout("vllm", 2, 1),
    "vllm-tp2": Layout("vllm", 2, 2, OF_TWO_RANKS + OF_PARTS + STREAM_ONLY_CASES + BFLOAT16_CASES),
    "sglang": Layout("sglang", 1, 1, ALL),  # test_sglang.py has engines beside each other
    # test_sglang.py has the other start, with a verification of its own
    "sglang-tp2": Layout("sglang", 2, 2, OF_TWO_RANKS),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, str]]:
    """Models with padding: more rows in the embedding than tokens."""

    @cache
    def make(model: Callable[..., str]) -> tuple[str, str]:
        folder: Path = tmp_path_factory.mktemp("models")
        models = model(folder / "plain", seed=1), model(folder / "tied", seed=2, tie=True)
        for path in models:
            byte_tokenizer(300).save_pretrained(path)
            advice = Path(path, "generation_config.json")
            advice.write_text(json.dumps(json.loads(advice.read_text()) | SAMPLING_DEFAULTS))
        return models

    return make


@pytest.fixture(scope="session")
def outcomes(folders: Callable[..., tuple[str, str]]) -> Callable[[str], list[dict[str, str]]]:
    """Name of a layout -> of every rank: case -> traceback.

    One engine start for all cases, also of several tests.
    """

    @cache
    def run(name: str) -> list[dict[str, str]]:
        layout = LAYOUTS[name]
        if layout.engine == "vllm":
            load_vllm()
        ranks = partial(
            run_ranks,
            layout.ranks,
            run_contract,
            layout.engine,
            layout.ranks_per_engine,
            layout.cases,
            *folders(layout.make),
            timeout=600,
        )

        return in_sglang_environment(ranks, timeout=1300) if layout.engine == "sglang" else ranks()

    return run


@pytest.mark.timeout(1400)  # ranks may start twice
@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(name, case.__name__, marks=() if name == "hf" else pytest.mark.slow)
        for name, layout in LAYOUTS.items()
        for case in layout.cases
    ],
)
def test_contract(outcomes: Callable[[str], list[dict[str, str]]], layout: str, case: str) -> None:
    if LAYOUTS[layout].engine == "vllm":
        pytest.importorskip("vllm", reason="vllm is not installed")
    if (
        torch.accelerator.is_available()
        and torch.accelerator.device_count() < LAYOUTS[layout].ranks
    ):
        pytest.skip(f"needs {LAYOUTS[layout].ranks} accelerators")

    found = outcomes(layout)
    failures = [
        f"rank {rank}:\n{outcome[case]}" for rank, outcome in enumerate(found) if outcome.get(case)
    ]
    assert case in found[0] and not failures, "\n".join(failures)
