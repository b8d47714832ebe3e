"""Environments of the package verifiers, unmodified: they send chats, and sampled tokens are
learned.

tests/test_extras.py runs this file in the environment that has the package.
"""

import sys

import pytest

from lightrft.config.errors import DataError
from lightrft.data.readers import BadRows, read_rows
from lightrft.extras.agents.programs import ProgramSetup
from lightrft.rewards.functions import environment
from player import Player, ids

pytest.importorskip("verifiers.v1", reason="test_extras.py runs it where verifiers is")
pytestmark = pytest.mark.slow

GAME = '''
import httpx
import verifiers.v1 as vf


class GuessData(vf.TaskData):
    digit: str


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        last = trace.nodes[-1].message.content
        return 1.0 if last == self.data.digit else -0.5


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        return [GuessTask(GuessData(prompt="Guess.", digit=str(digit)), self.config.task) for digit in range(4)]


class Chat(vf.Harness[vf.HarnessConfig]):
    """One reply to a conversation, from this process."""

    SUPPORTS_RESUME, NEEDS_CONTAINER, EXECUTES_CODE = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **others):
        prompt = data.prompt if isinstance(data.prompt, list) else [vf.UserMessage(content=data.prompt)]
        messages = [{"role": each.role, "content": each.content} for each in prompt]
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages},
                                      headers={"Authorization": f"Bearer {secret}"})
        return vf.ProgramResult(exit_code=0 if reply.is_success else 1, stdout="", stderr=reply.text)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            segment = await player.turn()
            while not segment.terminated and segment.last_reply != task.data.digit:
                if segment.last_reply == "crash":
                    raise OSError("the board is on fire")
                segment = await player.turn("<" if task.data.digit < segment.last_reply else ">")


__all__ = ["Guess", "GuessTaskset", "Chat"]
'''
TWICE = """
from guess_game import Chat, Guess, GuessTaskset


class Twice(Guess):
    async def run(self, task, agents):
        await super().run(task, agents)
        await super().run(task, agents)


__all__ = ["Twice", "GuessTaskset", "Chat"]
"""
ODD = """
import verifiers.v1 as vf
from guess_game import Chat, GuessData, GuessTaskset

tried = []


class OddTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        if self.data.digit == "3" and not tried:
            tried.append(True)
            raise OSError("busy")

    @vf.reward(weight=0.5)
    async def odd(self, trace) -> float:
        if self.data.digit == "0":
            vf.TaskData(idx="none")  # the last line of this error is an address of documentation
        if self.data.digit == "1":
            raise ValueError()
        if self.data.digit == "2":
            raise ValueError("first" + "\\n." * 1000 + "last")
        return 1.0


class OddTaskset(vf.Taskset[OddTask, vf.TasksetConfig]):
    def load(self):
        return [OddTask(GuessData(prompt="Guess.", digit=str(digit)), self.config.task) for digit in range(4)]


__all__ = ["OddTaskset", "Chat"]
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "guess_game.py").write_text(GAME)
    (folder / "twice_game.py").write_text(TWICE)
    (folder / "odd_game.py").write_text(ODD)
    (folder / "quits_game.py").write_text("import sys\nsys.exit('no key')\n")
    sys.path.insert(0, str(folder))
    yield [
        row
        for _, row in read_rows(
            "verifiers:guess-game?select.skip=1", "train", BadRows(False, "--prompt_data")
        )
    ]
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def player(rows):
    made = Player("verifiers:guess-game", chat=True, max_turns=4)
    yield made
    made.episodes.close()


def test_tasks_are_rows(rows):
    assert [row["input"] for row in rows] == ["Guess."] * 3
    assert [(row["task"]["idx"], row["task"]["digit"]) for row in rows] == [
        (1, "1"),
        (2, "2"),
        (3, "3"),
    ]

    unprotected = "guess-game?player.harness.id=bash"
    for name, told in (
        ("nowhere", "nowhere"),
        ("quits-game", "no key"),
        ("guess-game?player.colour=red", "colour"),
        (unprotected, "player.harness.id=null"),
    ):
        with pytest.raises(DataError, match=told):
            list(read_rows(f"verifiers:{name}", "train", BadRows(False, "--prompt_data")))
        with pytest.raises(ValueError, match=told):
            ProgramSetup(f"verifiers:{name}").program()


def test_an_environment_scores_episodes_that_its_limit_ends(rows):
    player = Player("verifiers:guess-game?player.max_turns=2", chat=True, max_turns=4)
    (sample,) = player.play([["7$", "0$"]], rows=rows[:1], seconds=120)
    player.episodes.close()
    assert sample.episode.problem == "" and not sample.truncated and sample.episode.num_turns == 2
    assert environment([sample]) == [-1.0]


def test_an_agent_that_runs_several_times_has_the_mean_reward_of_its_traces(rows):
    player = Player("verifiers:twice-game?player.max_turns=2", chat=True, max_turns=4)
    (sample,) = player.play([["7$", "1$", "7$", "0$"]], rows=rows[:1], seconds=120)
    player.episodes.close()
    assert sample.episode.problem == "" and sample.episode.num_turns == 2
    assert [each.token_ids for each in sample.rows] == [
        ids("7$\nu:<$\na:1$"),
        ids("7$\nu:<$\na:0$"),
    ]
    assert environment([sample]) == [(2.0 - 1.0) / 2]


def test_errors_say_what_is_wrong_unless_another_attempt_has_none(rows):
    player = Player("verifiers:odd-game?agent.retries.max_retries=1", chat=True, max_turns=4)
    data = read_rows("verifiers:odd-game", "train", BadRows(False, "--prompt_data"))
    samples = player.play([["7$", "7$"]] * 4, rows=[row for _, row in data], seconds=120)
    player.episodes.close()
    kind, empty, long, repeated = (sample.episode.problem for sample in samples)
    assert "TaskError: task OddTask scoring" in kind and "idx" in kind and "none" in kind
    assert "scoring: ValueError" in empty
    assert "ValueError: first" in long and "last" in long and len(long) < 2000
    assert repeated == "" and environment(samples[3:]) == [0.5]


def test_episodes(player, rows):
    """One game is won, one is lost at the limit of turns, one breaks, and a row of other data has
    no task.
    """
    turns = [["7$", "1$"], ["7$", "0$", "7$", "0$"], ["crash$"], []]
    won, limited, crashed, other = player.play(turns, rows=[*rows, {}], seconds=120)
    assert won.episode.problem == "" and won.prompt.token_ids == ids("u:Guess.$\na:")
    assert won.token_ids == ids("7$\nu:<$\na:1$") and won.rows == [won] and won.episode.drift == 0
    assert environment([won]) == [2.0]
    assert limited.truncated and limited.episode.num_turns == 4 and limited.episode.problem == ""
    assert environment([limited]) == [0.0]
    assert crashed.masked and "the board is on fire" in crashed.episode.problem
    assert other.masked and "--prompt_data verifiers:NAME" in other.episode.problem
