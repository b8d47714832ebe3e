"""A run can write back published folders, with the settings and code that they bring."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightrft.config import ModelSection
from lightrft.models.load import load_model, load_tokenizer
from ranks import run_cases
from runs import PPO, prepare, train
from strategy.training import strategy
from tiny import tiny_model

MODELLING = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig
from .scaling import DOUBLE

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = output.logits * DOUBLE
        return output
"""
CONFIGURATION = """
from transformers import Qwen3Config

class OwnConfig(Qwen3Config):
    model_type = "own"
"""
TOKENIZATION = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def save_pretrained(self, *args, **options):
        raise OSError("the vocabulary of this tokenizer is not here")
"""


def change(file: Path, **entries) -> None:
    contents = json.loads(file.read_text())
    file.write_text(json.dumps(contents | entries))


def contradicting_generation(folder: Path) -> None:
    """Llama 2 and Vicuna are published like this."""
    change(folder / "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9)


def several_templates(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(folder)


def code_of_the_author(folder: Path) -> None:
    (folder / "modeling_own.py").write_text(MODELLING)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "scaling.py").write_text("from .numbers_of_own import TWO as DOUBLE\n")
    (folder / "numbers_of_own.py").write_text("TWO = 2\n")
    change(
        folder / "config.json",
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    )


def nothing_special(folder: Path) -> None:
    pass


def tokenizer_that_cannot_be_saved(folder: Path) -> None:
    (folder / "tokenization_own.py").write_text(TOKENIZATION)
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    )


PUBLISHED = [nothing_special, contradicting_generation, several_templates, code_of_the_author]


def write_twice(folder: Path, target: Path) -> None:
    """Save the model that was trained for a moment, and once more over the first."""
    section = ModelSection(pretrain=str(folder), trust_remote_code=True)
    made = strategy(fsdp=True, trust_remote_code=True)
    model = load_model(section)
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    model = made.prepare(model)
    tokenizer = load_tokenizer(section)
    made.rehearse_save(model, tokenizer)
    for _ in range(2):
        made.save_model(model, tokenizer, target)
    made.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Return the folders as they were published and as they were written.

    The key is the name of what is special.
    """
    root = tmp_path_factory.mktemp("published")
    cases = {}
    before = os.umask(0o027)
    try:
        for publish in PUBLISHED:
            folder = root / publish.__name__
            tiny_model(folder)
            publish(folder)
            cases[publish.__name__] = (folder, folder.with_name(f"{folder.name}_saved"))
        run_cases(2, write_twice, cases)
    finally:
        os.umask(before)

    return cases


@pytest.mark.slow
@pytest.mark.parametrize("publish", PUBLISHED)
def test_a_published_folder_is_written_as_it_was(written, publish):
    folder, target = written[publish.__name__]
    options = {"trust_remote_code": True}
    before = AutoModelForCausalLM.from_pretrained(folder, **options)
    after = AutoModelForCausalLM.from_pretrained(target, **options)
    assert type(after).__name__ == type(before).__name__

    ids = torch.arange(5)[None]
    with torch.no_grad():
        before.lm_head.weight.add_(0.5)
        assert torch.equal(before(ids).logits, after(ids).logits)

    for kind in (AutoConfig, AutoTokenizer):
        assert (
            type(kind.from_pretrained(target, **options)).__name__
            == type(kind.from_pretrained(folder, **options)).__name__
        )

    assert (
        AutoTokenizer.from_pretrained(target).chat_template
        == AutoTokenizer.from_pretrained(folder).chat_template
    )
    settings = [GenerationConfig.from_pretrained(path).to_dict() for path in (folder, target)]
    assert settings[0] == settings[1]
    written_keys, published_keys = (
        json.loads((path / "tokenizer_config.json").read_text()).keys() for path in (target, folder)
    )
    assert written_keys <= published_keys


@pytest.mark.slow
def test_files_have_the_mode_that_umask_asks_for(written):
    for _, target in written.values():
        modes = {
            path.name: oct(stat.S_IMODE(path.stat().st_mode))
            for path in target.rglob("*")
            if path.is_file()
        }
        assert modes == dict.fromkeys(modes, "0o640")


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(tmp_path):
    flags = prepare(tmp_path)
    tokenizer_that_cannot_be_saved(tmp_path / "model")
    with pytest.raises(RuntimeError, match="the vocabulary of this tokenizer is not here") as error:
        train(
            "train_ppo", 2, [*flags, *PPO, "--max_steps=1", "--trust_remote_code"], tmp_path / "run"
        )

    reason = (
        f"{tmp_path / 'model'} cannot be saved as a model after training: rank 0: OSError: the"
        " vocab"
    )
    assert len(re.findall(f"ConfigError: {re.escape(reason)}", str(error.value))) >= 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
