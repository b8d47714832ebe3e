"""What a reward may be and how it is checked; every error names the flag and the path."""

import json
import math
import multiprocessing
import sys
import textwrap
import time
from dataclasses import replace

import pytest
from loguru import logger

from lightrft.app.run.run import Run
from lightrft.app.trainer.build_data import load_rewarded
from lightrft.config import Config, ConfigError, DataSection, RewardSection
from lightrft.core.samples import Prompt, Sample
from lightrft.rewards.functions import rewards
from lightrft.rewards.runner import RewardRunner
from tiny import byte_tokenizer


def sample(text: str, finish_reason: str = "stop", **columns) -> Sample:
    prompt = Prompt(index=0, text="question", token_ids=[1], columns=columns)
    return Sample(
        prompt=prompt,
        group=0,
        token_ids=[1],
        logprobs=[0.0],
        text=text,
        finish_reason=finish_reason,
    )


def runner(name: str, *, chat: bool = False, **settings) -> RewardRunner:
    """Return a runner that calls in this process unless told otherwise.

    test_pool.py has the worker processes.
    """
    return RewardRunner(name, section=RewardSection(**{"reward_workers": 0} | settings), chat=chat)


def judged(name: str, *samples: Sample) -> list[float]:
    runner(name)(list(samples))
    return [s.reward for s in samples]


def test_exact_match():
    samples = [sample(text, label="580") for text in ("580", "58", "580 ")]
    assert judged("exact_match", *samples, sample("580", "length", label="580")) == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert judged("exact_match", sample("7", label=7)) == [1.0]  # a number in the data file


GSM8K = [
    ("The answer is 72.", "72", 1.0),
    ("72", "#### 72", 1.0),
    ("first 10 and 20, so 30 in all", "30", 1.0),
    ("30, that is 10 + 20", "30", 0.0),
    ("It is -5", "-5", 1.0),
    ("It is 5", "-5", 0.0),
    ("10-3", "3", 1.0),
    ("x = 10 - 3 = 7", "7", 1.0),
    ("$1,234,567.50 in all", "1234567.5", 1.0),
    ("1234", "1,234", 1.0),
    ("one of 1, 2, 3", "3", 1.0),
    ("one of 1,2,3", "3", 1.0),
    ("5, and no more,", "5", 1.0),
    ("0.5", ".5", 1.0),
    ("2.50", "2.5", 1.0),
    ("2.51", "2.5", 0.0),
    ("72.0", "72", 1.0),
    ("no number here", "72", 0.0),
    ("no number here", "none here either", 0.0),
    ("", "", 0.0),
    ("72", "no number", 0.0),
    ("9" * 400, "72", 0.0),
    ("9" * 10_000, "9" * 10_000, 1.0),
    ("\u22125", "-5", 1.0),
    ("10\u22123", "3", 1.0),
    ("9007199254740993", "9007199254740992", 0.0),
    ("9007199254740993", "9007199254740993.0", 1.0),
    ("1/2", "2", 0.0),
    ("1/2", "0.5", 1.0),
    ("it is -3/4.", "-0.75", 1.0),
    ("\u22122/4", "-1/2", 1.0),
    ("1,000/4", "250", 1.0),
    ("1/3", "0.3333333333333333", 0.0),
    ("on 1/2/2024", "2024", 1.0),
    ("5/0", "0", 1.0),
    ("km/2", "2", 1.0),
]


@pytest.mark.parametrize("text, label, reward", GSM8K)
def test_gsm8k(text, label, reward):
    assert judged("gsm8k", sample(text, label=label)) == [reward]


def test_gsm8k_takes_a_number_as_label():
    assert judged("gsm8k", sample("so 72", label=72), sample("so 72", label=71.5)) == [1.0, 0.0]


