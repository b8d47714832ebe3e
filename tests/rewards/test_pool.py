"""Worker processes of rewards: a failing call is reported and affects no other call."""

import gc
import os
import pickle
import re
import subprocess
import sys
import time
import weakref
from multiprocessing import Pipe
from pathlib import Path

import pytest
from loguru import logger

from lightrft.config import ConfigError, DataSection, RewardSection
from lightrft.config.values import import_path
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Prompt, Sample
from lightrft.data.prompts import load_prompts
from lightrft.models.parallel.collectives import Axis
from lightrft.rewards.forks import FORK, end_with
from lightrft.rewards.runner import FAILURES_IN_A_ROW, RewardRunner
from lightrft.rewards.worker import Setup
from tiny import byte_tokenizer

FILE = Path(__file__).with_name("misbehaving.py")
ALONE = Axis("data", 1, 0, None)
SHORT = 3 / 60
"""Time limit where calls hang, in minutes.

It is much longer than the other calls take on a busy machine.
"""


def group(*texts: str, row: int = 0) -> list[Sample]:
    prompt = Prompt(row, f"question {row}", [1], {"label": "right"})
    return [Sample(prompt, row, [1], [0.0], text, "stop") for text in texts]


def runner(function: str = "obey", **settings) -> RewardRunner:
    section = RewardSection(
        **{"reward_workers": 2, "reward_minutes": 2.0, "reward_memory_gb": 1.0} | settings
    )
    return RewardRunner(f"{FILE}:{function}", section=section)


def judged(made: RewardRunner, *groups: list[Sample]) -> list[float]:
    for each in groups:
        made.begin(each)
    samples = [sample for each in groups for sample in each]
    made.finish(samples)
    return [sample.reward for sample in samples]


def logged(made: RewardRunner, *groups: list[Sample], rewards: list[float]) -> list[str]:
    """Return what is logged while these rewards are set."""
    said: list[str] = []
    sink = logger.add(lambda message: said.append(message.record["message"]))
    assert judged(made, *groups) == rewards
    logger.remove(sink)
    return said


def exists(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(process: int) -> bool:
    """Return whether a process ends within a minute."""
    deadline = time.monotonic() + 60
    while exists(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not exists(process)


@pytest.fixture(scope="module")
def forgiving() -> RewardRunner:
    return runner(reward_failure="zero")


def test_calls_run_at_the_same_time_in_other_processes(forgiving):
    assert (
        judged(forgiving, *(group("right", "wrong", row=row) for row in range(20)))
        == [1.0, 0.0] * 20
    )
    processes = judged(forgiving, group("process", "sleep 0.3"), group("process", "sleep 0.3"))[::2]
    assert len({*processes, os.getpid()}) == 3
    assert judged(forgiving, group("alarm", "modules")) == [1.0, 0.0], (
        "signals may be set, and no worker imports torch"
    )
    assert judged(runner("obey_slowly"), group("right", "wrong")) == [1.0, 0.0], (
        "coroutine functions are awaited"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "raise answer",
            (
                r"KeyError: 'answer', at \S*misbehaving.py:\d+ \(_obeyed\), for .*\. The data has"
                r" the columns label"
            ),
        ),
        ("exit", "SystemExit: 3, at"),
        ("die", "the worker has ended with exit code 3, twice"),
        ("crash", "the worker was killed by SIGSEGV, twice"),
        ("fill", "MemoryError"),
        ("nan", "nan is not a finite number"),
    ],
)
def test_a_call_that_fails_harms_no_other(forgiving, text, says):
    groups = [
        group("right", "wrong", row=1),
        group("right", text, "wrong", row=2),
        group("wrong", "right", row=3),
    ]
    # only the response that fails gets 0
    (said,) = logged(forgiving, *groups, rewards=[1, 0, 1, 0, 0, 0, 1])
    metrics = Metrics()
    forgiving.count_failures("failures", metrics)
    assert metrics.reduce(ALONE) == {"failures": 1}
    with pytest.raises(ConfigError) as caught:
        judged(runner(), group("right", text, "wrong", row=2))

    for message in (said, str(caught.value)):
        assert re.match(f"--reward {FILE}:obey: {says}", message)
        assert f"for the response '{text}' to the prompt 'question 2' (row 2)" in message


