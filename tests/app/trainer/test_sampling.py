"""Whole runs that sample in every way: engine and trainer mean the same distribution."""

import json

import pytest

from app.trainer.in_turn import train_in_turn
from runs import PPO, prepare

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


TWO_STEPS = [
    *PPO,
    "--max_steps=2",
    "--train_batch_size=16",
    "--init_kl_coef=0.1",
    "--generate_max_len=24",
    "--seed=2",
]
"""Two steps of two updates. The loss includes the divergence from the reference.

With the chosen seed, no token lies so near the edge of the top p that rounding moves it in or out.
"""
HOT = ["--first_token_temperature=30", "--stop", "q", "--stop_token_ids", "120"]
"""A first token's log-prob is of another temperature: the difference would be nats."""


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


@pytest.mark.slow
def test_a_part_of_the_vocabulary(inputs, tmp_path):
    """Two ranks also divide the vocabulary; one also has a hot first token that is not learned."""
    cases = {
        1: {"whole": PART, "hot": HOT},
        2: {"vllm": [*PART, "--engine_type=vllm"], "divided": [*PART, "--tp_size=2"]},
    }
    for ranks, flags in cases.items():
        runs = [([*inputs, *TWO_STEPS, *more], tmp_path / name) for name, more in flags.items()]
        for name, rows in zip(flags, train_in_turn("train_ppo", ranks, runs), strict=True):
            assert all(
                row["train/grad_norm"] > 0
                and row["rollout/response_length"] > 1
                and row["engine/logprob_mismatch_max"] < 1e-4
                for row in rows
            ), name


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
    ("layouts", "world_size"),
    [
        ([[]], 1),
        pytest.param(
            [["--tp_size=2"], ["--sp_size=2", "--engine_type=vllm"]], 2, marks=pytest.mark.slow
        ),
        pytest.param([["--lora_rank=4", "--first_token_temperature=9"]], 1, marks=pytest.mark.slow),
    ],
    ids=["alone", "tp and sp-vllm", "adapters-hot"],
)
def test_a_smallest_length(tmp_path, layouts, world_size):
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
        *EARLY,
        "--generate_max_len=12",
    ]
    runs = [([*flags, *layout], tmp_path / str(place)) for place, layout in enumerate(layouts)]
    for rows in train_in_turn("train_ppo", world_size, runs):
        assert max(row["engine/logprob_mismatch_max"] for row in rows) < 1e-4
        assert all(
            row["rollout/response_length_min"] >= 5 and row["train/grad_norm"] > 0 for row in rows
        )
        lengths = [row["rollout/response_length_min"] for row in rows]
        assert 6 in lengths, "it may end right after"