def longest(samples, *, label, weight, **columns):
    """A user's reward: it gets the columns as lists, aligned with the samples."""
    assert columns == {"level": [1, 2]}
    return [
        len(s.text) * w if right == s.text else 0
        for s, right, w in zip(samples, label, weight, strict=True)
    ]


def test_columns_arrive_by_name_aligned():
    samples = [
        sample("ab", label="ab", weight=0.5, level=1),
        sample("abc", label="abc", weight=2.0, level=2),
    ]
    assert judged(f"{__file__}:longest", *samples) == [1.0, 6.0]


def test_a_column_that_not_every_sample_has_is_left_out():
    with pytest.raises(
        ValueError,
        match="--reward exact_match: TypeError: .*label.* The data has the columns level",
    ):
        judged("exact_match", sample("a", label="a", level=1), sample("b", level=1))


def test_a_reward_by_module_path_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "mine_for_tests.py").write_text(
        "def half(samples, **columns):\n    return [0.5 for _ in samples]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("mine_for_tests:half", f"{tmp_path}/mine_for_tests.py:half"):
        assert judged(path, sample("a"), sample("b")) == [0.5, 0.5]
    sys.modules.pop("mine_for_tests")


def write(tmp_path, body: str) -> str:
    head = "import torch\nNOT_CALLABLE = 5\ndef f(samples, **columns):\n"
    (tmp_path / "reward.py").write_text(head + textwrap.indent(body, "    "))
    return f"{tmp_path}/reward.py:f"


def test_numbers_of_any_type(tmp_path):
    assert judged(
        write(tmp_path, "return torch.tensor([1.5, -2.0])"), sample("a"), sample("b")
    ) == [1.5, -2.0]
    assert type(sample("a").reward) is float
    path = tmp_path / "other.py"
    path.write_text("def f(samples, **columns):\n    return [True, 3]\n")
    found = judged(f"{path}:f", sample("a"), sample("b"))
    assert found == [1.0, 3.0] and all(type(value) is float for value in found)


BROKEN = {
    "too few": ("return [1.0]", r"\[1.0\] is not a list of 2 rewards, one per sample"),
    "too many": ("return [1.0, 2.0, 3.0]", r"\[1.0, 2.0, 3.0\] is not a list of 2 rewards"),
    "nothing": ("pass", "None is not a list of 2 rewards"),
    "one number": ("return 1.0", "1.0 is not a list of 2 rewards"),
    "NaN": ("return [1.0, float('nan')]", "nan is not a finite number, for the response 'second'"),
    "infinity": (
        "return [float('-inf'), 1.0]",
        "-inf is not a finite number, for the response 'first'",
    ),
    "a word": ("return [1.0, 'good']", "'good' is not a finite number"),
    "a number as text": ("return [1.0, '2.0']", "'2.0' is not a finite number"),
    "beyond float32": (
        "return [1.0, 1e300]",
        r"1e\+300 is larger than 1e\+18, for the response 'second' to the prompt 'question'",
    ),
    "a sum beyond float32": (
        "return [1.0, {'a': 9e17, 'b': 9e17}]",
        r"1.8e\+18 is larger than 1e\+18",
    ),
    "a large integer": ("return [1.0, 10 ** 400]", "1000.* is not a finite number"),
    "a row": ("return torch.ones(2, 3)", r"tensor\(\[1., 1., 1.\]\) is not a finite number"),
    "a tensor without rows": (
        "return torch.tensor(1.0)",
        r"tensor\(1.\) is not a list of 2 rewards",
    ),
    "components": (
        "return {'format': [1, 2], 'answer': [0, 1]}",
        "{.*} is not a list .*; to return components of a reward",
    ),
    "rewards by row": ("return {0: 1.0, 1: 2.0}", "{0: 1.0, 1: 2.0} is not a list of 2 rewards"),
    "a text": ("return '12'", "'12' is not a list of 2 rewards"),
    "a set": ("return {1.0, 2.0}", r"{1.0, 2.0} is not a list of 2 rewards"),
    "None": ("return [None, 1.0]", "None is not a finite number"),
    "its own error": (
        "return [1 / 0]",
        r"ZeroDivisionError: division by zero, at /.*/reward.py:\d+ \(f\)",
    ),
    "its own error, of another's file": (
        "import json; json.loads('{')",
        r"JSONDecodeError: .*, at /.*/reward.py:\d+ \(f\)",
    ),
    "its own key": (
        "return [columns['answer']]",
        r"KeyError: 'answer', at .*:\d+ \(f\), for .*\. The data has .* label",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_reward_may_not_return(tmp_path, case):
    body, message = BROKEN[case]
    path = write(tmp_path, body)
    with pytest.raises(ConfigError, match=f"--reward {path}: {message}"):
        judged(path, sample("first", label="x"), sample("second", label="y"))


def test_unknown_names_are_refused(tmp_path):
    path = write(tmp_path, "return []")
    for name, message in [
        ("gsm8", "--reward gsm8: no reward of this name; did you mean 'gsm8k'"),
        (
            "no_such_package.rewards:f",
            "--reward no_such_package.rewards:f: cannot import 'no_such_package.rewards'",
        ),
        ("math:nothing", "--reward math:nothing: 'math' has no object 'nothing'"),
        (f"{tmp_path}/absent.py:f", "absent.py:f: no file .*/absent.py"),
        (
            path.removesuffix(":f"),
            (
                r"no reward of this name; add the name of the function: --reward"
                r" .*/reward.py:function\. Choices"
            ),
        ),
        (path.replace(":f", ":g"), "reward.py' has no object 'g'"),
    ]:
        with pytest.raises(ValueError, match=message):
            runner(name)

    with pytest.raises(ValueError, match="NOT_CALLABLE: .*not callable"):
        judged(path.replace(":f", ":NOT_CALLABLE"), sample("a"))


def test_without_samples_no_function_is_called(tmp_path):
    runner(write(tmp_path, "raise SystemExit"))([])


def hangs(samples, **columns):
    if samples[0].text == "bad":
        time.sleep(60)
    return [1.0] * len(samples)


def hung(log: str) -> None:
    """End the process."""
    logger.remove()
    logger.add(log, format="{message}")
    judge = runner(f"{__name__}:hangs", reward_minutes=2 / 60)
    good = [sample("good")]
    bad = [sample("bad")]
    judge.begin(good)
    judge.begin(bad)
    judge.finish(good + bad)


def test_a_call_that_hangs_in_this_process_ends_it(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=hung, args=(f"{tmp_path}/log",))
    process.start()
    process.join(120)
    assert process.exitcode == 2
    said = (tmp_path / "log").read_text()
    assert (
        f"--reward {__name__}:hangs: a call has taken more than 2 s (--reward_minutes), for the"
        " response 'bad'" in said
    )
    assert (
        " to the prompt 'question' (row 0). It is at " in said
        and "(hangs) < " in said
        and "test_rewards.py:" in said
    )


# -- signatures


def test_a_signature_that_does_not_fit_is_found_before_anything_is_loaded():
    def needs(samples, label, answer, *, weight=1, **columns):
        """Needs columns, and the data has only the label."""

    def closed(samples, label):
        """Takes no other column."""

    def nothing(**columns):
        """Takes no samples."""

    def late(completions, solution, **kwargs):
        """Is TRL's, with a column that is not there."""

    def scored(solution_str, ground_truth, threshold):
        """Is verl's, with an argument that nobody gives."""

    prompts = [sample("", label="1", level=2).prompt]
    for number, (function, says) in enumerate(
        {
            needs: (
                r"the function needs answer: its signature is \(samples, .*\)\. The data has the"
                r" columns label, level"
            ),
            closed: "the function does not take level: add \\*\\*columns to",
            nothing: "the function has no parameter for samples",
            late: "the function needs solution",
            scored: "the function needs threshold",
            5: "5 is not callable",
        }.items()
    ):
        rewards.register(f"unfit{number}")(function)
        with pytest.raises(ConfigError, match=f"--reward unfit{number}: {says}"):
            runner(f"unfit{number}").check(prompts)

    for name in ("exact_match", "gsm8k", "none", f"{__file__}:steps"):
        runner(name).check(prompts)
    with pytest.raises(
        ConfigError, match="exact_match: the function needs label: .* columns level"
    ):
        runner("exact_match").check([*prompts, sample("", level=2).prompt])


TRL = """
def plain(completions, prompts, answer, **kwargs):
    assert prompts == ["question"] * 2 and set(kwargs) == {"completion_ids", "label"}, (prompts, kwargs)
    return [float(text == right) for text, right in zip(completions, answer)]

def undecided(completions, answer, **kwargs):
    return [None if text != right else 1.0 for text, right in zip(completions, answer)]

def chat(prompts, completions, answer):
    contents = [completion[0]["content"] for completion in completions]
    assert prompts[0] == [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert prompts[1] == [{"role": "user", "content": "{}"}]
    return [float(text == right) for text, right in zip(contents, answer)]
"""
OPENRLHF = """
import torch
def tensor(queries, prompts, labels):
    assert [query.removeprefix(prompt) for query, prompt in zip(queries, prompts)] == ["a", "b"], queries
    return torch.tensor([len(query) + (label == "x") for query, label in zip(queries, labels)])

def logs(queries, prompts, labels, **kwargs):
    return {"rewards": tensor(queries, prompts, labels), "scores": torch.ones(2), "extra_logs": {"length": torch.zeros(2)}}
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] == 3
    return float(solution_str == ground_truth)

def detailed(solution_str, ground_truth, **kwargs):
    return {"score": compute_score(solution_str=solution_str, ground_truth=ground_truth, **kwargs), "acc": 7}
"""
INFO = {"data_source": "openai/gsm8k", "extra_info": {"index": 3}}
CONVENTIONS = {
    "TRL": (TRL, "plain", {"answer": "a", "label": "x"}, [1, 0]),
    "TRL, without an opinion": (TRL, "undecided", {"answer": "a"}, [1, 0]),
    "TRL, with a chat template": (TRL, "chat", {"answer": "b", "label": "x", "level": 1}, [0, 1]),
    "OpenRLHF": (OPENRLHF, "tensor", {"label": "x", "level": 1}, [10, 10]),
    "OpenRLHF, with logs": (OPENRLHF, "logs", {"label": "y"}, [9, 9]),
    "verl": (VERL, "compute_score", {"label": "b", **INFO}, [0, 1]),
    "verl, with details": (VERL, "detailed", {"ground_truth": "a", "label": "b", **INFO}, [1, 0]),
    "verl, with its data": (
        VERL,
        "compute_score",
        {"reward_model": {"ground_truth": "b"}, **INFO},
        [0, 1],
    ),
}


@pytest.mark.parametrize("case", CONVENTIONS)
def test_rewards_of_other_tools(tmp_path, case):
    source, name, columns, expected = CONVENTIONS[case]
    (tmp_path / "theirs.py").write_text(source)
    judge = runner(f"{tmp_path}/theirs.py:{name}", chat="chat" in case)
    samples = [sample("a", **columns), sample("b", **columns)]
    if judge.function.reads_messages:
        chat = [{"role": "system", "content": "S"}, {"role": "human", "content": "U"}]
        for one, given in zip(samples, (chat, "{}"), strict=True):
            one.prompt.columns["prompt"] = given
    judge.check([one.prompt for one in samples])
    judge(samples)
    assert [one.reward for one in samples] == expected


def test_known_names():
    assert {"exact_match", "gsm8k"} <= set(rewards.names())


def steps(samples, **columns):
    return [[None, 0.5, None], [1.0, None, 0.25], 2.0]


def test_a_response_may_be_rewarded_step_by_step():
    samples = [replace(sample(""), token_ids=[1, 2, 3]) for _ in range(3)]
    assert judged(f"{__file__}:steps", *samples) == [0.5, 1.25, 2.0]
    assert [s.steps for s in samples] == [[(1, 0.5)], [(0, 1.0), (2, 0.25)], [(2, 2.0)]]
    assert replace(samples[2], token_ids=[]).steps == [(-1, 2.0)]


def test_judging_again_forgets_the_steps():
    samples = [replace(sample("", label=""), token_ids=[1, 2, 3]) for _ in range(3)]
    judged(f"{__file__}:steps", *samples)
    judged("exact_match", *samples)
    assert [s.steps for s in samples] == [[(2, 1.0)]] * 3


@pytest.mark.parametrize("length", [2, 4])
def test_steps_are_checked(length):
    samples = [replace(sample("what was said"), token_ids=[1] * length) for _ in range(3)]
    with pytest.raises(ValueError, match=f"not a list of {length} numbers or None.*what was said"):
        judged(f"{__file__}:steps", *samples)


def unsaid(samples, **columns):
    return [[None, None] for _ in samples]


def infinite(samples, **columns):
    return [[None, float("inf")] for _ in samples]


@pytest.mark.parametrize(
    "name, message", [("unsaid", "at least one number"), ("infinite", "not a finite number")]
)
def test_steps_without_a_number(name, message):
    with pytest.raises(ValueError, match=message):
        judged(f"{__file__}:{name}", replace(sample(""), token_ids=[1, 2]))


def components(samples, **columns):
    return [{"format": 0.1, "answer": 1.0}, {"format": 0.1}, {}]


def reordered(samples, **columns):
    values = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]
    return [
        turn if len(samples[0].token_ids) == 3 else dict(zip("abc", turn, strict=True))
        for turn in values
    ]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1]])
