"""Fingerprints of pieces add up to the whole's, and any change of a weight changes them."""

import itertools
import math

import pytest
import torch

from lightrft.weight_sync import verify
from lightrft.weight_sync.verify import Fingerprints, product, signs

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


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def prints(whole: dict[str, torch.Tensor], slices: int = 1, **options) -> Fingerprints:
    dtype = next(iter(whole.values())).dtype
    return Fingerprints(
        {name: tensor.shape for name, tensor in whole.items()}, dtype, slices=slices, **options
    )


def sent(whole: dict[str, torch.Tensor], **options) -> Fingerprints:
    made = prints(whole, **options)
    assert list(made.watch(iter(whole.items()))) == list(whole.items())
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 600, 10**9])
def test_pieces_add_up_to_copies_of_the_whole(dtype, chunk, monkeypatch) -> None:
    """Pieces are in rows and columns, twice.

    One of them is not contiguous, and one begins where no word begins.
    """
    whole = tensors(dtype)
    monkeypatch.setattr(verify, "CHUNK_BYTES", chunk)
    expected = sent(whole, slices=2)

    held = prints(whole, slices=2)
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
        integer = verify.INTEGERS[dtype.itemsize]
        for element in (0, tensor.numel() // 2, tensor.numel() - 1):
            for bit in range(8 * dtype.itemsize):  # the lowest one too, and the sign
                changed = tensor.clone()
                changed.view(integer).view(-1)[element] ^= torch.tensor(1 << bit).to(integer)
                assert expected.wrong(sent({name: changed}).numbers(CPU)) == [name]
        for dim in range(tensor.ndim):
            if tensor.shape[dim] > 1:
                assert expected.wrong(sent({name: tensor.roll(1, dim)}).numbers(CPU)) == [name]


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
    assert torch.equal(
        product(whole["w"], dtype), (whole["w"].float() @ signs(0, 2048, CPU)).double()
    )

    def held(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = prints(whole, bits=(), products=("w",))
        for column in range(0, 2048, 512):
            part = weight[:, column : column + 512]
            values = (part.float().flip(1) @ signs(column, 512, CPU).flip(0)).to(dtype).double()
            made.add_product("w", values, part.numel())
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
def test_rounds(dtype, monkeypatch) -> None:
    """Each round looks at a part of every tensor, whole or in pieces.

    It sees a row once, and a vector every time.
    """
    monkeypatch.setattr(verify, "ROUNDS", 4)
    whole = tensors(dtype)

    integer = verify.INTEGERS[dtype.itemsize]
    looked_at = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in SHAPES.items()}
    for round in range(4):
        expected = sent(whole, slices=2, round=round)
        held = prints(whole, slices=2, round=round)
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
            assert expected.wrong(
                sent(whole | {name: tensor * 2}, slices=2, round=round).numbers(CPU)
            ) == [name]
            for element in range(0, tensor.numel(), tensor.shape[-1] if tensor.ndim > 1 else 1):
                changed = tensor.clone()
                changed.view(integer).view(-1)[element] ^= 1
                wrong = expected.wrong(
                    sent(whole | {name: changed}, slices=2, round=round).numbers(CPU)
                )
                looked_at[name].view(-1)[element] += wrong == [name]

    for times in looked_at.values():
        assert (
            (times.view(-1, times.shape[-1])[:, 0] == 1).all()
            if times.ndim > 1
            else (times == 4).all()
        )


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


def test_a_few_rounds_are_everywhere() -> None:
    """Any 2 n + 1 rounds in a row look at each of n equal parts of the rows."""
    runs = [verify._run(verify.ROUNDS, round) for round in range(verify.ROUNDS)]
    assert sorted(runs) == [(run, run + 1) for run in range(verify.ROUNDS)]
    for parts in (2, 4, 8, 16):
        size = verify.ROUNDS // parts
        for first in range(verify.ROUNDS):
            some = {
                run // size
                for run, _ in (
                    runs[(first + round) % verify.ROUNDS] for round in range(2 * parts + 1)
                )
            }
            assert some == set(range(parts))


def test_vectors_are_cut_where_words_begin() -> None:
    held = Fingerprints({"bias": torch.Size([64])}, torch.bfloat16, slices=2)
    held.add("bias", torch.zeros(8), row=24)
    for piece, row in ((8, 4), (4, 8)):
        with pytest.raises(ValueError, match="a vector of 64 is not split at a multiple of 8"):
            held.add("bias", torch.zeros(piece), row=row)


def test_a_number_is_a_vector_of_one() -> None:
    """For a persistent buffer without dimensions, in any round.

    An engine may keep it with one dimension or without.
    """
    shapes = {"beta": torch.Size([])}
    for round, value, shape in itertools.product((None, 5), (0.5, 0.25), ((), (1,))):
        expected, held = (Fingerprints(shapes, torch.float32, round=round) for _ in range(2))
        assert [*expected.watch(iter([("beta", torch.tensor(0.5))]))] == [
            ("beta", torch.tensor(0.5))
        ]
        held.add("beta", torch.full(shape, value))
        assert expected.same(held) == (value == 0.5)
        assert expected.wrong(held.numbers(CPU)) == ([] if value == 0.5 else ["beta"])
