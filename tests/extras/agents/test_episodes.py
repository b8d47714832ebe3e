"""Why: what is learned has to be what was sampled, token by token.

This must hold whatever an environment does or raises, and also if it never returns.
"""

import json
import os
import runpy
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from loguru import logger

from lightrft.config.errors import ConfigError
from lightrft.config.sections import (
    Config,
    DataSection,
    EngineSection,
    EnvironmentSection,
    ModelSection,
)
from lightrft.core.samples import Prompt, Sample
from lightrft.extras.agents.episodes import FAILURES_IN_A_ROW
from lightrft.extras.agents.messages import ToolCall, TurnRequest
from lightrft.extras.agents.programs import ProgramSetup
from lightrft.extras.agents.tool_calls import HERMES_BEGIN, hermes, settled
from lightrft.extras.agents.tools import schemas
from lightrft.extras.agents.turn_format import TurnFormat
from lightrft.extras.build_episodes import build_parser, with_tools
from lightrft.models.parallel.collectives import Axis
from lightrft.rewards.functions import environment
from player import TEMPLATE, Player, ids
from ranks import run_ranks
from sglang_environment import in_sglang_environment
from tiny import EOS, byte_tokenizer, tiny_model

CODE = '''
import asyncio
import os
import subprocess
import sys
import time


class Echo:
    """Answers each turn with its own text, and rewards the number of letters."""

    def reset(self, label, **row):
        self.turns, self.label = 0, label
        return f"+{label}"

    def step(self, action):
        self.turns += 1
        if action == "die":
            os._exit(7)
        if action == "kill":
            os.kill(os.getpid(), 9)
        if action == "sleep":
            time.sleep(60)
        if action == "pause":
            time.sleep(2.5)
        if action == "raise":
            raise OSError("the game is over")
        if action == "exit":
            sys.exit("no board")
        return f"<{action}>", len(action), action == "end"


class Parent:
    """Starts processes in sessions of their own; one of them has lost its parent before the worker ends."""

    def reset(self, **row):
        started = [subprocess.Popen(["sleep", "600"], start_new_session=True).pid]
        told = subprocess.run(["sh", "-c", "setsid sleep 600 > /dev/null 2>&1 & echo $!"], capture_output=True, text=True)
        return f"{started[0]},{told.stdout.strip()}"

    def step(self, action):
        if action == "die":
            os._exit(7)
        time.sleep(60)


class Process:
    """Says in which process it runs."""

    def reset(self, **row):
        return str(os.getpid())

    def step(self, action):
        return "", 0.0, True


class Shop:
    """Sells fruit."""

    def reset(self, **row):
        self.sold = 0

    def buy(self, fruit: str, count: int = 1) -> int:
        """
        Buy fruit.

        Args:
            fruit: Name of the fruit.
            count: Number of pieces.
        """
        if fruit == "stone":
            raise ValueError("no such fruit")
        self.sold += count
        return self.sold

    async def wait(self, seconds: float) -> str:
        """
        Wait.

        Args:
            seconds: Time to wait.
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    def stall(self) -> str:
        """Take longer than any limit."""
        time.sleep(60)
        return "late"

    def get_reward(self):
        return self.sold


class Garbage:
    """Writes to the socket of its process what is no message of this package."""

    def reset(self, label, **row):
        self.label = label

    def step(self, action):
        for file in map(int, os.listdir("/proc/self/fd")):
            try:
                if os.readlink(f"/proc/self/fd/{file}").startswith("socket:"):
                    os.write(file, GARBAGE[action])
            except OSError:
                pass
        time.sleep(60 if action == "half a head" else 0)
        return "", 0.0, True


GARBAGE = {
    "half a head": b"\\0\\0", "text": b"hello\\n" * 9, "much": b"\\x7f\\xff\\xff\\xff" * 9, "negative": b"\\xff" * 9,
    "no JSON": b"\\0\\0\\0\\1{", "other JSON": b"\\0\\0\\0\\2[]", "brackets": b"\\0\\1\\0\\0" + b"[" * 65536,
    "another request": b"\\0\\0\\0\\24" + b'["TurnRequest", [1]]',
    "no turn": b"\\0\\0\\0\\x36" + b'["TurnRequest", {"observation": "a", "after": 999999}]',
    "pickle": b"\\0\\0\\0\\5" + b"\\x80\\4K\\1.",
}


async def meaningless(engine, row):
    from lightrft.extras.agents.messages import TurnRequest
    requests = [
        TurnRequest(5), TurnRequest([1.5]), TurnRequest("a", after=7), TurnRequest("a", max_tokens="5"), TurnRequest([{"a": 1}]),
        TurnRequest("a", sampling={"top_k": 2.5}), TurnRequest("a", sampling={"beam": 2}), TurnRequest("a", tools=5),
        TurnRequest("\\ud800"), TurnRequest({1}), TurnRequest(object()), TurnRequest([-5]), TurnRequest("", after=-1),
    ]
    refused = 0
    for request in requests:
        try:
            await engine.request(request)
        except ValueError:
            refused += 1
    assert refused == len(requests), refused
    await engine.turn("b")


async def impatient(engine, row):
    """It gives up waiting for a turn, which is then not the answer to its next request."""
    try:
        await asyncio.wait_for(engine.turn("p"), 0.3)
    except TimeoutError:
        pass
    return float((await engine.turn("q")).text == "2")


async def turns_at_once(engine, row):
    await asyncio.gather(*(engine.turn(letter) for letter in "ABC"))


async def leaves(engine, row):
    """It ends while the model samples a turn for it."""
    try:
        await asyncio.wait_for(engine.turn("p"), 0.001)
    except TimeoutError:
        pass


async def stubborn(engine, row):
    """An agent that asks again whatever the answer is."""
    while True:
        try:
            await engine.chat([{"role": "user", "content": "again"}])
        except ValueError:
            pass


async def quits(engine, row):
    sys.exit(await engine.turn() and "no board")


async def agent(engine, row):
    first = await engine.turn()
    second = await engine.turn([65, 66])
    engine.reward(0.25)
    return 1.0 if second.text > first.text else 0.0
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "mine.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def player(file):
    players = []

    def make(name, **options):
        players.append(Player(f"{file}:{name}", **options))
        return players[-1]

    yield make
    for started in players:
        started.episodes.close()


def test_a_game_without_a_chat_template(player):
    first, second = player("Echo").play([["ab", "end"], ["end"]])
    assert first.prompt.token_ids == ids("p+0") and second.prompt.token_ids == ids("p+1")
    assert first.token_ids == ids("ab<ab>end")
    assert first.episode.sampled == [True] * 2 + [False] * 4 + [True] * 3
    assert first.logprobs == [-0.5] * 2 + [0.0] * 4 + [-0.5] * 3
    assert (
        first.episode.rewards == [(1, 2.0), (8, 3.0)]
        and first.text == "end"
        and first.finish_reason == "stop"
    )
    assert environment([first, second]) == [[None, 2.0, *[None] * 6, 3.0], 3.0]
    assert [message["content"] for message in first.episode.messages] == ["+0", "ab", "<ab>", "end"]


def test_turns_of_a_chat_are_never_tokenized_again(player):
    """An end token that was sampled is not repeated; a missing one is added, and not learned."""
    ended, open_ended = player("Echo", chat=True).play([["ab$", "end$"], ["ab", "end"]])
    assert (
        bytes(token if token != EOS else ord("$") for token in ended.prompt.token_ids)
        == b"u:p+0$\na:"
    )
    assert ended.token_ids == ids("ab$\nu:<ab>$\na:end$") and open_ended.token_ids == ids(
        "ab$\nu:<ab>$\na:end"
    )
    assert ended.episode.sampled == [True] * 3 + [False] * 11 + [True] * 4
    assert open_ended.episode.sampled == [True] * 2 + [False] * 12 + [True] * 3


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_are_called_together_and_their_errors_are_read(player):
    both = call("buy", fruit="pear", count=3) + call("wait", seconds=0)
    wrong = (
        call("buy", fruit="stone")
        + call("sell")
        + call("buy", colour="red")
        + "<tool_call>{</tool_call>"
        + call("wait", seconds=30)
    )
    (sample,) = player("Shop", chat=True, tool_seconds=3.0, longest=2000).play(
        [[both, wrong, "done$"]]
    )
    replies = [
        message["content"] for message in sample.episode.messages if message["role"] == "tool"
    ]
    assert replies[:2] == ["3", "waited 0"]
    assert replies[2] == "Error: ValueError: no such fruit"
    assert replies[3] == "Error: there is no tool 'sell', only buy, stall, wait"
    assert replies[4].startswith("Error: TypeError: ") and "'fruit'" in replies[4]

    assert (
        replies[5].startswith("Error: the call is not of the form")
        and replies[6] == "Error: wait took more than 3 s"
    )
    assert (sample.episode.tool_calls, sample.episode.tool_errors) == (
        7,
        5,
    ) and 3 <= sample.episode.tool_seconds < 30
    assert environment([sample]) == [3.0] and sample.text == "done"


def test_a_process_runs_one_episode_after_another(player):
    """A call that has just returned is not taken for one that still runs."""
    samples = player("Process", environment_workers=1).play([["end$"]] * 100)
    assert len({sample.episode.messages[0]["content"] for sample in samples}) == 1


def test_calls_that_never_return_keep_no_later_episode_waiting(player):
    """There are more of them than an event loop has threads by default, so their worker is
    replaced.
    """
    play = player("Shop", chat=True, tool_seconds=2.0, longest=2000, environment_workers=1)
    stalled, bought = play.play(
        [[call("stall") * 12, "done$"], [call("buy", fruit="pear"), "done$"]], seconds=50.0
    )
    replies = [
        message["content"] for message in stalled.episode.messages if message["role"] == "tool"
    ]
    assert replies == ["Error: stall took more than 2 s"] * 12 and environment(
        [stalled, bought]
    ) == [0.0, 1.0]


def test_a_program_that_repeats_refused_requests_fails(player):
    (sample,) = player("stubborn", environment_minutes=0.01, max_turns=1, chat=True).play(
        [["a", "b"]]
    )
    assert "asked for no turn for 0.6 s" in sample.episode.problem and sample.masked


def test_an_agent_is_an_async_function(player):
    (sample,) = player("agent").play([["a", "b"]])
    assert sample.token_ids == ids("aABb") and sample.episode.sampled == [True, False, False, True]
    assert environment([sample]) == [1.25]


def test_a_program_that_dies_or_hangs_loses_only_its_sample(player):
    play = player("Echo", environment_minutes=0.05, environment_workers=3)
    turns = [["die"], ["kill"], ["sleep"], ["raise"], ["end"], ["end"]]
    samples = play.play(turns)
    problems = [sample.episode.problem for sample in samples]
    assert (
        problems[0] == "its process has ended with exit code 7"
        and problems[1] == "its process was killed by SIGKILL"
    )
    assert "asked for no turn for 3 s" in problems[2]
    assert "OSError: the game is over, at " in problems[3] and "mine.py:" in problems[3]
    assert problems[4:] == ["", ""]
    assert [sample.masked for sample in samples] == [True] * 4 + [False] * 2
    assert (
        environment(samples) == [0.0] * 4 + [3.0] * 2
        and play.play([["end"]])[0].episode.problem == ""
    )


@pytest.mark.parametrize("name", ["Echo", "quits"])
def test_a_program_that_exits_is_named_with_its_line(player, name):
    """Why: the process ended a little later, and was said to be killed."""
    (sample,) = player(name).play([["exit"]])
    assert "no board" in sample.episode.problem and "mine.py:" in sample.episode.problem


def test_garbage_on_the_socket_loses_only_one_sample(player, file):
    play = player("Garbage", environment_minutes=0.1, environment_workers=4)
    garbage = [*(name for name in runpy.run_path(str(file))["GARBAGE"]), "none"]
    samples = play.play([[name] for name in garbage])
    problems = {name: sample.episode.problem for name, sample in zip(garbage, samples, strict=True)}
    assert problems.pop("none").startswith("KeyError"), problems
    assert "asked for no turn" in problems.pop("half a head")
    assert all(
        "no message" in problem or "another request" in name or "no turn" in name
        for name, problem in problems.items()
    )
    assert player("Echo").play([["end"]])[0].episode.problem == ""


def test_a_meaningless_request_is_refused(player):
    (sample,) = player("meaningless").play([["a"]])
    assert sample.episode.problem == "" and sample.token_ids == ids("a")


def test_a_turn_that_a_program_does_not_wait_for_is_no_answer_to_another_request(player):
    (sample,) = player("impatient").play([["1", "2"]], delay=1.0)
    assert environment([sample]) == [1.0] and sample.episode.problem == ""
    play = player("leaves", environment_workers=1)
    assert [sample.episode.problem for sample in play.play([["1"]] * 3, delay=0.5)] == [""] * 3


def test_limits_end_an_episode(player):
    (turns,) = player("Echo", max_turns=2).play([["a", "b", "c"]])
    assert turns.token_ids == ids("a<a>b") and turns.finish_reason == "length"
    (minutes,) = player("Echo", episode_minutes=2 / 60).play([["a", "pause", "c"]])
    assert minutes.token_ids == ids("a<a>pause") and minutes.finish_reason == "length"
    (tokens,) = player("Echo", longest=6).play([["ab", "c"]])
    assert tokens.token_ids == ids("ab") and tokens.truncated, (
        "four tokens of the observation leave no room for a turn"
    )


def test_observations_have_no_placeholders_of_media():
    """A placeholder without an image would end the run in the engine.

    A text that mentions one is read letter by letter.
    """
    reader = byte_tokenizer()
    reader.add_special_tokens({"additional_special_tokens": ["<image>"]})
    reader.chat_template = TEMPLATE
    image = reader.convert_tokens_to_ids("<image>")
    format = TurnFormat(
        DataSection(apply_chat_template=True), reader, frozenset({EOS}), frozenset({image})
    )
    assert format.tokens(TurnRequest([{"role": "tool", "content": "an <image>"}]), EOS) == ids(
        "\nt:an <image>$\na:"
    )

    assert image in TurnFormat(DataSection(), reader, frozenset({EOS})).tokens(
        TurnRequest("<image>"), EOS
    )
    for observation in ([image], [{"role": "user", "content": [{"type": "image"}]}]):
        with pytest.raises(ValueError, match="an observation is text"):
            format.tokens(TurnRequest(observation), EOS)


def test_an_environment_that_always_fails_ends_the_run(player):
    with pytest.raises(ConfigError, match=f"{FAILURES_IN_A_ROW} episodes in a row have failed"):
        player("Echo").play([["raise"]] * (FAILURES_IN_A_ROW + 1))


def test_an_aborted_episode_leaves_no_process(player):
    play = player("Echo").episodes
    sample = Sample(Prompt(0, "p", ids("p"), {"label": "0", "prompt": "p"}), 0, [], [], "", "")
    play.begin(sample, 0, 0)
    while not (ready := play.poll(0.05)):
        pass
    process = ready[0].state.worker.process
    play.abort()
    assert not os.path.exists(f"/proc/{process}")
    assert play.running == [] and play.take_ended() == []


@pytest.mark.parametrize("end", ["die", "late", "close"])
def test_what_a_worker_has_started_ends_with_it(player, end):
    """Why: servers of tools run in sessions of their own, and were left behind."""
    play = player("Parent", environment_minutes=0.5 if end == "close" else 0.1)
    if end != "close":
        (sample,) = play.play([[end]])
        assert sample.masked
    else:
        sample = Sample(Prompt(0, "p", ids("p"), {"prompt": "p"}), 0, [], [], "", "")
        play.episodes.begin(sample, 0, 0)
        while not play.episodes.poll(0.05):
            pass
        play.episodes._forks.close()  # as if the rank had been killed

    processes = sample.episode.messages[0]["content"].split(",")
    until = time.monotonic() + 20 * (end == "close")
    while any(map(is_running, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(processes) == 2 and not any(map(is_running, processes))


def is_running(process):
    return os.path.exists(f"/proc/{process}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no object 'nothing'"),
        ("CODE", "has no object"),
        ("os", "neither a class nor an async function"),
    ],
)
def test_invalid_environments_are_refused(file, name, message):
    with pytest.raises(ValueError, match=message):
        ProgramSetup(f"{file}:{name}").program()


def test_tools_are_described_by_their_types_and_docstrings(file, tmp_path):
    buy, _, wait = schemas(ProgramSetup(f"{file}:Shop").program().all_tools)
    assert buy["function"]["name"] == "buy" and buy["function"]["parameters"]["required"] == [
        "fruit"
    ]
    assert wait["function"]["parameters"]["properties"] == {
        "seconds": {"type": "number", "description": "Time to wait."}
    }
    (tmp_path / "bare.py").write_text("def bare(x):\n    return x\n")
    with pytest.raises(ValueError, match="tool bare: .*A tool has a type for each argument"):
        schemas(ProgramSetup("", (str(tmp_path / "bare.py"),)).program().all_tools)
    with pytest.raises(ValueError, match="--tools calculator: another tool is named calculator"):
        ProgramSetup("", ("calculator", "calculator")).program()


WRAPPED = """
import functools
from functools import partial
def add(a: int, b: int) -> int:
    '''Add.

    Args:
        a: One.
        b: Other.
    '''
    return a + b
@functools.lru_cache
def cached(a: int) -> int:
    '''Look up.

    Args:
        a: Key.
    '''
    return a + 1
LIMIT = 5
class Helper: pass
_hidden = partial(add, b=1)
"""
METHOD = """
class Notes:
    def find(self, a: int) -> int:
        '''Find.

        Args:
            a: Key.
        '''
        return a
look = Notes().find
total = add
"""
CALLABLE = "class Search:\n  def __call__(self, a): return a\n"


@pytest.mark.parametrize(
    ("more", "chosen", "found"),
    [
        ("", "", ["add", "cached"]),
        ("", ":cached", ["cached"]),
        ("", ":add", ["add"]),
        (METHOD, "", ["add", "cached", "look", "total"]),
        ("more = partial(add, b=1)", "", "more is an object of the class partial"),
        ("more = partial(add, b=1)", ":more", "more is an object of the class partial"),
        (f"{CALLABLE}search = Search()", "", "search is an object of the class Search"),
        (f"{CALLABLE}search = Search()", ":search", "search is an object of the class Search"),
        ("class StructuredTool: pass\nfind = StructuredTool()", "", "the class StructuredTool"),
        ("", ":Helper", "has no public functions"),
    ],
)
def test_what_is_called_like_a_function_is_a_tool_or_named(tmp_path, more, chosen, found):
    (tmp_path / "tools.py").write_text(WRAPPED + more)
    setup = ProgramSetup("", (f"{tmp_path}/tools.py{chosen}",))
    if isinstance(found, str):
        with pytest.raises(ValueError, match=f"--tools .*{found}"):
            setup.program()
        return
    tools = setup.program().all_tools
    assert list(tools) == [each["function"]["name"] for each in schemas(tools)] == found


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("import numpy\nmore = numpy.vectorize(add)", "more is an object of the class vectorize"),
        ("import operator\nmore = operator.itemgetter('a')", "the class itemgetter, and a tool is"),
        ("from typing import Literal, Optional\nKind = Literal['a']\nNames = list[str]", ""),
    ],
)
def test_objects_of_others_are_left_out_with_a_line(tmp_path, more, said):
    (tmp_path / "tools.py").write_text(WRAPPED + more)
    lines = []
    handler = logger.add(lines.append, level="WARNING")
    assert list(ProgramSetup("", (f"{tmp_path}/tools.py",)).program().all_tools) == [
        "add",
        "cached",
    ]
    logger.remove(handler)
    assert bool(lines) == bool(said) and said in "".join(lines)


DESCRIBED = "\n    '''Find.\n\n    Args:\n        a: Key.\n    '''\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            f"def find(a: int, /) -> int:{DESCRIBED}    return a",
            "names each argument, and a: int has no name",
        ),
        (f"def find(*a: int) -> int:{DESCRIBED}    return a", r"and \*a: int has no name"),
        (f"def find(**a: int) -> int:{DESCRIBED}    return a", r"and \*\*a: int has no name"),
        (f"def find(a: int) -> list:{DESCRIBED}    yield a", "tool find is a generator"),
        (f"async def find(a: int) -> list:{DESCRIBED}    yield a", "tool find is a generator"),
    ],
)
def test_a_function_that_a_model_cannot_call_is_named(tmp_path, code, said):
    (tmp_path / "tools.py").write_text(code)
    with pytest.raises(ValueError, match=f"find.*{said}|{said}"):
        schemas(ProgramSetup("", (f"{tmp_path}/tools.py",)).program().all_tools)


def told_tools(tools: str, model: str) -> str:
    """Return the tools that this rank describes to the model, or why it cannot."""
    config = Config(
        data=DataSection(apply_chat_template=True),
        model=ModelSection(pretrain=model),
        environment=EnvironmentSection(tools=[tools]),
    )
    world = Axis("world", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    try:
        return with_tools(config, world).data.chat_template_kwargs
    except ConfigError as error:
        return str(error)


def test_all_ranks_describe_the_tools_alike(tmp_path):
    """Why: a server may say when it was started, and ranks that share a model would then differ."""
    mine = tmp_path / "mine.py"
    mine.write_text("import os\ndef tool() -> str: pass\ntool.__doc__ = f'Of {os.getpid()}.'\n")
    model = tiny_model(tmp_path / "model")
    for tools, told in ((str(mine), "Of "), ("nowhere.py", "no file")):
        first, second = run_ranks(2, told_tools, tools, model)
        assert told in first and first == second


def test_rewards_of_an_environment_that_the_run_ignores(player):
    with pytest.raises(
        ConfigError, match="--reward exact_match ignores: add environment to --reward"
    ):
        player("Echo", other_rewards="exact_match").play([["a$", "end$"]])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        (
            'x <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> y',
            [ToolCall("f", {"a": 1})],
        ),
        (
            (
                '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments":'
                ' "{\\"b\\": []}"}</tool_call>'
            ),
            [ToolCall("f", {}), ToolCall("g", {"b": []})],
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_c', [ToolCall("f", {})]),
        (
            '<tool_call>{"name": "f"}\n<tool_call> {"name": "g"}',
            [ToolCall("f", {}), ToolCall("g", {})],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> <tool_call>{"}}</tool_call>!',
            [ToolCall("f", {"a": "</tool_call> <tool_call>{"})],
        ),
        ("I can write <tool_call> to call", []),
        ("<think>a <tool_call>{</think>so", []),
    ],
)
def test_calls_in_a_text(text, calls):
    content, found = hermes(text)
    assert found == calls
    assert calls == [] or HERMES_BEGIN not in content


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "argu',
        '<tool_call>{"name": "f"} }</tool_call>',
        "<tool_call>f()</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_a_problem(text):
    content, (call,) = hermes(text)
    assert call.problem and content == ""


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("a < b", "a < b"),
        ("a <", "a"),
        ("a<tool_ca", "a"),
        ("a<tool_call>{}</tool_call>b", "a"),
        ("<think>a<tool_call>{", "<think>a<tool_call>{"),
        ("<think>a</thi", "<think>a"),
        ("<think>a</think>b\n<tool_call>{", "<think>a</think>b"),
    ],
)
def test_an_unfinished_text_is_shown_up_to_where_a_call_may_begin(text, before):
    assert settled(text, with_calls=True) == before


@pytest.mark.slow
def test_formats_of_other_models_are_read_by_vllm():
    pytest.importorskip("vllm", reason="vllm is not installed")
    data = DataSection(
        chat_template_kwargs=json.dumps(
            {"tools": [{"type": "function", "function": {"name": "f"}}]}
        )
    )

    def parser(name):
        return build_parser(
            Config(data=data, environment=EnvironmentSection(tool_parser=name)), byte_tokenizer()
        )

    assert parser("pythonic")('[f(a="x", b=[1]), g()]')[1] == [
        ToolCall("f", {"a": "x", "b": [1]}),
        ToolCall("g", {}),
    ]
    assert parser("pythonic")("no call") == ("no call", [])
    llama = byte_tokenizer()
    llama.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    of_llama = Config(data=data, environment=EnvironmentSection(tool_parser="llama3_json"))
    assert build_parser(of_llama, llama)('{"name": "f", "parameters": {"a": 1}}')[1] == [
        ToolCall("f", {"a": 1})
    ]
    with pytest.raises(ConfigError, match="--tool_parser nothing: vLLM has .*llama3_json"):
        parser("nothing")
    with pytest.raises(ConfigError, match="--tool_parser deepseek_v3 does not fit the tokenizer"):
        parser("deepseek_v3")


def parsed_by_sglang(name: str, text: str) -> tuple[str, list[ToolCall]]:
    empty = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": tool, "parameters": empty}} for tool in "fg"]
    data = DataSection(chat_template_kwargs=json.dumps({"tools": tools}))
    config = Config(
        data=data,
        engine=EngineSection(engine_type="sglang"),
        environment=EnvironmentSection(tool_parser=name),
    )
    return build_parser(config, byte_tokenizer())(text)


@pytest.mark.slow
def test_formats_of_other_models_are_read_by_sglang():
    _, calls = in_sglang_environment(parsed_by_sglang, "pythonic", '[f(a="x"), g()]')
    assert calls == [ToolCall("f", {"a": "x"}), ToolCall("g", {})]
    called = in_sglang_environment(
        parsed_by_sglang, "llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'
    )
    assert called == ("", [ToolCall("f", {"a": 1})])
    assert in_sglang_environment(parsed_by_sglang, "llama3", "no call") == ("no call", [])
    with pytest.raises(RuntimeError, match="--tool_parser nothing: SGLang has .*llama3"):
        in_sglang_environment(parsed_by_sglang, "nothing", "")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "[1]", "null", '{"name": 1}', '{"name": "f", "arguments": [1]}', "[" * 9999],
)
def test_unreadable_calls(content):
    _, (found,) = hermes(f"<tool_call>{content}</tool_call>")
    assert found.problem and replace(found, problem="") == ToolCall("", {})


def test_turns_that_the_engine_cannot_sample_are_refused_one_by_one(tmp_path):
    """Why: the second refusal of an episode ended the rank."""
    path = tmp_path / "program.py"
    path.write_text(
        "import asyncio\n\n\n"
        "async def program(engine, row):\n"
        "    asked = [[{'role': 'user', 'content': letter}] for letter in 'abc']\n"
        "    turns = (engine.chat(messages) for messages in asked)\n"
        "    told = await asyncio.gather(*turns, return_exceptions=True)\n"
        "    return float(sum('cannot sample' in str(each) for each in told))\n"
    )
    episodes = Player(f"{path}:program", chat=True).episodes
    sample = Sample(Prompt(0, "p", ids("p"), {"prompt": "p"}), 0, [], [], "", "")
    episodes.begin(sample, 0, 0)
    requested = []
    while len(requested) < 3:
        requested += episodes.poll(0.05)
    for turn in requested:
        episodes.refuse(turn, "it is too long")
    while not (ended := episodes.take_ended()):
        episodes.poll(0.05)
    assert ended == [sample] and sample.episode.problem == "" and environment([sample]) == [3.0]
    episodes.close()


def test_turns_at_once_follow_one_another(player):
    """turn() is for one conversation, so a second call waits for the first."""
    (sample,) = player("turns_at_once").play([["1", "2", "3"]])
    assert sample.episode.problem == "" and sample.episode.branches == []
    assert sample.token_ids == ids("1B2C3")
