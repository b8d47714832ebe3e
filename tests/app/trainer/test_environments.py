"""Whole runs whose responses have several turns: learned alike in every layout."""

import json
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from app.trainer.in_turn import train_and_resume, train_in_turn
from runs import PPO, prepare, repeatable, rows_of, train
from sglang_environment import in_sglang_environment

pytestmark = pytest.mark.slow

GAME = '''
import os
import random
import time


class Letters:
    """Two to four turns, each rewarded by its share of ASCII letters, and no two runs take the same times.

    With DIES, the second turn of prompt 3 ends its process.
    """

    def reset(self, prompt, label, **row):
        self.turns, self.label = 0, label
        return f"[{label}]"

    def step(self, action):
        time.sleep(random.SystemRandom().choice([0, 0, 0.005, 0.03]))
        self.turns += 1
        if self.label == "3" and self.turns == 2 and os.environ.get("DIES"):
            os._exit(1)
        good = sum(32 <= ord(letter) < 127 for letter in action) / max(len(action), 1)
        return f"<{self.turns}>", good / 3, self.turns == 2 + int(self.label) % 3
'''
AGENT = '''
import asyncio

from anthropic import AsyncAnthropic


class Game:
    """Three turns, and one reward at the end."""

    def reset(self, prompt, label, **row):
        self.turns, self.good = 0, 0.0
        return f"[{label}]"

    def step(self, action):
        self.turns += 1
        self.good += sum(32 <= ord(letter) < 127 for letter in action) / max(len(action), 1) / 3
        return f"<{self.turns}>", self.good if self.turns == 3 else None, self.turns == 3


async def game(client, row):
    """The same game, by a client of the server."""
    messages, played = [{"role": "user", "content": row["prompt"]}], Game()
    messages[0]["content"] += played.reset(**row)
    done = False
    while not done:
        reply = await client.chat.completions.create(model="tiny", messages=messages)
        observation, reward, done = played.step(reply.choices[0].message.content)
        messages += [reply.choices[0].message, {"role": "user", "content": observation}]
    return reward


async def delegates(client, row):
    """A turn, three sub-agents at the same time, of which two get the same task, and a last turn."""
    async with AsyncAnthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key) as claude:
        async def ask(*said):
            roles = ["user", "assistant"] * len(said)
            messages = [{"role": role, "content": text} for role, text in zip(roles, said)]
            reply = await claude.messages.create(model="tiny", max_tokens=8, messages=messages)
            return "".join(block.text for block in reply.content)

        plan = await ask(row["prompt"])
        parts = await asyncio.gather(*(ask(task) for task in "xxy"))
        more = await asyncio.gather(*(ask("x", part, "?") for part in parts[:2]))
        last = await ask(row["prompt"], plan, "z")
    said = last + "".join(more)
    return sum(32 <= ord(letter) < 127 for letter in said) / max(len(said), 1)


async def players(client, row):
    """Two players of one model take turns; what one wins, the other loses."""
    said = {"policy:first": [row["prompt"]], "policy:second": ["y"]}
    letters = dict.fromkeys(said, 0)
    last = ""
    for player in [*said, *said]:
        said[player][-1] += last
        roles = ["user", "assistant"] * len(said[player])
        messages = [{"role": role, "content": text} for role, text in zip(roles, said[player])]
        reply = await client.chat.completions.create(model=player, messages=messages)
        last = reply.choices[0].message.content
        said[player] += [last, "z"]
        letters[player] += sum(32 <= ord(letter) < 127 for letter in last) / 16
    first, second = letters.values()
    return {"first": first - second, "second": second - first}


async def forgets(client, row):
    """Two turns of which it remembers the first, and a third one that follows the first too."""
    messages = [{"role": "user", "content": row["prompt"]}]
    reply = await client.chat.completions.create(model="tiny", messages=messages)
    for text in "xy":
        later = [*messages, reply.choices[0].message, {"role": "user", "content": text}]
        last = await client.chat.completions.create(model="tiny", messages=later, max_tokens=4)
    return sum(32 <= ord(letter) < 127 for letter in last.choices[0].message.content) / 4
'''
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ENDS = ["--stop_token_ids", *map(str, range(40, 72))]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    flags = [
        flag for flag in prepare(folder) if not flag.startswith(("--reward", "--prompt_max_len"))
    ]
    (folder / "game.py").write_text(GAME)

    return [
        *flags,
        *PPO,
        *ENDS,
        "--generate_max_len=40",
        "--prompt_max_len=32",
        "--reward=environment",
        "--rollout_correction=tis",
        f"--environment={folder}/game.py:Letters",
    ]


