"""Whole runs that sample in every way: engine and trainer mean the same distribution."""

import json

import pytest

from runs import PPO, prepare, train

PLACEHOLDER = ord("e")
REWARD = '''
def short(samples, label, **columns):
    """Holds what a response may be, and rewards lengths, so that there is something to learn."""
    for sample in samples:
        assert {placeholder} not in sample.token_ids
        stopped = "q" in sample.text or "<eos>" in sample.text or sample.token_ids[-1] in (ord("x"), 258)
        assert sample.finish_reason == ("stop" if stopped else "length"), sample
        assert "q" not in sample.text[:-1] and ord("x") not in sample.token_ids[:-1]
    return [float(len(sample.token_ids)) for sample in samples]
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The model says of a token that it stands for images."""
    folder = tmp_path_factory.mktemp("inputs")
    flags = prepare(folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(
        json.dumps(config | {"image_token_id": PLACEHOLDER})
    )
    (folder / "reward.py").write_text(REWARD.replace("{placeholder}", str(PLACEHOLDER)))
    return [flag.replace("share_of_ascii", "short") for flag in flags]


def run_on_all_ranks(inputs, folder, *flags, world_size=1):
    """Return the largest difference of log-probs in two steps of two updates.

    The loss includes the divergence from the reference. With the chosen seed, no token lies so near
    the edge of the top p that rounding moves it in or out.
    """
    flags = [
        "--train_batch_size=16",
        "--init_kl_coef=0.1",
        "--generate_max_len=24",
        "--seed=2",
        *flags,
    ]
    flags = [*inputs, *PPO, "--max_steps=2", *flags]
    rows = train("train_ppo", world_size, flags, folder)
    assert all(row["train/grad_norm"] > 0 and row["rollout/response_length"] > 1 for row in rows)

    return max(row["engine/logprob_mismatch_max"] for row in rows)


PART = [
    "--temperature=0.8",
    "--top_p=0.9",
    "--top_k=20",
    "--min_p=0.1",
    "--bad_words=e",
    "--banned_token_ids=97,98",
    "--stop",
    "q",
    "unsaid",
    "--stop_token_ids",
    "120",
]


@pytest.mark.parametrize(
    ("engine", "world_size"), [("hf", 1), ("vllm", 2)], ids=["hf", "vllm-2-ranks"]
)
@pytest.mark.slow
def test_a_part_of_the_vocabulary(inputs, tmp_path, engine, world_size):
    assert (
        run_on_all_ranks(inputs, tmp_path, *PART, f"--engine_type={engine}", world_size=world_size)
        < 1e-4
    )


@pytest.mark.slow
def test_a_vocabulary_that_two_ranks_divide(inputs, tmp_path):
    assert run_on_all_ranks(inputs, tmp_path, *PART, "--tp_size=2", world_size=2) < 1e-4


@pytest.mark.slow
def test_a_hot_first_token_is_not_learned(inputs, tmp_path):
    """Its log-prob is of another temperature: the difference would be nats."""
    assert (
        run_on_all_ranks(
            inputs,
            tmp_path,
            "--first_token_temperature=30",
            "--stop",
            "q",
            "--stop_token_ids",
            "120",
        )
        < 1e-4
    )


EARLY = [
    "--min_tokens=5",
    "--top_p=0.9",
    "--top_k=60",
    "--entropy_coef=0.01",
    "--stop_token_ids",
    *map(str, range(0, 256, 2)),
]
"""Half of all tokens end a response, so the distribution before its smallest length is quite
another one."""


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ([], 1),
        pytest.param(["--tp_size=2"], 2, marks=pytest.mark.slow),
        pytest.param(["--sp_size=2", "--engine_type=vllm"], 2, marks=pytest.mark.slow),
        pytest.param(["--lora_rank=4", "--first_token_temperature=9"], 1, marks=pytest.mark.slow),
    ],
    ids=["alone", "tp", "sp-vllm", "adapters-hot"],
)
def test_a_smallest_length(tmp_path, layout, world_size):
    """Before it, both sides exclude whatever ends a response.

    Entropy and divergence are taken of the same distribution.
    """
    flags = [
        *prepare(tmp_path),
        *PPO,
        "--max_steps=3",
        "--train_batch_size=16",
        "--init_kl_coef=0.1",
        "--seed=2",
    ]
    rows = train(
        "train_ppo",
        world_size,
        [*flags, *EARLY, *layout, "--generate_max_len=12"],
        tmp_path / "run",
    )
    assert max(row["engine/logprob_mismatch_max"] for row in rows) < 1e-4
    assert all(
        row["rollout/response_length_min"] >= 5 and row["train/grad_norm"] > 0 for row in rows
    )
    assert any(row["rollout/response_length_min"] == 6 for row in rows), "it may end right after"