def test_equal_components_in_another_order_are_an_equal_reward(tokens):
    samples = [sample(""), sample("")]
    for each in samples:
        each.token_ids = tokens
    first, second = judged(f"{__file__}:reordered", *samples)
    assert first == second


def test_a_reward_may_have_components():
    samples = [sample("") for _ in range(3)]
    assert judged(f"{__file__}:components", *samples) == [1.1, 0.1, 0.0]
    assert samples[0].reward_components == {"format": 0.1, "answer": 1.0}
    judged("exact_match", *[replace(s, prompt=sample("", label="").prompt) for s in samples])


def test_a_component_that_is_not_a_number():
    def bad(samples, **columns):
        return [{"format": "well"}]

    rewards.register("bad components")(bad)
    with pytest.raises(ValueError, match="'well' is not a finite number"):
        judged("bad components", sample(""))


def of_verl(solution_str, ground_truth):
    return 0.0


def of_openrlhf(queries, prompts, labels):
    return [0.0] * len(queries)


def of_trl(completions, label, **kwargs):
    return [0.0] * len(completions)


def with_default(samples, label=None, **columns):
    return [0.0] * len(samples)


def any_columns(samples, **columns):
    return [0.0] * len(samples)


@pytest.mark.parametrize("columns", [{}, {"label": None}, {"label": math.nan}])
def test_a_row_without_the_right_answer_is_named_where_the_function_requires_it(columns):
    prompt = sample("", level=2, **columns).prompt
    for name in (
        "exact_match",
        "gsm8k",
        *(f"{__file__}:{name}" for name in ("of_verl", "of_openrlhf", "of_trl")),
    ):
        problem = runner(name).row_problem(prompt)
        assert (
            problem.startswith(f"--reward {name}: ")
            and "label" in problem
            and "its signature is (" in problem
        ), problem
        assert runner(name).row_problem(sample("", label="", **{"level": 2}).prompt) is None

    for name in (
        "none",
        f"{__file__}:with_default",
        f"{__file__}:any_columns",
        "http://127.0.0.1:1/reward",
    ):
        assert runner(name).row_problem(prompt) is None


