"""Rows, flags and results on the page of examples: what it says about a format is what happens.

A reader compares a file of ours with the page before anything else.
"""

import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from PIL import Image

from lightrft.app.cli import read_command_line
from lightrft.app.trainer.build_data import LOADERS
from lightrft.config import resolve
from lightrft.core.samples import Answer, Sample
from lightrft.data.conversations import load_examples
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import DataError
from lightrft.data.rendering.tokens import marked_texts
from lightrft.rewards.functions import rewards
from tiny import byte_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data_examples.md"
CHATML = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}: {{"
    " tool.function.description }}{% endfor %}<|im_end|>\n{% endif %}{% for m in messages"
    " %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part"
    " in m.content or [] %}{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{%"
    " endif %}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Example:
    """A command of a section, with what the page says about it."""

    command: str
    rows: list[dict]
    text: str = ""
    """What the model reads of the first row; empty if the page does not show it."""
    label: str = ""


def examples() -> dict[str, list[Example]]:
    """Return heading -> the commands below it."""
    found: dict[str, list[Example]] = {}
    _, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    for section in sections:
        name, _, rest = section.partition("\n")
        pattern = r"^```(\w+)\n(.*?)\n```|^The label of the first row is `(.*)`\.$"
        rows: list[dict] = []
        commands = found.setdefault(name, [])
        for kind, block, label in re.findall(pattern, rest, flags=re.DOTALL | re.MULTILINE):
            if kind == "json":
                rows = [json.loads(line) for line in block.splitlines()]
            elif kind == "bash":
                commands.append(Example(block, rows))
            elif kind == "text":
                commands[-1].text = block
            else:
                commands[-1].label = label
    return found


EXAMPLES = examples()
CASES = [
    pytest.param(example, id=f"{name}: {example.command.split()[1]}")
    for name, commands in EXAMPLES.items()
    for example in commands
]
COLUMNS = {
    "Alpaca": {"instruction", "input", "output"},
    "ShareGPT": {"id", "conversations"},
    "OpenAI messages": {"messages"},
    "UltraFeedback": {
        "prompt",
        "prompt_id",
        "chosen",
        "rejected",
        "messages",
        "score_chosen",
        "score_rejected",
    },
    "HH-RLHF": {"chosen", "rejected"},
    "OpenMathReasoning": {
        "expected_answer",
        "problem_type",
        "problem_source",
        "generation_model",
        "pass_rate_72b_tir",
        "problem",
        "generated_solution",
        "inference_mode",
        "used_in_kaggle",
    },
    "DAPO-Math-17k": {"data_source", "prompt", "ability", "reward_model", "extra_info"},
    "gsm8k": {"question", "answer"},
    "geometry3k": {"images", "problem", "answer"},
    "Calls of tools": {"messages", "tools"},
}
"""Format -> the columns as published."""


def test_the_page_has_all_formats():
    assert EXAMPLES.keys() == COLUMNS.keys()
    for name, commands in EXAMPLES.items():
        assert commands and commands[0].text, name
        assert [row.keys() == COLUMNS[name] for row in commands[0].rows] == [True] * 3, name


def load(example: Example, folder: Path):
    """Return the loaded rows, as the command of the page reads them, with the tokenizer."""
    words = shlex.split(example.command)
    assert words[0] == "lightrft"
    config = read_command_line(words[2:], words[1])
    file = folder / config.data.prompt_data
    file.write_text("".join(json.dumps(row) + "\n" for row in example.rows))
    for row in example.rows:
        for name in row.get("images", ()):
            Image.new("RGB", (8, 8)).save(folder / name)

    config.model.pretrain = "some/model"
    assert resolve(config, words[1], 1) == [], "a flag has no effect"
    section = replace(config.data, prompt_data=str(file))
    tokenizer = byte_tokenizer(marks=["<|im_start|>", "<|im_end|>", "<|image|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    if load_pairs := LOADERS.get(words[1]):
        return load_pairs(section, config.preference, tokenizer, longest=4096), tokenizer, config
    if words[1] == "train_sft":
        return load_examples(section, tokenizer, longest=4096), tokenizer, config
    return load_prompts(section, tokenizer), tokenizer, config


@pytest.mark.parametrize("example", CASES)
def test_the_first_row_is_read_as_the_page_says(example, tmp_path):
    prompts, tokenizer, config = load(example, tmp_path)
    assert len(prompts) == len(example.rows) == 3
    first = prompts[0]
    answers = [each for each in first.columns.values() if isinstance(each, Answer)]
    texts = marked_texts(first.text, answers, tokenizer)
    shown = "".join(f"⟦{text}⟧" if learned else text for text, learned in texts)
    if example.text:
        assert shown.rstrip() == example.text.rstrip()

    assert bool(example.label) == (not answers)
    if example.label:
        assert first.columns["label"] == example.label
        score = rewards[config.reward.reward]
        for prompt in prompts:
            label = prompt.columns["label"]
            responses = [f"So it is \\boxed{{{label}}}.", "So it is \\boxed{-77}."]
            if "Answer: $Answer" in prompt.text:
                responses += [f"I count.\n\nAnswer: {label}", "I count.\n\nAnswer: -77"]
            samples = [Sample(prompt, 0, [1], [0.0], text, "stop") for text in responses]
            scores = score(samples, label=[label] * len(samples))
            assert scores == [1.0, 0.0] * (len(samples) // 2)


@pytest.mark.parametrize("command", ["train_sft", "train_ppo"])
def test_images_that_no_flag_names_are_not_left_out(command, tmp_path):
    (example,) = EXAMPLES["geometry3k"]
    words = example.command.replace("--images_key images", "").replace("train_ppo", command)
    words = words.replace("--reward math", "") if command == "train_sft" else words
    with pytest.raises(DataError, match="geometry3k.jsonl:1: <image> .* add --images_key images"):
        load(replace(example, command=words), tmp_path)
