"""Whole runs that choose their prompts and groups: dynamic sampling, early stops, partial rollouts,
greedy baselines.
"""

import json
import math

import pytest

from app.trainer.in_turn import train_and_resume, train_in_turn
from runs import PPO, prepare, repeatable, train
from with_vllm import load_vllm

pytestmark = pytest.mark.slow

MANY_BYTES = '''

def asciis(samples, label, **columns):
    """1 for a response of four ASCII bytes of six or more, so that many groups agree."""
    return [float(sum(token < 128 for token in sample.token_ids) >= 4) for sample in samples]
'''
ALL = [
    "--dynamic_sampling",
    "--over_sampling=2",
    "--early_stop_every=1",
    "--partial_rollout",
    "--rollout_correction=tis",
    "--curriculum",
    "0.05",
    "0.95",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    flags = prepare(folder)
    (folder / "reward.py").open("a").write(MANY_BYTES)
    return [flag.replace("share_of_ascii", "asciis") for flag in flags]


def test_every_group_of_dynamic_sampling_has_a_signal(inputs, tmp_path):
    rows = train(
        "train_ppo", 2, [*inputs, *PPO, "--advantage_estimator=dapo", "--max_steps=6"], tmp_path
    )
    assert all(row["rollout/groups_without_signal"] == 0 for row in rows)
    assert sum(row["rollout/groups_given_up"] for row in rows) > 0
    assert max(row["rollout/sampling_rounds"] for row in rows) > 1


def test_ranks_that_have_other_groups_learn_alike(inputs, tmp_path):
    """Rank 0 has groups 1, 2 and 4, say: group 3 of rank 1 still belongs to the first optimizer
    step, and is before group 4 among tokens of equal entropy."""
    flags = [*inputs, *PPO, "--dynamic_sampling", "--train_batch_size=8"]
    flags += ["--rollout_batch_size=4", "--high_entropy_token_ratio=0.4", "--max_steps=5"]
    rows, others = (train("train_ppo", ranks, flags, tmp_path / str(ranks)) for ranks in (1, 2))
    for row, other in zip(rows, others, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("engine", "flags"), [("hf", []), ("vllm", ["--overlap", "--max_epochs=2"])], ids=["hf", "vllm"]
)
def test_partial_rollouts_have_the_log_probs_they_were_drawn_with(inputs, tmp_path, engine, flags):
    """With a learning rate of 0, the weights of all versions are the same.

    So the log-probs of every token must agree too. A sample gets a step older with every step, and
    not with the evaluation between two.
    """
    flags = [
        *flags,
        *ALL,
        f"--engine_type={engine}",
        "--enable_engine_sleep",
        "--actor_learning_rate=0",
        "--max_steps=5",
    ]
    flags += [
        "--seed=3",
        f"--eval_data={inputs[2].partition('=')[2]}",
        "--eval_split=train",
        "--max_eval_samples=2",
    ]
    flags += ["--eval_steps=1"]
    rows = train(
        "train_ppo",
        2,
        [*inputs, *PPO, *flags, "--n_samples_per_prompt=2", "--train_batch_size=16"],
        tmp_path,
    )
    assert max(row["rollout/groups_carried"] for row in rows) > 0
    assert rows[1]["rollout/staleness_max"] == 1 and "eval/reward" in rows[0]
    assert all(row["rollout/staleness_max"] <= number for number, row in enumerate(rows))
    assert all(row["engine/logprob_mismatch_max"] < 1e-4 for row in rows)


@pytest.mark.parametrize(
    "flags",
    [["--advantage_estimator=remax", "--first_token_temperature=2"], ["--sp_size=2"]],
    ids=["greedy", "replicas"],
)
def test_groups_that_ranks_share_are_learned_to_the_last_bit(inputs, tmp_path, flags):
    """Responses of a prompt are generated on several ranks.

    Nothing that is learned may depend on which ranks they are.
    """
    flags = [
        *flags,
        "--n_samples_per_prompt=8",
        "--train_batch_size=32",
        "--rollout_batch_size=4",
        "--early_stop_every=2",
        "--engine_type=vllm",
        "--generate_max_len=24",
        "--stop_token_ids",
        *map(str, range(40, 60)),
    ]
    flags = [*inputs, *PPO, "--max_steps=2", "--engine_kv_cache_gb=0.125", *flags]
    schedules = "fifo", "longest_first"
    runs = [([*flags, f"--rollout_schedule={each}"], tmp_path / each) for each in schedules]
    fifo, shared = train_in_turn("train_ppo", 2, runs)
    assert repeatable(shared) == repeatable(fifo)


def test_drafts_change_nothing_that_is_learned(inputs, tmp_path, monkeypatch):
    """At a low temperature the actor's responses repeat themselves, so there is much to draft.

    The cost of a draft is set to a tenth of a step.
    """
    load_vllm()
    from lightrft.engine.vllm.speculation import Costs, Speculation

    monkeypatch.setattr(Speculation, "_measure", lambda speculation: (Costs({1: 0.1}), Costs({})))
    flags = [
        *inputs,
        *PPO,
        "--max_steps=2",
        "--engine_type=vllm",
        "--engine_kv_cache_gb=0.125",
        "--generate_max_len=64",
        "--temperature=0.05",
    ]
    kinds = "none", "group"
    runs = [([*flags, f"--speculative={kind}"], tmp_path / kind) for kind in kinds]
    plain, drafted = train_in_turn("train_ppo", 1, runs)
    assert all(row["rollout/draft_acceptance"] > 0 for row in drafted)

    for row, other in zip(repeatable(plain), repeatable(drafted), strict=True):
        names = [
            name
            for name in row
            if name.startswith(("rollout/reward", "rollout/response", "train/loss"))
        ]
        assert len(names) > 3
        assert [other[name] for name in names] == [
            pytest.approx(row[name], rel=1e-3, abs=1e-5) for name in names
        ]


def test_log_probs_are_computed_while_others_are_generated(inputs, tmp_path):
    """With and without --overlap the same is learned; only how sequences are packed differs."""
    flags = [
        "--advantage_estimator=ppo",
        "--init_kl_coef=0.01",
        "--max_epochs=2",
        "--max_steps=3",
        "--generate_max_len=64",
        "--high_entropy_token_ratio=0.5",
        "--stop_token_ids",
        *map(str, range(40, 60)),
        "--early_stop_every=4",
    ]
    flags = [*inputs, *PPO, *flags]
    overlapped = [*flags, "--overlap", "--trace_steps=3"]
    runs = [(flags, tmp_path / "plain"), (overlapped, tmp_path / "overlap")]
    plain, rows = train_in_turn("train_ppo", 2, runs)

    for row, other in zip(repeatable(plain), repeatable(rows), strict=True):
        mismatch = row.pop("engine/logprob_mismatch_max"), other.pop("engine/logprob_mismatch_max")
        assert max(mismatch) < 1e-4 and other == pytest.approx(row, rel=2e-3, abs=1e-5)

    events = json.loads((tmp_path / "overlap" / "trace.json").read_text())
    begun = [
        event["ts"] for event in events if event.get("cat") == "overlap" and event["ph"] == "b"
    ]
    assert begun and all(
        any(
            event["name"] == "generate" and event["ts"] < time < event["ts"] + event["dur"] - 1000
            for event in events
            if event["ph"] == "X"
        )
        for time in begun
    )


def test_a_run_that_carries_responses_resumes_alike(inputs, tmp_path):
    """Another run continues from the checkpoint of step 3.

    Steps 4 to 6 must equal the same steps of the whole run.
    """
    flags = [*inputs, *PPO, *ALL, "--save_steps=3"]
    whole, resumed = train_and_resume("train_ppo", 2, flags, tmp_path, stop=3, end=6)
    assert whole[2]["rollout/groups_carried"] > 0
    assert repeatable(resumed)[-3:] == repeatable(whole)[-3:]


def test_remax_learns_from_one_sample_per_prompt(inputs, tmp_path):
    flags = [flag.replace(":asciis", ":share_of_ascii") for flag in inputs]
    ppo = [
        flag
        for flag in PPO
        if not flag.startswith(("--n_samples", "--train_batch", "--rollout_batch", "--init_kl"))
    ]
    quick = ["--actor_learning_rate=1.5e-2", "--max_steps=10", "--seed=2"]
    sizes = [
        "--n_samples_per_prompt=1",
        "--rollout_batch_size=24",
        "--train_batch_size=24",
        "--init_kl_coef=0",
    ]
    rows = train(
        "train_ppo", 2, [*flags, *ppo, *sizes, "--advantage_estimator=remax", *quick], tmp_path
    )
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert sum(row["rollout/reward"] for row in rows[-3:]) / 3 > rows[0]["rollout/reward"] + 0.15
    samples = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(samples[0])["response"] is not None
