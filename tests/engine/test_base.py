"""What the contract does for every adapter, shown on one that does nothing."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from lightrft.core.samples import Completion
from lightrft.engine.base import Engine, EngineError, Half, Request, Sampling
from lightrft.models.weight_sync.verify import FULL_EVERY, Fingerprints

EXPECTED = {"a": torch.Size([2]), "b": torch.Size([3])}
STREAM = [("a", torch.zeros(2)), ("b", torch.zeros(3))]


class Idle(Engine):
    """Reads `reads` tensors of a stream; breaks in the verbs named in `broken`."""

    def __init__(self, *, reads: int = 9, broken: tuple[str, ...] = ()):
        super().__init__(EXPECTED)
        self.reads = reads
        self.broken = broken
        self.closings = 0
        self.keys = []

    def _act(self, verb: str) -> None:
        if verb in self.broken:
            raise MemoryError(f"no memory to {verb}")

    def prompts_at_once(self, n: int) -> int:
        return 1

    def reset_cache(self) -> None: ...

    def _add(self, key: int, request: Request) -> None:
        self._act("generate")
        self.keys.append(key)

    def _step(self) -> Iterable[tuple[int, list[Completion]]]:
        return [(self.keys.pop(0), [])]

    def _abort(self, key: int) -> list[Completion]:
        self.keys.remove(key)
        return []

    def _num_sampled(self, key: int) -> list[int]:
        return []

    def _leave_cache(self) -> None: ...

    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        for _, _ in zip(range(self.reads), named_tensors, strict=False):
            pass

    def _sleep(self, level: int) -> None:
        self._act("sleep")

    def _wake(self, half: Half) -> None:
        self._act("wake")

    def _engine_fingerprints(self, prints: Fingerprints) -> tuple[Tensor, Tensor]:
        return prints.numbers(torch.device("cpu"))

    def _num_cached(self) -> int:
        return 0

    def _close(self) -> None:
        self.closings += 1


@pytest.mark.parametrize("verb", ["generate", "sleep", "wake"])
def test_an_engine_that_broke_is_not_used_again(verb: str) -> None:
    engine = Idle(broken=(verb,))
    with pytest.raises(EngineError, match=f"Idle.{verb} failed: no memory") as caught:
        if verb == "generate":
            engine.generate([Request([1])], Sampling())
        else:
            engine.sleep()
            engine.wake("weights")

    assert isinstance(caught.value.__cause__, MemoryError)
    for call in (
        lambda: engine.generate([], Sampling()),
        lambda: engine.load_weights(STREAM, 1),
        engine.sleep,
    ):
        with pytest.raises(EngineError, match="failed earlier.*no memory"):
            call()

    engine.close()
    engine.close()
    assert engine.closings == 1


def test_completions_that_are_not_read_to_the_end_leave_the_engine_unusable() -> None:
    engine = Idle()
    loop = engine.open(Sampling())
    loop.add([Request([1]), Request([2])])
    assert next(loop.to_the_end()) == (0, [])
    with pytest.raises(EngineError, match="its completions were not consumed to the end"):
        engine.generate([Request([1])], Sampling())


def test_a_stream_that_the_adapter_does_not_read_to_its_end_does_not_count() -> None:
    engine = Idle(reads=1)
    with pytest.raises(EngineError, match="stopped consuming the weight stream at b"):
        engine.load_weights(STREAM, 1)
    with pytest.raises(EngineError, match="load_weights"):
        engine.generate([Request([1])], Sampling())


def test_missing_names_are_found_even_if_the_adapter_stops_one_early() -> None:
    with pytest.raises(ValueError, match="1 weights are missing, the first is b"):
        Idle(reads=1).load_weights(STREAM[:1], 1)


class Keeps(Idle):
    """Holds what came, but for the elements in `wrong`."""

    def __init__(self):
        super().__init__()
        self.expected = {"a": torch.Size([128, 2])}
        self.verify_dtype = torch.float32
        self.wrong: list[int] = []
        self.held_rows = list(range(128))

    def _load_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        ((_, tensor),) = named_tensors
        self.held = tensor[self.held_rows]
        self.held.view(-1)[self.wrong] += 1

    def _engine_fingerprints(self, prints: Fingerprints) -> tuple[Tensor, Tensor]:
        prints.add("a", self.held)
        return super()._engine_fingerprints(prints)


def test_the_first_verification_is_full_and_later_ones_are_samples() -> None:
    """An element that is wrong from the second sync on is named in the round that covers its row.

    The next verification is full, and names it again.
    """
    engine = Keeps()
    stream = [("a", torch.arange(256.0).view(128, 2))]
    engine.wrong = [89]
    with pytest.raises(EngineError, match="a in the engine differs from the weight that was sent"):
        engine.load_weights(stream, 1)
    engine.wrong = []
    engine.load_weights(stream, 1)
    engine.wrong = [89]

    # Each looks at one of the 128 rows. The element is in row 44.
    for round in range(1, 44):
        assert engine.verify_round == round
        engine.load_weights(stream, 2)

    for _ in range(2):
        with pytest.raises(
            EngineError, match="a in the engine differs from the weight that was sent"
        ):
            engine.load_weights(stream, 3)
        assert engine.verify_round is None and not engine.weights_valid

    engine.wrong = []
    for round in [*range(1, FULL_EVERY), 0, 1]:
        engine.load_weights(stream, 4)
        assert engine.verify_round == round

    # Two rows that changed places look the same to a sample of both, and not to round 0.
    engine.verify_round = 0
    engine.held_rows = [1, 0, *range(2, 128)]
    with pytest.raises(EngineError, match="a in the engine differs from the weight that was sent"):
        engine.load_weights(stream, 4)
    engine.held_rows = list(range(128))
    engine.load_weights(stream, 4)

    engine.sleep(2)  # every row is written anew: what does not come is seen in any row
    engine.wake("weights")
    engine.load_weights(stream, 5)
    assert engine.verify_round == 2


class Broken(Idle):
    def _step(self) -> Iterable[tuple[int, list[Completion]]]:
        return [(self.keys.pop(0), [Completion([5], [float("nan")], "length", 0)])]


def test_a_log_prob_that_is_no_number_is_an_error() -> None:
    engine = Broken()
    with pytest.raises(EngineError, match="a log-prob that is not finite"):
        engine.generate([Request([1])], Sampling(max_tokens=1))
