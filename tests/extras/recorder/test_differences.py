"""Why: two runs that should be equal and are not cost days. Each of twenty planted faults is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.trainer.planted import run_all
from lightrft.app.run.digests import OF_SEQUENCES
from lightrft.extras.commands.debug import bisect
from lightrft.extras.recorder.differences import Difference, find_difference
from ranks import run_ranks
from runs import PPO, prepare

pytestmark = pytest.mark.slow

FLAGS = [
    *PPO,
    "--train_batch_size=8",
    "--rollout_batch_size=4",
    "--generate_max_len=6",
    "--max_steps=2",
    "--no_verify_weight_sync",
]
PLANTED: dict[str, tuple[int | None, str, str]] = {
    "reward": (2, "rewards", "sample 5 (group "),
    "logprob": (2, "logprobs", "sample 3 (group "),
    "token": (2, "samples", "token_ids[1] is "),
    "mask": (2, "rewards", "masked is False and True"),
    "advantage": (2, "advantages", ""),
    "output": (2, "outputs", ""),
    "gradient": (2, "gradient", "gradients are clipped differently, or one rounds"),
    "decay": (2, "weights", "checkpoint step2: "),
    "stale": (2, "samples", "its engine has other weights"),
    "version": (None, "", "version of torch: "),
    "clock": (None, "", ""),
}
"""Name of a function in planted.py -> step, phase, and a part of a sentence."""
CHANGED: dict[str, tuple[list[str], int, str, str]] = {
    "rate": (["--actor_learning_rate=2e-3"], 1, "weights", "--learning_rate: 0.003 and 0.002"),
    "clip": (["--max_norm=0.5"], 1, "gradient", "--max_norm: 1.0 and 0.5"),
    "loss": (
        ["--loss_agg_mode=seq-mean-token-sum"],
        1,
        "loss",
        "--loss_agg_mode: 'token-mean' and 'seq-mean-token-sum'",
    ),
    "packing": (["--max_tokens_per_microbatch=64"], 1, "plan", "--max_tokens_per_microbatch: "),
    "kl": (["--init_kl_coef=0.1"], 1, "outputs", "--init_kl_coef: 0.0 and 0.1"),
    "temperature": (["--temperature=0.9"], 1, "samples", "--temperature: 1.0 and 0.9"),
    "seed": (["--seed=7"], 1, "prompts", "--seed: 42 and 7"),
    "row": (["--prompt_data={folder}/row.jsonl"], 2, "prompts", "--prompt_data: line 11 is "),
    "code": (["--reward={folder}/code.py:share_of_ascii"], 1, "rewards", "--reward: line 4 is "),
    "base": (["--pretrain={folder}/base"], 0, "weights", "--pretrain: "),
}
"""Name of a run -> flags, step, phase, and a part of a sentence."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Write the runs with a fault, and two without one, into a folder."""
    folder = tmp_path_factory.mktemp("runs")
    inputs = prepare(folder)
    _change_inputs(folder)

    planned = []
    for name in ("first", "again", *PLANTED, *CHANGED):
        changes = [each.format(folder=folder) for each in CHANGED.get(name, ([],))[0]]
        saves = ["--save_steps=2"] if name in ("first", "decay") else []
        flags = [*inputs, *FLAGS, *saves, f"--dump_rollouts={folder / f'{name}_samples'}", *changes]
        planned.append((str(folder / name), flags, name if name in PLANTED else ""))
    run_ranks(1, run_all, planned, timeout=400)
    run_ranks(2, run_all, [(str(folder / "two"), [*inputs, *FLAGS], "")], timeout=400)

    return folder


def _change_inputs(folder: Path) -> None:
    rows = (folder / "train.jsonl").read_text().splitlines()
    row = json.loads(rows[10]) | {"input": "zz="}
    rows[10] = json.dumps(row)
    (folder / "row.jsonl").write_text("\n".join(rows) + "\n")
    code = (folder / "reward.py").read_text()
    (folder / "code.py").write_text(code.replace("len(label) == len(samples)", "label"))
    _lower_bar(folder / "code.py")

    shutil.copytree(folder / "model", folder / "base")
    weights = load_file(folder / "base" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = torch.nextafter(weights[name][3, 5], torch.tensor(9.0))
    save_file(weights, folder / "base" / "model.safetensors", metadata={"format": "pt"})


def _lower_bar(file: Path) -> None:
    file.write_text(file.read_text().replace("token < 128", "token < 127"))


def sentences(found: Difference) -> str:
    return "\n".join([*found.locations, *found.causes])


def test_equal_runs_are_equal(runs):
    assert find_difference(runs / "first", runs / "again") == Difference(steps=2)
    assert (runs / "first" / "digests.jsonl").read_bytes() == (
        runs / "again" / "digests.jsonl"
    ).read_bytes()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(runs, name):
    found = find_difference(runs / "first", runs / name)
    step, phase, sentence = PLANTED[name]
    assert (found.step, found.phase) == (step, phase), found
    assert sentence in sentences(found), found


def test_a_clock_is_no_difference(runs):
    assert find_difference(runs / "first", runs / "clock") == Difference(steps=2)


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_flag_or_file_is_named(runs, name):
    found = find_difference(runs / "first", runs / name)
    _, step, phase, sentence = CHANGED[name]
    assert (found.step, found.phase) == (step, phase), found
    assert sentence in sentences(found), found


def test_the_module_that_differs_is_named(runs):
    assert find_difference(runs / "first", runs / "base").modules == ["layers.1"]
    assert find_difference(runs / "first", runs / "gradient").update == 1


def test_the_command_prints_where_runs_differ(runs, tmp_path, capsys):
    printed = {}
    for name, code in (("again", 0), ("logprob", 1), ("decay", 1), ("base", 1)):
        with pytest.raises(SystemExit) as ended:
            bisect.main([str(runs / "first"), str(runs / name)])
        assert ended.value.code == code
        printed[name] = capsys.readouterr().out
    assert printed["again"].startswith("equal: all digests of the 2 steps")
    assert printed["logprob"].startswith(
        "step 2, logprobs: the first difference is in the engine's"
    )
    assert "logprobs[2] is " in printed["logprob"] and "nothing else is known" in printed["logprob"]
    assert "weights of optimizer step 1" in printed["decay"] and "first [0, 0]" in printed["decay"]
    assert printed["base"].startswith("before the first step: the runs begin with other weights")

    with pytest.raises(SystemExit) as ended:
        bisect.main([str(runs / "first"), str(tmp_path)])
    assert ended.value.code == 2 and "has no digests.jsonl" in capsys.readouterr().err


def test_another_number_of_ranks_is_named(runs):
    """The shares that ranks have of a model say nothing, so only sequences are compared."""
    found = find_difference(runs / "first", runs / "two")
    assert found.other_layout and found.phase in ("", *OF_SEQUENCES)
    assert "world size: 1 and 2" in found.causes
