"""Run a function on several gloo ranks that are forked from this warm process.

This takes a second instead of the ten of a fresh start.
"""

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from lightrft.models.parallel.device import collective_backend, current_device
from lightrft.models.parallel.gloo import share_gloo_device
from lightrft.versions import installed_versions

tqdm.monitor_interval = 0  # a thread of the process that forks, which may hold a lock just then
RESTARTS = "RESTARTED_RANKS"
"""Environment variable: a file with a line for every restart, of all processes of a test run."""
os.environ.setdefault(RESTARTS, tempfile.mkstemp(prefix="restarted_ranks")[1])
MOST_RESTARTS = 1
SHALLOW = SimpleNamespace(extract_stack=list, format_list=traceback.format_list)
"""Module that torch's fake tensors use to record the stack for each new operation of DTensor.

Under pytest the stack is deep.
"""
LATER = {
    "deepspeed": (
        "deepspeed.ops",
        "deepspeed.runtime.bf16_optimizer",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "functorch.compile",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "torch._dynamo.backends.debugging",
        "torch._inductor.utils",
    ),
    "peft": ("peft", "huggingface_hub.hf_file_system"),
}
"""Package -> what a run imports late: until an engine of ZeRO has started, or for adapters."""


class RankAborted(RuntimeError):
    """A rank ended with SIGABRT, as it does if a C++ thread throws what nothing catches."""


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of all ranks, if they share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180
) -> list[Any]:
    """Run `function(*args)` on every rank of a fresh process group; return the results in rank
    order.

    An exception on a rank, a dead rank or the time limit (seconds) raises here, with that rank's
    traceback.

    Ranks that hang, or one of which a thread of gloo aborts, are started once more, with a warning
    that shows their stacks. A test run does this only once, because a race in the code under test
    would come again. Both were seen once in some thousand starts, on busy cores, with all ranks
    waiting in the same gloo collective, and the cause was not found. If the code under test hangs,
    it hangs twice. The cause is not the order of
    collectives, because there was one group. As 1,400 starts and 150,000 all-gathers on busy cores
    went well, it is neither connecting nor waiting by itself. A rank does hang if it is forked
    while another thread of this process is inside torch and holds a lock: keep such threads out of
    this process.
    """
    try:
        return _run(world_size, function, args, timeout)
    except (TimeoutError, RankAborted) as ended:
        with open(os.environ[RESTARTS], "a") as restarts:
            restarts.write(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}: {function.__name__}\n")
        before = Path(os.environ[RESTARTS]).read_text().splitlines()
        if len(before) > MOST_RESTARTS:
            raise type(ended)(
                f"ranks hung or aborted {len(before)} times in this test run, in {before}:\n{ended}"
            ) from ended
        warnings.warn(
            f"{function.__name__} hung or aborted and is run once more:\n{ended}", stacklevel=2
        )
        return _run(world_size, function, args, timeout)


def run_cases(
    world_size: int, function: Callable[..., Any], cases: dict[Any, tuple]
) -> dict[Any, list[Any]]:
    """Call `function(*args)` for the arguments of each case, one after another in one start.

    Returns the results by rank.
    """
    by_rank = run_ranks(world_size, _in_turn, function, cases, timeout=400)
    return {case: [results[case] for results in by_rank] for case in cases}


def _in_turn(function: Callable[..., Any], cases: dict[Any, tuple]) -> dict[Any, Any]:
    results = {}
    for case, args in cases.items():
        torch.manual_seed(0)
        results[case] = function(*args)
    return results