@pytest.mark.slow
def test_calls_that_hang_harm_no_other():
    said = logged(
        runner(reward_failure="zero", reward_minutes=SHORT),
        group("right", row=1),
        group("right", "hang", "hang_in_c", "wrong", row=2),
        group("wrong", "right", row=3),
        rewards=[1, 1, 0, 0, 0, 0, 1],
    )
    with pytest.raises(ConfigError) as caught:
        judged(runner(reward_minutes=SHORT), group("hang", row=2))

    late = rf"--reward {FILE}:obey: a call has taken more than 3 s \(--reward_minutes\)"
    for message, text in zip(
        [*said, str(caught.value)], ("hang", "hang_in_c", "hang"), strict=True
    ):
        assert re.match(
            rf"{late}.* '{text}' to .* \(row 2\)\. It is at \S*misbehaving.py:\d+ \(_obeyed\) < ",
            message,
        )


@pytest.mark.parametrize(
    "written", ["00", "0000000568656c6c6f", "ffffffff", "7fffffff", "7ffffffe", "00" * 9]
)
def test_garbage_on_the_socket_loses_only_its_own_call(written):
    made = runner(reward_failure="zero", reward_minutes=SHORT)
    assert (
        judged(made, group(f"write {written}"), *(group("right", row=row) for row in range(1, 6)))
        == [0.0] + [1.0] * 5
    )


def test_a_function_that_never_ends_writing_is_out_of_time():
    made = runner(reward_failure="zero", reward_minutes=SHORT)
    assert judged(made, group("drip"), group("right", row=1)) == [0.0, 1.0]


def test_a_failure_that_ends_the_run_waits_for_no_other_call():
    """Neither for calls that hang before it, nor for calls that wait for a worker."""
    began = time.monotonic()
    with pytest.raises(ConfigError, match="KeyError: 'now'"):
        judged(runner(), group("sleep 60"), group("raise now", row=1))
    with pytest.raises(ConfigError, match="a call has taken more than 3 s"):
        judged(
            runner(reward_minutes=SHORT), *(group("hang", "right", row=row) for row in range(12))
        )
    assert time.monotonic() - began < 15


def test_a_thread_that_has_failed_lets_no_call_wait():
    made = runner(reward_minutes=1e18)
    for row in range(2):
        with pytest.raises(
            ConfigError, match="the thread of the worker processes has failed: OverflowError"
        ):
            judged(made, group("sleep 5", row=row))


def test_a_long_error_is_cut():
    with pytest.raises(ConfigError) as raised:
        judged(runner(), group("print"))
    assert len(str(raised.value)) < 10_000 and "misbehaving.py:" in str(raised.value)


def test_a_worker_without_memory_gets_no_further_call(forgiving):
    groups = [
        each
        for row in range(24)
        for each in (group("right", "fill", row=row), group("right", row=row))
    ]
    judged(forgiving, *groups)
    assert [sample.reward for each in groups for sample in each] == [1, 0, 1] * 24


