"""The weight stream equals the full tensors bit for bit.

Neither the sharding nor the bucket size matters.
"""

import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.models.parallel import shm_all_gather
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.shm_all_gather import AllGather
from lightrft.models.weight_sync.stream import _gather_bucket, bucket_limit, stream
from ranks import fake_group, run_ranks

BUCKETS = [1, 100, 1000, 10**9]


class Uneven(nn.Module):
    """A model whose dim 0 is smaller than, equal to, or not divisible by the number of ranks.

    It has vectors, a big tensor, and two dtypes.
    """

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, shape in enumerate(
            [(1,), (3, 5), (7, 2, 3), (9,), (8, 4), (61, 33), (1, 17), (4,)]
        ):
            self.register_parameter(
                f"weight{index}", nn.Parameter(torch.randn(shape, generator=generator))
            )
        self.bf16_weight = nn.Parameter(torch.randn(5, 3, generator=generator).bfloat16())

    def forward(self) -> None: ...


class Gathers:
    """While entered, notes what this rank contributes to every all-gather."""

    def __enter__(self) -> list[torch.Tensor]:
        self.original = AllGather.run
        self.seen = []
        AllGather.run = lambda gather: (self.seen.append(gather.local), self.original(gather))
        return self.seen

    def __exit__(self, *_) -> None:
        AllGather.run = self.original


def _memory_is_shared() -> None:
    """Check that shared memory gathers what torch gathers through sockets.

    Tensors fit into a half or not, and all share one memory without a name.
    """
    # before the first use, so that what follows in this start has large tensors too
    shm_all_gather.HALF_BYTES = 2048
    group = dist.group.WORLD

    rank = dist.get_rank()
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool):
        for count in (1, 7, 256, 1023, 5000):
            mine = (torch.arange(count) * 37 + rank * 101).remainder(120).to(dtype)
            expected = torch.empty(size, count, dtype=dtype)
            dist.all_gather(list(expected.unbind()), mine)
            one = AllGather(count, dtype, mine.device, group)
            assert one.in_shared_memory == (size * mine.nbytes <= 2048)
            one.local.copy_(mine)
            one.run()
            assert torch.equal(one.gathered, expected)

    assert len(shm_all_gather._of_groups) == 1
    mapped = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "lightrft-gather" in line
    ]
    assert len(mapped) == 1 and mapped[0].endswith("/memfd:lightrft-gather (deleted)")


def _on_hosts(of_ranks: str) -> bool:
    """Check whether a new group gathers through memory where `of_ranks` has each rank's host.

    What it gathers must be right.
    """
    shm_all_gather._host = lambda: of_ranks[dist.get_rank()].strip()
    one = AllGather(9, torch.float32, torch.device("cpu"), dist.new_group())
    one.local.fill_(dist.get_rank())
    one.run()
    assert one.gathered.tolist() == [[float(rank)] * 9 for rank in range(dist.get_world_size())]
    return one.in_shared_memory


def _gathers() -> tuple[list[bool], str]:
    """Return whether ranks gather through memory, for each layout of hosts.

    Also return what is logged where a rank may not open the first one's memory.
    """
    _memory_is_shared()
    there = [_on_hosts(of_ranks) for of_ranks in ("aaaa", "aabb", "abab", "    ")]
    said = []
    logger.add(said.append, format="{message}", level="WARNING")
    if dist.get_rank() == 1:
        shm_all_gather.open = lambda *_: (_ for _ in ()).throw(PermissionError("not yours"))
    there.append(_on_hosts("aaaa"))
    return there, "".join(said)


