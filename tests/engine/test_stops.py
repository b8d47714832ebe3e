"""Where a response ends whose text has a stop string, and what of the vocabulary a sampling
names.
"""

import pytest

from lightrft.algorithms.rollout.sampler import greedy_sampling, sampling_of
from lightrft.config import RolloutSection
from lightrft.core.samples import Completion
from lightrft.engine.requests import Sampling
from lightrft.engine.stops import StopStrings
from tiny import EOS, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def completion(tokens: list[int], reason: str = "length") -> Completion:
    return Completion(
        tokens,
        [-float(position) for position in range(len(tokens))],
        reason,
        7,
        weight_versions=[*range(len(tokens))],
    )


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("a</b>c</b>", ("</b>",), "a</b>"),
        ("one, two; three", (";", ", "), "one, "),
        ("nothing", ("else",), "nothing"),
        ("日本語です", ("語",), "日本語"),
        ("ends with it", ("h it",), "ends with it"),
    ],
)
def test_the_last_token_completes_the_first_text(tokenizer, text, stop, kept):
    """Of tokens that are bytes: a character of three of them is there with the third."""
    tokens = list(text.encode())
    cut = StopStrings(tokenizer, stop).cut(completion(tokens))
    assert bytes(cut.token_ids).decode() == kept and cut.logprobs == [
        -float(position) for position in range(len(kept.encode()))
    ]
    assert cut.finish_reason == ("length" if stop == ("else",) else "stop")
    assert (cut.weight_versions, cut.num_cached_tokens) == ([*range(len(cut.token_ids))], 7)


def test_asked_after_every_token_it_is_reached_at_the_same_one(tokenizer):
    """However long the response is; special tokens are text."""
    stops = StopStrings(tokenizer, ("語<eos>", "xyz"))
    tokens = list(("日本 " * 50 + "語").encode()) + [EOS, 65]
    reached = [stops.match(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert reached.index(True) == len(tokens) - 2
    assert stops.cut(completion(tokens)).token_ids == tokens[:-1]
    assert stops.cut(completion([])).token_ids == []


def test_a_sampling_of_the_flags():
    section = RolloutSection(
        generate_max_len=9,
        top_p=0.5,
        top_k=4,
        stop=["a"],
        stop_token_ids=[1],
        first_token_temperature=3.0,
    )
    sampling = sampling_of(section, seed=5)
    assert sampling == Sampling(8, 9, 1.0, 5, (1,), 0.5, 4, ("a",), 3.0)
    greedy = greedy_sampling(section)
    assert (greedy.n, greedy.temperature, greedy.first_token_temperature, greedy.stop) == (
        1,
        0.0,
        None,
        ("a",),
    )
    assert greedy.resolved(()).truncation.active is False
