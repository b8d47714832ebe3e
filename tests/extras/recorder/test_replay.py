"""Why: a step that surprises on a cluster can be looked at on a laptop, with the same bits."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml

from app.trainer.planted import run_all
from lightrft.app.quickstart.inputs import tiny_qwen3
from lightrft.app.run.digests import OF_SEQUENCES, PHASES
from lightrft.app.trainer import build
from lightrft.config.errors import ConfigError
from lightrft.config.references import RewardTerm, reward_model_terms
from lightrft.extras.commands.debug import bundle as bundle_command
from lightrft.extras.commands.debug import replay as replay_command
from lightrft.extras.recorder.bundle import Bundle, write_bundle
from lightrft.extras.recorder.replay import Replay, explanation, replay
from ranks import run_ranks
from runs import PPO, prepare

pytestmark = pytest.mark.slow

FLAGS = [*PPO, "--rollout_batch_size=4", "--max_steps=2", "--save_steps=1"]
REMEMBERS = ["--reward_running_norm", "--init_kl_coef=0.1", "--use_kl_loss=false", "--kl_target=1"]
CODE = """
from lightrft.algorithms.{module} import {table}

mine = {table}["{name}"]
"""
OF_USERS = [
    "--advantage_estimator={folder}/advantage/own.py:mine",
    "--policy_loss={folder}/policy_loss/own.py:mine",
    "--rollout_correction={folder}/correction/own.py:mine",
]
"""Code of a user, in files of one name."""
RUNS = {
    "plain": ["--train_batch_size=16"],
    "several": ["--train_batch_size=8", "--max_epochs=2", *REMEMBERS, *OF_USERS],
    "critic": ["--train_batch_size=8", "--advantage_estimator=gae"],
    "taught": [
        *["--train_batch_size=16", "--distill_coef=0.5", "--distill_top_k=20"],
        *["--self_teacher=actor", "--teacher_prompt_key=label"],
        *["--measure_kl", "--ref_ema=0.9", "--entropy_coef=0.01", "--entropy_target=9"],
    ],
    "elsewhere": [
        *["--train_batch_size=16", "--distill_coef=0.5", "--enable_ema"],
        "--teacher_pretrain={folder}/teacher",
    ],
}
ENGINE = {
    "engine_type": "vllm",
    "engine_args": '{"max_num_seqs": 8}',
    "engine_tp_size": 2,
    "speculative": "draft",
    "draft_pretrain": "/gone/draft",
    "rollout_quantization": "int8",
}
"""Settings of an engine that a replay does not have. Samples are recorded, so they do not matter."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    inputs = prepare(folder)
    tiny_qwen3(folder / "teacher", seed=1)
    tables = (
        ("advantage", "estimators", "grpo"),
        ("policy_loss", "policy_losses", "ppo"),
        ("correction", "corrections", "tis"),
    )
    for module, table, name in tables:
        (folder / module).mkdir()
        code = CODE.format(module=module, table=table, name=name)
        (folder / module / "own.py").write_text(code)
    planned = [
        (
            str(folder / name),
            [
                *inputs,
                *FLAGS,
                *(flag.format(folder=folder) for flag in flags),
                f"--dump_rollouts={folder / f'{name}_samples'}",
            ],
            "",
        )
        for name, flags in (*RUNS.items(), ("ranks", RUNS["plain"]))
    ]
    run_ranks(1, run_all, planned[:-1])
    run_ranks(2, run_all, planned[-1:])
    written = folder / "elsewhere" / "config.yaml"
    config = yaml.safe_load(written.read_text())
    config["engine"] |= ENGINE
    config["strategy"]["ep_size"] = 2
    written.write_text(yaml.safe_dump(config))
    return folder


def replays(paths: list[Path], folder: Path) -> list[Replay]:
    results = []
    for number, path in enumerate(paths):
        bundle = Bundle.unpack(path, folder / str(number))
        results.append(replay(bundle, build, explain=list(range(len(bundle.samples)))))
    return results


@pytest.fixture(scope="module")
def repeated(runs, tmp_path_factory) -> dict[tuple[str, int], Replay]:
    steps = [(name, step) for name in (*RUNS, "ranks") for step in (1, 2)]
    folder = tmp_path_factory.mktemp("bundles")
    paths = [write_bundle(runs / name, step, folder / f"{name}{step}.zip") for name, step in steps]
    assert max(path.stat().st_size for path in paths) < 10e6
    # The program that reads a bundle has nothing but the bundle.
    code = ("advantage", "policy_loss", "correction")
    hidden = [runs / name for name in ("model", "teacher", "train.jsonl", "reward.py", *code)]
    for path in hidden:
        if path.exists():
            path.rename(path.with_name(f"{path.name}.hidden"))

    (results,) = run_ranks(1, replays, paths, folder, timeout=300)
    for path in hidden:
        if path.with_name(f"{path.name}.hidden").exists():
            path.with_name(f"{path.name}.hidden").rename(path)
    return dict(zip(steps, results, strict=True))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_a_replay_has_the_bits_of_the_run(runs, repeated, name, step):
    result = repeated[name, step]
    assert result.equal == dict.fromkeys(PHASES, True)
    assert len(result.rewards) == 16


