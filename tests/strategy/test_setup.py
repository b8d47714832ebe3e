import gc
import multiprocessing
import os
import random
import socket
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from lightrft.config.errors import ConfigError
from lightrft.models.launch.rendezvous import (
    adopt_node_size,
    adopt_slurm,
    join_process_group,
    ranks_per_node,
)
from lightrft.models.parallel.device import check_device_index
from lightrft.strategy import FSDPStrategy
from ranks import run_ranks
from strategy.training import strategy

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_ID",
)
ENVIRONMENT = TORCHRUN + SLURM


def one_step(arrival: float) -> tuple[int, float]:
    made = FSDPStrategy(args={"fsdp": True, "arrival_minutes": arrival / 60})
    assert made.get_rank() == int(os.environ.get("RANK", 0))
    made.setup_distributed()
    torch.manual_seed(0)
    model = made.prepare(torch.nn.Linear(3, 2))
    made.backward(model(torch.ones(1, 3)).sum(), model)
    norm = made.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1), model)
    size = made.mesh.world.size
    made.close()
    made.close()
    assert not dist.is_initialized()

    return size, round(norm.item(), 3)


def launch(arrival: float = 60, rounds: int = 1, **variables: str):
    """Start a process with just these of a launcher's variables.

    Return a function that waits for (result, error) of the process. `arrival` is in seconds; of
    several rounds the last result counts.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def child() -> None:
        for name in ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(variables)
        try:
            sending.send(([one_step(arrival) for _ in range(rounds)][-1], ""))
        except BaseException as error:
            sending.send((None, f"{type(error).__name__}: {error}"))
        os._exit(0)

    process = context.Process(target=child)
    process.start()

    def result():
        assert receiving.poll(60), "no answer"
        answer = receiving.recv()
        process.join()
        return answer

    return result


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def test_one_process_without_a_launcher():
    assert launch()() == ((1, 2.828), "")


def test_two_processes_of_torchrun():
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    results = [launch(RANK=str(rank), LOCAL_RANK=str(rank), **given) for rank in range(2)]
    assert [result() for result in results] == [((2, 5.657), "")] * 2


def test_one_strategy_after_another_under_torchrun():
    """torchrun serves the meeting point, so that it remembers what earlier process groups wrote."""
    port = free_port()
    given = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    results = [launch(10, 4, RANK=str(rank), LOCAL_RANK=str(rank), **given) for rank in range(2)]
    served = dist.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
    assert [result() for result in results] == [((2, 5.657), "")] * 2
    del served


def opened_and_closed() -> list[tuple[int, int]]:
    """(process groups, threads) after each of some strategies in a process group of the caller."""
    seen = []
    for _ in range(6):
        made = FSDPStrategy(args={"fsdp": True, "engine_tp_size": 2})
        made.setup_distributed()
        made.mesh.gloo_axis("background").barrier()
        made.close()
        gc.collect()
        seen.append((len(_world.pg_map), len(os.listdir("/proc/self/task"))))
    return seen


def test_strategies_after_one_another_use_the_same_groups():
    for seen in run_ranks(2, opened_and_closed):
        assert len({groups for groups, _ in seen}) == 1 and seen[-1][1] <= seen[1][1] + 2, seen


def test_two_tasks_of_slurm_meet_at_the_first_node():
    job = next(port for port in range(20000, 30000) if is_free(port)) - 20000 + 1_230_000
    given = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost,elsewhere",
        "SLURM_JOB_ID": str(job),
    }
    results = [
        launch(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **given) for rank in range(2)
    ]
    assert [result() for result in results] == [((2, 5.657), "")] * 2


def is_free(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("localhost", port)) != 0


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,fat1", "gpu7"),
        ("gpu[07-09,12],fat1", "gpu07"),
        ("r[2-3]n[1-8].x", "r2n1.x"),
        ("n[3,5]", "n3"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    environment = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_ID": "54321",
    }
    adopt_slurm(environment)
    assert environment["MASTER_ADDR"] == first and environment["MASTER_PORT"] == "24321"


@pytest.mark.parametrize(("tasks", "of_a_node"), [("8(x2)", "8"), ("16", "16"), ("9,7", None)])
def test_srun_says_how_many_ranks_each_node_has(tasks, of_a_node):
    """One rank of each node sends weights, and its ranks share the cores; nodes may differ."""
    environment = dict.fromkeys(SLURM, "16") | {"SLURM_STEP_TASKS_PER_NODE": tasks}
    environment |= {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
    adopt_slurm(environment)
    assert environment.get("LOCAL_WORLD_SIZE") == of_a_node


def test_a_meeting_point_of_the_user_is_kept():
    environment = dict.fromkeys(SLURM, "2") | {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
    adopt_slurm(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"], environment["RANK"]) == (
        "here",
        "1",
        "2",
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"RANK": "13"}, "5"), ({"RANK": "13", "LOCAL_RANK": "2"}, "2"), ({}, None)],
    ids=str,
)
def test_ranks_are_given_the_devices_of_their_node(given, expected):
    adopt_node_size(given, 8)
    assert given.get("LOCAL_RANK") == expected


def test_a_rank_that_never_starts_is_missed():
    """Its launcher died on the other node, say."""
    port = free_port()
    _, error = launch(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="4", arrival=1
    )()
    assert (
        f"RuntimeError: ranks 1-3 did not connect to 127.0.0.1:{port} within 1 s (--arrival_minutes"
        " 0.016" in error
    )


def test_nobody_at_the_meeting_point():
    port = free_port()
    _, error = launch(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="1", WORLD_SIZE="2", arrival=1
    )()
    assert (
        f"found no other rank at 127.0.0.1:{port} (MASTER_ADDR and MASTER_PORT) within 1 s"
        " (--arrival_minutes" in error
    )


def test_a_rank_that_cannot_be_reached_is_explained(clean_environment, monkeypatch):
    """The error is gloo's own, of a rank that listens on a loopback interface."""

    def connect(*args, **kwargs):
        raise RuntimeError("Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]")

    def meet(store, rank, world_size, arrival):
        dist.PrefixStore("arrivals", store).multi_set(["0", "1"], ["127.0.1.1", ""])

    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "lightrft.models.launch.rendezvous._meeting_point", lambda *args: dist.HashStore()
    )
    monkeypatch.setattr("lightrft.models.launch.rendezvous._meet", meet)
    monkeypatch.setattr("lightrft.models.launch.rendezvous.dist.init_process_group", connect)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(
        RuntimeError,
        match="cannot connect to all.*resolves to 127.0.1.1.*GLOO_SOCKET_IFNAME=eth0.*Mesh",
    ):
        join_process_group(torch.device("cpu"), timedelta(seconds=1), timedelta(seconds=1))


