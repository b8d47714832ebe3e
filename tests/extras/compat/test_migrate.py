"""Why: who comes from another tool has a script or a file of it, and wants to run it here."""

import json
from pathlib import Path

import pytest
import yaml

from lightrft.config.command_line import load
from lightrft.config.errors import ConfigError
from lightrft.extras.compat.counterparts import defaults
from lightrft.extras.migrate import main, migrated

TRL = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig
MODEL = "some/model"
dataset = load_dataset("openai/gsm8k", "main", split="train").map(lambda row: row)
def short(completions, **kwargs): return [1.0]
args = GRPOConfig(output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=8,
    beta=0.0, use_vllm=True, max_steps=200, warmup_steps=10, loss_type="dr_grpo", learning_rate=1e-5, dataloader_num_workers=2)
GRPOTrainer(model=MODEL, reward_funcs=[short, "a/judge"], args=args, train_dataset=dataset,
    peft_config=LoraConfig(r=16, use_rslora=True)).train()
"""
UNSLOTH = """
from unsloth import FastLanguageModel
from trl import SFTTrainer, SFTConfig
length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(model_name="some/model", max_seq_length=length, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "k_proj"], use_gradient_checkpointing="unsloth")
SFTTrainer(model=model, train_dataset=load_dataset("json", data_files="mine.jsonl", split="train"),
    args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="adamw_8bit")).train()
"""
VERL = r"""
MODEL=some/model
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$DATA/train.parquet \
  data.train_batch_size=1024 actor_rollout_ref.model.path=${MODEL} actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_kl_loss=False algorithm.use_kl_in_reward=False trainer.logger='["console","wandb"]' \
  actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8 $@ 2>&1 | tee log
"""
UNPACKED = """
shared = {"bf16": True, "beta": 0.04}
args = GRPOConfig(learning_rate=a.lr, **shared, **options())
GRPOTrainer(model="some/model", args=args, weight_decay=0.1)
"""
ARRAYS = r"""
MODEL=${MODEL:-some/model}
ARGS=(
  data.train_files=$DATA/train.parquet  # the training data
  "data.train_batch_size=256"
)
MORE=($(cat flags))
ROLLOUT=(actor_rollout_ref.rollout.n=4)
python3 -m verl.trainer.main_ppo "${ARGS[@]}" ${ROLLOUT[@]} "${MORE[@]}" actor_rollout_ref.model.path=$MODEL \
  +trainer2.depth=1 $@
"""
OPENRLHF = r"""
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1 --pretrain some/model \
  --remote_rm_url http://host/reward --prompt_data d.jsonl --eps_clip_low_high 0.1 0.3 --async_train
"""
SWIFT = r"""
NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model some/model --reward_funcs accuracy --train_type lora \
  --lora_rank 8 --dataset d.jsonl --per_device_train_batch_size 4 --num_generations 8 --beta 0.001
"""
AXOLOTL = """
base_model: some/model
datasets: [{path: mine.jsonl, type: alpaca}]
val_set_size: 0.1
adapter: lora
lora_r: 16
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
bf16: auto
"""
FILES = {
    "trl.py": (
        TRL,
        "train_ppo",
        {
            "pretrain": "some/model",
            "prompt_data": "openai/gsm8k",
            "reward_pretrain": ["a/judge"],
            "train_batch_size": 16,
            "rollout_batch_size": 2,
            "lr_warmup_ratio": 0.05,
            "init_kl_coef": 0.0,
            "engine_type": "vllm",
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "lora_rank": 16,
            "rslora": True,
            "lr_scheduler": "linear",
            "num_episodes": 3.0,
        },
        ["use one that does not train", ".map()"],
    ),
    "parts.py": (
        UNPACKED,
        "train_ppo",
        {"init_kl_coef": 0.04, "bf16": True, "l2": 0.1, "learning_rate": None},
        ["learning_rate: a.lr: only running", "**options(): options(): only running"],
    ),
    "arrays.sh": (
        ARRAYS,
        "train_ppo",
        {
            "pretrain": "some/model",
            "prompt_data": "$DATA/train.parquet",
            "rollout_batch_size": 256,
            "n_samples_per_prompt": 4,
        },
        ["+trainer2.depth=1: no flag", "$@: only running", "$(cat: only running"],
    ),
    "unsloth.py": (
        UNSLOTH,
        "train_sft",
        {
            "prompt_data": "mine.jsonl",
            "prompt_max_len": 2048,
            "load_in_4bit": True,
            "lora_rank": 16,
            "target_modules": ["q_proj", "k_proj"],
            "train_batch_size": 16,
            "optimizer": "adamw_8bit",
        },
        [],
    ),
    "verl.sh": (
        VERL,
        "train_ppo",
        {
            "pretrain": "some/model",
            "advantage_estimator": "grpo",
            "rollout_batch_size": 1024,
            "train_batch_size": 1280,
            "init_kl_coef": 0.0,
            "report_to": "wandb",
            "learning_rate": 1e-6,
            "dual_clip": 3.0,
        },
        [],
    ),
    "openrlhf.sh": (
        OPENRLHF,
        "train_ppo",
        {
            "reward": "http://host/reward",
            "eps_clip_high": 0.3,
            "advantage_estimator": "gae",
            "rollout_batch_size": 1024,
        },
        ["async_train: "],
    ),
    "openrlhf_sft.sh": (
        "python -m openrlhf.cli.train_sft --pretrain some/model --dataset d.jsonl --max_len 2048",
        "train_sft",
        {"pretrain": "some/model"},
        ["dataset: write --prompt_data d.jsonl", "max_len is ignored"],
    ),
    "swift.sh": (
        SWIFT,
        "train_ppo",
        {
            "reward": "math",
            "lora_rank": 8,
            "train_batch_size": 8,
            "init_kl_coef": 0.001,
            "use_kl_loss": True,
            "temperature": 0.9,
        },
        [],
    ),
    "axolotl.yaml": (
        AXOLOTL,
        "train_sft",
        {
            "prompt_data": ["mine.jsonl"],
            "train_batch_size": 16,
            "num_episodes": 2,
            "bf16": True,
            "lora_rank": 16,
        },
        ["val_set_size: ", "datasets.type: check"],
    ),
}
"""File -> its text, the command, some of the keys on two ranks, and parts of comments."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_tool_becomes_a_configuration(name: str, tmp_path: Path) -> None:
    text, command, expected, comments = FILES[name]
    (tmp_path / name).write_text(text)
    written = migrated(tmp_path / name, ranks=2)

    keys = yaml.safe_load(written)
    assert {key: keys.get(key) for key in expected} == expected
    assert f"lightrft {command} --config" in written.splitlines()[0]
    remarks = "\n".join(line for line in written.splitlines() if line.startswith("#"))
    assert all(comment in remarks for comment in comments)

    (tmp_path / "mine.yaml").write_text(written)
    load(tmp_path / "mine.yaml")