def test_a_failure_is_reported_at_the_line_of_the_data(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            '\n{"input": "one", "label": "right"}\n{"input": "two", "label": "right"}\n'
        )

    section = DataSection(prompt_data=f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")
    prompts = load_prompts(section, byte_tokenizer())
    assert [prompt.location for prompt in prompts] == [
        f"{tmp_path}/{name}.jsonl:{line}" for name in "ab" for line in (2, 3)
    ]

    with pytest.raises(
        ConfigError, match=rf"the response 'raise it' to the prompt 'two' \({tmp_path}/b.jsonl:3\)"
    ):
        judged(
            runner(),
            [Sample(prompts[3], 0, [1], [0.0], text, "stop") for text in ("right", "raise it")],
        )


def test_a_call_that_fails_only_with_several_samples_is_reported_with_their_responses(forgiving):
    failing = runner("only_alone", reward_failure="zero")
    (said,) = logged(failing, group("right", "wrong"), rewards=[1, 0])
    assert "for the responses 'right', 'wrong' to the prompt" in said
    with pytest.raises(ConfigError, match="for the responses 'right', 'wrong' to the prompt"):
        judged(runner("only_alone"), group("right", "wrong"))


def test_a_worker_that_is_killed_through_no_fault_of_its_own_loses_nothing(tmp_path):
    assert judged(
        runner(), group("right"), group(f"crash_once {tmp_path}/mark"), group("right")
    ) == [1, 0, 1]


def test_responses_of_a_failed_call_are_dropped_with_their_prompt():
    made = runner(reward_failure="drop")
    groups = [group("right", "wrong"), group("right", "raise it")]
    (said,) = logged(made, *groups, rewards=[1, 0, 0, 0])
    assert "for the response 'raise it' to the prompt 'question 0' (row 0)" in said
    assert [sample.masked for each in groups for sample in each] == [False, False, True, True]


def test_a_function_that_always_fails_ends_the_run(forgiving):
    with pytest.raises(ConfigError, match=f"{FAILURES_IN_A_ROW} calls in a row have failed"):
        judged(forgiving, *(group("raise it", "raise it") for _ in range(FAILURES_IN_A_ROW)))


def test_what_workers_start_ends_with_them(tmp_path):
    made = runner(reward_failure="zero", reward_minutes=SHORT)
    assert judged(made, group(f"child {tmp_path}/pid")) == [0]
    assert ended(int((tmp_path / "pid").read_text()))
    (worker,) = judged(made, group("process"))
    assert exists(int(worker))
    del made
    gc.collect()
    assert ended(int(worker))


KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(FILE.parents[1])!r})
from rewards.test_pool import group, judged, runner
made = runner()
print(int(judged(made, group("process"))[0]), flush=True)
made.begin(group("hang"))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_no_worker_outlives_its_rank():
    rank = subprocess.run(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False
    )
    assert ended(int(rank.stdout))


def test_a_process_ends_if_its_parent_has_ended_before_it_asks_to_end_with_it():
    reads, writes = os.pipe()
    parent = os.fork()
    if not parent:
        process = os.getpid()
        if not os.fork():
            while os.getppid() == process:
                time.sleep(0.01)
            end_with(process)
            os.write(writes, b"alive")
        os._exit(0)

    os.waitpid(parent, 0)
    os.close(writes)
    assert os.read(reads, 5) == b""
    os.close(reads)


def test_a_function_without_a_module_stays_in_this_process():
    assert import_path(group) == f"{__name__}:group"
    assert import_path(lambda samples: [0.0]) == ""


def of_the_main_script(samples, **columns):
    return [float(os.getpid())] * len(samples)


def test_a_function_of_the_main_script_stays_in_this_process(monkeypatch):
    monkeypatch.setattr(of_the_main_script, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "mine", of_the_main_script, raising=False)
    made = RewardRunner("__main__:mine", section=RewardSection(reward_workers=2))
    assert judged(made, group("")) == [os.getpid()]
    collected = weakref.ref(made)
    del made

    deadline = time.monotonic() + 60
    # the thread of a timer that was cancelled has to end
    while collected() and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()

    assert collected() is None, "nothing keeps it, or the reward models beside it, in memory"


SLOW_IMPORT = """
import sys, time
time.sleep(0 if "pytest" in sys.modules else 4)
def right(samples, **columns):
    return [1.0] * len(samples)
"""


@pytest.mark.slow
def test_many_calls_never_make_their_caller_wait_for_the_import(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_IMPORT)
    made = RewardRunner(f"{tmp_path}/slow.py:right", section=RewardSection(reward_workers=1))
    groups = [group("right", row=row) for row in range(3000)]
    began = time.monotonic()
    for each in groups:
        made.begin(each)
    assert time.monotonic() - began < 3, "the worker processes still import"
    made.finish([sample for each in groups for sample in each])
    assert {sample.reward for each in groups for sample in each} == {1.0}


def test_calls_of_a_pool_that_closes_get_a_result():
    made = runner()
    for text in ("hang", "hang", "right"):
        made.begin(group(text))
    time.sleep(0.5)
    made.calls.close()
    with pytest.raises(
        ConfigError, match="the worker processes have been closed, for the response 'hang'"
    ):
        made.finish([])


@pytest.mark.parametrize("asked", ["setup", "worker"])
def test_the_process_that_forks_says_nothing_if_the_rank_ends_before_its_answer(asked):
    mine, other = Pipe()
    program = f"from lightrft.rewards.forks import main; main({other.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=[other.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )
    other.close()
    mine.send_bytes(pickle.dumps(Setup("exact_match")))
    if asked == "worker":
        assert mine.recv() == ""
        mine.send(FORK)
    mine.close()

    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
