"""Runs from Python take objects in place of names, and return what a user asks for next."""

import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from loguru import logger
from transformers import AutoModelForCausalLM, AutoTokenizer

import lightrft
from lightrft.app.quickstart.inputs import tiny_qwen3
from lightrft.app.run.logs import log_unless_set_up
from lightrft.app.trainer.objects import model_folder, with_names
from lightrft.config import ConfigError
from warm import warm_python

SMALL = {
    "engine_type": "hf",
    "fsdp": True,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "generate_max_len": 3,
    "max_steps": 2,
    "prompt_max_len": 16,
    "report_to": "jsonl",
    "init_kl_coef": 0,
}
ROWS = [{"input": f"{number}+1=", "label": str(number + 1)} for number in range(16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"), seed=0)


DOOR = """
import json, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
import lightrft

def main(folder, out, small, rows):
    calls = []

    def counted(samples, label, **columns):
        calls.append(len(samples))
        return [len(sample.token_ids) / 3 for sample in samples]

    class Right:
        def __call__(self, samples, label, **columns):
            return [float(sample.text == right) for sample, right in zip(samples, label)]

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    run = lightrft.train_ppo(
        model=model, tokenizer=tokenizer, prompt_data=rows, eval_data=Dataset.from_list(rows[:4]), reward=[counted, Right()],
        save_path=out, **small)
    numbers = run.evaluate()
    other = run.evaluate(eval_data=rows[:3], reward="exact_match", engine_type="hf")
    print(json.dumps([run.done, len(run.history), run.history[-1]["rollout/reward"], str(run.model_path), len(calls) > 8,
                      numbers["num_samples"], other["num_samples"], "rollout/reward_of_counted" in run.history[0]]))
    AutoModelForCausalLM.from_pretrained(run.model_path), AutoTokenizer.from_pretrained(run.model_path)

main(sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:]))
"""


@pytest.mark.slow
def test_a_run_with_objects_in_place_of_names(folder, tmp_path):
    """A run takes objects, and nothing of them stays behind.

    The reward is a closure, the data are rows and a Dataset, and model and tokenizer are objects.
    The evaluation starts a second vLLM in the process.
    """
    (tmp_path / "door.py").write_text(DOOR)
    small = SMALL | {"engine_type": "vllm", "engine_kv_cache_gb": 0.05}
    arguments = [str(folder), str(tmp_path / "run"), json.dumps(small), json.dumps(ROWS)]
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [warm_python(), "door.py", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
    )
    assert done.returncode == 0, done.stderr[-2000:]

    steps, rows, reward, model, called, held_out, others, has_label = json.loads(
        done.stdout.splitlines()[-1]
    )
    assert (steps, rows, model, called, held_out, others, has_label) == (
        2,
        2,
        f"{tmp_path}/run/model",
        True,
        4,
        3,
        True,
    )
    assert 0 < reward <= 2
    assert "DEBUG" not in done.stderr and " INFO    algorithm: grpo" in done.stderr
    assert list((tmp_path / "tmp").glob("lightrft-model-*")) == []


def test_the_public_names_are_listed():
    assert {
        "train_ppo",
        "train_sft",
        "train_rm",
        "train_prm",
        "train_dpo",
        "train_kto",
        "evaluate",
        "Config",
        "ConfigError",
        "DataError",
        "TrainedRun",
        "__version__",
    } == set(dir(lightrft))
    assert all(getattr(lightrft, name) is not None for name in dir(lightrft))
    with pytest.raises(AttributeError, match="no attribute 'train_pp'"):
        lightrft.train_pp  # noqa: B018


def exact(samples, label, **columns):
    return [0.0 for _ in samples]


def test_objects_get_names_and_names_stay():
    def inner(samples, label, **columns):
        return []

    data = Dataset.from_list(ROWS)
    named = with_names(
        {"prompt_data": ROWS, "eval_data": data, "reward": inner, "pretrain": "x", "seed": 3}
    )
    assert (
        named["prompt_data"].startswith("lightrft_objects:prompt_data")
        and named["reward"] == "lightrft_objects:inner"
    )
    assert named == with_names(
        {"prompt_data": ROWS, "eval_data": data, "reward": inner, "pretrain": "x", "seed": 3}
    )

    assert with_names({"prompt_data": data.to_iterable_dataset()})["prompt_data"].startswith(
        "lightrft_objects:"
    )
    unchanged = {
        "prompt_data": ["a.jsonl", "b.jsonl"],
        "reward": "math,format",
        "policy_loss": "gspo",
    }
    assert with_names(unchanged) == unchanged and with_names({"reward": exact}) == {"reward": exact}
    assert (
        with_names({"reward": [exact, "math", lambda samples, **columns: []]})["reward"][2]
        == "lightrft_objects:lambda"
    )
    with pytest.raises(ConfigError, match=r"DatasetDict has several splits: .*data\['train'\]"):
        with_names({"prompt_data": DatasetDict({"train": data})})


def test_a_folder_with_another_tokenizer(folder):
    """The tokenizer's files come from the object, and all others from the model.

    The model's folder stays as it was.
    """
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "mine"

    with model_folder({"model": folder, "tokenizer": tokenizer}) as named:
        written = Path(named["pretrain"])
        assert AutoTokenizer.from_pretrained(written).chat_template == "mine"
        assert AutoModelForCausalLM.from_pretrained(written).num_parameters() > 0

    assert (
        not written.exists()
        and {file.name: file.read_bytes() for file in folder.iterdir()} == before
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "a", "pretrain": "b"}, "two names of one value"),
        (
            {"model": "a", "tokenizer": "b"},
            "tokenizer is a tokenizer or processor of transformers, not str",
        ),
        ({"model": 3}, "model is a model of transformers, a folder or a hub name, not int"),
        ({"model": torch.nn.Linear(1, 1)}, "a folder or a hub name, not Linear"),
        (
            {"prompt_data": {"input": ["a"]}},
            "prompt_data is a list of rows, a Dataset, a file or a hub name, not dict",
        ),
        (
            {"eval_data": (row for row in ROWS)},
            "eval_data is a list of rows, a Dataset, .*, not generator",
        ),
        ({"config": ROWS}, "config is a YAML file or a Config, not list: pass values by name"),
    ],
)
def test_objects_of_the_wrong_kind(values, message):
    with pytest.raises(ConfigError, match=message):
        lightrft.train_ppo(**{"prompt_data": ROWS} | values)


def test_a_model_object_is_written_as_it_was_published(folder):
    """The settings of generation contradict each other: transformers would refuse to write them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.update(do_sample=False, temperature=0.6)
    with model_folder({"model": model}) as named:
        written = AutoModelForCausalLM.from_pretrained(named["pretrain"])
        assert written.generation_config.temperature == 0.6 and written.dtype == torch.bfloat16
        for name, parameter in written.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name))


def test_a_model_object_is_for_one_process(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ConfigError, match="for a run of one process"):
        lightrft.train_sft(model=str(folder), tokenizer=tokenizer, prompt_data=ROWS)


def test_a_program_that_has_set_up_its_own_log_keeps_it():
    stream = io.StringIO()
    handler = logger.add(stream, format="{message}")
    try:
        logger.remove(0)
    except ValueError:
        pass
    log_unless_set_up()
    logger.debug("mine")
    logger.remove(handler)
    assert stream.getvalue() == "mine\n"
