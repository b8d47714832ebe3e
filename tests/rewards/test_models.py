"""Rewards from other models: a reward model beside the actor, and a server."""

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from algorithms.roles import rows
from json_server import JsonHandler, listening
from lightrft.algorithms.roles import endpoint
from lightrft.config import Config, RewardSection, validate
from lightrft.core.samples import Prompt, Sample
from lightrft.data.step_ends import StepEnds
from lightrft.rewards.functions import rewards
from lightrft.rewards.models import ModelRewards, ScoringModel
from lightrft.rewards.runner import RewardRunner
from lightrft.rewards.steps import StepRewards
from ranks import run_ranks
from tiny import tiny_model

SHAPES = [(3, 5), (1, 1), (7, 2), (4, 0), (2, 9)]
"""Tokens of prompt and response."""
COEFFICIENT = 0.5
ENDS = {0: (1, 4), 4: (3,)}
"""Sample -> where the byte 10, a line end, is in its response."""
CHOSEN = [["steps"], "model0", ["model0", "steps"], "steps", ["steps"]]
"""Models that score the samples where the column `models` chooses them."""


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, shape in enumerate(SHAPES):
        prompt, response = (
            torch.randint(0, 256, (count,), generator=generator).tolist() for count in shape
        )
        text = f"{number}!"
        response = [
            10 if index in ENDS.get(number, ()) else token for index, token in enumerate(response)
        ]
        asked = Prompt(
            number, f"{number}?", prompt, {"label": str(number), "models": CHOSEN[number]}
        )
        made.append(Sample(asked, number, response, [0.0] * len(response), text, "stop"))

    return made


def runner(address: str, **settings) -> RewardRunner:
    """Return a runner that calls in this process; test_pool.py has the worker processes."""
    return RewardRunner(address, section=RewardSection(**{"reward_workers": 0} | settings))


def by_step(given: list[Sample], **_) -> list:
    """Return a number, a reward for each token, and components, in turn."""
    kinds = {
        0: lambda s: 2.0,
        1: lambda s: [1.0],
        2: lambda s: {"a": 1.0, "b": 3.0},
        3: lambda s: 0.0,
        4: lambda s: [1.0] + [None] * 8,
    }
    return [kinds[sample.group](sample) for sample in given]


def scored(
    folders: list[str], held: list[int], key: str | None = None, early: int = 0
) -> list[tuple[float, dict, list | None]]:
    """Score samples of each rank; the first `early` ones before the function is called."""
    made = rows.strategy()
    rewards.register("by_step")(by_step)
    judge = RewardRunner("by_step", made.mesh.model_parallel, RewardSection(reward_workers=0))
    models = [rows.reward_model(made, folder, max_tokens=24) for folder in folders]
    whole = [
        ScoringModel(f"model{number}", model, COEFFICIENT) for number, model in enumerate(models)
    ]
    of_lines = StepRewards(
        AutoTokenizer.from_pretrained(folders[0].rpartition("/")[0]), "\n", "sum"
    )
    steps = ScoringModel("steps", models[1], 2.0, of_lines)
    judge.models = ModelRewards(whole if key is None else [whole[0], steps], key=key)
    mine = samples()[sum(held[: made.get_rank()]) : sum(held[: made.get_rank() + 1])]
    if early:
        judge.models.compute_early(mine[:early])
    judge(mine)

    return [(sample.reward, sample.reward_components, sample.token_rewards) for sample in mine]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    return [rows.dense_scorer(folder, seed) for seed in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("held", "early"), [([5], 0), ([2, 3], 1), ([5, 0], 5)], ids=str)
def test_scores_are_added_to_what_the_function_says(folders, held, early):
    """The scores are transformers' own, read at the last token.

    Some of them, or all, are computed early.
    """
    found = [
        each for share in run_ranks(len(held), scored, folders, held, None, early) for each in share
    ]

    plain = [rows.plain_scorer(folder) for folder in folders]
    function = [2.0, 1.0, 4.0, 0.0, 1.0]
    for sample, (reward, components, tokens), said in zip(samples(), found, function, strict=True):
        ids = torch.tensor([*sample.prompt.token_ids, *sample.token_ids])
        with torch.no_grad():
            scores = [
                COEFFICIENT * float(model(ids[None], use_cache=False).logits) for model in plain
            ]

        assert reward == pytest.approx(said + sum(scores), abs=1e-4)
        from_function = {"a": 1.0, "b": 3.0} if sample.group == 2 else {"function": said}
        assert components == pytest.approx(
            from_function | {"model0": scores[0], "model1": scores[1]}, abs=1e-4
        )

        if sample.group == 4:
            assert tokens == [1.0, *[None] * 7, pytest.approx(sum(scores), abs=1e-4)]
        elif sample.group == 1:
            assert tokens == [pytest.approx(1.0 + sum(scores), abs=1e-4)]
        else:
            assert tokens is None


