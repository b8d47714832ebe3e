"""What is SGLang's own, beyond the contract.

There are a course with the real engine, whole runs, and what the versions of SGLang have.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from engine.sglang_course import (
    answer_to_an_image,
    arguments_of_the_user,
    course,
    drawn_by_noise,
    drawn_of_one_at_the_ends,
    reserved_arguments_without_a_refusal,
    shares_of_free_memory,
    truncated_by_groups,
    weights_before_a_stream,
)
from engine.sglang_families import FAMILIES, hybrid, write
from engine.sglang_families import course as families
from hosts import PREFIX
from ranks import run_ranks
from runs import PPO, prepare, repeatable, rows_of, train
from scripts.sglang_interface import interface, missing, source, used
from sglang_environment import in_sglang_environment
from tiny import tiny_hybrid, tiny_model

NEWEST = Path(__file__).parent / "sglang_newest.json"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tiny_model(tmp_path_factory.mktemp("tied"), seed=2, tie=True)
    return in_sglang_environment(
        partial(run_ranks, 2, course, folder, timeout=400), timeout=850, spawns=True
    )


@pytest.mark.slow
def test_course(outcomes: list[dict[str, str]]) -> None:
    assert len(outcomes[0]) == 11
    failures = [
        f"rank {rank}, {case}:\n{trace}"
        for rank, outcome in enumerate(outcomes)
        for case, trace in outcome.items()
        if trace
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_buffers_stay_as_the_model_makes_them() -> None:
    """No stream brings those that transformers has not; weights are noise until one comes."""
    seen = in_sglang_environment(weights_before_a_stream)
    assert seen["scale"] == 1 and 0 < abs(seen["weight"]) < 0.01


@pytest.mark.slow
def test_images_that_sglang_misreads_are_refused(tmp_path: Path) -> None:
    said = in_sglang_environment(answer_to_an_image, str(tmp_path))
    assert (
        "request 0 carries images: this engine supports only text; --engine_type hf also supports"
        " images" in said
    )


@pytest.mark.slow
def test_memory_is_a_share_of_the_accelerator() -> None:
    """As it is with vLLM, whatever the trainer holds: 48 and 24 of 80 GB."""
    *shares, refused = in_sglang_environment(shares_of_free_memory, [0.6, 0.3, 0.8])
    assert shares == pytest.approx([48 / 60, 24 / 60])
    assert "--engine_mem_util 0.8 of 80.0 GB is more than the 60.0 GB" in refused


@pytest.mark.slow
def test_arguments_of_the_user_come_last() -> None:
    plain = in_sglang_environment(arguments_of_the_user, "")
    assert plain["enable_fp32_lm_head"]

    given = {"max_running_requests": 512, "sleep_on_idle": False}
    found = in_sglang_environment(arguments_of_the_user, json.dumps(given))
    assert found == plain | given

    wrong = json.dumps({"random_seed": 1, "max_runing_requests": 8})
    assert in_sglang_environment(arguments_of_the_user, wrong).splitlines() == [
        "--engine_args random_seed: use --seed",
        "--engine_args max_runing_requests: the engine has no such argument; did you mean"
        " max_running_requests?",
    ]
    assert in_sglang_environment(reserved_arguments_without_a_refusal) == []


@pytest.mark.slow
def test_families(tmp_path: Path) -> None:
    write(tmp_path)
    found = in_sglang_environment(
        partial(run_ranks, 2, families, str(tmp_path), timeout=400), timeout=450
    )
    assert {family for rank in found for family in rank} == {*FAMILIES, "cut"}
    assert [
        (family, problems) for rank in found for family, problems in rank.items() if problems
    ] == []


@pytest.mark.slow
def test_a_hybrid_is_streamed_and_verified(tmp_path: Path) -> None:
    """SGLang has no kernels of linear attention here; the tests bring some in plain torch."""
    folder = tiny_hybrid(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"full_attention_interval": 4}
    file.write_text(json.dumps(config))
    found = in_sglang_environment(partial(run_ranks, 2, hybrid, folder, timeout=400), timeout=450)
    assert found == [[], []]


# -- runs, which differ from those with another engine in one flag


LORA = ["--lora_rank=8", "--lora_alpha=32", "--actor_learning_rate=1e-2"]
RUNS = {
    "fsdp": (2, []),
    "zigzag, tp, engine cut": (
        4,
        ["--sp_size=2", "--sp_impl=zigzag", "--tp_size=2", "--engine_tp_size=2"],
    ),
    "lora, zero3": (2, [*LORA, "--fsdp=false", "--zero_stage=3", "--offload_idle"]),
}
"""Ranks and flags. ../trainer/test_resume.py has ZeRO 3, ../trainer/test_lora.py the numbers of
adapters."""
SAME = {"zigzag, tp, engine cut": "fsdp"}
"""Runs that have the same numbers, as they have as many engines."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("runs")
    engine = ["--engine_type=sglang", "--engine_kv_cache_gb=0.05", "--enable_engine_sleep"]
    flags = [*prepare(folder), *PPO, *engine, "--train_batch_size=16"]

    @cache
    def rows(name: str) -> list[dict[str, float]]:
        ranks, options = RUNS[name]
        steps = "--max_steps=6" if name == "fsdp" else "--max_steps=3"
        in_sglang_environment(
            partial(train, "train_ppo", ranks, [*flags, *options, steps], folder / name)
        )
        return repeatable(rows_of(folder / name))

    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_strategy_feeds_it(run: Callable[[str], list[dict[str, float]]], name: str) -> None:
    """At every step SGLang samples from the weights that the trainer computes with.

    The layout changes no number.
    """
    rows = run(name)
    assert (
        max(row["engine/logprob_mismatch_max"] for row in rows)
        < 1e-4
        < min(row["train/grad_norm"] for row in rows)
    )
    for mine, other in zip(rows[:3], run(SAME.get(name, name))[:3], strict=True):
        for metric in mine.keys() - {"engine/logprob_mismatch_max"}:
            assert mine[metric] == pytest.approx(other[metric], rel=2e-3, abs=1e-5), metric


