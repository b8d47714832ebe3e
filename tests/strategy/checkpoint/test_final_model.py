"""Checkpoints and adapters become folders that stand alone.

They have the same weights that the run itself writes at its end.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightrft.app.cli import MAINS
from lightrft.app.cli.export import main as export
from lightrft.config import ConfigError
from lightrft.strategy.checkpoint.final_model import _section
from lightrft.strategy.checkpoint.hf_export import end_generation_at
from ranks import run_ranks
from runs import PPO, prepare, rows_of, train
from tiny import EOS, VOCABULARY, tiny_model

TWO = [*PPO, "--max_steps=2", "--save_steps=2", "--enable_ema"]
LORA = ["--lora_rank=4", "--lora_alpha=16", "--actor_learning_rate=1e-2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def adapted(inputs, tmp_path_factory) -> Path:
    """Run with adapters on two ranks; the final models are only the adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    train("train_ppo", 2, [*inputs, *TWO, *LORA, "--save_adapter_only"], folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(found: Path, expected: Path) -> None:
    mine = weights(found)
    theirs = weights(expected)
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        export([str(argument) for argument in arguments])
    return ended.value.code


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [["--fsdp"], ["--fsdp=false", "--zero_stage=3", "--advantage_estimator=ppo"]],
    ids=["fsdp", "zero3"],
)
def test_an_export_equals_what_the_run_writes(inputs, tmp_path, flags):
    """From two ranks, also with bfloat16, where the checkpoint has the float32 masters.

    The critic and the average are exported too.
    """
    flags = [*inputs[1:], *TWO, *flags, "--bf16", "--freeze_prefix=model.embed_tokens"]
    train("train_ppo", 2, flags, tmp_path / "run")
    models = {"actor": "model", "ema": "model_ema"} | (
        {"critic": "critic"} if "--advantage_estimator=ppo" in flags else {}
    )

    for name, folder in models.items():
        checkpoint = (
            tmp_path / "run" / "checkpoints" / "step2" if name == "actor" else tmp_path / "run"
        )
        export([str(checkpoint), str(tmp_path / name), f"--name={name}"])
        found = tmp_path / name
        expected = tmp_path / "run" / folder
        assert_equal(found, expected)
        assert {path.name for path in found.iterdir()} == {
            path.name for path in expected.iterdir()
        } - {"README.md"}


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_merged_or_stays_one(inputs, adapted, tmp_path):
    export([str(adapted / "checkpoints"), str(tmp_path / "adapter"), "--adapter_only"])
    found, expected = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "adapter", adapted / "model")
    )
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )
    export([str(adapted / "checkpoints"), str(tmp_path / "merged")])
    export([str(adapted / "model"), str(tmp_path / "by_peft")])
    mine = weights(tmp_path / "merged")
    theirs = weights(tmp_path / "by_peft")
    base = weights(Path(inputs[1].partition("=")[2]))
    assert mine.keys() == theirs.keys() == base.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-6)
    assert any((mine[name] - base[name]).abs().max() > 1e-3 for name in mine)
    ids = torch.arange(4, 20)[None]
    assert AutoTokenizer.from_pretrained(tmp_path / "by_peft").eos_token_id == 258

    loaded = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits
        for name in ("merged", "by_peft")
    ]
    torch.testing.assert_close(*loaded, rtol=1e-4, atol=1e-4)


def evaluated(flags: list[str]) -> None:
    MAINS["evaluate"](flags)


@pytest.mark.slow
def test_an_adapter_is_evaluated_and_trained_on(inputs, adapted, tmp_path):
    """The folder of the adapter is enough, and gives the same rewards as the merged model."""
    export([str(adapted / "checkpoints"), str(tmp_path / "merged")])
    data = [
        inputs[2].replace("prompt_data", "eval_data"),
        "--eval_split=train",
        inputs[3],
        "--prompt_max_len=8",
        "--fsdp",
    ]

    found = []
    for name, pretrain in (("adapter", adapted / "model"), ("merged", tmp_path / "merged")):
        flags = [*data, f"--pretrain={pretrain}", "--engine_type=hf", "--generate_max_len=6"]
        with pytest.raises(RuntimeError, match="SystemExit: 0"):
            run_ranks(2, evaluated, [*flags, f"--save_path={tmp_path / name}_run"])
        found.append(json.loads((tmp_path / f"{name}_run" / "evaluation.json").read_text()))

    assert found[0] == pytest.approx(found[1], rel=1e-5)
    pretrain = f"--pretrain={adapted / 'model'}"
    flags = [inputs[0], pretrain, *inputs[2:], *PPO, "--max_steps=1", "--save_steps=1", *LORA]
    rows = train("train_ppo", 1, flags, tmp_path / "run")
    plain = train("train_ppo", 1, [*flags, f"--pretrain={tmp_path / 'merged'}"], tmp_path / "plain")
    assert rows[0]["engine/logprob_mismatch_max"] < 1e-4
    assert rows[0]["rollout/reward"] == pytest.approx(plain[0]["rollout/reward"], rel=1e-4)
    merged = (tmp_path / "run" / "merged_pretrain" / "model.safetensors").stat().st_mtime_ns
    assert f"pretrain: {adapted / 'model'}" in (tmp_path / "run" / "config.yaml").read_text()
    train("train_ppo", 1, [*flags, "--max_steps=2", "--load_checkpoint"], tmp_path / "run")
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]
    assert (
        merged == (tmp_path / "run" / "merged_pretrain" / "model.safetensors").stat().st_mtime_ns
    ), "it is merged once"