@pytest.mark.slow
def test_a_column_chooses_models_and_steps_get_rewards_of_their_own(folders):
    found = [each for share in run_ranks(2, scored, folders, [2, 3], "models") for each in share]
    outcome, process = (rows.plain_scorer(folder) for folder in folders)
    function = [2.0, 1.0, 4.0, 0.0, 1.0]
    for sample, chosen, (reward, components, tokens), said in zip(
        samples(), CHOSEN, found, function, strict=True
    ):
        ids = torch.tensor([*sample.prompt.token_ids, *sample.token_ids])
        with torch.no_grad():
            last = COEFFICIENT * float(outcome(ids[None], use_cache=False).logits)
            correct = rows.plain_scores(process, ids)[len(sample.prompt.token_ids) :].sigmoid()

        expected = {"a": 1.0, "b": 3.0} if sample.group == 2 else {"function": said}
        expected |= {"model0": last} if "model0" in chosen else {}
        ends = sorted({*ENDS.get(sample.group, ()), len(sample.token_ids) - 1} - {-1})
        if "steps" in chosen and ends:
            expected["steps"] = 2 * float(correct[ends].sum())
            before = {0: [None] * 4 + [2.0], 2: [None, 4.0 + last], 4: [1.0] + [None] * 8}[
                sample.group
            ]
            of_steps = [
                2 * float(correct[index]) if index in ends else None for index in range(len(before))
            ]
            pairs = zip(before, of_steps, strict=True)
            assert tokens == [
                pytest.approx((a or 0) + (b or 0), abs=1e-4) if (a, b) != (None, None) else None
                for a, b in pairs
            ]

        assert (components or {"function": reward}) == pytest.approx(expected, abs=1e-4)
        assert reward == pytest.approx(sum(expected.values()), abs=1e-4)


