"""Why: people copy the examples, so each must play an episode, and lose no token of it."""

import json
from pathlib import Path

import pytest

from lightrft.rewards.functions import environment
from player import Player, ids

pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("anthropic", reason="anthropic is not installed")

AGENTS = Path(__file__).parents[2] / "scripts" / "agents"


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Plays an episode of one of the examples; all run in the same process."""
    path = tmp_path_factory.mktemp("agents") / "all.py"
    path.write_text(
        f"import sys\nsys.path.append({str(AGENTS)!r})\nimport coding, delegate, research, self_play\n"
        "ALL = {'coding': coding.solve, 'research': research.answer, 'delegate': delegate.solve}\n"
        "ALL['self_play'] = self_play.play\n"
        "async def play(client, row):\n    return await ALL[row['agent']](client, row)\n"
    )
    player = Player(agent=f"{path}:play", chat=True, longest=800, prompt_max_len=200)

    def run(agent, turns, **row):
        (sample,) = player.play([turns], rows=[row | {"agent": agent, "prompt": "p"}])
        assert sample.episode.problem == "" and sample.episode.drift == 0
        return sample

    yield run
    player.episodes.close()


def calls(*named):
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in named
    )


def test_a_coding_agent_repairs_a_file(play):
    look = calls(("list_files", {}), ("read_file", {"name": "../b.txt"}))
    write = calls(("write_file", {"name": "answer.txt", "content": "42"}))
    turns = [f"{look}$", f"{write}$", "done$"]
    sample = play("coding", turns, files={"b.txt": "6*7"}, label="42")
    assert environment([sample]) == [1.0] and sample.episode.branches == []
    read = "\nt:b.txt$\nt:6*7$\na:"
    assert sample.token_ids == ids(f"{look}${read}{write}$\nt:written$\na:done$")


def test_a_research_agent_answers_from_documents(play):
    look = calls(("search", {"query": "capital of France"}))
    documents = ["Rivers are long", "The capital of France is Paris"]
    sample = play("research", [f"{look}$", "Paris$"], documents=documents, label="paris")
    assert environment([sample]) == [1.0] and sample.episode.branches == []
    assert sample.token_ids == ids(f"{look}$\nt:{documents[1]}$\na:Paris$")


def test_a_parent_joins_what_two_sub_agents_say(play):
    turns = ["one\ntwo$", "1$", "2$", "3$"]
    sample = play("delegate", turns, label="3")
    assert environment([sample]) == [1.0]
    assert sample.token_ids == ids("one\ntwo$\nu:1\n2$\na:3$")
    prompts = [branch.prompt.token_ids for branch in sample.episode.branches]
    assert prompts == [ids("u:one$\na:"), ids("u:two$\na:")]


@pytest.mark.parametrize("letters, first", [("ee", -0.5), ("ull", 0.5), ("x", -1.0), ("ex", 1.0)])
def test_two_players_of_one_model_have_a_conversation_each(play, letters, first):
    """The game begins with b. What the other player says is read, and not learned."""
    sample = play("self_play", list(letters), label="0")
    assert environment([sample]) == [{"policy:first": first, "policy:second": -first}]
    assert sample.token_ids == ids(letters if len(letters) % 2 else letters[:-1])
    assert sample.episode.sampled == [index % 2 == 0 for index in range(len(sample.token_ids))]
    assert [row.episode.role for row in sample.rows] == ["first", "second"][: len(letters)]
    for branch in sample.episode.branches:
        prompt = "pb" + letters[0]
        assert [*branch.prompt.token_ids, *branch.token_ids] == ids(prompt + letters[1])
        assert branch.episode.sampled[-1] and sum(branch.episode.sampled) == 1