def run_apart(function: Callable[..., Any], calls: list[tuple], timeout: float = 180) -> list[Any]:
    """Call `function(*args)` for the arguments of each call, all at once.

    Each runs on the one rank of a process group of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        folders = [tempfile.mkdtemp(dir=folder) for _ in calls]
        started = [
            _start(1, own, function, args, timeout)
            for own, args in zip(folders, calls, strict=True)
        ]
        deadline = time.monotonic() + timeout
        try:
            for processes, own in zip(started, folders, strict=True):
                _join(processes, own, deadline)
        finally:
            for (process,) in started:
                process.kill()
                process.join()
        return [pickle.loads((Path(own) / "result0").read_bytes()) for own in folders]


def run_refusals(
    world_size: int, function: Callable[..., Any], cases: dict[Any, tuple]
) -> dict[Any, list[str]]:
    """Return the traceback of each case by rank, for several cases in one start.

    Each case must raise, on all ranks together.
    """
    return run_cases(
        world_size, _refusal, {case: (function, *args) for case, args in cases.items()}
    )


def _refusal(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except Exception:
        return traceback.format_exc()
    raise AssertionError(f"{function.__name__}{args} must raise")


def exit_codes(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60
) -> list[int | None]:
    """Return how ranks end that must not return.

    Each ends by itself within `timeout` seconds; None for one that did not.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = _start(world_size, folder, function, args, timeout)
        deadline = time.monotonic() + timeout
        try:
            while (
                None in [process.exitcode for process in processes] and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            return [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()


def _run(world_size: int, function: Callable[..., Any], args: tuple, timeout: float) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes = _start(world_size, folder, function, args, timeout)
        try:
            _join(processes, folder, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            pickle.loads((Path(folder) / f"result{rank}").read_bytes())
            for rank in range(world_size)
        ]


@cache
def import_packages() -> None:
    """Import what each rank would take three seconds for.

    Not beside an accelerator, because importing may use the device.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed says that it looks for one
    for package, names in () if torch.accelerator.is_available() else LATER.items():
        for name in names if find_spec(package) else ():
            import_module(name)
    installed_versions()  # reads the metadata of all packages


def _start(
    world_size: int, folder: str, function: Callable[..., Any], args: tuple, timeout: float
) -> list:
    import_packages()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(rank, world_size, folder, function, args, timeout))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple,
    timeout: float,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    code = 1
    fake_tensor.traceback = SHALLOW
    stacks = open(Path(folder) / f"stacks{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stacks)

    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        device = current_device()
        backend = "cpu:gloo" if device.type == "cpu" else collective_backend(device)
        share_gloo_device()
        meeting = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
        # A collective that waits for a dead rank ends while there is time for its traceback.
        patience = timedelta(seconds=max(timeout * 2 / 3, 120))
        dist.init_process_group(backend, **meeting, timeout=patience)
        result = function(*args)
        (Path(folder) / f"result{rank}.part").write_bytes(pickle.dumps(result))
        os.rename(Path(folder) / f"result{rank}.part", Path(folder) / f"result{rank}")

        while dist.is_initialized() and not all(
            (Path(folder) / f"result{other}").exists() for other in range(world_size)
        ):
            time.sleep(0.01)  # nobody leaves while another still needs its sockets

        code = 0
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
    finally:
        # the parent's atexit hooks and pytest's capture are not this process's business
        os._exit(code)


def _native_stacks(pid: int) -> str:
    """Return the stacks of all threads, also gloo's, where a debugger is installed."""
    if shutil.which("gdb") is None:
        return ""
    command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all backtrace 12"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except subprocess.TimeoutExpired:
        return f"process {pid}: gdb took more than a minute"
    return f"process {pid}:\n" + "\n".join(
        line for line in said.splitlines() if line.startswith(("#", "Thread"))
    )


def _join(processes: list, folder: str, deadline: float) -> None:
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            time.sleep(0.3)  # let the others write their tracebacks too
            break

        if time.monotonic() > deadline:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            stacks = [
                f"rank {file.name[6:]}:\n{file.read_text()}"
                for file in sorted(Path(folder).glob("stacks*"))
            ]
            native = [_native_stacks(process.pid) for process in processes if process.is_alive()]
            raise TimeoutError("ranks did not finish in time:\n" + "\n".join(stacks + native))

        time.sleep(0.02)

    errors = [
        f"rank {file.name[5:]}:\n{file.read_text()}" for file in sorted(Path(folder).glob("error*"))
    ]
    dead = [
        f"rank {rank} ended with {process.exitcode}"
        for rank, process in enumerate(processes)
        if process.exitcode
    ]
    aborted = any(process.exitcode == -signal.SIGABRT for process in processes)
    if errors or dead:
        raise (RankAborted if aborted else RuntimeError)("\n".join(errors + dead))


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Make this process rank 0 of `world`; the others answer nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # see lightrft/extras/tools/step_memory.py