def of_verl_in_batches(data_sources, solution_strs, ground_truths, extra_infos):
    return [
        {"score": float(text == right), "acc": 9}
        for text, right in zip(solution_strs, ground_truths, strict=True)
    ]


def of_easy_r1(reward_inputs, format_weight=0.5):
    return [{"overall": _overall(one), "format": 9} for one in reward_inputs]


def of_easy_r1_alone(reward_input):
    return {"overall": _overall(reward_input), "format": 9}


def _overall(reward_input):
    assert reward_input["response_length"] == 1
    return float(reward_input["response"] == reward_input["ground_truth"])


@pytest.mark.parametrize("name", ["of_verl_in_batches", "of_easy_r1", "of_easy_r1_alone"])
@pytest.mark.parametrize(
    "column", ["label", "ground_truth", "reward_model", "reward_model in JSON"]
)
def test_functions_for_verl_and_easy_r1_are_called_as_there(name, column):
    rows = {
        "reward_model": {"reward_model": {"ground_truth": "7", "style": "rule"}},
        "reward_model in JSON": {
            "reward_model": '{"ground_truth": "7", "style": "rule"}',
            "extra_info": '{"index": 1}',
        },
    }
    columns = rows.get(column, {column: "7"})
    samples = [sample(text, **columns) for text in ("7", "8")]
    judge = runner(f"{__file__}:{name}")
    judge.check([one.prompt for one in samples])
    assert judge.row_problem(samples[0].prompt) is None
    judge(samples)
    assert [one.reward for one in samples] == [1.0, 0.0] and not samples[0].reward_components

    for null in (
        {"label": None},
        {"reward_model": '{"ground_truth": null}'},
        {"reward_model": "rule"},
        {"input": "7"},
    ):
        assert judge.row_problem(sample("", **null).prompt), null