def _limits_agree() -> None:
    """Check that a bucket without a given size fits the rank with the least free memory.

    Here it is the last rank.
    """
    axis = Axis("world", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    free = 8000 - 800 * dist.get_rank()
    with mock.patch("lightrft.models.weight_sync.stream.free_memory", lambda device: (free, 9999)):
        assert bucket_limit(0, axis, torch.device("cuda")) == 1000 - 100 * (axis.size - 1)
    assert [bucket_limit(size, axis, torch.device("cpu")) for size in (0, 3)] == [
        512 * 2**20,
        3 * 2**20,
    ]


def _compare(replicate: int) -> list[tuple[int, torch.dtype, int, int]]:
    """Return (bucket bytes, transfer dtype, all-gathers, bytes contributed).

    Before that, compare every tensor with the whole model's.
    """
    shm_all_gather.HALF_BYTES = 2048  # below the largest tensor
    expected = dict(Uneven().named_parameters())
    model = Uneven()
    sizes = (replicate, dist.get_world_size() // replicate)
    names = ("replicate", "shard")
    mesh = (
        init_device_mesh("cpu", sizes, mesh_dim_names=names)
        if replicate > 1
        else init_device_mesh("cpu", sizes[1:])
    )
    fully_shard(model, mesh=mesh)
    _limits_agree()

    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in BUCKETS:
            with Gathers() as gathers:
                # all held at once
                received = list(stream(model.named_parameters(), dtype, bucket_bytes))

            assert {tensor.dtype for tensor in gathers} == {dtype}, "cast before it is gathered"
            assert [name for name, _ in received] == list(expected)
            for name, tensor in received:
                assert not isinstance(tensor, DTensor) and not tensor.requires_grad
                assert tensor.dtype == dtype
                assert torch.equal(tensor, expected[name].detach().to(dtype)), name

            results.append(
                (bucket_bytes, dtype, len(gathers), sum(tensor.nbytes for tensor in gathers))
            )

    return results


@pytest.mark.parametrize(("world_size", "replicate"), [(2, 1), (4, 1), (4, 2)])
def test_every_parameter_arrives_bit_for_bit(world_size: int, replicate: int) -> None:
    by_rank = run_ranks(world_size, _compare, replicate)
    assert all(results == by_rank[0] for results in by_rank)
    shards = world_size // replicate
    parameters = list(Uneven().parameters())
    padded = sum(
        -(-len(parameter) // shards) * (parameter.numel() // len(parameter))
        for parameter in parameters
    )

    for bucket_bytes, dtype, gathers, nbytes in by_rank[0]:
        if bucket_bytes == 1:
            rows = sum(-(-len(parameter) // shards) for parameter in parameters)
            assert gathers == rows, "a tensor larger than a bucket travels by rows"
        if bucket_bytes == 10**9:
            assert gathers == 1
        assert nbytes == padded * dtype.itemsize, "each byte moves once, however large the buckets"


def _counts() -> list[int]:
    """Count all-gathers for growing buckets of four tensors of 100 float32 each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [
        (str(i), distribute_tensor(torch.full((10, 10), float(i)), mesh, [Shard(0)]))
        for i in range(4)
    ]

    counts = []
    for bucket_bytes in (399, 400, 799, 800, 1200, 1600):
        with Gathers() as gathers:
            list(stream(parameters, torch.float32, bucket_bytes))
        counts.append(len(gathers))

    return counts


def test_plain_parameters_pass_without_a_copy() -> None:
    whole = Uneven()
    for name, tensor in stream(whole.named_parameters(), torch.float32, 1):
        parameter = whole.get_parameter(name)
        assert torch.equal(tensor, parameter.float())
        assert (tensor.data_ptr() == parameter.data_ptr()) == (parameter.dtype == torch.float32)


def test_an_empty_model_streams_nothing() -> None:
    assert list(stream(iter(()), torch.float32, 1)) == []


def test_nothing_is_gathered_before_it_is_asked_for() -> None:
    seen = []

    def parameters():
        for index in range(3):
            seen.append(index)
            yield str(index), torch.zeros(10)

    received = stream(parameters(), torch.float32, 40)
    assert next(received)[0] == "0"
    assert seen == [0, 1], "one bucket, and the parameter that did not fit into it"


def _mixed() -> None:
    """Check that alternating plain and sharded parameters keep their order."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [torch.arange(6.0).reshape(3, 2) + 10 * index for index in range(4)]
    parameters = [
        (str(i), distribute_tensor(t, mesh, [Shard(0)]) if i % 2 else t)
        for i, t in enumerate(tensors)
    ]
    received = list(stream(parameters, torch.float32, 10**6))
    assert [name for name, _ in received] == list("0123")
    assert all(torch.equal(tensor, tensors[int(name)]) for name, tensor in received)


class Split(nn.Module):
    """A model cut over tensor-parallel ranks along dim 0, dim 1 and not at all.

    Parts are even, uneven and empty.
    """

    CUTS = [
        *[
            ((8, 4), Shard(0)),
            ((7, 5), Shard(0)),
            ((1, 3), Shard(0)),
            ((6, 4), Shard(1)),
            ((5, 3), Shard(1)),
            ((4, 1), Shard(1)),
        ],
        *[
            ((9,), Replicate()),
            ((13,), Shard(0)),
            ((3, 2), Replicate()),
            ((11, 2), None),
            ((4,), None),
        ],
    ]

    def __init__(self, mesh: dist.DeviceMesh | None = None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, (shape, placement) in enumerate(self.CUTS):
            weight = torch.randn(shape, generator=generator)
            if mesh is not None and placement is not None:
                weight = distribute_tensor(weight, mesh, [placement])
            self.register_parameter(f"weight{index}", nn.Parameter(weight))

    def forward(self) -> None: ...


def _compare_split(sizes: tuple[int, int, int]) -> list[int]:
    """Return the all-gathers of one large bucket.

    Before that, compare every tensor with the whole model's, for every bucket size.
    """
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    expected = dict(Split().named_parameters())
    model = Split(mesh["tp"])
    fully_shard(model, mesh=mesh["shard"] if sizes[0] == 1 else mesh["replicate", "shard"])

    counts = []
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in BUCKETS:
            with Gathers() as gathers:
                received = list(stream(model.named_parameters(), dtype, bucket_bytes))
            assert {tensor.dtype for tensor in gathers} == {dtype}, "cast before it is gathered"
            assert [name for name, _ in received] == list(expected)
            for name, tensor in received:
                assert (
                    not isinstance(tensor, DTensor)
                    and tensor.is_contiguous()
                    and tensor.dtype == dtype
                )
                assert torch.equal(tensor, expected[name].detach().to(dtype)), name

        counts.append(len(gathers))

    return counts


FOUR = (1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 1)
"""Divisions of four ranks, which take seconds together."""


@pytest.mark.parametrize(
    "sizes", [(1, 1, 2), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in FOUR)], ids=str
)
def test_tensor_parallel_parameters_arrive_bit_for_bit(sizes) -> None:
    """There is one all-gather of the bucket for each axis that cuts."""
    gathers = sum(size > 1 for size in sizes[1:])
    world_size = sizes[0] * sizes[1] * sizes[2]
    assert run_ranks(world_size, _compare_split, sizes) == [[gathers] * 2] * world_size


def _on_one_axis() -> None:
    """Check plain DTensors without FSDP: along dim 1, whole, and cut twice in the order of the
    mesh.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(35.0).reshape(7, 5)
    for placements in (
        (Shard(1), Replicate()),
        (Replicate(), Replicate()),
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
    ):
        received = dict(
            stream([("a", distribute_tensor(whole, mesh, placements))], torch.float32, 100)
        )
        assert torch.equal(received["a"], whole), placements


def _partial() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(ValueError) as caught:
        list(
            stream(
                [("a", DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()]))],
                torch.float32,
                100,
            )
        )
    return str(caught.value)


def _on_two_ranks() -> tuple:
    return _gathers(), _counts(), _mixed(), _partial()


def test_two_ranks() -> None:
    """Through memory, or sockets: one all-gather per bucket.

    Plain and sharded ones alternate; what is not summed is refused.
    """
    for rank, (gathers, counts, _, refused) in enumerate(run_ranks(2, _on_two_ranks)):
        _right(rank, gathers, [True, True, False, False, False])
        assert counts == [8, 4, 4, 2, 2, 1], "4 of 5 rows fit into the first bucket"
        assert "sharded at most twice" in refused


def _on_four_ranks() -> tuple:
    return _gathers(), _on_one_axis()


def test_four_ranks() -> None:
    """Through memory, or sockets; plain placements."""
    for rank, (gathers, _) in enumerate(run_ranks(4, _on_four_ranks)):
        _right(rank, gathers, [True, False, False, False, False])


def _right(rank: int, gathers: tuple[list[bool], str], there: list[bool]) -> None:
    assert gathers[0] == there
    assert ("through sockets, because they cannot share memory: not yours" in gathers[1]) == (
        rank == 0
    )


def test_parameters_in_host_memory_are_brought_to_the_device_of_the_engine():
    """The meta device stands for an accelerator."""
    parameters = [
        ("a", nn.Parameter(torch.ones(3, 2))),
        ("b", nn.Parameter(torch.ones(5, dtype=torch.bfloat16))),
    ]
    for _, tensor in _gather_bucket(parameters, torch.bfloat16, torch.device("meta"), 10**9):
        assert tensor.is_meta and tensor.dtype == torch.bfloat16


class Operations(TorchDispatchMode):
    """While entered, notes the operations, and the most bytes of new tensors at any time."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, torch.device, torch.dtype]] = []
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.seen.append((function.__name__, tensor.device, tensor.dtype))
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, key)
            self.peak = max(self.peak, sum(self.sizes.values()))


@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_in_host_memory_are_cast_on_the_device(sharded: bool) -> None:
    """With --fsdp_cpu_offload one thread of the host would be much slower."""
    parameter = torch.ones(6, 4)
    with fake_group(2):
        if sharded:
            mesh = init_device_mesh("cpu", (2,))
            parameter = DTensor.from_local(parameter, mesh, [Shard(0)], run_check=False)
        with Operations() as operations:
            ((_, tensor),) = _gather_bucket(
                [("a", parameter)], torch.bfloat16, torch.device("meta"), 10**6
            )

    assert tensor.is_meta and tensor.dtype == torch.bfloat16
    casts = [
        (name, device.type, dtype) for name, device, dtype in operations.seen if "copy" in name
    ]
    assert casts[0] == ("_to_copy.default", "meta", torch.float32), "first to the device, as it is"
    assert casts[1][1:] == ("meta", torch.bfloat16)
    assert {device.type for _, device, dtype in operations.seen if dtype == torch.bfloat16} == {
        "meta"
    }


LARGE = 2**20
"""Bytes of each of three large tensors, in float32."""


def _peak_of(dim: int) -> tuple[int, bool]:
    """Return the most bytes that a stream of large tensors needs, and whether they are right.

    Ranks gather through sockets, because shared memory would not be counted.
    """
    shm_all_gather._host = lambda: ""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(LARGE / 4).reshape(64, 64, 64)
    parameters = [
        (str(index), distribute_tensor(whole + index, mesh, [Shard(dim)])) for index in range(3)
    ]
    engine = dict.fromkeys("012")
    for name in engine:
        engine[name] = torch.empty(64, 64, 64)

    with Operations() as operations:
        for name, tensor in stream(parameters, torch.float32, LARGE // 8):
            engine[name].copy_(tensor)
            del tensor
    return operations.peak, all(
        torch.equal(tensor, whole + int(name)) for name, tensor in engine.items()
    )


def _peaks() -> list[tuple[int, bool]]:
    return [_peak_of(dim) for dim in (0, 1, 2)]


def test_a_tensor_larger_than_a_bucket_exists_once() -> None:
    """Beside it are a bucket of gathered rows, and this rank's rows of it."""
    for peaks in run_ranks(2, _peaks):
        for peak, right in peaks:
            assert right
            assert LARGE <= peak - LARGE * 3 / 2 - LARGE * 3 <= LARGE * 1.3