@pytest.fixture(scope="module")
def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the tokens `.\n\n` and `\n\n`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    text = ["Ab.\n\n", "Cd.\n\n", "E\n\n", "\n\nF", "\n\nG"]
    trainer = BpeTrainer(vocab_size=280, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(text * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("text", "separator", "steps"),
    [
        ("one.\n\ntwo\n\nthree", "\n\n", ["one.\n\n", "two\n\n", "three"]),
        ("one.\n\ntwo.\n\n", "\n\n", ["one.\n\n", "two.\n\n"]),
        ("one.\n\n\n\n\n\ntwo", "\n\n", ["one.\n\n\n\n\n\n", "two"]),
        ("one\ntwo", "\n\n", ["one\ntwo"]),
        ("one.\n\n \n", "\n\n", ["one.\n\n \n"]),
        (
            "1 \N{CYRILLIC SMALL LETTER KA}\N{CYRILLIC SMALL LETTER I} 2",
            "\N{CYRILLIC SMALL LETTER KA}\N{CYRILLIC SMALL LETTER I}",
            ["1 \N{CYRILLIC SMALL LETTER KA}\N{CYRILLIC SMALL LETTER I}", " 2"],
        ),
        ("", "\n\n", []),
    ],
)
def test_steps_end_at_the_token_that_completes_the_separator(
    merging_tokenizer, text, separator, steps
):
    ids = merging_tokenizer.encode(text)
    ends = StepEnds(merging_tokenizer, separator)(ids)
    starts = [0, *(end + 1 for end in ends)][: len(ends)]
    assert [
        merging_tokenizer.decode(ids[start : end + 1])
        for start, end in zip(starts, ends, strict=True)
    ] == steps


@pytest.mark.parametrize(
    ("form", "rewards"),
    [
        ("sum", [0.8, 0.2, 0.5]),
        ("mean", [0.8 / 3, 0.2 / 3, 0.5 / 3]),
        ("difference", [0.8, -0.6, 0.3]),
        ("min", [None, 0.2, None]),
    ],
)
def test_rewards_of_steps(merging_tokenizer, form, rewards):
    ids = merging_tokenizer.encode("1\n\n2\n\n3")
    scores = torch.logit(torch.tensor([0.1, 0.8, 0.1, 0.2, 0.5]))
    found = StepRewards(merging_tokenizer, "\n\n", form)(ids, scores)
    assert len(ids) == 5
    expected = [None, rewards[0], None, rewards[1], rewards[2]]
    assert [None if each is None else round(each, 5) for each in found] == [
        each and round(each, 5) for each in expected
    ]


# -- a server


class Lengths(JsonHandler):
    """Rewards a response by its length.

    `said` has the requests, and `answer` is what it says instead.
    """

    said: list
    answer: object = None

    def do_POST(self) -> None:
        request = self.read_json()
        type(self).said.append((self.path, request, self.headers["Authorization"]))
        self.send_json(
            {"rewards": [len(text) for text in request["responses"]]}
            if self.answer is None
            else self.answer
        )


@pytest.fixture
def address():
    Lengths.said = []
    Lengths.answer = None
    with listening(Lengths) as address:
        yield f"{address}/get_reward"


def test_a_server_is_a_reward_function(address, monkeypatch):
    monkeypatch.setenv("REWARD_API_KEY", "secret")
    given = samples()[:2]
    runner(address)(given)
    assert [sample.reward for sample in given] == [2, 2]
    request = {
        "query": ["0?0!", "1?1!"],
        "prompts": ["0?", "1?"],
        "responses": ["0!", "1!"],
        "labels": ["0", "1"],
    }
    assert Lengths.said == [("/get_reward", request, "Bearer secret")]


def test_worker_processes_ask_it_too(address):
    given = samples()[:2]
    runner(address, reward_workers=2)(given)
    runner(address, reward_workers=1)(given)
    assert [sample.reward for sample in given] == [2, 2]


def test_a_key_of_user_and_password(address, monkeypatch):
    monkeypatch.setenv("REWARD_API_KEY", "me:secret")
    runner(address)(samples()[:2])
    assert Lengths.said[0][2] == "Basic " + base64.b64encode(b"me:secret").decode()


@pytest.mark.parametrize(
    ("url", "key", "says"),
    [
        (
            "http://host:80/x?token=secret",
            "",
            r"http://host\?\.\.\.: .* set REWARD_API_KEY in the environment",
        ),
        (
            "http://host:80/x#secret",
            "",
            r"http://host\?\.\.\.: .* set REWARD_API_KEY in the environment",
        ),
        (
            "http://me:secret@host:80/x",
            "",
            r"http://\.\.\.@host: .* set REWARD_API_KEY=user:password",
        ),
        ("http://host:port/x", "", "the address cannot be read"),
        ("http://", "", "is not an address such as"),
        ("http://host/a b", "", "is not an address such as"),
        (
            "http://host/x",
            "secret\n",
            "the environment variable REWARD_API_KEY must not contain line ends",
        ),
        (
            "http://host/x",
            "s\N{LATIN SMALL LETTER E WITH ACUTE}cret",
            "REWARD_API_KEY must not contain",
        ),
    ],
)
def test_addresses_and_keys_are_checked_before_anything_else(monkeypatch, url, key, says):
    monkeypatch.setenv("REWARD_API_KEY", key)
    config = Config()
    config.reward.reward = url
    for ask in (lambda: validate(config, command="evaluate", world_size=1), lambda: runner(url)):
        with pytest.raises(ValueError, match=says) as caught:
            ask()
        assert "secret" not in str(caught.value)


@contextmanager
def strange_server(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the URL of a server that calls `behave` with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as accepting:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(
                        target=behave, args=(accepting.accept()[0],), daemon=True
                    ).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{accepting.getsockname()[1]}/x"


def drip(connection: socket.socket, begin: bytes, byte: bytes) -> None:
    """Send the beginning of an answer, then one byte after another without end."""
    with suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + begin)
        while True:
            connection.sendall(byte)
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("begin", "byte"), [(b"X-Header: ", b"x"), (b"Content-Length: 100000\r\n\r\n", b" ")]
)
def test_a_server_that_never_ends_its_answer(begin, byte):
    with strange_server(partial(drip, begin=begin, byte=byte)) as url:
        with pytest.raises(
            ValueError,
            match=r"POST sent no complete response within 0 s \(after \d+ s of repeated requests",
        ):
            runner(url, reward_minutes=0.3 / 60)(samples()[:2])


def test_a_server_that_is_away_is_asked_again_for_as_long_as_it_may(address, monkeypatch):
    said = []
    monkeypatch.setattr(endpoint, "WARN_AFTER", 0)  # which the first attempt outlasts
    monkeypatch.setattr(endpoint.logger, "warning", said.append)
    began = time.monotonic()
    problem = (
        r"POST: ConnectError: .* \(after \d+ s of repeated requests, see --server_minutes\),"
        r" for the"
    )
    with socket.socket() as bound:  # without `listen`, so that connections are refused
        bound.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{bound.getsockname()[1]}/x"
        with pytest.raises(ValueError, match=problem):
            runner(away, server_minutes=1 / 60)(samples()[:2])
    assert time.monotonic() - began > 1
    assert len(said) == 1 and "retrying for at most 1 s (--server_minutes)" in said[0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"scores": [1, 1]}, 'the response is not {"rewards": '),
        ({"rewards": [1]}, r"\[1\] is not a list of 2 rewards"),
        ({"rewards": {"0": 1, "1": 0}}, r"{'0': 1, '1': 0} is not a list of 2 rewards"),
        ({"rewards": "12"}, "'12' is not a list of 2 rewards"),
    ],
    ids=str,
)
def test_other_answers_are_refused(address, answer, says):
    Lengths.answer = answer
    with pytest.raises(ValueError, match=f"--reward {address}: .*{says}"):
        runner(address)(samples()[:2])
