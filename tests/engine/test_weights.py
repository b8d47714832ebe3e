"""The weight stream: equal to the full tensors bit for bit, whatever the sharding and the bucket size."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightrft.engine.weights import stream
from ranks import run_ranks

BUCKETS = [1, 100, 1000, 10**9]


class Uneven(nn.Module):
    """Dim 0 smaller than, equal to and not divisible by the number of ranks; vectors, a big tensor, two dtypes."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, shape in enumerate([(1,), (3, 5), (7, 2, 3), (9,), (8, 4), (61, 33), (1, 17), (4,)]):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.randn(shape, generator=generator)))
        self.bf16_weight = nn.Parameter(torch.randn(5, 3, generator=generator).bfloat16())

    def forward(self) -> None: ...


class Gathers:
    """While entered, notes what this rank contributes to every all-gather."""

    def __enter__(self) -> list[torch.Tensor]:
        self.original, self.seen = dist.all_gather_into_tensor, []
        dist.all_gather_into_tensor = self._gather
        return self.seen

    def __exit__(self, *_) -> None:
        dist.all_gather_into_tensor = self.original

    def _gather(self, output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.seen.append(part)
        self.original(output, part, group=group)


def _compare(replicate: int) -> list[tuple[int, torch.dtype, int, int]]:
    """(bucket bytes, transfer dtype, all-gathers, bytes contributed), after comparing every tensor with the whole model's."""
    expected, model = dict(Uneven().named_parameters()), Uneven()
    sizes, names = (replicate, dist.get_world_size() // replicate), ("replicate", "shard")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names) if replicate > 1 else init_device_mesh("cpu", sizes[1:])
    fully_shard(model, mesh=mesh)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in BUCKETS:
            with Gathers() as gathers:
                received = list(stream(model.named_parameters(), dtype, bucket_bytes))  # all held at once
            assert {part.dtype for part in gathers} == {dtype}, "cast before it is gathered"
            assert [name for name, _ in received] == list(expected)
            for name, tensor in received:
                assert not isinstance(tensor, DTensor) and not tensor.requires_grad
                assert tensor.dtype == dtype
                assert torch.equal(tensor, expected[name].detach().to(dtype)), name
            results.append((bucket_bytes, dtype, len(gathers), sum(part.nbytes for part in gathers)))
    return results


@pytest.mark.parametrize(("world_size", "replicate"), [(2, 1), (4, 1), (4, 2)])
def test_every_parameter_arrives_bit_for_bit(world_size: int, replicate: int) -> None:
    by_rank = run_ranks(world_size, _compare, replicate)
    assert all(results == by_rank[0] for results in by_rank)
    shards = world_size // replicate
    parameters = list(Uneven().parameters())
    padded = sum(-(-len(parameter) // shards) * (parameter.numel() // len(parameter)) for parameter in parameters)
    for bucket_bytes, dtype, gathers, nbytes in by_rank[0]:
        if bucket_bytes == 1:
            assert gathers == len(parameters), "a tensor larger than a bucket travels alone"
        if bucket_bytes == 10**9:
            assert gathers == 1
        assert nbytes == padded * dtype.itemsize, "each byte moves once, however large the buckets"


def _counts() -> list[int]:
    """All-gathers for growing buckets of four tensors of 100 float32 each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [(str(i), distribute_tensor(torch.full((10, 10), float(i)), mesh, [Shard(0)])) for i in range(4)]
    counts = []
    for bucket_bytes in (399, 400, 799, 800, 1200, 1600):
        with Gathers() as gathers:
            list(stream(parameters, torch.float32, bucket_bytes))
        counts.append(len(gathers))
    return counts


def test_one_all_gather_per_bucket() -> None:
    assert run_ranks(2, _counts) == [[4, 4, 4, 2, 2, 1]] * 2


def test_plain_parameters_pass_without_a_copy() -> None:
    whole = Uneven()
    for name, tensor in stream(whole.named_parameters(), torch.float32, 1):
        parameter = whole.get_parameter(name)
        assert torch.equal(tensor, parameter.float())
        assert (tensor.data_ptr() == parameter.data_ptr()) == (parameter.dtype == torch.float32)


def test_nothing_of_nothing() -> None:
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
    """Plain and sharded parameters in turns keep their order."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [torch.arange(6.0).reshape(3, 2) + 10 * index for index in range(4)]
    parameters = [(str(i), distribute_tensor(t, mesh, [Shard(0)]) if i % 2 else t) for i, t in enumerate(tensors)]
    received = list(stream(parameters, torch.float32, 10**6))
    assert [name for name, _ in received] == list("0123")
    assert all(torch.equal(tensor, tensors[int(name)]) for name, tensor in received)


def test_plain_and_sharded_parameters_in_turns() -> None:
    run_ranks(2, _mixed)


class Split(nn.Module):
    """Cut over tensor-parallel ranks along dim 0, dim 1 and not at all; even and uneven, with parts that are empty."""

    CUTS = [
        *[((8, 4), Shard(0)), ((7, 5), Shard(0)), ((1, 3), Shard(0)), ((6, 4), Shard(1)), ((5, 3), Shard(1)), ((4, 1), Shard(1))],
        *[((9,), Replicate()), ((13,), Shard(0)), ((3, 2), Replicate()), ((11, 2), None), ((4,), None)],
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
    """All-gathers of one large bucket, after comparing every tensor with the whole model's, for every bucket size."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    expected, model = dict(Split().named_parameters()), Split(mesh["tp"])
    fully_shard(model, mesh=mesh["shard"] if sizes[0] == 1 else mesh["replicate", "shard"])
    counts = []
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in BUCKETS:
            with Gathers() as gathers:
                received = list(stream(model.named_parameters(), dtype, bucket_bytes))
            assert {part.dtype for part in gathers} == {dtype}, "cast before it is gathered"
            assert [name for name, _ in received] == list(expected)
            for name, tensor in received:
                assert not isinstance(tensor, DTensor) and tensor.is_contiguous() and tensor.dtype == dtype
                assert torch.equal(tensor, expected[name].detach().to(dtype)), name
        counts.append(len(gathers))
    return counts


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 1)], ids=str)
def test_tensor_parallel_parameters_arrive_bit_for_bit(sizes) -> None:
    """One all-gather of the bucket for each axis that cuts."""
    gathers = sum(size > 1 for size in sizes[1:])
    world_size = sizes[0] * sizes[1] * sizes[2]
    assert run_ranks(world_size, _compare_split, sizes) == [[gathers] * 2] * world_size


def _on_one_axis() -> None:
    """Without FSDP, as a plain DTensor: along dim 1, whole, and cut twice in the order of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(35.0).reshape(7, 5)
    for placements in ((Shard(1), Replicate()), (Replicate(), Replicate()), (Shard(0), Shard(0)), (Shard(0), Shard(1))):
        received = dict(stream([("a", distribute_tensor(whole, mesh, placements))], torch.float32, 100))
        assert torch.equal(received["a"], whole), placements


def test_plain_placements() -> None:
    run_ranks(4, _on_one_axis)


def _partial() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(ValueError) as caught:
        list(stream([("a", DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()]))], torch.float32, 100))
    return str(caught.value)


def test_what_is_not_summed_is_refused() -> None:
    assert "sharded up to twice" in run_ranks(2, _partial)[0]
