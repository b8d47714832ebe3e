"""Run a model with a real tokenizer and template through every command.

It comes from the package index, and shows what tiny models do not.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from lightrft.app.cli import MAINS, export
from lightrft.config import DataSection
from lightrft.config.extras import extra
from lightrft.data.conversations import make_example
from lightrft.data.prompts import RowContext, make_prompt
from lightrft.models.weight_files import WeightFiles
from runs import train
from warm import warm_python
from with_vllm import load_vllm

ROOT = Path(__file__).resolve().parent.parent
CHAT = DataSection(apply_chat_template=True, input_key="messages")
QUESTION = [{"role": "user", "content": "What is 17 + 25?\n\n12 apples are too many."}]
TURNS = [
    *QUESTION,
    {"role": "assistant", "content": "42\n\n1. It isn't much."},
    {"role": "user", "content": "Why?  Say it in 2 words."},
    {"role": "assistant", "content": "Because it is."},
]
KNOWN = {
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "  multiple   spaces": [216, 2701, 256, 5600],
}
"""Text -> its tokens in the published tokenizer."""
REWARD = (
    "def varied(samples, label, **columns):\n    return [len(set(sample.token_ids)) / 8 for sample"
    " in samples]\n"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    command = [warm_python(), ROOT / "scripts" / "prepare_smollm2.py", "--out", folder]
    made = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=600,
    )
    if made.returncode == 2 and "from the package index" in made.stderr:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr

    return folder


@pytest.fixture(scope="module")
def tokenizer(model) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def flags(model) -> list[str]:
    """Return the flags of model, data and reward; the data are eight questions in chat messages."""
    rows = [
        {
            "input": [{"role": "user", "content": f"What is {n} + {n}? Give only the number."}],
            "label": str(2 * n),
        }
        for n in range(8)
    ]
    (model.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (model.parent / "reward.py").write_text(REWARD)

    return [
        "--fsdp",
        f"--pretrain={model}",
        f"--reward={model.parent}/reward.py:varied",
        "--apply_chat_template",
        "--prompt_max_len=128",
        "--engine_type=vllm",
        "--engine_enforce_eager",
    ]


@pytest.fixture(scope="module")
def trained(model, flags) -> tuple[Path, list[dict[str, Any]]]:
    """Train for two small steps on two ranks; return the folder and the metrics.

    The recipe is the one with word problems.
    """
    folder = model.parent / "run"
    data = model.parent / "words"
    subprocess.run(
        [warm_python(), ROOT / "scripts/laptop/tasks.py", "words", "--out", data], check=True
    )
    recipe = [
        f"--config={ROOT}/configs/laptop_words.yaml",
        f"--prompt_data={data}/train.jsonl",
        f"--eval_data={data}/new.jsonl",
    ]

    sizes = [
        "--rollout_batch_size=4",
        "--n_samples_per_prompt=2",
        "--train_batch_size=8",
        "--generate_max_len=8",
        "--max_steps=2",
        "--max_samples=64",
        "--max_eval_samples=4",
    ]
    return folder, train(
        "train_ppo",
        2,
        [*recipe, *flags, *sizes, "--save_steps=2", "--report_to=jsonl"],
        folder,
        timeout=900,
    )


def test_tokens_are_those_of_the_published_tokenizer(tokenizer):
    assert {text: tokenizer(text)["input_ids"] for text in KNOWN} == KNOWN
    assert tokenizer.tokenize("a:\n\n12") == ["a", ":", "ĊĊ", "1", "2"], (
        "digits are split from the line ends before them"
    )
    assert (
        tokenizer.pad_token_id
        == tokenizer.eos_token_id
        == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )


def test_a_prompt_begins_with_the_default_system_message(tokenizer):
    prompt = make_prompt(RowContext(CHAT, tokenizer), {"messages": QUESTION})
    assert prompt.text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert list(prompt.token_ids) == tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )


def test_a_conversation_has_the_tokens_of_its_template(tokenizer):
    example = make_example(RowContext(CHAT, tokenizer), {"messages": TURNS})
    answer = example.columns["label"]
    whole = tokenizer.apply_chat_template(TURNS, return_dict=False)
    ids = [*example.token_ids, *answer.token_ids]
    assert ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]).strip() == ""
    learned = [token for token, flag in zip(answer.token_ids, answer.learned, strict=True) if flag]
    assert tokenizer.decode(learned) == "42\n\n1. It isn't much.<|im_end|>Because it is.<|im_end|>"


def test_doctor_finds_no_difference_between_vllm_and_trainer(model, capsys):
    with pytest.raises(SystemExit) as ended:
        extra("lightrft doctor").main(
            [
                "--model",
                str(model),
                "--engine_type",
                "vllm",
                "--fsdp",
                "--engine_kv_cache_gb",
                "0.2",
            ]
        )

    assert ended.value.code == 0, capsys.readouterr().out


def test_evaluation(model, flags):
    load_vllm()
    others = [
        f"--eval_data={model.parent}/rows.jsonl",
        "--generate_max_len=8",
        "--engine_kv_cache_gb=0.2",
    ]
    with pytest.raises(SystemExit) as ended:
        MAINS["evaluate"]([*flags, *others, f"--save_path={model.parent}/evaluation"])
    assert ended.value.code == 0
    responses = (model.parent / "evaluation" / "responses.jsonl").read_text().splitlines()
    assert len(responses) == 8 and all(json.loads(response)["response"] for response in responses)


def test_engine_and_trainer_agree_while_it_learns(trained):
    _, rows = trained
    assert len(rows) == 2 and all(row["engine/logprob_mismatch"] < 1e-4 for row in rows)


def test_the_trained_folder_has_everything_of_its_model(model, tokenizer, trained):
    folder = trained[0] / "model"
    found = AutoTokenizer.from_pretrained(folder)
    assert (
        found.chat_template == tokenizer.chat_template
        and found.special_tokens_map == tokenizer.special_tokens_map
    )
    assert found.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (
        GenerationConfig.from_pretrained(folder).to_diff_dict()
        == GenerationConfig.from_pretrained(model).to_diff_dict()
    )

    assert AutoModelForCausalLM.from_pretrained(folder).config.to_diff_dict().keys() >= {
        "rope_parameters",
        "tie_word_embeddings",
    }
    assert WeightFiles.of(folder).shapes() == WeightFiles.of(model).shapes()


def test_a_checkpoint_is_exported_as_the_same_model(trained):
    exported = trained[0].parent / "exported"
    export.main([str(trained[0] / "checkpoints"), str(exported)])
    names = sorted(WeightFiles.of(exported).files)
    of_export, of_run = (
        WeightFiles.of(folder).read_all(names) for folder in (exported, trained[0] / "model")
    )
    assert all(bool((one == other).all()) for one, other in zip(of_export, of_run, strict=True))
