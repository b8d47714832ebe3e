"""Why: an agent that plays several roles is rewarded for each, and a role learns from its own.

So each turn must belong to the role that asked for it, and a reward that is missing is told.
"""

import pytest

from lightrft.algorithms.rollout.measures import measure_turns_and_drafts
from lightrft.algorithms.rollout.rollout import GroupOutcome
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.core.strategy import Alone
from lightrft.rewards.functions import environment
from player import Player, ids

pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("anthropic", reason="anthropic is not installed")

AGENTS = '''
from anthropic import AsyncAnthropic
from openai import BadRequestError


async def turn(client, role, *said):
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said)]
    reply = await client.chat.completions.create(model=role, messages=messages)
    return reply.choices[0].message.content


async def three(client, row):
    """A solver, a judge that reads the same task, and each goes on; then one more of no role."""
    first = await turn(client, "policy:solver", "p")
    judged = await turn(client, "policy:judge", "p")
    await turn(client, "policy:solver", "p", first, "x")
    await turn(client, "policy:judge", "p", judged, "y")
    await turn(client, "policy", "z")
    return {"solver": 1.0, "judge": -1.0, "policy": 0.25}


async def judges_a_turn(client, row):
    """The judge reads the solver's conversation, and the solver goes on with its own."""
    first = await turn(client, "policy:solver", "p")
    await turn(client, "policy:judge", "p", first, "good?")
    await turn(client, "policy:solver", "p", first, "on")
    return {"solver": 1, "judge": 0}


async def other_apis(client, row):
    base_url = str(client.base_url).removesuffix("/v1/")
    async with AsyncAnthropic(base_url=base_url, api_key=client.api_key, max_retries=0) as api:
        said = [{"role": "user", "content": "p"}]
        await api.messages.create(model="policy:a", max_tokens=9, messages=said)
    await client.responses.create(model="policy:b", input="q")
    await client.completions.create(model="policy:c", prompt="r")
    body = {"model": "policy:d", "token_ids": [115], "sampling_params": {}}
    await client.post("/../inference/v1/generate", body=body, cast_to=object)
    return dict.fromkeys("abcd", 1.0)


async def forgets(client, row):
    await turn(client, "policy:solver", "p")
    return {"solvr": 1.0}


async def both(client, row):
    await turn(client, "policy", "p")
    return {"policy": "much"}


async def no_name(client, row):
    try:
        await turn(client, "policy:the judge", "p")
    except BadRequestError as error:
        assert "the role of the model policy:the judge is a name of letters" in str(error)
    await turn(client, "mypolicy:7b", "p")
    return 1.0


async def program(engine, row):
    """The same without a server."""
    first = await engine.chat([{"role": "user", "content": "p"}], role="black")
    await engine.complete("q", role="white")
    engine.reward({"black": 1})
    engine.reward({"white": 2, "black": 1})


async def adds(engine, row):
    await engine.chat([{"role": "user", "content": "p"}])
    engine.reward(1.0)
    return {"policy": 1.0}


ALL = {f.__name__: f for f in (three, judges_a_turn, other_apis, forgets, both, no_name)}


async def play(client, row):
    return await ALL[row["agent"]](client, row)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("roles") / "agents.py"
    path.write_text(AGENTS)
    return path


@pytest.fixture(scope="module")
def play(file):
    player = Player(agent=f"{file}:play", chat=True, longest=80)

    def run(agent, turns):
        (sample,) = player.play([turns], rows=[{"agent": agent, "prompt": "p"}])
        return sample

    yield run
    player.episodes.close()


def test_turns_belong_to_the_role_that_asks_for_them(play):
    """Two roles with the same task and the same words have a conversation each."""
    sample = play("three", ["a$", "a$", "b$", "c$", "d$"])
    assert sample.episode.problem == "" and sample.episode.drift == 0
    assert sample.episode.role == "solver" and sample.token_ids == ids("a$\nu:x$\na:b$")
    judge, alone = sample.episode.branches
    assert judge.episode.role == "judge" and judge.token_ids == ids("a$\nu:y$\na:c$")
    assert alone.episode.role == "policy" and alone.token_ids == ids("d$")
    (reward,) = environment([sample])
    assert reward == {"policy:solver": 1.0, "policy:judge": -1.0, "policy:policy": 0.25}


def test_a_role_learns_nothing_of_the_turns_of_another(play):
    """They are tokens before its own, as they were sampled."""
    sample = play("judges_a_turn", ["a$", "b$", "c$"])
    assert sample.episode.problem == "" and sample.episode.drift == 0
    assert sample.episode.role == "solver" and sample.token_ids == ids("a$\nu:on$\na:c$")
    (judge,) = sample.episode.branches
    assert judge.episode.role == "judge" and judge.token_ids == ids("a$\nu:good?$\na:b$")
    learned = [
        token for token, own in zip(judge.token_ids, judge.episode.sampled, strict=True) if own
    ]
    assert learned == ids("b$")


def test_every_route_has_roles(play):
    sample = play("other_apis", ["1$", "2$", "3$", "4$"])
    assert sample.episode.problem == ""
    assert [row.episode.role for row in sample.rows] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "agent, problem",
    [
        ("forgets", "the role 'solver' has turns and no reward, and ['solvr'] have one"),
        ("both", "could not convert string to float"),
    ],
)
def test_a_reward_that_is_missing_or_no_number_is_told(play, agent, problem):
    sample = play(agent, ["a$"])
    assert problem in sample.episode.problem and sample.masked
    assert environment([sample]) == [0.0]


def test_a_name_that_is_no_role_is_refused_and_other_models_have_none(play):
    sample = play("no_name", ["a$"])
    assert sample.episode.problem == "" and sample.episode.role == "policy"
    assert environment([sample]) == [1.0]


def test_a_program_has_roles_without_a_server(file):
    player = Player(f"{file}:program", chat=True)
    (sample,) = player.play([["a$", "b$"]])
    assert [row.episode.role for row in sample.rows] == ["black", "white"]
    assert environment([sample]) == [{"policy:black": 2.0, "policy:white": 2.0}]
    player.episodes.close()


def test_rewards_of_turns_and_of_roles_are_not_mixed(file):
    player = Player(f"{file}:adds", chat=True)
    (sample,) = player.play([["a$"]])
    assert "a number for each role, not both" in sample.episode.problem
    player.episodes.close()


def test_roles_are_reported_and_give_a_signal(play):
    """The rewards of a game against itself always have the sum 0."""
    samples = [play("judges_a_turn", ["a$", "b$", "c$"]) for _ in range(2)]
    samples[1].episode.role_rewards = {"solver": 0.0, "judge": 1.0}
    for sample in samples:
        (sample.reward_components,) = environment([sample])
        sample.reward = sum(sample.reward_components.values())
    assert samples[0].reward == samples[1].reward
    group = Group(1, 0, samples)
    assert GroupOutcome.of(group).has_signal

    metrics = Metrics()
    measure_turns_and_drafts(1, samples, 1, metrics)
    found = metrics.reduce(Alone())
    assert found["reward/solver"] == found["reward/judge"] == 0.5
    assert found["episodes/turns_of_solver"] == 2 and found["episodes/turns_of_judge"] == 1
