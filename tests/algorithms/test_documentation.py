"""Why: users read the table of presets and the names of algorithms, and both must be what runs."""

import math
import re
from pathlib import Path

import pytest
import torch

from lightrft.algorithms.advantage import estimators
from lightrft.algorithms.correction import corrections
from lightrft.algorithms.kl import kl_estimators
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.config.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "algorithms.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| [`")
]


@pytest.mark.parametrize(
    "registry",
    [estimators, policy_losses, corrections, kl_estimators],
    ids=lambda registry: registry.flag,
)
def test_every_name_is_there(registry):
    assert [name for name in registry.names() if f"`{name}`" not in TEXT] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_is_its_preset(row):
    for name in re.findall(r"`([^`]+)`", row[0]):
        preset = PRESETS[name]
        assert row[2] == f"`{preset['policy_loss']}`" and row[4] == preset["loss_agg_mode"]
        bounds = [float(number) for number in re.findall(r"\d[\d.e-]*", row[3])]
        expected = (
            ("sapo_tau_positive", "sapo_tau_negative")
            if name == "sapo"
            else ("eps_clip_low", "eps_clip_high")
        )
        assert bounds == [preset[field] for field in expected if field in preset]

        where, *rest = row[5].split(", ")
        if where == "none":
            assert preset["init_kl_coef"] == 0
        else:
            assert rest == [preset["kl_estimator"], str(preset["init_kl_coef"])]
            assert preset["use_kl_loss"] == (where == "loss")

        assert preset.get("advantages_norm", False) == ("normalised" in row[1])


def test_every_preset_has_a_row_and_a_section():
    assert {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])} == set(PRESETS)
    for row in ROWS:
        anchor = re.search(r"\(#([^)]+)\)", row[0]).group(1)
        assert f"### {anchor}\n" in TEXT or f'<a id="{anchor}"></a>' in TEXT


def test_every_preset_has_a_curve():
    recipes = {id(preset): name for name, preset in reversed(PRESETS.items())}.values()
    assert [name for name in recipes if f"(presets/{name}.svg)" not in TEXT] == []
    assert [
        name
        for name in re.findall(r"\(presets/(.*)\.svg\)", TEXT)
        if not (DOCS / "presets" / f"{name}.svg").is_file()
    ] == []


def test_the_examples_run():
    examples = {}
    for example in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(example, examples)
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
    groups = torch.tensor([0, 0, 0, 1])
    assert examples["median"](
        rewards, groups, lengths=torch.tensor([1, 2, 4, 3]), difficulty=torch.ones(4)
    ).tolist() == [0.0, -0.5, 0.25, 0.0]

    losses, report = examples["plain"](
        torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.ones(2), eps_clip_low=0.2
    )
    assert losses.tolist() == pytest.approx([-1.0, -math.exp(-1)]) and report[
        "train/below"
    ].tolist() == [0.0, 1.0]
