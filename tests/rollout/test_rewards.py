"""What a reward may be, what is checked of it, and that every error names the flag and the path."""

import signal
import sys
import textwrap
import threading
from dataclasses import replace

import pytest

from lightrft.config import ConfigError
from lightrft.rollout.rewards import Judge, rewards
from lightrft.types import Prompt, Sample


def sample(text: str, finish_reason: str = "stop", **columns) -> Sample:
    prompt = Prompt(index=0, text="", token_ids=[1], columns=columns)
    return Sample(prompt=prompt, group=0, token_ids=[1], logprobs=[0.0], text=text, finish_reason=finish_reason)


def judged(name: str, *samples: Sample) -> list[float]:
    Judge(name)(list(samples))
    return [s.reward for s in samples]


def test_exact_match():
    samples = [sample(text, label="580") for text in ("580", "58", "580 ")]
    assert judged("exact_match", *samples, sample("580", "length", label="580")) == [1.0, 0.0, 0.0, 0.0]
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
]


@pytest.mark.parametrize("text, label, reward", GSM8K)
def test_gsm8k(text, label, reward):
    assert judged("gsm8k", sample(text, label=label)) == [reward]


def test_gsm8k_takes_a_number_as_label():
    assert judged("gsm8k", sample("so 72", label=72), sample("so 72", label=71.5)) == [1.0, 0.0]


def longest(samples, *, label, weight, **columns):
    """A user's reward: it gets the columns as lists, aligned with the samples."""
    assert columns == {"level": [1, 2]}
    return [len(s.text) * w if right == s.text else 0 for s, right, w in zip(samples, label, weight, strict=True)]


def test_columns_arrive_by_name_aligned():
    samples = [sample("ab", label="ab", weight=0.5, level=1), sample("abc", label="abc", weight=2.0, level=2)]
    assert judged(f"{__file__}:longest", *samples) == [1.0, 6.0]


def test_a_column_that_not_every_sample_has_is_left_out():
    with pytest.raises(ValueError, match="--reward exact_match: TypeError: .*label.* The data has the columns level"):
        judged("exact_match", sample("a", label="a", level=1), sample("b", level=1))


def test_a_reward_by_module_path_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "mine_for_tests.py").write_text("def half(samples, **columns):\n    return [0.5 for _ in samples]\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("mine_for_tests:half", f"{tmp_path}/mine_for_tests.py:half"):
        assert judged(path, sample("a"), sample("b")) == [0.5, 0.5]
    sys.modules.pop("mine_for_tests")


def write(tmp_path, body: str) -> str:
    head = "import torch\nNOT_CALLABLE = 5\ndef f(samples, **columns):\n"
    (tmp_path / "reward.py").write_text(head + textwrap.indent(body, "    "))
    return f"{tmp_path}/reward.py:f"


def test_numbers_of_any_kind(tmp_path):
    assert judged(write(tmp_path, "return torch.tensor([1.5, -2.0])"), sample("a"), sample("b")) == [1.5, -2.0]
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
    "infinity": ("return [float('-inf'), 1.0]", "-inf is not a finite number, for the response 'first'"),
    "a word": ("return [1.0, 'good']", "'good' is not a finite number"),
    "None": ("return [None, 1.0]", "None is not a finite number"),
    "its own error": ("return [1 / 0]", r"ZeroDivisionError: division by zero, at /.*/reward.py:\d+ \(f\)"),
    "its own error, of another's file": ("import json; json.loads('{')", r"JSONDecodeError: .*, at /.*/reward.py:\d+ \(f\)"),
    "its own key": ("return [columns['answer']]", r"KeyError: 'answer', at .*:\d+ \(f\)\. The data has the columns label"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_reward_may_not_return(tmp_path, case):
    body, message = BROKEN[case]
    path = write(tmp_path, body)
    with pytest.raises(ConfigError, match=f"--reward {path}: {message}"):
        judged(path, sample("first", label="x"), sample("second", label="y"))


def test_names_that_are_none(tmp_path):
    path = write(tmp_path, "return []")
    for name, message in [
        ("gsm8", "--reward gsm8: no reward of this name; did you mean 'gsm8k'"),
        ("no_such_package.rewards:f", "--reward no_such_package.rewards:f: cannot import 'no_such_package.rewards'"),
        ("math:nothing", "--reward math:nothing: 'math' has no object 'nothing'"),
        (f"{tmp_path}/absent.py:f", "absent.py:f: no file .*/absent.py"),
        (path.removesuffix(":f"), r"no reward of this name; which function of the file\? --reward .*/reward.py:function\. Known"),
        (path.replace(":f", ":g"), "reward.py' has no object 'g'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Judge(name)
    with pytest.raises(ValueError, match="NOT_CALLABLE: .*not callable"):
        judged(path.replace(":f", ":NOT_CALLABLE"), sample("a"))


def test_no_samples_ask_for_nothing(tmp_path):
    Judge(write(tmp_path, "raise SystemExit"))([])


def timed(samples, **columns):
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    return [float(threading.current_thread() is threading.main_thread())] * len(samples)


def test_a_reward_with_signals_is_asked_in_the_main_thread():
    one = sample("1")
    with pytest.raises(ValueError, match="main thread.*: --no_reward_background asks it there"):
        Judge(f"{__name__}:timed")([one])
    Judge(f"{__name__}:timed", background=False)([one])
    assert one.reward == 1


def in_turn(samples, **columns):
    return [float(samples[0].text)] * len(samples)


@pytest.mark.parametrize("background", [True, False])
def test_what_is_begun_is_judged_when_it_is_finished(background):
    judge, groups = Judge(f"{__name__}:in_turn", background=background), [[sample(str(n)), sample(str(n))] for n in range(5)]
    for group in groups:
        judge.begin(group)
    judge.finish([one for group in groups for one in group])
    assert [one.reward for group in groups for one in group] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


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


@pytest.mark.parametrize("name, message", [("unsaid", "at least one number"), ("infinite", "not a finite number")])
def test_steps_without_a_number(name, message):
    with pytest.raises(ValueError, match=message):
        judged(f"{__file__}:{name}", replace(sample(""), token_ids=[1, 2]))


def parts(samples, **columns):
    return [{"format": 0.1, "answer": 1.0}, {"format": 0.1}, {}]


def reordered(samples, **columns):
    values = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]
    return [turn if len(samples[0].token_ids) == 3 else dict(zip("abc", turn, strict=True)) for turn in values]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1]])
def test_equal_parts_in_another_order_are_an_equal_reward(tokens):
    samples = [sample(""), sample("")]
    for each in samples:
        each.token_ids = tokens
    first, second = judged(f"{__file__}:reordered", *samples)
    assert first == second


def test_a_reward_may_have_parts():
    samples = [sample("") for _ in range(3)]
    assert judged(f"{__file__}:parts", *samples) == [1.1, 0.1, 0.0]
    assert samples[0].reward_parts == {"format": 0.1, "answer": 1.0}
    judged("exact_match", *[replace(s, prompt=sample("", label="").prompt) for s in samples])


def test_a_part_that_is_no_number():
    def bad(samples, **columns):
        return [{"format": "well"}]

    rewards.register("bad parts")(bad)
    with pytest.raises(ValueError, match="'well' is not a finite number"):
        judged("bad parts", sample(""))
