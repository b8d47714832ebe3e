"""Why: a flag that is accepted and changes nothing is worse than a missing one.

Every field about judged answers is changed in two real steps, which must then report other numbers
than without; a field that is not listed here fails too.
"""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from app.trainer.judged import PAIRS, RUN, write
from lightrft.config import PreferenceSection
from ranks import run_ranks
from runs import prepare, repeatable, rows_of, run_here

HEADS = ["--reward_heads", "a", "b", "--head_key=head"]
TIES = ["--rm_loss=ties", "--tie_key=tie"]
TURNED: dict[str, tuple[str, list[str], list[str]]] = {
    "chosen_key": ("train_rm", [], ["--chosen_key=better"]),
    "rejected_key": ("train_rm", [], ["--rejected_key=worse"]),
    "margin_key": ("train_rm", [], ["--margin_key=margin"]),
    "tie_key": ("train_rm", ["--rm_loss=ties"], ["--tie_key=tie"]),
    "tie_threshold": ("train_rm", TIES, ["--tie_threshold=3"]),
    "rm_loss": ("train_rm", [], ["--rm_loss=ties"]),
    "reward_heads": ("train_rm", [], HEADS),
    "head_key": ("train_rm", HEADS, ["--head_key=other"]),
    "learn_scale": ("train_rm", [], ["--learn_scale"]),
    "completion_key": ("train_kto", [], ["--completion_key=worse"]),
    "desirable_weight": ("train_kto", [], ["--desirable_weight=3"]),
    "undesirable_weight": ("train_kto", [], ["--undesirable_weight=3"]),
    "step_separator": ("train_prm", [], ["--step_separator=;"]),
    "dpo_loss": ("train_dpo", [], ["--dpo_loss=ipo"]),
    "beta": ("train_dpo", [], ["--beta=0.5"]),
    "label_smoothing": ("train_dpo", [], ["--label_smoothing=0.3"]),
    "length_normalized": ("train_dpo", [], ["--length_normalized"]),
    "sft_coef": ("train_dpo", [], ["--sft_coef=1"]),
    "ld_alpha": ("train_dpo", [], ["--ld_alpha=0.5"]),
    "simpo_gamma": ("train_dpo", ["--dpo_loss=simpo"], ["--simpo_gamma=1"]),
}
"""Field -> (command, flags of both runs, flags of the second)."""
ONLY_WHERE_AND_WHEN = {"precompute_reference"}
"""Fields that give the same numbers with one model less; see tests/app/trainer/test_dpo.py."""


def test_every_field_is_covered():
    of_data = {"step_separator"}
    assert (
        set(TURNED) - of_data
        == {field.name for field in fields(PreferenceSection)} - ONLY_WHERE_AND_WHEN
    )


def every_run(folder: str, given: list[str]) -> dict[str, list]:
    """Return the metrics of two steps without and with each field's flags."""
    known: dict[str, list] = {}

    def steps(command: str, flags: list[str]) -> list:
        key = json.dumps([command, flags])
        if key not in known:
            path = f"{folder}/run{len(known)}"
            data = [f"--prompt_data={folder}/steps.jsonl"] if command == "train_prm" else []
            run_here(command, [*given, *data, *flags, f"--save_path={path}", "--max_steps=2"])
            known[key] = repeatable(rows_of(Path(path)))
        return known[key]

    return {
        name: [steps(command, both), steps(command, [*both, *flags])]
        for name, (command, both, flags) in TURNED.items()
    }


@pytest.mark.slow
def test_a_field_changes_a_number(tmp_path):
    prepare(tmp_path)
    turned = [
        row
        | {"better": row["chosen"] + "!", "worse": row["rejected"] + "!", "other": "a"}
        | {
            "completion": row["chosen"],
            "label": row["tie"],
            "completions": ["a", row["chosen"]],
            "labels": [True, row["tie"]],
        }
        for row in PAIRS
    ]
    data = write(turned, tmp_path / "pairs.jsonl")
    write(
        [{name: row[name] for name in ("prompt", "completions", "labels")} for row in turned],
        tmp_path / "steps.jsonl",
    )
    given = ["--fsdp", f"--pretrain={tmp_path}/model", f"--prompt_data={data}", *RUN]

    (found,) = run_ranks(1, every_run, str(tmp_path), given)
    for name, (before, after) in found.items():
        shared = before[-1].keys() & after[-1].keys()
        assert any(before[-1][metric] != after[-1][metric] for metric in shared), name