@pytest.mark.slow
def test_the_base_of_adapters_may_not_change_under_them(inputs, adapted, tmp_path):
    """Frozen weights are not in the checkpoint, so neither a run nor an export may continue on
    others.
    """
    values = dict(flag.removeprefix("--").split("=", 1) for flag in inputs if "=" in flag)
    model = Path(shutil.copytree(values["pretrain"], tmp_path / "model"))
    run = Path(shutil.copytree(adapted, tmp_path / "run"))
    changed = AutoModelForCausalLM.from_pretrained(model)
    changed.model.layers[1].mlp.up_proj.weight.data += 1e-3
    changed.save_pretrained(model)
    flags = [*inputs, *TWO, *LORA, "--save_adapter_only", "--load_checkpoint", "--max_steps=3"]
    kept = Path(values["pretrain"], "model.safetensors")
    original = kept.read_bytes()
    kept.write_bytes((model / "model.safetensors").read_bytes())

    try:
        with pytest.raises(
            RuntimeError, match="the weights of the actor's base model have changed"
        ):
            train("train_ppo", 1, flags, run)
    finally:
        kept.write_bytes(original)

    assert exit_code(run / "checkpoints", tmp_path / "out", f"--pretrain={model}") == 2
    assert not (tmp_path / "out").exists()


def test_a_run_without_checkpoints_says_where_its_model_is(tmp_path, capfd):
    (tmp_path / "model").mkdir()
    assert exit_code(tmp_path, tmp_path / "out") == 2
    assert f"the trained model of this run is {tmp_path}/model" in capfd.readouterr().err


def test_what_cannot_be_exported_is_one_message(tmp_path):
    assert exit_code(tmp_path, tmp_path / "out") == 2
    (tmp_path / "adapter_config.json").write_text("{}")
    assert exit_code(tmp_path, tmp_path / "out") == 2


def test_a_checkpoint_does_not_say_whether_code_may_run():
    settings = {
        "pretrain": "owner/name",
        "trust_remote_code": True,
        "bf16": True,
        "save_path": "run",
    }
    assert not _section(settings, "", trust_remote_code=False)[0].trust_remote_code
    assert _section(settings | {"trust_remote_code": False}, "", trust_remote_code=True)[
        0
    ].trust_remote_code
    with pytest.raises(ConfigError, match="--pretrain ./gone does not exist"):
        _section(settings | {"pretrain": "./gone"}, "", trust_remote_code=False)


IM_END = VOCABULARY
PUBLISHED_ENDS = {
    "another one": (EOS, [EOS, IM_END]),
    "several": ([7, EOS], [7, EOS, IM_END]),
    "these already": ([IM_END, EOS], [IM_END, EOS]),
    "none": (None, [EOS, IM_END]),
}


@pytest.mark.parametrize("case", PUBLISHED_ENDS)
def test_ends_are_added_to_the_published_ones(tmp_path, case):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path, layers=1))
    published, expected = PUBLISHED_ENDS[case]
    model.generation_config.eos_token_id = published
    end_generation_at(model, {IM_END, EOS})
    assert model.generation_config.eos_token_id == expected


@pytest.mark.slow
def test_a_base_model_that_learned_a_chat_template_ends_its_turns(tmp_path):
    """Engines that read only the exported folder stop at the template's end.

    The run and an export write the same.
    """
    flags = [flag for flag in prepare(tmp_path) if not flag.startswith("--reward")]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"

    flags = [
        *flags,
        "--apply_chat_template",
        "--prompt_max_len=16",
        "--train_batch_size=8",
        "--max_steps=1",
        "--save_steps=1",
    ]
    train("train_sft", 1, [*flags, "--lora_rank=2", "--save_adapter_only"], run)
    export([str(run), str(tmp_path / "exported")])
    export([str(run / "model"), str(tmp_path / "merged")])

    for folder in (run / "model", tmp_path / "exported", tmp_path / "merged"):
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        assert ends == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