SCRIPTS = {
    "annotated.py": ('MODEL: str = "m/x"\nSFTTrainer(model=MODEL)', {"pretrain": "m/x"}, ""),
    "positions.py": (
        'GRPOTrainer("m/x", [f], GRPOConfig("out", beta=0.1))\ndef f(completions): ...',
        {"pretrain": "m/x", "save_path": "out", "reward": ["positions.py:f"]},
        "prompt_data: the file does not say it: write --prompt_data",
    ),
    "unsloth_positions.py": (
        'FastLanguageModel.from_pretrained("m/x", max_seq_length=5)\nSFTTrainer(model)',
        {"pretrain": "m/x", "prompt_max_len": 5},
        "",
    ),
    "fields.py": (
        "args = GRPOConfig()\nargs.learning_rate = 2e-6\nargs.num_generations = n\n"
        'other.max_steps = 3\nGRPOTrainer(model="m/x", args=args)',
        {"learning_rate": 2e-6, "max_steps": None},
        "num_generations: n: only running",
    ),
    "computed.py": (
        'SFTTrainer(model=f"m/{size}")',
        {"pretrain": None},
        "pretrain: the file does not say it: write --pretrain",
    ),
    "line.sh": (
        "export M=m/x; trl sft --model_name_or_path $M --bf16 2>&1 | tee log && echo done",
        {"pretrain": "m/x", "bf16": True},
        "",
    ),
    "hash.sh": (
        "swift sft --model m/x --dataset a#500 b --lora_rank 8 --system 'S # x'  # don't",
        {"prompt_data": ["a#500", "b"], "lora_rank": 8, "system_prompt": "S # x"},
        "",
    ),
    "hydra.sh": (
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path='m/x # y' data.train_files=a",
        {"pretrain": "m/x # y", "prompt_data": "a"},
        "",
    ),
    "two.sh": (
        "trl sft --model_name_or_path m/a\ntrl dpo --model_name_or_path m/b",
        {"pretrain": "m/b"},
        "earlier commands: there is one of train_sft, left out",
    ),
    "variable.sh": (
        "trl grpo --model_name_or_path m/x --num_generations $N --per_device_train_batch_size 4",
        {"pretrain": "m/x", "n_samples_per_prompt": None},
        "per_device_train_batch_size: write --train_batch_size",
    ),
    "axolotl_grpo.yaml": (
        "base_model: m/x\nrl: grpo\ndatasets: [a, {path: b}]\n"
        "trl: {num_generations: 4, reward_funcs: [lib.graded]}",
        {"prompt_data": ["a", "b"], "n_samples_per_prompt": 4, "reward": ["lib:graded"]},
        "",
    ),
    "axolotl_name.yaml": ("base_model: m/x\ndatasets: a", {"prompt_data": ["a"]}, ""),
}
"""File -> its text, some of the keys, and a part of its comments."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_of_a_file_is_lost_in_silence(name, tmp_path, monkeypatch):
    text, expected, said = SCRIPTS[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    written = migrated(Path(name))
    keys = yaml.safe_load(written)
    assert {key: keys.get(key) for key in expected} == expected
    assert said in written


NAMED = """
import functools, theirs
from theirs import graded
def f(completions, **kwargs): return [0.0]
def start():
    def inside(completions, **kwargs): return [0.0]
