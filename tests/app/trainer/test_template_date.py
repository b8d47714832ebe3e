"""Chat templates that write the date write the day on which the run began.

All ranks write the same, also after midnight.
"""

import json
import os

import pytest
from transformers import AutoTokenizer

from lightrft.app.run import run_folder
from lightrft.app.run.prepare import prepare_config
from lightrft.config import ConfigError, DataSection, parse
from lightrft.data.rendering.template import chat_template
from runs import prepare, repeatable, rows_of, train
from tiny import byte_tokenizer

TEMPLATE = (
    "{% if strftime_now is defined %}Today is {{ strftime_now('%d %B %Y') }}.{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STEPS = [
    "--train_batch_size=8",
    "--apply_chat_template",
    "--learning_rate=1e-3",
    "--save_steps=2",
    "--lr_scheduler=constant",
    "--lr_warmup_ratio=0",
]


def test_a_template_writes_the_date_that_it_is_given():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    template = chat_template(DataSection(chat_template_date="2025-02-03"), tokenizer)
    text = template.render([{"role": "user", "content": "Hi"}], answer_follows=True)
    assert text == "Today is 03 February 2025.user: Hi<eos>assistant: "


def test_a_date_is_checked_before_anything_starts():
    flags = ["--pretrain=some/model", "--prompt_data=some/rows", "--chat_template_date=yesterday"]
    with pytest.raises(ConfigError, match="--chat_template_date yesterday is not a date such as"):
        prepare_config("train_sft", parse(flags, "train_sft"))


@pytest.mark.slow
def test_a_run_that_is_resumed_on_another_day_keeps_its_date(tmp_path, monkeypatch):
    flags = [flag for flag in prepare(tmp_path) if not flag.startswith("--reward")]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE.replace("<eos>", tokenizer.eos_token)
    tokenizer.save_pretrained(tmp_path / "model")
    flags = [*flags, *STEPS, "--prompt_max_len=200"]

    # The second rank starts after midnight.
    monkeypatch.setattr(run_folder, "today", lambda: f"2026-01-0{1 + int(os.environ['RANK'])}")
    for name, steps in (("whole", 4), ("parts", 2)):
        train("train_sft", 2, [*flags, f"--max_steps={steps}"], tmp_path / name)
    monkeypatch.setattr(run_folder, "today", lambda: "2026-01-09")
    train("train_sft", 2, [*flags, "--max_steps=4", "--load_checkpoint"], tmp_path / "parts")

    assert repeatable(rows_of(tmp_path / "parts")) == repeatable(rows_of(tmp_path / "whole"))
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["date"] == "2026-01-01"
