"""Why: a run from Python is the run of the command line, and a user's strategy is asked for
everything that it overrides.
"""

import json
import subprocess
from pathlib import Path

import pytest

import lightrft
from lightrft.app.cli import MAINS
from lightrft.config import SECTIONS, ConfigError, parse
from runs import PPO, prepare, repeatable, rows_of, train
from warm import warm_python

COUNTING = '''
import json, os
from collections import Counter
from contextlib import contextmanager
from lightrft.strategy import FSDPStrategy

VERBS = {verbs}


class Counting(FSDPStrategy):
    """Counts how often each of its verbs is called, and writes it down at the end."""

    calls = Counter()

    def close(self):
        open(os.environ["CALLS"], "w").write(json.dumps(self.calls))
        super().close()


def counted(name, verb):
    def call(self, *args, **kwargs):
        self.calls[name] += 1
        return verb(self, *args, **kwargs)
    return call


for name in VERBS:
    setattr(Counting, name, counted(name, getattr(FSDPStrategy, name)))
for name in ("print", "report_memory", "sync_and_clear_cache", "is_rank_0"):
    def on_class(cls, *args, name=name):
        Counting.calls[name] += 1
        return getattr(super(Counting, cls), name)(*args)
    setattr(Counting, name, classmethod(on_class))
'''
VERBS = [
    "all_reduce",
    "announce",
    "backward",
    "begin_sum",
    "create_optimizer",
    "create_scheduler",
    "data_order",
    "engine_awake",
    "enter",
    "finish_ckpt",
    "full_params",
    "init_model_context",
    "load_ckpt",
    "maybe_load_optimizer",
    "maybe_offload_optimizer",
    "maybe_sleep_inference_engine",
    "moving_average",
    "offload_model",
    "open_generation",
    "optimizer_step",
    "prepare",
    "redistribute",
    "rehearse_save",
    "reload_model",
    "sample_store",
    "save_ckpt",
    "save_model",
    "set_seed",
    "setup_distributed",
    "setup_inference_engine",
    "to_device",
    "unwrap_model",
    "update_engine_weights",
    "wakeup_inference_engine",
]
FOR_OTHER_LOOPS = {
    "all_gather",
    "engine_generate_local",
    "gather_and_generate",
    "prepare_models_and_optimizers",
    "prepare_reward_model",
    "save_adapter",
    "setup_dataloader",
}
"""Verbs for loops of the user's own, which docs/extending.md names."""
STEPS = 2


def test_every_verb_that_a_strategy_overrides_is_called(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(COUNTING.format(verbs=VERBS))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls.json"))
    flags = [flag for flag in prepare(tmp_path) if flag != "--fsdp"]
    flags += [
        f"--strategy={tmp_path}/counting.py:Counting",
        "--enable_ema",
        "--offload_idle",
        "--enable_engine_sleep",
        "--save_steps=1",
        f"--max_steps={STEPS}",
        "--load_checkpoint",
        f"--save_path={tmp_path}/run",
    ]
    with pytest.raises(SystemExit) as end:
        MAINS["train_ppo"]([*PPO[:-3], *PPO[-2:], *flags])
    assert end.value.code == 0
    calls = json.loads((tmp_path / "calls.json").read_text())
    assert (
        sorted(
            {*VERBS, "print", "report_memory", "sync_and_clear_cache", "is_rank_0"} - calls.keys()
        )
        == []
    )

    assert calls["update_engine_weights"] == calls["wakeup_inference_engine"] + 1 == STEPS + 1, (
        "one way, in every step"
    )
    assert calls["open_generation"] == STEPS and calls["optimizer_step"] == STEPS
    text = Path("docs/extending.md").read_text()
    assert all(f"`{verb}`" in text for verb in FOR_OTHER_LOOPS)


def test_every_public_verb_is_counted_or_said_to_be_for_other_loops():
    from lightrft.strategy import StrategyBase
    from lightrft.strategy.backends.base import Backend

    public = {
        name
        for name in dir(StrategyBase)
        if not name.startswith("_") and callable(getattr(StrategyBase, name))
    }
    hooks = {name for name in vars(Backend)}
    ends = {
        "close",
        "close_checkpoints",
        "close_engine",
        "fail",
        "get_rank",
        "engine_lags",
        "get_sequence_parallel_group",
    }
    # of --rollout_ranks, --lora_sync, --ep_size, --overlap
    of_options = {"serve_engine", "adapter_params", "expert_params", "compute_tokens"}
    on_class = {"print", "report_memory", "sync_and_clear_cache", "is_rank_0"}
    assert (
        sorted(public - hooks - ends - on_class - of_options - set(VERBS) - FOR_OTHER_LOOPS) == []
    )


NOTEBOOK = """
import lightrft

def share_of_ascii(samples, label, **columns):
    return [sum(token < 128 for token in sample.token_ids) / len(sample.token_ids) for sample in samples]

trainer = lightrft.train_ppo(config="run.yaml", reward=share_of_ascii, advantage_estimator="dapo", max_steps=2)
print("steps", trainer.done)
print("evaluation", lightrft.evaluate(config="evaluation.yaml", reward=share_of_ascii)["num_samples"])
"""


@pytest.mark.slow
def test_a_run_from_python_is_that_of_the_command_line(tmp_path, monkeypatch):
    """As in a notebook, a function of the main module is the reward.

    A file gives most of the rest.
    """
    named = dict(
        flag.removeprefix("--").split("=")
        for flag in prepare(tmp_path)
        if "=" in flag and "reward" not in flag
    )
    flags = [
        *(flag for flag in PPO if not flag.startswith(("--loss_agg", "--init_kl"))),
        "--fsdp",
        "--no_dynamic_sampling",
    ]
    flags += [f"--{name}={value}" for name, value in named.items()]
    estimator = ["--reward=reward.py:share_of_ascii", "--advantage_estimator=dapo", "--max_steps=2"]
    monkeypatch.chdir(tmp_path)
    train("train_ppo", 1, [*flags, *estimator], Path("command"))
    config = parse([*flags, "--save_path=notebook"])
    written = {
        section: {
            name: value
            for name, value in vars(getattr(config, section)).items()
            if name in config.written
        }
        for section in SECTIONS
    }
    (tmp_path / "run.yaml").write_text(json.dumps(written))

    (tmp_path / "evaluation.yaml").write_text(
        json.dumps(
            {
                "model": {"pretrain": "notebook/model"},
                "data": {"eval_data": named["prompt_data"]},
                "strategy": {"fsdp": True},
                "engine": {"engine_type": "hf"},
                "rollout": {"generate_max_len": 4},
                "train": {"save_path": "evaluation"},
            }
        )
    )
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    done = subprocess.run(
        [warm_python(), "notebook.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "steps 2" in done.stdout and "evaluation 24" in done.stdout
    assert repeatable(rows_of(tmp_path / "notebook")) == repeatable(rows_of(tmp_path / "command"))


def test_what_cannot_run_is_an_exception_in_python(tmp_path):
    with pytest.raises(ConfigError, match="--pretrain is empty"):
        lightrft.train_ppo(prompt_data="x")
    with pytest.raises(ConfigError, match="unknown name 'max_stps'; did you mean max_steps?"):
        lightrft.train_sft(max_stps=3)
    with pytest.raises(ConfigError, match=f"--config {tmp_path}/none.yaml: No such file"):
        lightrft.evaluate(config=tmp_path / "none.yaml")
