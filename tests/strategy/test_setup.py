import multiprocessing
import os
import random
import socket
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightrft.strategy import FSDPStrategy
from lightrft.strategy.launch import adopt_slurm
from ranks import run_ranks
from strategy.training import strategy

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID",
               "SLURM_NTASKS", "SLURM_LOCALID")


def one_step() -> tuple[int, float]:
    made = FSDPStrategy(args={"fsdp": True})
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


def launch(**variables: str):
    """A process with just these of a launcher's variables; returns a function that waits for its (result, error)."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def child() -> None:
        for name in ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(variables)
        try:
            sending.send((one_step(), ""))
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


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")])
def test_two_processes_of_torchrun_and_slurm(names):
    port = free_port()
    results = [launch(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **dict(zip(names, (str(rank), "2", str(rank)), strict=True)))
               for rank in range(2)]
    assert [result() for result in results] == [((2, 5.657), "")] * 2


def test_a_port_in_use_is_named():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = str(listening.getsockname()[1])
        _, error = launch(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="2")()
    assert f"RuntimeError: MASTER_PORT {port} on 127.0.0.1 is in use" in error and "torchrun --standalone" in error


@pytest.fixture
def clean_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("given", [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"MASTER_ADDR": "here", "MASTER_PORT": "1"}])
def test_part_of_an_environment_is_an_error(clean_environment, given):
    for name, value in given.items():
        clean_environment.setenv(name, value)
    with pytest.raises(RuntimeError, match="is not: start the run with `torchrun"):
        FSDPStrategy().setup_distributed()
    assert not dist.is_initialized()


def test_a_rank_that_is_no_number_is_an_error(clean_environment):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        clean_environment.setenv(name, "one")
    with pytest.raises(RuntimeError, match="RANK='one' is not a number"):
        FSDPStrategy().setup_distributed()


def test_slurm_without_a_meeting_point_is_an_error():
    with pytest.raises(RuntimeError, match="MASTER_ADDR, MASTER_PORT is not set. Start the processes with srun"):
        adopt_slurm({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})


@pytest.mark.parametrize("given", [{"SLURM_NTASKS": "2", "RANK": "1"}, {"SLURM_NTASKS": "1"}, {}])
def test_slurm_is_left_alone_where_torchrun_or_one_process_runs(given):
    before = dict(given)
    adopt_slurm(given)
    assert given == before


def test_batch_sizes():
    says = "train_batch_size 30 is not a multiple of micro_train_batch_size 4 x data-parallel size 2 = 8"
    with pytest.raises(RuntimeError, match=says):
        run_ranks(2, sized, 30, 4)
    assert run_ranks(2, sized, 32, 4) == run_ranks(2, sized, 31, None) == [2, 2]


def sized(train, micro):
    made = FSDPStrategy(train_batch_size=train, micro_train_batch_size=micro)
    made.setup_distributed()
    return made.mesh.data.size


@pytest.mark.parametrize("args, says", [
    ({"dp_replicate": 3}, "dp_replicate 3"),
    ({"engine_tp_size": 3}, "engine_tp_size 3 does not divide"),
    ({"engine_type": "tgi"}, "unknown engine_type 'tgi'"),
])
def test_layouts_that_cannot_be(args, says):
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


def late():
    made = FSDPStrategy(args={"fsdp": True})
    made.setup_distributed(timedelta(seconds=2))
    if made.is_rank_0():
        made.mesh.data.sum(torch.ones(1))
    else:
        time.sleep(30)


def test_a_rank_that_never_comes_ends_the_run_within_the_timeout():
    with pytest.raises(RuntimeError, match="(?i)timed out"):
        run_ranks(2, late, timeout=25)


def test_before_setup():
    made = FSDPStrategy()
    memory = made.report_memory("start")
    assert memory["memory/peak_gb"] >= memory["memory/in_use_gb"] * 0.5 > 0
    made.print("hello", 1)
    assert made.is_rank_0() and made.get_rank() == 0
    made.close()
    with pytest.raises(RuntimeError, match=r"call setup_distributed\(\) first"):
        _ = made.mesh
