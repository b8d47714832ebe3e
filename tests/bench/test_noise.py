"""Why: the benchmark of the noise meter calls the trainer, the roles and the meter by name."""

import re

import pytest

from runs import prepare
from scripts.bench import noise


@pytest.mark.slow
def test_the_noise_of_resampled_batches_and_the_cost_are_printed(tmp_path, monkeypatch, capsys):
    prepare(tmp_path)
    (tmp_path / "sft").mkdir()
    (tmp_path / "model").rename(tmp_path / "sft" / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "data" / "train.jsonl")
    reward = f"--reward {tmp_path / 'reward.py'}:share_of_ascii"
    monkeypatch.setattr(noise, "RECIPE", noise.RECIPE.replace("--reward exact_match", reward))

    small = ["--pool=8", "--prompts=4", "--batches=30", "--tokens=32", "--turns=1"]
    noise.main([str(tmp_path), f"--out={tmp_path / 'runs'}", *small])
    said = capsys.readouterr().out
    assert re.search(r"30 batches of 4 prompts .* a noise scale of \d+ samples", said)
    assert re.search(r"products of the gradients by [\d.]+% of the product of their norms", said)
    assert re.search(r"For 32 tokens that is [\d.]+% of the passes", said)
