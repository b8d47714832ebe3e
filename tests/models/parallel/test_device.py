"""Why: if a bucket's memory is used again too early, it holds other numbers.

This happens on an accelerator only, and now and then. Memory of a host has large pages.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightrft.models.parallel import device
from lightrft.models.parallel.device import _side_stream, ahead, exponentials, grow_segments
from ranks import run_ranks

SIZE = 4096
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def different_numbers(device: torch.device, count: int, limit: int = 10**9) -> int:
    """Count the numbers that differ from what was put into so many buckets.

    With a `limit` of 0 no bucket is made ahead.

    All memory is overwritten as soon as it is free. Large products delay the caller's stream, so
    the next buckets are made while it still reads.
    """
    table = torch.arange(64 * SIZE, device=device).view(64, SIZE)
    slow = torch.randn(512, 512, device=device)
    different = torch.zeros((), dtype=torch.int64, device=device)

    def overwrite() -> None:
        for _ in range(4):
            torch.full((SIZE,), -1, device=device)

    def buckets() -> Iterator[list[tuple[str, Tensor]]]:
        for index in range(count):
            overwrite()
            yield [("a", table[index % 64] + index), ("b", table[(index + 1) % 64] * 2)]

    for index, ((_, first), (_, second)) in enumerate(ahead(buckets(), device, limit)):
        if index % 8 == 0:
            slow = (slow @ slow).clamp(-1, 1)
        different += (first != table[index % 64] + index).sum() + (
            second != table[(index + 1) % 64] * 2
        ).sum()
        del first, second
        overwrite()
    return int(different)


@pytest.mark.gpu
def test_buckets_made_ahead_are_the_same_bit_by_bit():
    assert (
        different_numbers(torch.device(torch.accelerator.current_accelerator().type, 0), 10_000)
        == 0
    )


@pytest.mark.gpu
def test_a_bucket_beyond_the_limit_is_not_beside_the_next_one():
    """Each bucket fills 64 MB; the second is made in the memory of the first."""
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    assert different_numbers(device, 1_000, limit=0) == 0

    def large() -> Iterator[list[tuple[str, Tensor]]]:
        for index in range(8):
            yield [("a", torch.full((2**24,), float(index), device=device))]

    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    for index, bucket in enumerate(ahead(large(), device, 2**20)):
        assert bucket.pop()[1][-1] == index
    assert torch.accelerator.max_memory_allocated(device) - before <= 2**26


@contextmanager
def accelerator() -> Iterator[tuple[list[MagicMock], list[Tensor]]]:
    """Stand in for an accelerator; yield the streams that are made, and what records a stream."""
    streams: list[MagicMock] = []
    recorded: list[Tensor] = []

    def stream(_: torch.device) -> MagicMock:
        streams.append(MagicMock())
        return streams[-1]

    _side_stream.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Stream", stream)
        patch.setattr(torch.accelerator, "current_stream", lambda _: MagicMock())
        patch.setattr(Tensor, "record_stream", lambda tensor, _: recorded.append(tensor))
        yield streams, recorded
    _side_stream.cache_clear()


def divided_experts_are_made_ahead() -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = [torch.full((2, 3), float(number)) for number in range(3)]
    made: list[int] = []

    def buckets() -> Iterator[list[tuple[str, Tensor]]]:
        for number, shard in enumerate(shards):
            made.append(number)
            yield [("experts", DTensor.from_local(shard, mesh, [Shard(0)]))]

    with accelerator() as (_, recorded):
        found = [
            (len(made), bucket.pop()[1].to_local())
            for bucket in ahead(buckets(), torch.device("meta"), limit=shards[0].nbytes)
        ]

    assert [count for count, _ in found] == [2, 3, 3]
    assert all(map(torch.equal, (shard for _, shard in found), shards))
    assert all(map(torch.equal, recorded, shards)) and len(recorded) == 3
    assert not any(isinstance(tensor, DTensor) for tensor in recorded)


def test_divided_experts_record_the_stream_and_count_as_this_ranks_part() -> None:
    """Torch has no record_stream() of a DTensor: on a GPU the sync of divided experts would fail.

    A bucket of shards that fit is not beyond the limit, so the next one is made beside it.
    """
    run_ranks(2, divided_experts_are_made_ahead)


def test_all_buckets_are_made_on_one_stream() -> None:
    """Matrices in four bits are streamed one by one. Memory of one stream is not reused on others.

    With new streams each time, up to 32 of them would each keep the memory of a bucket.
    """
    with accelerator() as (streams, _):
        for _ in range(3):
            assert len(list(ahead(iter([[("a", torch.ones(2))]]), torch.device("meta"), 8))) == 1
        assert len(streams) == 1


@pytest.mark.parametrize(
    ("variable", "before", "after"),
    [
        ("PYTORCH_ALLOC_CONF", "", "expandable_segments:True"),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "max_split_size_mb:512",
            "max_split_size_mb:512,expandable_segments:True",
        ),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_segments_grow_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, variable: str, before: str, after: str
) -> None:
    """All other settings of the user stay."""
    found = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, before)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", found.append)

    grow_segments(torch.device("cpu"))
    assert not found

    grow_segments(torch.device("cuda", 0))
    assert found == [after]


def test_segments_cannot_grow_while_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The all-reduce of vLLM exchanges addresses then, whatever the user has chosen."""
    found = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", found.append)

    grow_segments(torch.device("cuda", 0), allowed=False)
    grow_segments(torch.device("cuda", 0))
    assert found == [
        "max_split_size_mb:512,expandable_segments:False",
        "expandable_segments:True,max_split_size_mb:512",
    ]


@pytest.mark.parametrize(("asked", "advised"), [(None, True), ("0", False)])
def test_large_tensors_on_a_host_ask_for_huge_pages(asked, advised):
    """The kernel has a flag at their memory; a variable that the user sets is left alone."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("a kernel without huge pages")
    source = (
        "import lightrft, torch; ones = torch.ones(2**22); from pathlib import Path;"
        "print(' hg' in Path('/proc/self/smaps').read_text())"
    )
    environment = {key: value for key, value in os.environ.items() if key != HUGE_PAGES}
    environment |= {HUGE_PAGES: asked} if asked else {}
    process = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout == f"{advised}\n"


def compare_rows(threads: int) -> None:
    torch.set_num_threads(threads)
    for vendor, width in product(("AuthenticAMD", "GenuineIntel"), (7, 96, 4099, 40960)):
        device.is_amd = lambda vendor=vendor: vendor == "AuthenticAMD"
        row = -30 * torch.rand(width, generator=torch.Generator().manual_seed(1))
        row[0] = 0
        row[1] = -torch.inf
        rows = row.repeat(9, 1)
        found = exponentials(rows, out=torch.empty_like(rows))
        in_place = exponentials(rows, out=rows)

        assert torch.equal(found, found[:1].expand(9, -1)) and torch.equal(found, in_place)
        assert found[0, 0] == 1 and found[0, 1] == 0
        # An exponent of -30 is rounded by 2^-20 at most when it becomes a power of two.
        torch.testing.assert_close(found[0].double(), row.double().exp(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_equal_rows_have_equal_exponentials(threads: int) -> None:
    """They do so wherever they are, and are right to a few parts in 10^7, on every processor.

    It runs in a process of its own: one that has computed with two threads cannot fork others that
    do.
    """
    run_ranks(1, compare_rows, threads)