def test_a_port_in_use_is_named():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = str(listening.getsockname()[1])
        _, error = launch(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="2")()
    assert (
        f"RuntimeError: MASTER_PORT {port} on 127.0.0.1 is in use" in error
        and "torchrun --standalone" in error
    )


@pytest.fixture
def clean_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "given",
    [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"MASTER_ADDR": "here", "MASTER_PORT": "1"}],
)
def test_part_of_an_environment_is_an_error(clean_environment, given):
    for name, value in given.items():
        clean_environment.setenv(name, value)
    with pytest.raises(ConfigError, match="is not: start the run with `torchrun"):
        FSDPStrategy().setup_distributed()
    assert not dist.is_initialized()


def test_a_rank_that_is_not_a_number_is_an_error(clean_environment):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        clean_environment.setenv(name, "one")
    with pytest.raises(ConfigError, match="RANK='one' is not a number"):
        FSDPStrategy().setup_distributed()


def test_part_of_what_srun_says_is_an_error():
    with pytest.raises(
        ConfigError, match="SLURM_STEP_NODELIST, SLURM_JOB_ID is not set: pass srun's variables on"
    ):
        adopt_slurm({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, None),
        ({}, None),
    ],
)
def test_ranks_of_a_node(given, expected):
    assert ranks_per_node(given) == expected


BATCH_SCRIPT = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
"""What a program sees that an sbatch script starts without srun."""


@pytest.mark.parametrize(
    "given",
    [{"SLURM_STEP_NUM_TASKS": "2", "RANK": "1"}, {"SLURM_STEP_NUM_TASKS": "1"}, BATCH_SCRIPT, {}],
)
def test_slurm_is_left_alone_where_torchrun_or_one_process_runs(given):
    before = dict(given)
    adopt_slurm(given)
    assert given == before


def test_more_processes_than_devices():
    check_device_index(7, 8)
    with pytest.raises(
        RuntimeError, match=r"LOCAL_RANK is 1, but this process sees 1 device\(s\).*--gpus-per-node"
    ):
        check_device_index(1, 1)


def test_batch_sizes():
    says = (
        "train_batch_size 30 is not a multiple of micro_train_batch_size 4 x data-parallel size"
        " 2 = 8"
    )
    with pytest.raises(RuntimeError, match=says):
        run_ranks(2, sized, 30, 4)
    assert run_ranks(2, sized, 32, 4) == run_ranks(2, sized, 31, None) == [2, 2]


def sized(train, micro):
    made = FSDPStrategy(train_batch_size=train, micro_train_batch_size=micro)
    made.setup_distributed()
    return made.mesh.data.size


@pytest.mark.parametrize(
    "args, says",
    [
        ({"dp_replicate": 3}, "dp_replicate 3"),
        ({"engine_tp_size": 3}, "engine_tp_size 3 does not divide"),
        ({"engine_type": "tgi"}, "engine_type 'tgi': unknown"),
    ],
)
def test_impossible_layouts_are_refused(args, says):
    with pytest.raises(RuntimeError, match=says):
        run_ranks(2, with_args, args)


def with_args(args):
    strategy(**args)


def seeded():
    made = strategy()
    first = random.random(), np.random.rand(), torch.rand(1).item()
    made.set_seed(1)
    return first, (random.random(), np.random.rand(), torch.rand(1).item())


def test_seeds_are_equal_on_all_ranks_and_repeat():
    results = run_ranks(2, seeded)
    assert results[0] == results[1] and results[0][0] == results[0][1]


def test_before_setup():
    made = FSDPStrategy()
    memory = made.report_memory("start")
    assert memory["memory/peak_gb"] >= memory["memory/in_use_gb"] * 0.5 > 0
    made.print("hello", 1)
    assert made.is_rank_0() and made.get_rank() == 0
    made.close()
    with pytest.raises(RuntimeError, match=r"call setup_distributed\(\) first"):
        _ = made.mesh