def test_the_extra_information_of_verl_may_be_json(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(solution_str, ground_truth, extra_info):\n    return"
        " float(extra_info['index'])\n"
    )
    assert judged(f"{file}:score", sample("", label="7", extra_info='{"index": 3}')) == [3.0]


def test_a_row_without_a_label_says_how_to_name_its_column():
    prompt = sample("", answer="7").prompt
    assert (
        runner("exact_match")
        .row_problem(prompt)
        .endswith("--label_key names the column of the label")
    )


def test_a_row_of_verls_data_without_the_right_answer():
    judge = runner(f"{__file__}:of_verl")
    assert judge.row_problem(sample("", reward_model={"ground_truth": 0}).prompt) is None
    assert "ground_truth (--label_key) is None" in judge.row_problem(
        sample("", reward_model={"ground_truth": None}).prompt
    )
    assert "needs the column 'ground_truth'" in judge.row_problem(
        sample("", reward_model=None).prompt
    )


def test_trl_gets_the_messages_of_the_row(tmp_path):
    """Why: the whole rendered prompt came as one message of the user."""
    (tmp_path / "theirs.py").write_text(
        "def chat(prompts, completions, **kwargs):\n"
        "    return [float(prompt == [{'role': 'user', 'content': 'hi'}]) for prompt in prompts]\n"
    )
    row = {"messages": [{"role": "user", "content": "hi"}], "label": "x"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = DataSection(
        prompt_data=f"{tmp_path}/rows.jsonl", input_key="messages", apply_chat_template=True
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    judge = runner(f"{tmp_path}/theirs.py:chat", chat=True)
    (prompt,) = load_rewarded(Run(Config(data=data), None, tokenizer), judge)
    assert prompt.text.startswith("<user>hi")
    one = replace(sample("a"), prompt=prompt)
    judge.check([prompt])
    judge([one])
    assert one.reward == 1.0