one = f
judge = "a/judge"
both = (f, judge)
circle = [circle]
partial = functools.partial(f, a=1)
GRPOTrainer(model="m/x", reward_funcs=REWARDS)
"""


@pytest.mark.parametrize(
    ("written", "functions", "models", "said"),
    [
        ("f", ["f"], None, ""),
        ("one", ["f"], None, ""),
        ("judge", None, ["a/judge"], ""),
        ("both", ["f"], ["a/judge"], ""),
        ("[*both, graded]", ["f", "graded"], ["a/judge"], ""),
        ("[one, [partial]]", ["f", "partial"], None, ""),
        ("circle", ["circle"], None, ""),
        (
            "[lambda **columns: [1.0], f]",
            ["f"],
            None,
            "lambda **columns: [1.0]: another file cannot import it",
        ),
        ("theirs.graded", None, None, "theirs.graded: another file cannot import it"),
        ("inside", None, None, "inside: another file cannot import it"),
        ("make()", None, None, "make(): another file cannot import it"),
        ("both + [f]", None, None, "both + [f]: another file cannot import it"),
    ],
)
def test_rewards_are_found_through_their_names(written, functions, models, said, tmp_path):
    """Why: the name of a list, or of a model, became the name of a function without a word."""
    file = tmp_path / "train.py"
    file.write_text(NAMED.replace("REWARDS", written))
    text = migrated(file)
    keys = yaml.safe_load(text)
    found = keys.get("reward")
    assert found == (functions and [f"{file}:{name}" for name in functions])
    assert keys.get("reward_pretrain") == models
    assert said in text and ("--reward FILE:FUNCTION" in text) == bool(said)


@pytest.mark.parametrize(
    ("written", "rewards", "unknown"),
    [
        ("accuracy_reward", ["math"], ""),
        ("my.lib.graded", ["my.lib:graded"], ""),
        ("[accuracy_reward, graded]", ["math", "graded"], "graded"),
        ("some/model", ["some/model"], "some/model"),
    ],
)
def test_rewards_of_a_configuration_are_translated_or_named(written, rewards, unknown, tmp_path):
    (tmp_path / "a.yaml").write_text(f"num_generations: 4\nreward_funcs: {written}\n")
    (tmp_path / "a.sh").write_text("trl grpo --config a.yaml --model_name_or_path m/x")
    text = migrated(tmp_path / "a.sh")
    assert yaml.safe_load(text)["reward"] == rewards
    assert (f"reward_funcs: write --reward FILE:FUNCTION for {unknown}" in text) == bool(unknown)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "trl grpo --config none.yaml", "No such file"),
        ("a.py", "print('hello')", "calls no trainer of TRL"),
        ("a.py", "def (", "not a Python file"),
        ("a.py", "SFTTrainer()\nDPOTrainer()", "trains by SFT and DPO: leave one of them"),
        ("a.sh", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a", "no trainer of"),
        ("a.ipynb", "{}", "not a notebook"),
        ("a.ipynb", '{"cells": [{"cell_type": "code", "source": ["1"]}]}', "calls no trainer"),
        ("a.sh", "echo hello", "starts no trainer of"),
        ("a.yaml", "a: 1", "of no tool that is known"),
        ("a.yaml", "[1, 2", "not valid YAML"),
        (
            "a.yaml",
            "stage: sft\nmodel_name_or_path: m\nfinetuning_type: lora",
            "no tool that is known",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(name, text, said, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit):
        main([str(tmp_path / name)])
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_notebook_is_read_as_a_script(tmp_path):
    cells = [
        ("markdown", "# Train\n(a list"),
        ("code", "%%capture\nif True:\n    !pip install \\\n        unsloth\n%env A=1"),
        ("code", "%%bash\nfor each in a; do echo $each; done"),
        ("code", UNSLOTH),
    ]
    content = [{"cell_type": kind, "source": text.splitlines(True)} for kind, text in cells]
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": content, "nbformat": 4}))
    (tmp_path / "train.py").write_text(UNSLOTH)
    of_notebook = migrated(tmp_path / "train.ipynb")
    assert of_notebook.replace("train.ipynb", "train.py") == migrated(tmp_path / "train.py")


def test_a_script_is_read_and_not_run(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "a.py").write_text(f"open({str(marker)!r}, 'w')\n" + TRL)
    migrated(tmp_path / "a.py")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("train_ppo", "GRPOConfig"),
        ("train_sft", "SFTConfig"),
        ("train_dpo", "DPOConfig"),
        ("train_kto", "KTOConfig"),
        ("train_rm", "RewardConfig"),
    ],
)
def test_the_defaults_of_trl_are_those_of_the_installed_one(command, config):
    trl = pytest.importorskip("trl")
    theirs = getattr(trl, config).__dataclass_fields__
    ours = defaults("trl", command)
    assert {name: theirs[name].default for name in ours} == ours


def test_errors_of_a_missing_file_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        migrated(tmp_path / "none.py")