def test_the_samples_of_several_ranks_are_repeated_in_one_process(repeated):
    """Sums over ranks are rounded in another order, so only what has no such sums is compared."""
    equal = repeated["ranks", 2].equal
    assert all(equal[phase] for phase in OF_SEQUENCES if phase in equal)


def test_shares_of_samples_add_up_to_the_loss(repeated):
    for name, updates in (("plain", 1), ("several", 4), ("taught", 1)):
        result = repeated[name, 2]
        total = sum(share for record in result.records.values() for share in record.shares)
        assert total == pytest.approx(result.loss * updates, abs=1e-6)
        assert {len(each.shares) for each in result.records.values()} == {max(1, updates // 2)}


def test_a_sample_is_explained(repeated):
    text = "\n".join(explanation(repeated["several", 2], 5))
    lines = [line.split()[0] for line in text.splitlines()]
    assert lines[:7] == [
        "sample",
        "prompt",
        "response",
        "reward",
        "group",
        "advantage",
        "log-probs",
    ]
    assert text.count("tokens clipped, share") == 2 and "ratio" in text
    assert "4 rewards, mean" in text


def commands(run: str, folder: str) -> list[tuple[int, str]]:
    """Call both commands, as a user does; return exit codes and outputs."""
    import contextlib
    import io

    path = f"{folder}/step.zip"
    bundle_command.main([run, "--step", "2", "--out", path])
    found = []
    for arguments in (["--stage", "reward"], ["--sample", "7"], ["--sample", "99"]):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
            replay_command.main([path, *arguments])
        found.append((ended.value.code, output.getvalue()))

    changed = _with_another_reward(Path(path))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
        replay_command.main([str(changed), "--stage", "reward"])
    return [*found, (ended.value.code, output.getvalue())]


def _with_another_reward(path: Path) -> Path:
    folder = path.with_suffix("")
    with zipfile.ZipFile(path) as file:
        file.extractall(folder)
    code = folder / "code" / "0" / "reward.py"
    code.write_text(code.read_text().replace("128", "64"))
    return Path(shutil.make_archive(str(folder) + "_changed", "zip", folder))


def test_commands_print_what_is_equal(runs, tmp_path):
    ((reward, sample, unknown, other),) = run_ranks(
        1, commands, str(runs / "plain"), str(tmp_path), timeout=300
    )
    assert reward[0] == 0 and "rewards    equal" in reward[1] and "advantages" not in reward[1]
    assert sample[0] == 0 and "sample 7: group" in sample[1] and "gradient   equal" in sample[1]
    assert unknown[0] == 2
    assert other[0] == 1 and "rewards    different" in other[1]


def with_settings(run: Path, copy: Path, section: str, **values) -> Path:
    """Return a copy of a run that has other settings."""
    shutil.copytree(run, copy)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config[section] |= values
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    return copy


def test_folders_of_reward_models_are_not_needed(runs, tmp_path):
    """Their scores are recorded."""
    models = {"reward_pretrain": ["/gone/judge:0.5"]}
    run = with_settings(runs / "plain", tmp_path / "run", "model", **models)
    path = write_bundle(run, 1, tmp_path / "a.zip")
    bundle = Bundle.unpack(path, tmp_path / "bundle")
    ((flag, term),) = reward_model_terms(bundle.config.model)
    expected = RewardTerm("judge", str(tmp_path / "bundle"), 0.5)
    assert (flag, term) == ("reward_pretrain", expected)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("optim", "draft_learning_rate", 1e-3), ("engine", "router_replay", True)],
)
def test_what_recorded_samples_do_not_hold_is_refused(runs, tmp_path, section, name, value):
    run = with_settings(runs / "plain", tmp_path / "run", section, **{name: value})
    with pytest.raises(ConfigError, match=f"a bundle holds a step on text without .*--{name}"):
        write_bundle(run, 1, tmp_path / "a.zip")


def test_what_a_bundle_lacks_is_said(runs, tmp_path):
    with pytest.raises(ConfigError, match="no samples of step 9: record them with --dump_rollouts"):
        write_bundle(runs / "plain", 9, tmp_path / "a.zip")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        write_bundle(tmp_path, 1, tmp_path / "a.zip")
    shutil.copytree(runs / "plain", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step1")
    with pytest.raises(ConfigError, match="no checkpoint of step 1"):
        write_bundle(tmp_path / "run", 2, tmp_path / "a.zip")
    (tmp_path / "b.zip").write_text("{}")
    with pytest.raises(ConfigError, match="is not a bundle"):
        Bundle.unpack(tmp_path / "b.zip", tmp_path)
    assert json.loads((runs / "plain" / "run.json").read_text())["total_steps"] == 2
