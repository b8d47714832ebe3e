"""What rows of many data sets mean to each trainer, and rows that are refused.

The expected prompts and answers are written by hand, as the data sets describe their columns.
"""

import json
import re
from pathlib import Path

import pytest
from loguru import logger
from transformers import LlamaConfig

from lightrft.app.trainer.build_data import shown_data
from lightrft.config import Config, DataSection, PreferenceSection
from lightrft.core.samples import Answer
from lightrft.data.conversations import load_examples
from lightrft.data.preferences import load_answers, load_pairs
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import DataError
from lightrft.data.rendering.forms import _warn, learned
from lightrft.data.step_labels import load_steps
from tiny import EOS, byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>"
    "{% else %};{% endif %}{% endfor %}{% if add_generation_prompt %}a>{% endif %}"
)
ASKED = [{"role": "user", "content": "Q"}]
SAID = [*ASKED, {"role": "assistant", "content": "A"}]
SHAREGPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
EMPTY = {"input": "", "system": None, "history": []}

LEARNED = {
    "Alpaca": ({"instruction": "I", "input": "Q", "output": "A", "text": "all"}, "u>I\n\nQ;a>[A$]"),
    "Alpaca without a context": ({"instruction": "Q", "output": "A"} | EMPTY, "u>Q;a>[A$]"),
    "Alpaca with a label": ({"instruction": "I", "input": "Q", "label": "A"}, "u>I\n\nQ;a>[A$]"),
    "Dolly": (
        {"instruction": "I", "context": "C", "response": "A", "category": "qa"},
        "u>I\n\nC;a>[A$]",
    ),
    "no history as JSON": ({"instruction": "Q", "output": "A", "history": "[]"}, "u>Q;a>[A$]"),
    "a history as JSON": (
        {"instruction": "Q", "output": "A", "history": '[["P", "B"]]'},
        "u>P;a>B$u>Q;a>[A$]",
    ),
    "WizardLM": ({"instruction": "Q", "output": "A"}, "u>Q;a>[A$]"),
    "OpenOrca": (
        {"id": "1", "system_prompt": "S", "question": "Q", "response": "A"},
        "s>S;u>Q;a>[A$]",
    ),
    "GSM8K": ({"question": "Q", "answer": "A\n#### 7"}, "u>Q;a>[A\n#### 7$]"),
    "MATH": ({"problem": "Q", "solution": "A", "level": "5", "type": "x"}, "u>Q;a>[A$]"),
    "MATH-500": ({"problem": "Q", "solution": "A", "answer": "7"}, "u>Q;a>[A$]"),
    "AIME": ({"ID": "1", "Problem": "Q", "Solution": "A", "Answer": 7}, "u>Q;a>[A$]"),
    "OpenMathInstruct": (
        {"problem": "Q", "generated_solution": "A", "expected_answer": "7", "problem_source": "x"},
        "u>Q;a>[A$]",
    ),
    "NuminaMath": (
        {"source": "x", "problem": "P", "solution": "B", "messages": SAID},
        "u>Q;a>[A$]",
    ),
    "OpenR1-Math": (
        {"problem": "P", "solution": "B", "answer": "7", "generations": ["C"], "messages": SAID},
        "u>Q;a>[A$]",
    ),
    "MetaMathQA": (
        {"type": "x", "query": "Q", "original_question": "P", "response": "A"},
        "u>Q;a>[A$]",
    ),
    "UltraChat": ({"prompt": "Q", "prompt_id": "1", "messages": SAID}, "u>Q;a>[A$]"),
    "ShareGPT": ({"id": "1", "conversations": SHAREGPT}, "u>Q;a>[A$]"),
    "OpenThoughts": ({"system": "S", "conversations": SHAREGPT}, "s>S;u>Q;a>[A$]"),
    "ShareGPT as JSON": ({"conversations": json.dumps(SHAREGPT)}, "u>Q;a>[A$]"),
    "HelpSteer": ({"prompt": "Q", "response": "A", "helpfulness": 3}, "u>Q;a>[A$]"),
    "TRL": ({"prompt": ASKED, "completion": SAID[1:]}, "u>Q;a>[A$]"),
    "Nemotron": ({"input": ASKED, "output": "A", "category": "math"}, "u>Q;a>[A$]"),
    "FLAN": ({"inputs": "Q", "targets": "A"}, "u>Q;a>[A$]"),
    "SQuAD-like": ({"question": "Q", "context": "C", "answer": "A"}, "u>Q\n\nC;a>[A$]"),
    "ms-swift": (
        {"system": "S", "query": "Q", "response": "A", "history": [["P", "B"]]},
        "s>S;u>P;a>B$u>Q;a>[A$]",
    ),
    "LLaMA-Factory": (
        {"instruction": "I", "input": "Q", "output": "A", "system": "S", "history": [["P", "B"]]},
        "s>S;u>P;a>B$u>I\n\nQ;a>[A$]",
    ),
    "a label of rewards": ({"messages": SAID, "label": 3}, "u>Q;a>[A$]"),
    "a score beside the answer": ({"question": "Q", "answer": "A", "label": 1}, "u>Q;a>[A$]"),
    "an answer that looks like a chat": (
        {"input": "Q", "label": json.dumps(SAID)},
        f"u>Q;a>[{json.dumps(SAID)}$]",
    ),
    "an answer of roles": (
        {"input": "Q", "label": '[{"role": "CEO", "name": "Ann"}]'},
        'u>Q;a>[[{"role": "CEO", "name": "Ann"}]$]',
    ),
    "a prompt of roles": (
        {"input": '[{"role": "user", "age": 7, "content": "x"}]', "label": "A"},
        'u>[{"role": "user", "age": 7, "content": "x"}];a>[A$]',
    ),
    "another answer": ({"input": "Q", "label": "A", "output": "B"}, "u>Q;a>[A$]"),
    "objects in a prompt": (
        {"input": '[{"role": "CEO", "name": "Ann"}]', "label": "A"},
        'u>[{"role": "CEO", "name": "Ann"}];a>[A$]',
    ),
    "a prompt that is a chat": ({"input": json.dumps(ASKED), "label": "A"}, "u>Q;a>[A$]"),
}
SCORED = {
    "the default": ({"input": "Q", "label": 7, "answer": "8"}, "u>Q;a>", 7),
    "an unknown label": ({"question": "Q", "answer": float("nan")}, "u>Q;a>", None),
    "no label": ({"prompt": "Q", "id": 1}, "u>Q;a>", None),
    "Alpaca": ({"instruction": "I", "input": "Q", "output": "A"}, "u>I\n\nQ;a>", "A"),
    "GSM8K": ({"question": "Q", "answer": "6 + 1\n#### 1,007"}, "u>Q;a>", "1007"),
    "MATH": ({"problem": "Q", "solution": "\\boxed{7}", "level": "5"}, "u>Q;a>", "\\boxed{7}"),
    "DeepScaleR": ({"problem": "Q", "solution": "B", "answer": "7"}, "u>Q;a>", "7"),
    "OpenR1-Math": (
        {"problem": "Q", "solution": "B", "answer": "7", "messages": SAID},
        "u>Q;a>",
        "7",
    ),
    "OpenMathInstruct": (
        {"problem": "Q", "generated_solution": "B", "expected_answer": "7"},
        "u>Q;a>",
        "7",
    ),
    "DAPO-Math": (
        {
            "data_source": "x",
            "prompt": ASKED,
            "ability": "MATH",
            "reward_model": {"ground_truth": "7", "style": "rule"},
            "extra_info": {"index": "1"},
        },
        "u>Q;a>",
        "7",
    ),
    "verl with JSON": (
        {"prompt": ASKED, "reward_model": json.dumps({"ground_truth": 7, "style": "rule"})},
        "u>Q;a>",
        7,
    ),
    "a reward model that is another thing": (
        {"prompt": ASKED, "reward_model": "some/model", "answer": "A"},
        "u>Q;a>",
        "A",
    ),
    "HH-RLHF": (
        {"prompt": "\n\nHuman: P\n\nAssistant: B\n\nHuman: Q\n\nAssistant:"},
        "u>P;a>B$u>Q;a>",
        None,
    ),
    "HH-RLHF with an answer": ({"prompt": "Human: Q\n\nAssistant: A"}, "u>Q;a>", "A"),
    "a text with one speaker": ({"prompt": "Human: Q"}, "u>Human: Q;a>", None),
    "DeepMath": ({"question": "Q", "final_answer": "7", "r1_solution_1": "B"}, "u>Q;a>", "7"),
    "UltraChat": ({"prompt": "Q", "prompt_id": "1", "messages": SAID}, "u>Q;a>", None),
    "messages": ({"messages": SAID}, "u>Q;a>", "A"),
    "ShareGPT": ({"conversations": [*SHAREGPT, *SHAREGPT]}, "u>Q;a>A$u>Q;a>", "A"),
    "TRL": ({"prompt": ASKED, "completion": SAID[1:]}, "u>Q;a>", "A"),
}
PAIRS = {
    "UltraFeedback": {
        "prompt": "Q",
        "chosen": SAID,
        "rejected": [*ASKED, {"role": "assistant", "content": "B"}],
        "messages": SAID,
        "score_chosen": 8.0,
    },
    "HH-RLHF": {
        "chosen": "\n\nHuman: Q\n\nAssistant: A",
        "rejected": "\n\nHuman: Q\n\nAssistant: B",
    },
    "HH-RLHF with a prompt": {
        "prompt": "\n\nHuman: Q\n\nAssistant:",
        "chosen": "A",
        "rejected": "B",
    },
    "HH-RLHF with the prompt twice": {
        "prompt": "\n\nHuman: Q\n\nAssistant:",
        "chosen": "\n\nHuman: Q\n\nAssistant: A",
        "rejected": "\n\nHuman: Q\n\nAssistant: B",
    },
    "a prompt with a space": {
        "prompt": "Q ",
        "chosen": [*ASKED, {"role": "assistant", "content": "A"}],
        "rejected": [*ASKED, {"role": "assistant", "content": "B"}],
    },
    "Orca": {"question": "Q", "chosen": "A", "rejected": "B"},
    "LLaMA-Factory": {
        "conversations": SHAREGPT[:1],
        "chosen": {"from": "gpt", "value": "A"},
        "rejected": {"from": "gpt", "value": "B"},
    },
    "ms-swift": {"messages": SAID, "rejected_response": "B"},
    "its older form": {"query": "Q", "response": "A", "rejected_response": "B"},
    "OpenAI": {
        "input": ASKED,
        "preferred_output": SAID[1:],
        "non_preferred_output": [{"role": "assistant", "content": "B"}],
    },
    "HelpSteer2": {"prompt": "Q", "response_1": "B", "response_2": "A", "preference_strength": 2},
    "HelpSteer3": {"context": ASKED, "response1": "A", "response2": "B", "overall_preference": -1},
}
JUDGED = {
    "TRL": {"prompt": ASKED, "completion": SAID[1:], "label": True},
    "ms-swift": {"messages": SAID, "label": True},
    "LLaMA-Factory": {"instruction": "Q", "input": "", "output": "A", "kto_tag": True},
    "axolotl": {"prompt": "Q", "response": "A", "label": True},
}
REFUSED = {
    "unknown columns": ("answer", {"title": "Q", "body": "A"}, "--input_key title"),
    "two questions": (
        "answer",
        {"question": "Q", "problem": "P", "answer": "A"},
        "each of the columns question, problem could be the prompt, and they differ.*--input_key",
    ),
    "a question and an input": (
        "answer",
        {"question": "Q", "input": "4", "output": "5"},
        "each of the columns input, question could be the prompt",
    ),
    "two answers": (
        "answer",
        {"instruction": "Q", "output": "A", "response": "B"},
        "each of the columns output, response could be the answer, and they differ.*--label_key",
    ),
    "two right answers": (
        "prompt",
        {"question": "Q", "answer": "A", "label": 1},
        "each of the columns label, answer could be the answer",
    ),
    "choices": (
        "prompt",
        {"question": "Q", "choices": ["x", "y"], "answer": 1},
        "the column 'choices' belongs to the question in 'question'.*--input_key",
    ),
    "choices in columns of their own": (
        "prompt",
        {"question": "Q", "A": "x", "B": "y", "answer": "A"},
        "the column 'B' belongs to the question in 'question'.*--input_key",
    ),
    **{
        f"choices called {name}": (
            "prompt",
            {"question": "Q", name: "y", "label": "1"},
            f"the column {re.escape(repr(name))} belongs to the question in 'question'",
        )
        for name in ("B)", "(b)", "option_2", "Choice2", "ending1", "answerB", "distractor3")
    },
    "candidates": (
        "answer",
        {"question": "Q", "candidates": ["x", "y"], "answer": "A"},
        "the column 'candidates' belongs",
    ),
    "an odd history": (
        "answer",
        {"instruction": "Q", "output": "A", "history": [["P", "B", "C"]]},
        r"'history' is not pairs of texts: \[\['P', 'B', 'C'\]\]",
    ),
    "a history without an answer": (
        "answer",
        {"instruction": "Q", "output": "A", "history": [["P", None]]},
        "'history' is not pairs of texts",
    ),
    "an invisible question": ("prompt", {"input": "\u200b\ufeff"}, "the prompt is empty"),
    "an invisible message": (
        "prompt",
        {"input": [{"role": "user", "content": "\u200b"}]},
        "message 1 of 1, of role 'user', is empty",
    ),
    "an invisible answer": ("answer", {"input": "Q", "label": "\u2060"}, "no text to train on"),
    "an invisible turn": (
        "answer",
        {"messages": [*ASKED, {"role": "assistant", "content": "\u200b "}]},
        "message 2 of 2, of role 'assistant', has no content",
    ),
    "an invisible answer of a pair": (
        "pair",
        {"prompt": "Q", "chosen": "A", "rejected": "\u200b"},
        "the column 'rejected' .--rejected_key. is empty",
    ),
    "an answer that is better by no number": (
        "pair",
        PAIRS["HelpSteer2"] | {"preference_strength": float("nan")},
        "the column 'preference_strength' is nan: no answer is better",
    ),
    "an answer that is better by true": (
        "pair",
        PAIRS["HelpSteer2"] | {"preference_strength": True},
        "the column 'preference_strength' is True: no answer is better",
    ),
    "a history that is no list": (
        "answer",
        {"instruction": "Q", "output": "A", "history": '{"a": 1}'},
        "'history' is neither text nor a list",
    ),
    "a system message in a list": (
        "answer",
        {"system": ["S"], "question": "Q", "response": "A"},
        "the column 'system' belongs",
    ),
    "a system message of a chat in a list": (
        "answer",
        {"system": ["S"], "messages": SAID},
        "the system message is no text",
    ),
    "a context that is no text": (
        "prompt",
        {"question": "Q", "context": {"title": ["x"]}, "answer": "A"},
        "the column 'context' belongs to the question",
    ),
    "a prompt with its answer": (
        "prompt",
        {"prompt": SAID, "label": "A"},
        "the last message of 'prompt' is a turn of the assistant",
    ),
    "an answer behind an answer": (
        "answer",
        {"prompt": SAID, "completion": "B"},
        "the last message of 'prompt' is a turn of the assistant",
    ),
    "an empty question": ("prompt", {"input": " \n", "label": "7"}, "the prompt is empty"),
    "an empty question of a form": (
        "answer",
        {"instruction": "", "input": " ", "output": "7"},
        "the prompt is empty",
    ),
    "an empty message": (
        "prompt",
        {"input": [{"role": "user", "content": " "}], "label": "7"},
        "message 1 of 1, of role 'user', is empty",
    ),
    "an empty message in a conversation": (
        "answer",
        {"messages": [{"role": "user", "content": ""}, SAID[1], *SAID]},
        "message 1 of 4, of role 'user', is empty",
    ),
    "an empty answer": ("answer", {"input": "Q", "label": " "}, "no text to train on.*--label_key"),
    "an empty turn": (
        "answer",
        {"messages": [*ASKED, {"role": "assistant", "content": "\n"}]},
        "message 2 of 2, of role 'assistant', has no content",
    ),
    "a number to learn": (
        "answer",
        {"messages": ASKED, "label": 3},
        "no text to train on in the answer column .--label_key.: 3; the row has messages, label",
    ),
    "an empty answer of a pair": (
        "pair",
        {"prompt": "Q", "chosen": " ", "rejected": "B"},
        "the column 'chosen' .--chosen_key. is empty",
    ),
    "a pair whose prompt is another one": (
        "pair",
        {
            "prompt": "P",
            "chosen": SAID,
            "rejected": [*ASKED, {"role": "assistant", "content": "B"}],
        },
        "the prompt in 'prompt' is not in the conversation of 'chosen'",
    ),
    "a pair whose prompt has more messages": (
        "pair",
        {
            "prompt": [{"role": "system", "content": "S"}, *ASKED],
            "chosen": SAID,
            "rejected": [*ASKED, {"role": "assistant", "content": "B"}],
        },
        "the prompt in 'prompt' is not in the conversation of 'chosen'",
    ),
    "a pair of HH-RLHF whose prompt is another one": (
        "pair",
        PAIRS["HH-RLHF"] | {"prompt": "\n\nHuman: P\n\nAssistant:"},
        "the prompt in 'prompt' is not in the conversation of 'chosen'",
    ),
    "a judged answer whose prompt is another one": (
        "judged",
        {"prompt": "P", "completion": SAID, "label": True},
        "the prompt in 'prompt' is not in the conversation of 'completion'",
    ),
    "a right answer of verl that is no JSON": (
        "prompt",
        {"prompt": "Q", "reward_model": "{'ground_truth': 7}"},
        "reward_model: not valid JSON",
    ),
    "a pair without a question": ("pair", {"prompt": " ", "chosen": "A", "rejected": "B"}, "empty"),
    "no preference": (
        "pair",
        {"prompt": "Q", "response_1": "A", "response_2": "B", "preference_strength": 0},
        "the column 'preference_strength' is 0: no answer is better",
    ),
    "an empty answer of KTO": (
        "judged",
        {"prompt": "Q", "completion": " ", "label": True},
        "empty",
    ),
    "an empty step": (
        "steps",
        {"prompt": "Q", "completions": ["a", " "], "labels": [1, 1]},
        "list",
    ),
}
LOADERS = {
    "prompt": load_prompts,
    "answer": lambda *given: load_examples(*given, longest=999),
    "pair": lambda section, reader: load_pairs(section, PreferenceSection(), reader, longest=999),
    "judged": lambda section, reader: load_answers(
        section, PreferenceSection(), reader, longest=999
    ),
    "steps": lambda section, reader: load_steps(section, PreferenceSection(), reader, longest=999),
}


