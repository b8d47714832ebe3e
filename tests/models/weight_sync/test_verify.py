"""Fingerprints of pieces add up to the whole's, and any change of a weight changes them."""

import itertools
import math

import pytest
import torch

from lightrft.models.weight_sync import verify
from lightrft.models.weight_sync.fused_layout import decays
from lightrft.models.weight_sync.verify import Fingerprints, product, signs

CPU = torch.device("cpu")
SHAPES = {
    "wide": (12, 256),
    "odd": (6, 10),
    "odd_rows": (8, 31),
    "vector": (9,),
    "experts": (4, 6, 8),
    "scalar": (1,),
}
DTYPES = [torch.float32, torch.bfloat16]
INTEGERS = {2: torch.int16, 4: torch.int32}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def prints(whole: dict[str, torch.Tensor], **options) -> Fingerprints:
    dtype = next(iter(whole.values())).dtype
    return Fingerprints({name: tensor.shape for name, tensor in whole.items()}, dtype, **options)


def sent(whole: dict[str, torch.Tensor], **options) -> Fingerprints:
    made = prints(whole, **options)
    for name, tensor in whole.items():
        made.add_sent(name, tensor)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 600, 10**9])
def test_pieces_add_up_to_copies_of_the_whole(dtype, chunk, monkeypatch) -> None:
    """Pieces are in rows and columns, twice.

    One of them is not contiguous, and one begins where no word begins.
    """
    whole = tensors(dtype)
    monkeypatch.setattr(verify, "CHUNK_BYTES", chunk)
    expected = sent(whole)

    held = prints(whole)
    for name, tensor in whole.items():
        half = len(tensor) // 2
        last = tensor.shape[-1] // 2
        if name in ("wide", "odd"):
            held.add(name, tensor[:, :last])
            held.add(name, tensor[:, last:].clone(), column=last)
            held.add(
                name, torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
            )
        else:
            rows = math.prod(tensor.shape[1:-1])
            held.add(name, tensor[:half])
            held.add(name, tensor[half:], row=half * rows)

    assert expected.wrong(held.numbers(CPU)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_change_of_a_weight_is_found(dtype) -> None:
    for name, tensor in tensors(dtype).items():
        expected = sent({name: tensor})
        integer = INTEGERS[dtype.itemsize]
        for element in (0, tensor.numel() // 2, tensor.numel() - 1):
            for bit in range(8 * dtype.itemsize):  # the lowest one too, and the sign
                changed = tensor.clone()
                changed.view(integer).view(-1)[element] ^= torch.tensor(1 << bit).to(integer)
                assert expected.wrong(sent({name: changed}).numbers(CPU)) == [name]
        for dim in range(tensor.ndim):
            if tensor.shape[dim] > 1:
                assert expected.wrong(sent({name: tensor.roll(1, dim)}).numbers(CPU)) == [name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_changed_bit_in_an_even_number_of_copies_is_found(dtype) -> None:
    """An engine repeats heads, so the change may count twice, or 1,024 times."""
    whole = {"wide": tensors(dtype)["wide"]}
    expected = sent(whole)
    changed = whole["wide"].clone()
    changed[5, 7] *= -1
    for copies in (2, 1024):
        held = prints(whole)
        for _ in range(copies):
            held.add("wide", changed)
        assert expected.wrong(held.numbers(CPU)) == ["wide"]


def test_weights_of_few_values_in_other_places_are_found() -> None:
    """Powers of two have all their bits at one end; equal sums lie at other positions."""
    whole = {"a": torch.ones(8, 1024), "b": torch.ones(300)}
    whole["a"][2], whole["a"][3, :512], whole["b"][7] = 2.0, -1.0, 0.5

    expected = sent(whole)
    for one in range(8):
        for other in range(one):
            rows = whole["a"].clone()
            rows[[one, other]] = rows[[other, one]]
            moved = not torch.equal(rows, whole["a"])
            assert (expected.wrong(sent(whole | {"a": rows}).numbers(CPU)) == ["a"]) == moved

    for shift in (1, 64, 299):
        assert expected.wrong(sent(whole | {"b": whole["b"].roll(shift)}).numbers(CPU)) == ["b"]
    assert expected.wrong(sent(whole | {"a": whole["a"].roll(128, 1)}).numbers(CPU)) == ["a"]


def test_what_is_missing_or_there_in_part_is_found() -> None:
    whole = tensors(torch.float32)
    expected = sent(whole)
    held = prints(whole)
    assert expected.wrong(held.numbers(CPU)) == list(SHAPES)
    for name, tensor in whole.items():
        held.add(name, tensor)
    held.add("wide", whole["wide"][:3])
    assert expected.wrong(held.numbers(CPU)) == ["wide"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_differ_by_rounding_or_are_found(dtype) -> None:
    """Summed in another order and in pieces they are the same.

    One element that is replaced by another of its kind is found.
    """
    generator = torch.Generator().manual_seed(1)
    whole = {"w": (torch.randn(96, 2048, generator=generator) * 0.02).to(dtype)}
    expected = sent(whole, bits=(), products=("w",))
    assert torch.equal(product(whole["w"], dtype), (whole["w"].float() @ signs(2048, CPU)).double())

    def held(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = prints(whole, bits=(), products=("w",))
        for column in range(0, 2048, 512):
            shard = weight[:, column : column + 512]
            values = (
                (shard.float().flip(1) @ signs(2048, CPU)[column:][:512].flip(0)).to(dtype).double()
            )
            made.add_product("w", values, shard.numel())
        return made.numbers(CPU)

    assert expected.wrong(held(whole["w"])) == []
    smallest = 0.002 if dtype == torch.float32 else 0.04
    for element in range(0, whole["w"].numel(), 4099):
        changed = whole["w"].clone()
        changed.view(-1)[element] += smallest
        assert expected.wrong(held(changed)) == ["w"]
    assert expected.wrong(held(whole["w"].roll(1, 0))) == ["w"]
    assert expected.wrong(held(whole["w"] * torch.nan)) == ["w"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples(dtype, monkeypatch) -> None:
    """Each sample has a slice of every tensor, whole or in pieces.

    Four rounds look at every row once, and at a vector or the few rows of a tensor every time.
    """
    monkeypatch.setattr(verify, "FULL_EVERY", 4)
    whole = tensors(dtype) | {"few": torch.randn(3, 5).to(dtype)}

    integer = INTEGERS[dtype.itemsize]
    looked_at = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    for round in range(1, 5):
        expected = sent(whole, round=round)
        held = prints(whole, round=round)
        for name, tensor in whole.items():
            cut = max(1, len(tensor) // 3)
            last = tensor.shape[-1] // 2
            held.add(name, tensor[:cut])
            held.add(name, tensor[cut:], row=cut * math.prod(tensor.shape[1:-1]))
            if name in ("wide", "odd"):
                held.add(name, tensor[:, :last])
                held.add(name, tensor[:, last:], column=last)

        assert expected.wrong(held.numbers(CPU)) == []
        for name, tensor in whole.items():
            assert expected.wrong(sent(whole | {name: tensor * 2}, round=round).numbers(CPU)) == [
                name
            ]
            for element in range(0, tensor.numel(), tensor.shape[-1] if tensor.ndim > 1 else 1):
                changed = tensor.clone()
                changed.view(integer).view(-1)[element] ^= 1
                wrong = expected.wrong(sent(whole | {name: changed}, round=round).numbers(CPU))
                looked_at[name].view(-1)[element] += wrong == [name]

    for name, times in looked_at.items():
        every_time = times.ndim == 1 or name == "few"
        assert (times.reshape(-1, times.shape[-1])[:, 0] == (4 if every_time else 1)).all()


def test_a_sample_finds_what_is_missing_stale_or_another_weight() -> None:
    """It finds a rank's shard too, wherever that lies, but not rows that changed places in it."""
    generator = torch.Generator().manual_seed(3)
    whole = {name: torch.randn(512, 8, generator=generator) for name in "ab"}
    old = torch.randn(512, 8, generator=generator)

    def wrong(round: int | None, **changed: torch.Tensor) -> list[str]:
        expected = sent(whole, round=round)
        return expected.wrong(sent(whole | changed, round=round).numbers(CPU))

    for round in (1, 77, 127):
        assert wrong(round, a=torch.zeros(512, 8)) == ["a"]
        assert wrong(round, a=old) == ["a"]
        assert wrong(round, a=whole["b"], b=whole["a"]) == ["a", "b"]
        for rank in range(4):
            rows = torch.arange(128 * rank, 128 * (rank + 1))
            assert wrong(round, a=whole["a"].index_copy(0, rows, old[rows])) == ["a"]

        assert wrong(round, a=whole["a"].roll(128, 0)) == []
    assert wrong(None, a=whole["a"].roll(128, 0)) == ["a"]


def test_in_a_narrower_dtype() -> None:
    """What is sent in float32 and kept in bfloat16 is compared in bfloat16."""
    whole = tensors(torch.float32)
    shapes = {name: tensor.shape for name, tensor in whole.items()}
    expected = Fingerprints(shapes, torch.bfloat16)
    held = Fingerprints(shapes, torch.bfloat16)
    for name, tensor in whole.items():
        expected.add(name, tensor)
        held.add(name, tensor.bfloat16())
    assert expected.wrong(held.numbers(CPU)) == []


def test_vectors_are_split_anywhere() -> None:
    vector = torch.randn(64).bfloat16()
    for round in (None, 5):
        held = prints({"bias": vector}, round=round)
        held.add("bias", vector[:3])
        held.add("bias", vector[3:], row=3)
        assert sent({"bias": vector}, round=round).wrong(held.numbers(CPU)) == []


def test_a_weight_that_an_engine_stores_as_a_function_of_it() -> None:
    """Mamba 2: ranks apply it to their heads, in float32 under bfloat16 too."""
    logarithms = torch.linspace(-3, 3, 37).bfloat16()
    expected = sent({"A_log": logarithms}, forms={"A_log": decays})

    for index in (None, *range(37)):
        stored = -torch.exp(logarithms.float())
        if index is not None:
            stored.view(torch.int32)[index] ^= 1
        held = prints({"A_log": logarithms}, forms={"A_log": decays})
        held.add("A_log", stored[:19])
        held.add("A_log", stored[19:], row=19)
        assert expected.wrong(held.numbers(CPU)) == ([] if index is None else ["A_log"])


def test_the_signs_of_fewer_columns_are_the_first_ones() -> None:
    """An engine may fill a layer up with columns of zeros."""
    assert torch.equal(signs(5000, CPU)[:77], signs(77, CPU))


def test_a_number_is_a_vector_of_one() -> None:
    """For a persistent buffer without dimensions, in any round.

    An engine may keep it with one dimension or without.
    """
    shapes = {"beta": torch.Size([])}
    for round, value, shape in itertools.product((None, 5), (0.5, 0.25), ((), (1,))):
        expected, held = (Fingerprints(shapes, torch.float32, round=round) for _ in range(2))
        expected.add_sent("beta", torch.tensor(0.5))
        held.add("beta", torch.full(shape, value))
        assert expected.wrong(held.numbers(CPU)) == ([] if value == 0.5 else ["beta"])