def test_a_run_in_two_parts_repeats_to_the_last_bit(inputs, tmp_path):
    """How long programs take changes neither a number nor a weight."""
    saving = ["--save_steps=1"]
    whole, resumed = train_and_resume(
        "train_ppo", 2, inputs, tmp_path, stop=1, end=2, saving=saving
    )
    assert_equal(whole, resumed)
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "parts")


def test_runs_with_vllm(inputs, tmp_path):
    """With few workers a run repeats to the last bit.

    An engine over two ranks samples what two engines sample; so it does with episodes that it
    aborts (--over_sampling).
    """
    few = ["--engine_type=vllm", "--engine_kv_cache_gb=0.125", "--environment_workers=5"]
    flags = [*inputs, *few, "--max_steps=2"]
    divided = [*flags, "--engine_tp_size=2"]
    over_sampled = [*divided, "--over_sampling=1.5", "--early_stop_every=4"]
    runs = [
        (flags, tmp_path / "first"),
        (flags, tmp_path / "second"),
        (divided, tmp_path / "divided"),
        (over_sampled, tmp_path / "over_sampled"),
    ]
    first, second, of_one_engine, aborted = train_in_turn("train_ppo", 2, runs)
    assert_equal(first, second)
    assert weights_of(tmp_path / "first") == weights_of(tmp_path / "second")
    assert_alike(first, of_one_engine)
    assert all(
        row["engine/logprob_mismatch_max"] < 1e-4 and row["episodes/turns"] > 2 for row in aborted
    )


def assert_equal(rows, others):
    """Assert that two runs have the same numbers, except for times."""
    for row, other in zip(repeatable(rows), repeatable(others), strict=True):
        names = [name for name in row if "seconds" not in name]
        assert {name: other[name] for name in names} == {name: row[name] for name in names}


