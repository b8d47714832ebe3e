"""A killed run continues as if nothing happened: metrics and parameters of the second half are
bit-identical.
"""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from loguru import logger
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.trainer.in_turn import train_in_turn
from lightrft.strategy import StrategyBase
from runs import PPO, prepare, repeatable, rows_of, train
from sglang_environment import in_sglang_environment

DEADLY_REWARD = '''
import json, os, resource, signal, time
seen = []
if "DIE_WRITING_AT" in os.environ:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
def deadly(samples, label, **columns):
    """In the step that the environment names: kill this process, ask it to end, or let it die in the next checkpoint's file."""
    (version,) = {version for sample in samples for version in sample.weight_versions}
    if version not in seen:
        seen.append(version)
    if len(seen) == int(os.environ.get("KILL_AT", 0)):
        while "ROWS" in os.environ and open(os.environ["ROWS"]).read().count("\\n") < len(seen) - 1:
            time.sleep(0.01)  # until a thread has written those of the steps before
        os.kill(os.getpid(), signal.SIGKILL)
    if len(seen) == int(os.environ.get("STOP_AT", 0)) and os.environ["RANK"] in os.environ.get("STOP_RANKS", "01"):
        del os.environ["STOP_AT"]  # a second signal ends the process at once
        os.kill(os.getpid(), signal.SIGTERM)
    if len(seen) == int(os.environ.get("DIE_WRITING_AT", 0)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return [sum(token < 128 for token in sample.token_ids) / len(sample.token_ids) + version for sample in samples]
'''
"""It adds the version of the weights, so that one that begins afresh is seen in the metrics."""
STRATEGIES = {"fsdp": ["--fsdp"], "zero3": ["--zero_stage=3"]}
REMEMBERS = [
    "--reward_running_norm",
    "--use_kl_loss=false",
    "--init_kl_coef=0.1",
    "--kl_target=1e-4",
    "--kl_horizon=50",
]
"""What goes on from step to step beside the models: moments of all rewards, a coefficient that
moves."""
ADAPTERS = ["--lora_rank=4", "--lora_sync=adapter", "--actor_learning_rate=1e-2"]
VLLM = ["--engine_type=vllm", "--enable_engine_sleep"]
SGLANG = ["--engine_type=sglang", "--engine_kv_cache_gb=0.05", "--enable_engine_sleep"]
RUN = [
    *PPO,
    *REMEMBERS,
    "--max_steps=6",
    "--train_batch_size=16",
    "--lr_scheduler=cosine",
    "--save_steps=2",
    "--no_async_save",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    flags = [flag for flag in prepare(folder) if not flag.startswith(("--reward", "--fsdp"))]
    (folder / "deadly.py").write_text(DEADLY_REWARD)
    return [*flags, f"--reward={folder / 'deadly.py'}:deadly", "--reward_workers=0"]


def parameters(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same_run(found: Path, expected: Path) -> None:
    assert repeatable(rows_of(found)) == repeatable(rows_of(expected))
    mine = parameters(found)
    theirs = parameters(expected)
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def run(flags: list[str], folder: Path) -> None:
    where = in_sglang_environment if "--engine_type=sglang" in flags else partial.__call__
    where(partial(train, "train_ppo", 2, flags, folder))


def interrupted(
    flags: list[str], folder: Path, monkeypatch, says: str = "ended with -9", **environment: str
) -> list[str]:
    """Run until something happens; returns what is in the folder of checkpoints."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=says):
        run(flags, folder)
    for name in environment:
        monkeypatch.delenv(name)
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """Six steps with checkpoints after 2, 4 and 6, each with a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("finished")
    train("train_ppo", 2, [*inputs, *RUN, *STRATEGIES["fsdp"], "--save_hf_ckpt"], folder)
    return folder


WSD = ["--optimizer=lion", "--lr_scheduler=wsd", "--lr_decay_ratio=0.6", "--lr_min_ratio=0"]
POLYNOMIAL = ["--lr_scheduler=polynomial", "--lr_power=2"]
CASES = {
    "hf-fsdp": ("fsdp", []),
    "vllm-int8-adapters": ("fsdp", [*VLLM, *ADAPTERS, "--rollout_quantization=int8", *WSD]),
    "sglang-zero3": ("zero3", [*SGLANG, "--async_save", "--offload_idle", *POLYNOMIAL]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_run_continues_with_the_same_numbers(inputs, finished, tmp_path, monkeypatch, case):
    """Killed in step 4, after the checkpoint of step 2, in the middle of a pass of three steps."""
    strategy, options = CASES[case]
    flags = [*inputs, *RUN, *STRATEGIES[strategy], *options]
    whole = finished
    if case != "hf-fsdp":
        whole = tmp_path / "whole"
        run(flags, whole)

    rows = str(tmp_path / "killed" / "metrics.jsonl")
    assert interrupted(flags, tmp_path / "killed", monkeypatch, KILL_AT="4", ROWS=rows) == [
        "latest",
        "step2",
    ]
    assert len(rows_of(tmp_path / "killed")) == 3
    run([*flags, "--load_checkpoint"], tmp_path / "killed")
    assert_same_run(tmp_path / "killed", whole)
    assert len({row["rollout/kl_coef"] for row in rows_of(whole)}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--async_save"]])
def test_killed_while_it_writes_a_checkpoint(inputs, finished, tmp_path, monkeypatch, options):
    flags = [*inputs, *RUN, *STRATEGIES["fsdp"], *options]
    died = f"ended with -{int(signal.SIGXFSZ)}"
    left = interrupted(flags, tmp_path / "killed", monkeypatch, died, DIE_WRITING_AT="4")
    assert left == ["latest", "step2", "step4.part"]
    if options:  # the other run has left the same
        train("train_ppo", 2, [*flags, "--load_checkpoint"], tmp_path / "killed")
        assert_same_run(tmp_path / "killed", finished)
        assert not list((tmp_path / "killed" / "checkpoints").glob("*.part"))


# -- a finished run, continued in other ways


@pytest.fixture
def again(finished, tmp_path):
    """A copy of it that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "again"))


@pytest.fixture
def log(tmp_path):
    """Collects what ranks say that are forked from this process."""
    sink = logger.add(tmp_path / "log", format="{message}")
    yield tmp_path / "log"
    logger.remove(sink)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    inputs, finished, again, log
):
    file = again / "checkpoints" / "step6" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    train("train_ppo", 2, [*inputs, *RUN, *STRATEGIES["fsdp"], "--load_checkpoint"], again)
    said = log.read_text()
    assert (
        f"{file.parent} is damaged and is not used: __1_0.distcp has" in said
        and "resuming after step 4" in said
    )
    assert_same_run(again, finished)


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_and_a_fresh_one_does_not_replace_it(
    inputs, finished, again, log
):
    flags = [*inputs, *RUN, *STRATEGIES["fsdp"]]
    with pytest.raises(
        RuntimeError,
        match="ConfigError: .*has the results of an earlier run .*--overwrite moves it",
    ):
        train("train_ppo", 1, flags, again)

    assert "loading" not in log.read_text(), "it is refused before anything heavy"
    before = {path: path.stat().st_mtime_ns for path in (again / "model").iterdir()}
    described = (again / "run.json").read_text()
    rows = train("train_ppo", 1, [*flags, "--load_checkpoint"], again)
    assert "this run is complete: all 6 steps are done" in log.read_text()
    assert rows == rows_of(finished) and described == (again / "run.json").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in (again / "model").iterdir()}


@pytest.mark.slow
def test_the_last_step_is_saved_and_a_longer_run_repeats_nothing(inputs, tmp_path, log):
    flags = [*inputs, *RUN, *STRATEGIES["fsdp"], "--lr_scheduler=constant"]
    runs = [
        ([*flags, "--max_steps=4"], tmp_path / "whole"),
        ([*flags, "--max_steps=3"], tmp_path / "longer"),
    ]
    train_in_turn("train_ppo", 1, runs)
    assert sorted(path.name for path in (tmp_path / "longer" / "checkpoints").iterdir()) == [
        "latest",
        "step2",
        "step3",
    ]
    identity = json.loads((tmp_path / "longer" / "run.json").read_text())["run"]
    train("train_ppo", 1, [*flags, "--max_steps=4", "--load_checkpoint"], tmp_path / "longer")
    assert "resuming after step 3" in log.read_text()
    assert_same_run(tmp_path / "longer", tmp_path / "whole")
    ended = json.loads((tmp_path / "longer" / "run.json").read_text())
    assert (ended["run"], ended["status"], ended["steps"]) == (identity, "finished", 4)
    assert (tmp_path / "longer" / "report.html").is_file(), "the end writes the report"


@pytest.mark.slow
def test_a_job_requeued_before_its_first_save_begins_afresh(inputs, tmp_path, monkeypatch):
    """The same command every time, with --load_checkpoint: what it had written is kept aside."""
    flags = [
        *inputs,
        *RUN,
        *STRATEGIES["fsdp"],
        "--save_steps=5",
        "--load_checkpoint",
        f"--ckpt_path={tmp_path / 'ckpt'}",
    ]
    monkeypatch.setenv("KILL_AT", "3")
    monkeypatch.setenv("ROWS", str(tmp_path / "job" / "metrics.jsonl"))
    with pytest.raises(RuntimeError, match="ended with -9"):
        train("train_ppo", 1, [*flags, "--max_steps=4"], tmp_path / "job")
    monkeypatch.delenv("KILL_AT")
    rows = train("train_ppo", 1, [*flags, "--max_steps=4"], tmp_path / "job")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in rows_of(tmp_path / "job.previous")] == [1, 2]
    assert [path.name for path in (tmp_path / "ckpt").iterdir() if path.is_dir()] == ["step4"]


@pytest.mark.slow
def test_every_checkpoint_has_a_folder_for_from_pretrained(inputs, finished):
    for step in (2, 4, 6):
        folder = finished / "checkpoints" / f"step{step}" / "hf"
        found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        if step == 6:
            assert all(
                torch.equal(found[name], tensor) for name, tensor in parameters(finished).items()
            )
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 258


@pytest.mark.slow
def test_what_may_change_takes_effect_and_is_said(inputs, again, log):
    """The learning rate comes from the flag, not from the checkpoint."""
    options = ["--max_steps=7", "--actor_learning_rate=1e-4", "--lr_scheduler=constant"]
    rows = train(
        "train_ppo", 2, [*inputs, *RUN, *STRATEGIES["fsdp"], *options, "--load_checkpoint"], again
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[-1]["train/learning_rate"] == 1e-4

    said = log.read_text()
    for change in (
        "--learning_rate was 0.003, is 0.0001",
        "--lr_scheduler was 'cosine', is 'constant'",
    ):
        assert change in said


def test_another_run_s_checkpoint_is_an_error_that_names_everything(inputs, finished, tmp_path):
    """The run that it cannot resume stays as it is: it has finished."""
    before = [
        (finished / name).read_text() for name in ("run.json", "config.yaml", "metrics.jsonl")
    ]
    values = dict(flag.removeprefix("--").split("=", 1) for flag in inputs)
    AutoTokenizer.from_pretrained(values["pretrain"]).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(values["pretrain"])
    model.config.rope_parameters["rope_theta"] = 5e5
    model.save_pretrained(tmp_path / "model")
    rows = Path(values["prompt_data"]).read_text().splitlines()[:20]
    (tmp_path / "other.jsonl").write_text("\n".join(rows))

    options = [
        f"--pretrain={tmp_path / 'model'}",
        f"--prompt_data={tmp_path / 'other.jsonl'}",
        "--seed=7",
        "--max_epochs=2",
    ]
    with pytest.raises(RuntimeError) as error:
        train(
            "train_ppo",
            1,
            [*inputs, *RUN, *STRATEGIES["fsdp"], *options, "--load_checkpoint"],
            finished,
        )

    for says in (
        "step6 belongs to another run:",
        "--seed was 42, is 7",
        "--max_epochs was 1, is 2",
        "had 24 rows, has 20",
        "the model's rope_parameters was",
        "undo these changes, or set another --ckpt_path",
    ):
        assert says in str(error.value)

    assert before == [
        (finished / name).read_text() for name in ("run.json", "config.yaml", "metrics.jsonl")
    ]


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(inputs, tmp_path, monkeypatch):
    """In the background: the failure is raised at the next safe point, on all ranks."""
    (tmp_path / "full.py").write_text(DEADLY_REWARD.replace("SIG_DFL", "SIG_IGN"))
    reward = [f"--reward={tmp_path / 'full.py'}:deadly", "--reward_workers=0"]
    flags = [*inputs, *RUN, *STRATEGIES["fsdp"], *reward, "--async_save"]
    says = (
        r"step4 could not be written: rank 0: OSError: \[Errno 27\].*step4.part'; rank 1:"
        r" OSError(.|\n)*rank 1:(.|\n)*step4 c"
    )
    assert interrupted(flags, tmp_path / "run", monkeypatch, says, DIE_WRITING_AT="4") == [
        "latest",
        "step2",
    ]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_step_that_is_interrupted_comes_again(inputs, tmp_path, monkeypatch):
    """A run that is asked to end in the middle of step 4 keeps the checkpoint of step 3.

    It draws the same prompts again when it resumes. The checkpoint lies between two passes, and
    between two rows of metrics: there are 24 rows, in batches of 8.
    """
    flags = [*inputs, *RUN, *STRATEGIES["fsdp"], "--logging_steps=2", "--max_steps=5"]
    train("train_ppo", 2, flags, tmp_path / "whole")
    stopped = interrupted(
        flags, tmp_path / "stopped", monkeypatch, "interrupted by SIGTERM", STOP_AT="4"
    )
    assert stopped == ["latest", "step2", "step3"]
    run([*flags, "--load_checkpoint"], tmp_path / "stopped")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_the_signal_may_reach_a_rank_while_it_saves_because_of_another_rank_s(
    inputs, tmp_path, monkeypatch
):
    """The launchers of several nodes do not send it at the same time."""
    announce = StrategyBase.announce

    def signalled(strategy, phase):
        announce(strategy, phase)
        if phase == "checkpoint" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StrategyBase, "announce", signalled)
    flags = [*inputs, *RUN, *STRATEGIES["fsdp"], "--save_steps=5"]
    stopped = interrupted(
        flags,
        tmp_path / "stopped",
        monkeypatch,
        "interrupted by SIGTERM",
        STOP_AT="2",
        STOP_RANKS="0",
    )
    assert stopped == ["latest", "step1"]


@pytest.mark.slow
def test_checkpoints_by_the_clock(inputs, tmp_path):
    """Every step takes longer than a millionth of a minute; the last one always writes one."""
    flags = [flag for flag in inputs if not flag.startswith("--reward")]
    flags += ["--fsdp", "--train_batch_size=8", "--max_tokens_per_microbatch=128", "--max_steps=3"]
    runs = [
        ([*flags, f"--save_minutes={minutes}", "--no_async_save"], tmp_path / minutes)
        for minutes in ("1e-6", "1000")
    ]
    train_in_turn("train_sft", 2, runs)
    saved = [
        sorted(path.name for path in (folder / "checkpoints").glob("step*")) for _, folder in runs
    ]
    assert saved == [["step1", "step2", "step3"], ["step3"]]
