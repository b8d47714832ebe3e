"""Why: before the first update the actor is its own past and its own reference.

Any part of the pipeline may compute their log-probs (another micro-batch, another mode, another
model object). The ratio is exactly 1 and the KL exactly 0; anything else is a bug in log-probs,
packing or the moving of rows. Without learning that holds in every step.
"""

import pytest

from runs import PPO, prepare, train

STILL = [
    "--actor_learning_rate=0",
    "--init_kl_coef=0.04",
    "--max_steps=4",
    "--max_epochs=2",
    "--train_batch_size=16",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_actor_that_does_not_move(inputs, tmp_path, world_size):
    rows = train(
        "train_ppo", world_size, [*inputs, *PPO, *STILL, "--max_tokens_per_microbatch=60"], tmp_path
    )
    assert len(rows) == 4
    for row in rows:
        assert row["train/ratio"] == 1.0
        assert row["train/kl"] == 0.0
        assert row["train/clip_low"] == row["train/clip_high"] == 0.0
        assert row["train/grad_norm"] > 0


@pytest.mark.slow
def test_engine_mismatch_stays_flat(inputs, tmp_path):
    """The same weights are streamed again and again: engine and trainer do not drift apart."""
    rows = train("train_ppo", 2, [*inputs, *PPO, *STILL, "--enable_engine_sleep"], tmp_path)
    assert all(row["engine/logprob_mismatch_max"] < 1e-5 for row in rows)
    means = [row["engine/logprob_mismatch"] for row in rows]
    assert max(means) < 1.5 * min(means)