def load(folder: Path, purpose: str, *rows: dict, **options):
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = byte_tokenizer()
    reader.chat_template = TEMPLATE
    section = DataSection(prompt_data=str(file), **{"apply_chat_template": True} | options)
    return LOADERS[purpose](section, reader)


def shown(token_ids) -> str:
    return "".join("$" if token == EOS else chr(token) for token in token_ids)


def with_answer(prompt, answer) -> str:
    """Return prompt and answer; what is learned stands in brackets."""
    if isinstance(answer, str):
        return f"{shown(prompt.token_ids)}[{answer}$]"
    marked = [
        f"[{shown([token])}]" if learned else shown([token])
        for token, learned in zip(answer.token_ids, answer.learned, strict=True)
    ]
    return (shown(prompt.token_ids) + "".join(marked)).replace("][", "")


@pytest.mark.parametrize("name", LEARNED)
def test_rows_to_learn(tmp_path, name):
    row, expected = LEARNED[name]
    (example,) = load(tmp_path, "answer", row)
    assert isinstance(example.columns["label"], Answer)
    assert with_answer(example, example.columns["label"]) == expected


@pytest.mark.parametrize("name", SCORED)
def test_rows_to_score(tmp_path, name):
    row, text, label = SCORED[name]
    (prompt,) = load(tmp_path, "prompt", row)
    assert (prompt.text.replace("<eos>", "$"), prompt.columns.get("label")) == (text, label)


