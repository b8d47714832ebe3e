"""Environments of OpenEnv: a server of its protocol, and episodes in real worker processes."""

import json
from threading import Thread

import pytest

from lightrft.rewards.functions import environment
from player import Player, ids

server = pytest.importorskip("websockets.sync.server", reason="websockets is not installed")


class Guess:
    """Environment of a connection, with the replies of OpenEnv's server."""

    def __init__(self):
        self.turns = 0

    def reply(self, message):
        kind = message["type"]
        data = message["data"]
        if kind == "reset":
            self.digit = data["label"]
            return self.observation("Guess.", None, False)

        self.turns += 1
        if set(data) != {"message"}:
            errors = [
                {"type": "missing", "loc": ["message"], "msg": "Field required", "input": data}
            ]
            return "error", {
                "message": "Invalid message",
                "code": "VALIDATION_ERROR",
                "errors": errors,
            }

        if data["message"] == "crash":
            return "error", {"message": "the board is on fire", "code": "EXECUTION_ERROR"}
        return self.observation(f"{self.turns}", 0.5, data["message"] == self.digit)

    def observation(self, text, reward, done):
        fields = {"text": text, "metadata": {"seen": False}}
        return "observation", {
            "observation": fields,
            "reward": reward,
            "done": done,
            "metadata": {"seen": False},
        }


@pytest.fixture(scope="module")
def connections():
    return []


@pytest.fixture(scope="module")
def player(connections):
    def handle(socket):
        connections.append(socket)
        game = Guess()
        for message in socket:
            kind, data = game.reply(json.loads(message))
            socket.send(json.dumps({"type": kind, "data": data}))

    def full(socket):
        data = {
            "message": "1 of 1 sessions are in use",
            "code": "CAPACITY_REACHED",
            "active_sessions": 1,
            "max_sessions": 1,
        }
        socket.send(json.dumps({"type": "error", "data": data}))

    servers = [server.serve(one, "127.0.0.1", 0) for one in (handle, full)]
    for started in servers:
        Thread(target=started.serve_forever, daemon=True).start()
    ports = [started.socket.getsockname()[1] for started in servers]
    players = [
        Player(f"openenv:http://127.0.0.1:{port}", environment_workers=3, max_turns=4)
        for port in ports
    ]
    yield players
    for started in players:
        started.episodes.close()
    for started in servers:
        started.shutdown()


def test_a_game_that_a_server_plays(player, connections):
    """Each episode has an environment of its own; rewards count from their turns on."""
    won, limited, third = player[0].play([["1$", '{"message": "0"}$'], ["7$"] * 4, ["2$"]])
    assert won.prompt.token_ids == ids("pGuess.") and won.token_ids == ids('1$1{"message": "0"}$')
    assert environment([won]) == [
        [0.5 if index in (1, 19) else None for index in range(len(won.token_ids))]
    ]
    assert limited.token_ids == ids("7$17$27$37$") and limited.truncated
    assert third.episode.problem == "" and environment([third]) == [0.5]
    assert len(connections) == 3


def test_failures_of_an_action_and_of_a_server(player, connections):
    """An action that does not fit the schema is answered with the errors; other errors end the
    episode.
    """
    wrong, crashed = player[0].play([['{"guess": 0}$', "0$"], ["crash$"]])
    read = '{"error": [{"field": ["message"], "problem": "Field required"}]}'
    assert wrong.token_ids == ids('{"guess": 0}$') + ids(read) + ids("0$")
    assert environment([wrong]) == [0.5]
    assert (
        crashed.masked
        and crashed.episode.problem
        == "RuntimeError: OpenEnv: the board is on fire (EXECUTION_ERROR)"
    )
    (full,) = player[1].play([[]])
    assert full.masked and "1 of 1 sessions are in use (CAPACITY_REACHED)" in full.episode.problem
    nobody = Player("openenv:127.0.0.1:9")
    (sample,) = nobody.play([[]])
    nobody.episodes.close()

    assert (
        sample.masked
        and "no OpenEnv server answers at ws://127.0.0.1:9/ws: " in sample.episode.problem
    )
    assert all(each.close_code is not None for each in connections), (
        "every episode has closed its connection"
    )


@pytest.mark.parametrize(
    ("observation", "read"),
    [
        ({"message": "hm", "metadata": {}}, "hm"),
        (
            {"echoed_message": "hé", "message_length": 2, "metadata": {}},
            '{"echoed_message": "hé", "message_length": 2}',
        ),
        ({"legal_actions": [0, 2], "metadata": {}}, '{"legal_actions": [0, 2]}'),
    ],
)
def test_what_the_model_reads(observation, read):
    from lightrft.extras.agents.adapters.openenv import observation_text

    assert observation_text(observation) == read