def weights_of(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def test_episodes_are_alike_in_every_layout(inputs, tmp_path):
    layouts = [
        [],
        ["--sp_size=2", "--rollout_schedule=longest_first"],
        ["--tp_size=2"],
        ["--fsdp=false", "--zero_stage=3", "--overlap", "--max_epochs=1", "--init_kl_coef=0"],
    ]
    runs = [
        ([*inputs, "--max_steps=2", "--observation_coef=0.05", *layout], tmp_path / str(number))
        for number, layout in enumerate(layouts)
    ]
    plain, *others = train_in_turn("train_ppo", 2, runs)
    for rows in others:
        assert_alike(plain, rows)
        for row in rows:
            assert (
                row["episodes/turns"] > 2
                and row["episodes/tokens_observed"] > 3
                and row["engine/logprob_mismatch_max"] < 1e-4
            )


def assert_alike(rows, others):
    for row, other in zip(repeatable(rows), repeatable(others), strict=True):
        names = [
            name
            for name in row
            if name.startswith(("rollout/", "episodes/", "train/")) and name in other
        ]
        names = [name for name in names if "seconds" not in name]
        assert {name: other[name] for name in names} == pytest.approx(
            {name: row[name] for name in names}, rel=2e-3, abs=1e-5
        )


def test_episodes_with_adapters_a_critic_and_dynamic_sampling(inputs, tmp_path):
    """The critic and the adapters learn from episodes of two to four turns.

    Groups without a signal are replaced.
    """
    flags = [
        "--advantage_estimator=gae",
        "--lora_rank=4",
        "--max_steps=2",
        "--critic_learning_rate=1e-3",
        "--dynamic_sampling",
    ]
    for row in train("train_ppo", 2, [*inputs, *flags], tmp_path):
        assert (
            row["engine/logprob_mismatch_max"] < 1e-4
            and row["critic/grad_norm"] > 0
            and row["train/grad_norm"] > 0
        )
        assert row["rollout/sampling_rounds"] >= 1 and row["episodes/turns"] > 2


def test_the_rewards_of_turns_are_learned_and_shown(inputs, tmp_path, monkeypatch):
    """A process that dies costs only its own samples: one prompt of 24 dies in every episode."""
    monkeypatch.setenv("DIES", "1")
    quick = ["--actor_learning_rate=1e-2", "--max_steps=9", "--seed=3"]
    rows = train("train_ppo", 2, [*inputs, *quick], tmp_path)
    rewards = [row["rollout/reward"] for row in rows]
    assert rewards[0] < 0.55 and sum(rewards[-3:]) / 3 > 0.75, rewards
    assert sum(row["episodes/failed"] for row in rows) > 0 and all(
        row["episodes/failed"] % 4 == 0 for row in rows
    )
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [message["role"] for message in samples[0]["messages"]] == ["user", "assistant"] * 3
    assert r"\u003c1>" in (tmp_path / "report.html").read_text()


def test_canaries_are_episodes_too(inputs, tmp_path):
    data = next(flag for flag in inputs if flag.startswith("--prompt_data="))
    canaries = ["--canaries=0.5", data.replace("prompt", "canary"), "--canary_baseline=8"]
    runs = [
        ([*inputs, "--max_steps=2"], tmp_path / "without"),
        ([*inputs, "--max_steps=2", *canaries], tmp_path / "with"),
    ]
    without, found = train_in_turn("train_ppo", 2, runs)

    assert all(0 <= row["canary/reward"] <= 1 for row in found)
    assert found[0]["rollout/reward"] == pytest.approx(without[0]["rollout/reward"], rel=1e-6)


@pytest.fixture(scope="module")
def chats(inputs, tmp_path_factory):
    """The same data and model, with a chat template."""
    folder = tmp_path_factory.mktemp("chats")
    model = next(
        Path(flag.removeprefix("--pretrain=")) for flag in inputs if flag.startswith("--pretrain=")
    )
    shutil.copytree(model, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "agent.py").write_text(AGENT)
    flags = [flag for flag in inputs if not flag.startswith(("--pretrain", "--environment"))]

    return folder, [
        *flags,
        f"--pretrain={folder}/model",
        "--apply_chat_template",
        "--generate_max_len=60",
        "--turn_max_len=8",
        "--max_steps=2",
    ]


def test_an_agent_learns_what_a_game_learns(chats, tmp_path):
    """The server of the OpenAI API changes nothing: every number is the same."""
    folder, flags = chats
    runs = [
        ([*flags, f"--environment={folder}/agent.py:Game"], tmp_path / "game"),
        ([*flags, f"--agent={folder}/agent.py:game"], tmp_path / "agent"),
    ]
    game, agent = train_in_turn("train_ppo", 2, runs)
    assert_equal(game, agent)
    for row in game:
        assert row["episodes/turns"] > 2 and row["episodes/drift"] == row["episodes/branches"] == 0


def test_branches_are_learned_alike_in_every_layout(chats, tmp_path):
    folder, flags = chats
    flags = [*flags, "--train_batch_size=16", "--max_steps=2"]
    runs = [
        (
            [*flags, f"--agent={folder}/agent.py:{agent}", *layout],
            tmp_path / f"{agent}{len(layout)}",
        )
        for agent in ("forgets", "delegates")
        for layout in ([], ["--sp_size=2"])
    ]

    plain, divided, plain_too, divided_too = train_in_turn("train_ppo", 2, runs)
    assert all(row["episodes/branches"] > 2.5 for row in plain_too)
    rows, others = [*plain, *plain_too], [*divided, *divided_too]
    for row, other in zip(repeatable(rows), repeatable(others), strict=True):
        assert (
            row["episodes/branches"] > 0.9
            and row["episodes/drift"] == 0
            and row["engine/logprob_mismatch_max"] < 1e-4
        )
        names = [
            name
            for name in row
            if name.startswith(("rollout/", "episodes/", "train/")) and "seconds" not in name
        ]
        assert {name: other[name] for name in names} == pytest.approx(
            {name: row[name] for name in names}, rel=2e-3, abs=1e-5
        )


def test_agents_with_sglang(chats, tmp_path):
    """Branches that ask for turns at the same time."""
    folder, flags = chats
    engine = ["--engine_type=sglang", "--engine_kv_cache_gb=0.05"]
    flags = [*flags, *engine, "--train_batch_size=16", f"--agent={folder}/agent.py:delegates"]
    in_sglang_environment(partial(train, "train_ppo", 1, flags, tmp_path / "run"))
    for row in rows_of(tmp_path / "run"):
        assert row["episodes/branches"] > 2.5 and row["episodes/drift"] == 0
        assert row["engine/logprob_mismatch_max"] < 1e-4 and row["train/grad_norm"] > 0


def test_roles_are_learned_alike_in_every_layout_and_after_a_resume(chats, tmp_path):
    """A game of two roles, of which both learn, or only one."""
    folder, flags = chats
    flags = [*flags, f"--agent={folder}/agent.py:players", "--train_batch_size=16"]
    layouts = [[], ["--sp_size=2"], ["--train_roles", "second"]]
    runs = [([*flags, *layout], tmp_path / str(number)) for number, layout in enumerate(layouts)]
    plain, divided, alone = train_in_turn("train_ppo", 2, runs)
    assert_alike(plain, divided)
    for row in [*plain, *alone]:
        assert row["episodes/drift"] == 0 and row["episodes/branches"] > 0.9
        assert row["reward/first"] == pytest.approx(-row["reward/second"], abs=1e-6)
        assert row["train/grad_norm"] > 0 and row["rollout/reward_max"] < 1e-6
    assert plain[0]["rollout/reward"] == alone[0]["rollout/reward"]
    assert plain[0]["train/grad_norm"] != alone[0]["train/grad_norm"]
    assert 0.4 < alone[0]["rollout/left_out"] < 0.6 and plain[0]["rollout/left_out"] < 0.1

    recorded = [*flags, f"--agent_record={tmp_path}/agent.sqlite"]
    saving = ["--save_steps=1"]
    whole, resumed = train_and_resume(
        "train_ppo", 2, recorded, tmp_path / "resumed", stop=1, end=2, saving=saving
    )
    assert_equal(whole, resumed)

    # Both runs have the same file, and the same episodes. Each turn is there once.
    rows = []
    for rank in range(2):
        with closing(sqlite3.connect(tmp_path / f"agent.rank{rank}.sqlite")) as file:
            query = "SELECT draw, prompt_group, slot, number, role, token_ids FROM exchanges"
            rows += file.execute(query).fetchall()
    assert len({row[0] for row in rows}) == 2 and len({row[:4] for row in rows}) == len(rows)
    assert len(rows) == 4 * 2 * 8 * 4
    assert {row[4] for row in rows} == {"first", "second"} and all(row[5] for row in rows)


def test_an_error_of_an_episode_is_told_and_not_what_the_engine_says_then(inputs, tmp_path):
    with pytest.raises(RuntimeError, match="ConfigError: .* --reward exact_match ignores"):
        train("train_ppo", 1, [*inputs, "--reward=exact_match", "--max_steps=1"], tmp_path)