@pytest.mark.slow
def test_the_reward_rises(run: Callable[[str], list[dict[str, float]]]) -> None:
    assert (
        len(run("fsdp")) == 6
        and run("fsdp")[-1]["rollout/reward"] > run("fsdp")[0]["rollout/reward"]
    )


# -- without an engine


def test_an_accelerator_draws_what_the_formula_says() -> None:
    """SGLang computes it in float64; float32 has other roundings."""
    same, drawn, p = in_sglang_environment(drawn_by_noise)
    assert same >= drawn - 2 and p > 1e-3


def test_the_only_token_that_is_allowed_is_drawn_for_every_hash() -> None:
    """In float32 the largest hash rounds to 2^32, whose noise would be -inf."""
    assert in_sglang_environment(drawn_of_one_at_the_ends) == [2, 2]


def test_rows_of_a_batch_are_listed_once() -> None:
    assert all(in_sglang_environment(truncated_by_groups))


def test_the_pinned_version_has_what_is_used() -> None:
    packages = next(PREFIX.glob("lib/python*/site-packages"), None)
    assert packages is not None, (
        f"no environment with SGLang at {PREFIX}: make it with `bash scripts/environment.sh test`"
    )
    assert missing(used(source()), interface(packages)) == []


def test_the_newest_version_has_what_is_used() -> None:
    """Recorded by scripts/sglang_interface.py."""
    assert missing(used(source()), json.loads(NEWEST.read_text())) == []


@pytest.mark.parametrize(
    ("name", "other", "problem"),
    [
        ("load_format=", "load_as=", "Engine.update_weights_from_tensor: load_as"),
        ('"max_total_tokens"', '"max_tokens"', "arguments: max_tokens"),
        ('"sampling_seed"', '"seed"', "sampling: seed"),
        ('"cuda_graph"', '"graphs"', "tags: graphs"),
        (
            "import run_scheduler_process",
            "import run_scheduler",
            "from sglang.srt.managers.scheduler import run_scheduler",
        ),
        (
            "multinomial_with_seed",
            "multinomial",
            "from sglang.srt.layers.sampler import multinomial",
        ),
        (
            "self.engine.begin_weight_update",
            "self.engine.start_update",
            "Engine.start_update: start_update",
        ),
    ],
)
def test_what_a_version_lacks_is_named(name: str, other: str, problem: str) -> None:
    adapter = source().replace(
        "import Scheduler, run_scheduler_process", "import run_scheduler_process"
    )
    assert missing(used(adapter.replace(name, other)), json.loads(NEWEST.read_text())) == [problem]