@pytest.mark.parametrize("name", PAIRS)
def test_rows_with_pairs(tmp_path, name):
    row = PAIRS[name]
    (pair,) = load(tmp_path, "pair", row, input_key="context" if "context" in row else None)
    both = [with_answer(pair, pair.columns[each]) for each in ("chosen", "rejected")]
    assert both == ["u>Q;a>[A$]", "u>Q;a>[B$]"]


@pytest.mark.parametrize("name", JUDGED)
def test_rows_with_one_judged_answer(tmp_path, name):
    (judged,) = load(tmp_path, "judged", JUDGED[name])
    assert with_answer(judged, judged.columns["answer"]) == "u>Q;a>[A$]"
    assert judged.columns["desirable"] is True


@pytest.mark.parametrize("name", REFUSED)
def test_refused_rows(tmp_path, name):
    purpose, row, message = REFUSED[name]
    with pytest.raises(DataError, match=rf"data.jsonl:1: (?s:.*){message}"):
        load(tmp_path, purpose, row)


PLAIN = {
    "Alpaca": ({"instruction": "I", "input": "Q", "output": "A"}, "I\n\nQ[A$]"),
    "OpenOrca": ({"system_prompt": "S", "question": "Q", "response": "A"}, "S\n\nQ[A$]"),
    "NuminaMath": ({"problem": "Q", "solution": "A", "messages": SAID}, "Q[A$]"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_rows_without_a_chat_template(tmp_path, name):
    row, expected = PLAIN[name]
    (example,) = load(tmp_path, "answer", row, apply_chat_template=False)
    assert with_answer(example, example.columns["label"]) == expected


FLAGS = {
    "the answer alone": ({"label_key": "output"}, "u>I\n\nQ;a>[A$]"),
    "the prompt alone": ({"input_key": "input"}, "u>Q;a>[A$]"),
    "both": ({"input_key": "instruction", "label_key": "note"}, "u>I;a>[N$]"),
    "the prompt, beside a label": ({"input_key": "other"}, "u>O;a>[L$]"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_have_precedence(tmp_path, name):
    flags, expected = FLAGS[name]
    said: list[str] = []
    handler = logger.add(said.append, level="WARNING", format="{message}")
    _warn.cache_clear()
    row = {"instruction": "I", "input": "Q", "output": "A", "note": "N"}
    row |= {"other": "O", "label": "L"} if flags.get("input_key") == "other" else {}
    (example,) = load(tmp_path, "answer", row, **flags)
    logger.remove(handler)
    assert with_answer(example, example.columns["label"]) == expected
    leaves_out = flags.get("input_key") == "instruction"
    assert ["'input' is not a part of the prompt" in line for line in said] == [True] * leaves_out


def test_a_flag_says_whether_a_text_has_turns(tmp_path):
    row = {"prompt": "Human: Q\n\nAssistant: A"}
    (prompt,) = load(tmp_path, "prompt", row, json_chats="never")
    assert prompt.text == f"u>{row['prompt']};a>"
    (prompt,) = load(tmp_path, "prompt", row, apply_chat_template=False)
    assert prompt.text == row["prompt"]


def test_pairs_of_texts_begin_with_their_prompt(tmp_path):
    row = PAIRS["HH-RLHF"] | {"prompt": "\n\nHuman: P\n\nAssistant:"}
    with pytest.raises(DataError, match="'prompt' is not in the conversation of 'chosen'"):
        load(tmp_path, "pair", row, apply_chat_template=False)


def test_a_flag_says_whether_a_text_is_a_chat(tmp_path):
    chat = json.dumps(SAID[:1])
    row = {"input": chat, "label": json.dumps(SAID[1:])}
    for flag, expected in (
        ("auto", f"u>Q;a>[{row['label']}$]"),
        ("never", f"u>{chat};a>[{row['label']}$]"),
        ("always", "u>Q;a>[A$]"),
    ):
        (example,) = load(tmp_path, "answer", row, json_chats=flag)
        assert with_answer(example, example.columns["label"]) == expected


LINES = {
    "answer": (
        [LEARNED["Alpaca"][0]] * 3,
        "Alpaca: instruction + input -> output; 3 rows of 2 files",
    ),
    "prompt": (
        [SCORED["DAPO-Math"][0], SCORED["GSM8K"][0]],
        "verl: prompt -> reward_model.ground_truth (1 rows), GSM8K: question -> answer (1 rows);"
        " 2 rows of 2 files",
    ),
    "pair": ([PAIRS["UltraFeedback"]], "TRL: prompt -> chosen, rejected; 1 rows"),
    "judged": ([JUDGED["TRL"]], "TRL: prompt -> completion, label; 1 rows"),
}


@pytest.mark.parametrize("purpose", LINES)
def test_the_log_says_how_rows_were_understood(tmp_path, purpose):
    rows, expected = LINES[purpose]
    for number, some in enumerate((rows[:1], rows[1:])):
        if some:
            lines = "".join(json.dumps(row) + "\n" for row in some)
            (tmp_path / f"train-{number}.jsonl").write_text(lines)
    reader = byte_tokenizer()
    reader.chat_template = TEMPLATE
    said: list[str] = []
    handler = logger.add(said.append, level="INFO", format="{message}")
    LOADERS[purpose](DataSection(prompt_data=str(tmp_path), apply_chat_template=True), reader)
    logger.remove(handler)
    (line,) = (line.strip() for line in said if "row" in line)
    assert line.startswith(f"--prompt_data {tmp_path}: {expected}")


@pytest.mark.parametrize(
    ("options", "text", "warns"),
    [
        ({}, "1+1=", True),
        ({"apply_chat_template": True}, "1+1=", False),
        ({"input_template": "Q: {}"}, "1+1=", False),
        ({}, "<bos>rendered", False),
    ],
)
def test_texts_for_a_tokenizer_with_a_chat_template(tmp_path, options, text, warns):
    said: list[str] = []
    handler = logger.add(said.append, level="WARNING", format="{message}")
    row = {"input": text, "label": "2"}
    load(tmp_path, "answer", row, **{"apply_chat_template": False} | options)
    logger.remove(handler)
    assert ["add --apply_chat_template" in line for line in said] == [True] * warns


SHOWN = {
    "train_sft": (LEARNED["Alpaca"][0], "u>I\n\nQ;a>", ["A<eos>"]),
    "train_ppo": (SCORED["GSM8K"][0], "u>Q;a>", []),
    "train_dpo": (PAIRS["Orca"], "u>Q;a>", ["A<eos>", "B<eos>"]),
    "train_rm": (PAIRS["HH-RLHF"], "u>Q;a>", ["A<eos>", "B<eos>"]),
    "train_kto": (JUDGED["ms-swift"], "u>Q;a>", ["A<eos>"]),
    "train_prm": (
        {"prompt": "Q", "completions": ["a", "b"], "labels": [True, False]},
        "u>Q;a>",
        ["\n", "<eos>"],
    ),
}


@pytest.mark.parametrize("command", SHOWN)
def test_a_row_is_shown_with_what_is_learned(tmp_path, command):
    row, prompt, expected = SHOWN[command]
    reader = byte_tokenizer()
    reader.chat_template = TEMPLATE
    reader.save_pretrained(tmp_path / "model")
    LlamaConfig().save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    config = Config.of(
        pretrain=str(tmp_path / "model"), prompt_data=str(tmp_path), apply_chat_template=True
    )
    (line,), texts = shown_data(config, command)
    assert line.startswith(f"--prompt_data {tmp_path}: ") and line.endswith("1 rows (train.jsonl)")
    assert texts[0] == (prompt, False)
    assert [text for text, is_learned in texts if is_learned] == expected


def test_columns_of_a_row_are_not_changed():
    row = {"instruction": "I", "input": "Q", "output": "A", "history": [["P", "B"]]}
    before = json.dumps(row)
    learned(DataSection(apply_chat_template=True), row)
    assert json.dumps(row) == before


def test_rewards_receive_all_columns_but_the_prompt(tmp_path):
    row = {"question": "Q", "context": "C", "system": "S", "answer": "A", "id": 1}
    (prompt,) = load(tmp_path, "prompt", row)
    others = {name: value for name, value in row.items() if name != "question"}
    assert prompt.columns == others | {"label": "A"}
