"""Measure how the control path of a step grows with the number of ranks.

For each operation it counts bytes, messages, sockets and CPU seconds.

    python scripts/bench/scaling.py --slow_polls  # docs/scaling.md, ten minutes
    python scripts/bench/scaling.py --ranks 2 4 8 --simulated 16 --rows 8

Every rank is a real process, forked from this one, with gloo and the code of the program: it meets
the others, sends heartbeats, builds the mesh, collects the responses of an engine that invents
them, shares rewards and metrics, plans, moves samples and writes and reads a checkpoint of a model
of a few bytes. The work of a rank is the same for any number of ranks: --rows responses. Bytes and
segments are those that the kernel counts for the TCP connections of each process (TCP_INFO), so
nothing is estimated. Many processes share few cores: only the CPU seconds of a rank are comparable,
not the time that passes.

Each group of gloo has a thread that wakes a hundred times a second, which takes both cores when 256
processes have several groups. With --slow_polls these threads wake ten times a second, or as soon
as something arrives: a library with another epoll_wait is compiled and preloaded. It changes no
message.

For --simulated ranks one process runs what a rank computes by itself, with the data of all ranks;
the monitor of rank 0 really has that many connections. Bytes are extrapolated along the line
through the two largest sizes that ran.

The tables go to standard output, the figure to --figure, and the last line is one JSON object.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import pickle
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from lightrft.algorithms.rollout.rollout import ResumableRollout  # noqa: E402
from lightrft.algorithms.schedulers.assignment import Assignment  # noqa: E402
from lightrft.algorithms.schedulers.rounds import Rounds  # noqa: E402
from lightrft.app.observe.pending_metrics import PendingMetrics  # noqa: E402
from lightrft.config import RewardSection, RolloutSection  # noqa: E402
from lightrft.core.batch import Experience  # noqa: E402
from lightrft.core.groups import RewardTable  # noqa: E402
from lightrft.core.metrics import Metrics  # noqa: E402
from lightrft.core.samples import Prompt, Sample  # noqa: E402
from lightrft.models.launch.connection import Connection  # noqa: E402
from lightrft.models.launch.heartbeat import BEAT, LOOPBACK, Watchdog  # noqa: E402
from lightrft.models.launch.monitor import Monitor  # noqa: E402
from lightrft.models.launch.rendezvous import join_process_group  # noqa: E402
from lightrft.models.parallel.collectives import Axis  # noqa: E402
from lightrft.models.parallel.mesh import Mesh  # noqa: E402
from lightrft.rewards.runner import RewardRunner  # noqa: E402
from lightrft.strategy.batching.micro_batches import get_batch, put_batch  # noqa: E402
from lightrft.strategy.batching.planner import plan  # noqa: E402
from lightrft.strategy.batching.sample_store import MemoryStore  # noqa: E402
from lightrft.strategy.checkpoint import manager  # noqa: E402
from lightrft.strategy.checkpoint.model_state import ModelState  # noqa: E402
from scripts.bench.harness import parser_of  # noqa: E402

LIMIT = timedelta(minutes=30)
SAMPLES = 4
"""Responses to a prompt."""
LONGEST = 32
"""Tokens of the longest response."""
EVERY = 16
"""Tokens between two exchanges of counts."""
METRICS = 60
OPERATIONS = {
    "meet": "rendezvous, default process group",
    "watchdog": "connections to the monitor",
    "mesh": "axes of the mesh",
    "groups": "two further groups of all ranks",
    "collect": "collector: counts, homes, groups",
    "rewards": "rewards of all ranks",
    "plan": "lengths of all ranks to a plan",
    "move": "samples to their ranks",
    "metrics": "60 metrics",
    "save": "checkpoint written",
    "load": "checkpoint found, checked and read",
}

SLOW_POLLS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/epoll.h>

int epoll_wait(int epoll, struct epoll_event *events, int most, int milliseconds) {
    static int (*original)(int, struct epoll_event *, int, int);
    if (!original)
        original = (int (*)(int, struct epoll_event *, int, int))dlsym(RTLD_NEXT, "epoll_wait");
    return original(epoll, events, most, milliseconds == 10 ? 100 : milliseconds);
}
"""
"""C source of a library that makes gloo's threads poll for 100 ms instead of 10 ms."""


# -- what a process sends


@dataclass
class Traffic:
    """What the kernel has counted for the TCP connections of this process."""

    sent: int = 0
    received: int = 0
    segments: int = 0
    sockets: int = 0
    served: int = 0
    """Bytes in both directions of connections to the store that this process serves."""


def traffic(served_port: int, ignored_port: int | None) -> dict[str, tuple[int, int, int, bool]]:
    """Return what the kernel knows of each socket.

    Socket -> bytes sent, bytes received, segments with data, and whether it belongs to the store's
    server.
    """
    by_link = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
            copy = socket.socket(fileno=os.dup(int(name))) if link.startswith("socket:") else None
        except OSError:
            continue

        if copy is None:
            continue

        with copy:
            if (
                copy.family not in (socket.AF_INET, socket.AF_INET6)
                or copy.type != socket.SOCK_STREAM
            ):
                continue

            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if info[0] != 1:  # TCP_ESTABLISHED
                continue

            own = copy.getsockname()[1]
            other = copy.getpeername()[1]
            if ignored_port in (own, other):
                continue

            (received,), (segments,), (sent,) = (
                struct.unpack_from(form, info, at)
                for form, at in (("Q", 128), ("I", 156), ("Q", 200))
            )
            by_link[link] = sent, received, segments, own == served_port

    return by_link


class Meter:
    """Measurement of one operation after another on this rank.

    Ranks wait for each other before and after they read their counters, at `together`, which uses
    no connection: otherwise what a fast rank sends in its next operation would be counted in a slow
    rank's last one.
    """

    def __init__(self, store_port: int, together: Barrier):
        self.store_port = store_port
        self.monitor_port = None
        self.together = together
        self.operations: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before = self._traffic()
        cpu = time.process_time()
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu

        total = Traffic()
        for link, (sent, received, segments, serves) in self._traffic().items():
            old = before.get(link, (0, 0, 0, False))
            total.sockets += 1
            if serves:
                total.served += sent - old[0] + received - old[1]
            else:
                total.sent = total.sent + sent - old[0]
                total.received = total.received + received - old[1]
                total.segments += segments - old[2]

        self.operations[name] = {**vars(total), "cpu": cpu, "seconds": seconds}

    def _traffic(self) -> dict[str, tuple[int, int, int, bool]]:
        self.together.wait()
        found = traffic(self.store_port, self.monitor_port)
        self.together.wait()
        return found


# -- an engine that invents its responses


def reward(samples: list[Any], **columns: Any) -> list[float]:
    """Return the reward of each response to a prompt."""
    return [float(sample.token_ids[-1] % 2) for sample in samples]


@dataclass
class Invented:
    """Sampler without an engine.

    Each response has a length that depends on its prompt and index, and no meaning.
    """

    exchange: Axis
    divides_groups: bool = True

    def open(self, seed: int) -> "InventedLoop":
        return InventedLoop(seed)

    def capacity(self, loop: "InventedLoop") -> int:
        return SAMPLES

    def extend(self, sample: Any, completion: Any) -> None:
        sample.token_ids += completion.token_ids
        sample.logprobs += completion.logprobs
        sample.weight_versions += completion.weight_versions
        sample.finish_reason = completion.finish_reason


def invented_length(row: int, place: int) -> int:
    return 1 + random.Random(row * SAMPLES + place).randrange(LONGEST)


@dataclass
class InventedLoop:
    seed: int
    parts: list[Any] = field(default_factory=list)

    def add(self, parts: Any) -> None:
        self.parts += [part for part in parts if not part[0].complete]

    def running(self) -> set[tuple[int, int]]:
        return {
            (group.number, place)
            for group, places in self.parts
            for place in places
            if group.responses[place].finish_reason is None
        }

    def steps(self, most: int | None = None) -> Iterator[Any]:
        while self.parts and most != 0:
            most = most and most - 1
            for part in list(self.parts):
                group, places = part
                for place in places:
                    self._grow(group.responses[place], invented_length(group.row, place))
                if all(group.responses[place].finish_reason is not None for place in places):
                    self.parts.remove(part)
                    if group.complete:
                        yield group

    def _grow(self, sample: Any, length: int) -> None:
        if sample.finish_reason is None:
            sample.token_ids.append(len(sample.token_ids))
            sample.logprobs.append(-0.5)
            sample.weight_versions.append(1)
            if len(sample.token_ids) == length:
                sample.finish_reason = "stop"

    def abort(self) -> None:
        self.parts = []

    def finish(self) -> Iterator[Any]:
        return iter(())


def new_rollout(axis: Axis, exchange: Axis, rewards: RewardRunner, rows: int) -> ResumableRollout:
    """Return a rollout of `rows` responses for each rank."""
    prompts = [
        Prompt(number, "", [1, 2, 3], {}) for number in range(2 * axis.size * rows // SAMPLES)
    ]
    section = RolloutSection(
        rollout_batch_size=axis.size * rows // SAMPLES,
        n_samples_per_prompt=SAMPLES,
        generate_max_len=LONGEST,
        rollout_schedule="longest_first",
        early_stop_every=EVERY,
    )

    scheduler = Rounds(Invented(exchange), rewards, prompts, section=section, data=axis, seed=0)
    return ResumableRollout(scheduler, rewards)


def invented_samples(rank: int, rows: int) -> list[Sample]:
    """Return the rewarded samples of a rank."""
    prompt = Prompt(0, "", [1, 2, 3], {})
    return [
        Sample(
            prompt,
            group=rank * rows + row // SAMPLES,
            token_ids=[1, 2],
            logprobs=[-1.0, -1.0],
            text="",
            finish_reason="stop",
            reward=float(row % 2),
        )
        for row in range(rows)
    ]


def experience(rows: int, first: int) -> Experience:
    """Return `rows` samples with the columns of a step; the first is number `first`."""
    generator = torch.Generator().manual_seed(first)
    lengths = torch.randint(LONGEST, 4 * LONGEST, (rows,), generator=generator)
    total = int(lengths.sum())
    numbers = torch.arange(first, first + rows)
    tokens = {
        name: torch.randn(total, generator=generator)
        for name in ("engine_logprobs", "reward_advantages")
    }

    return Experience(
        lengths=lengths,
        input_ids=torch.randint(32000, (total,), generator=generator),
        rows=numbers,
        groups=numbers // SAMPLES,
        loss_mask=torch.ones(total, dtype=torch.bool),
        rewards=torch.rand(rows, generator=generator),
        **tokens,
    )


def owners(lengths: list[int], size: int) -> list[list[int]]:
    """Return the rows of each rank by a plan of four optimizer steps."""
    schedule = plan(
        lengths, num_ranks=size, minibatch_size=-(-len(lengths) // 4), max_tokens=16 * LONGEST
    )
    return [schedule.rows(rank) for rank in range(size)]


def numbers() -> Metrics:
    metrics = Metrics()
    for number in range(METRICS):
        metrics.mean(f"phase/metric_{number}", torch.rand(8), torch.ones(8))
    return metrics


# -- ranks that are processes


def run_rank(
    rank: int, size: int, port: int, args: argparse.Namespace, folder: Path, together: Barrier
) -> dict[str, Any]:
    """Execute and measure every operation as one of `size` ranks."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
    )
    meter = Meter(port, together)
    rows = args.rows
    with meter("meet"):
        processes = join_process_group(torch.device("cpu"), LIMIT, LIMIT)
    with meter("watchdog"):
        watchdog = Watchdog(processes, limit=LIMIT, phase_limit=LIMIT)
    meter.monitor_port = watchdog._rank_0["port"]

    with meter("mesh"):
        mesh = Mesh.shared("cpu", timeout=LIMIT)
        mesh.engine(1)

    axis = mesh.data
    alone = mesh.model_parallel
    if size <= args.collector_ranks:
        with meter("groups"):
            exchange = mesh.gloo_axis("exchange")
            _ = mesh.gloo_axis("background")
        rewards = RewardRunner(f"{__file__}:reward", section=RewardSection(reward_workers=0))
        rollout = new_rollout(axis, exchange, rewards, rows)
        with meter("collect"):
            rollout.score(rollout.collect(1, Metrics()))

    batch = experience(rows, rank * rows)
    store = MemoryStore(axis, alone)
    with meter("rewards"):
        RewardTable.share(axis, invented_samples(rank, rows), first_row=rank * rows)
    put_batch(store, batch)
    store.rows()  # the first call learns the largest number of rows
    with meter("plan"):
        chosen = owners(store.rows().lengths.tolist(), size)

    with meter("move"):
        store.move(chosen)
        get_batch(store, chosen[rank], batch)

    metrics = numbers()
    with meter("metrics"):
        metrics.reduce(mesh.world)
    if size <= args.checkpoint_ranks:
        checkpoint(meter, mesh, rollout, folder / "checkpoints")
    memory = next(
        line
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss_Anon")
    )
    mesh.world.barrier()
    watchdog.close()

    return {"operations": meter.operations, "memory_mb": int(memory.split()[1]) / 1024}


def checkpoint(meter: Meter, mesh: Mesh, rollout: ResumableRollout, folder: Path) -> None:
    model = nn.Sequential(*[nn.Linear(1, 1024, bias=False) for _ in range(8)])
    fully_shard(model, mesh=mesh.parameters)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = ModelState(model, optimizer, None, mesh.world, torch.device("cpu"))
    parts = {"collector": rollout, "metrics": PendingMetrics(numbers(), mesh.world)}

    contents = manager.CheckpointState({"actor": state}, parts, mesh.world, torch.device("cpu"))
    path = folder / "step1"
    with meter("save"):
        taken = manager.snapshot(contents, {"client": {}}, tensors={"actor": state.tensors()})
        manager.write(taken, path, mesh.world, max_num=2, max_mem=math.inf, latest=True)

    with meter("load"):
        manifest, checkpoint, _ = manager.find(folder, None, mesh.world)
        manager.load(contents, checkpoint, manifest.world_size, strict=True, module_only=False)


def start(
    rank: int, size: int, port: int, args: argparse.Namespace, folder: Path, together: Barrier
) -> None:
    code = 1
    try:
        warnings.filterwarnings("ignore", category=FutureWarning)
        gc.freeze()  # the pages of the parent's objects remain shared
        torch.set_num_threads(1)
        (folder / f"{rank}.result").write_text(
            json.dumps(run_rank(rank, size, port, args, folder, together))
        )
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return server.getsockname()[1]


def run(size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run `size` processes; return, for each operation, the largest numbers of any rank."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port()
        together = context.Barrier(size)
        processes = [
            context.Process(target=start, args=(rank, size, port, args, folder, together))
            for rank in range(size)
        ]
        for process in processes:
            process.start()

        try:
            while any(process.is_alive() for process in processes):
                time.sleep(0.05)
                if errors := sorted(folder.glob("*.error")):
                    time.sleep(1)
                    raise RuntimeError(f"{size} ranks: {errors[0].name}\n{errors[0].read_text()}")
        finally:
            for process in processes:
                process.kill()
                process.join()

        missing = [rank for rank in range(size) if not (folder / f"{rank}.result").exists()]
        if missing:
            raise RuntimeError(f"of {size} ranks, {missing} ended without a result")
        ranks = [json.loads((folder / f"{rank}.result").read_text()) for rank in range(size)]

    operations = {}
    for name in ranks[0]["operations"]:
        each = [rank["operations"][name] for rank in ranks]
        operations[name] = {key: max(one[key] for one in each) for key in each[0]}
        operations[name]["cpu_median"] = statistics.median(one["cpu"] for one in each)

    return {
        "ranks": size,
        "operations": operations,
        "memory_mb": statistics.median(rank["memory_mb"] for rank in ranks),
    }


# -- what one rank of many computes by itself


@dataclass(frozen=True)
class OneOfMany(Axis):
    """Axis where only this rank runs.

    The others have rows of the same shape, numbered after its own.
    """

    def gather(self, value: Any) -> list[Any]:
        content = pickle.dumps(value)
        return [pickle.loads(content) for _ in range(self.size)]

    def gather_rows(self, rows: Tensor, note: int = 0) -> tuple[list[Tensor], list[int]]:
        shift = torch.zeros(rows.shape[1], dtype=rows.dtype)
        shift[0] = len(rows)
        return [rows + rank * shift for rank in range(self.size)], [note] * self.size

    def all_to_all(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return flat.new_zeros(sum(received))


def simulate(size: int, rows: int) -> dict[str, float]:
    """Return the CPU seconds of what one of `size` ranks computes by itself.

    It covers each operation that computes much.
    """
    axis = OneOfMany("data", size, 0, None)
    alone = Axis("replica", 1, 0, None)
    seconds = {}

    def timed(name: str, way: Callable[[], Any]) -> Any:
        gc.collect()
        began = time.process_time()
        result = way()
        seconds[name] = time.process_time() - began
        return result

    gc.freeze()
    timed("collect", lambda: decide(size, rows))
    batch = experience(rows, 0)
    store = MemoryStore(axis, alone)
    put_batch(store, batch)
    lengths = timed("rows", lambda: store.rows().lengths.tolist())
    chosen = timed("plan", lambda: owners(lengths, size))
    timed("move", lambda: store.move(chosen))
    metrics = numbers()
    timed("metrics", lambda: metrics.reduce(axis))
    return seconds | heartbeats(size)


def decide(size: int, rows: int) -> None:
    """Take all decisions of a round as each rank does, from the counts of all ranks."""
    num_groups = size * rows // SAMPLES
    round = Assignment(
        [LONGEST / 2] * num_groups,
        [None] * num_groups,
        SAMPLES,
        num_ranks=size,
        needed=num_groups,
        at_once=SAMPLES,
        divided=True,
    )
    lengths = [
        [invented_length(chunk.group, place) for place in chunk.responses] for chunk in round.chunks
    ]

    ages = [0] * len(lengths)
    while not round.over:
        round.begin_exchange()
        for index in round.started:
            ages[index] += EVERY
        running = [
            sum(length > age for length in each) for each, age in zip(lengths, ages, strict=True)
        ]
        round.decide(
            running,
            [
                sum(length for length in each if length <= age)
                for each, age in zip(lengths, ages, strict=True)
            ],
        )


def heartbeats(size: int, beats: int = 5) -> dict[str, float]:
    """Return CPU seconds and bytes of one heartbeat of all ranks in the monitor of rank 0.

    All ranks are connected to it.
    """
    monitor = Monitor(
        size, address=LOOPBACK, token="token", limit=3600, phase_limit=3600, beat=BEAT
    )
    connections = []
    for rank in range(size):
        connection = Connection(socket.create_connection((LOOPBACK, monitor.port)))
        connection.send(
            {
                "hello": {
                    "host": "host",
                    "pid": rank,
                    "node": "host/",
                    "rank": rank,
                    "token": "token",
                }
            }
        )
        connections.append(connection)

    while len(monitor.statuses) < size:
        time.sleep(0.01)
    clock = time.pthread_getcpuclockid(monitor._thread.ident)
    issued = {f"group {number} (cpu)": 1 for number in range(6)}
    state = {
        "state": {
            "place": (
                "lightrft/models/parallel/collectives.py:69 (Axis._reduce) < lightrft/app/trainer/ppo.py:1"
            ),
            "issued": issued,
        }
    }
    before = time.clock_gettime(clock)
    began = time.perf_counter()

    for beat in range(1, beats + 1):
        issued.update(dict.fromkeys(issued, 1 + beat))
        for connection in connections:
            connection.send(state)
        while any(
            1 + beat not in [count for count, _ in status.issued.values()]
            for status in monitor.statuses.values()
        ):
            time.sleep(0.005)

    seconds = time.clock_gettime(clock) - before
    idle = (time.perf_counter() - began) / BEAT  # the monitor also speaks by itself
    monitor.closing.set()
    monitor.join()
    for connection in connections:
        connection.close()

    return {
        "heartbeat": seconds / beats,
        "heartbeat_bytes": len(json.dumps(state)) + 1,
        "heartbeat_periods": round(idle, 2),
    }


# -- results


def run_again_with_slow_polls() -> None:
    """Replace this process by one with the library SLOW_POLLS, unless it has it."""
    preloaded = os.environ.get("LD_PRELOAD", "").split()
    if any(Path(library).name == "slow_polls.so" for library in preloaded):
        return

    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/slow_polls.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-xc", "-", "-o", library, "-ldl"],
            input=SLOW_POLLS.encode(),
            check=True,
        )
        environment = os.environ | {"LD_PRELOAD": " ".join([library, *preloaded])}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)


def extrapolated(sizes: list[int], values: list[float], size: int) -> float:
    """Return the value at `size` on the line through the two largest sizes."""
    (low, high), (first, last) = sizes[-2:], values[-2:]
    return last + (last - first) / (high - low) * (size - high)


def exponent(sizes: list[int], values: list[float]) -> float:
    """Return p of the growth as (size - 1) ** p between the two largest sizes.

    size - 1 is the number of others; 0 without any.
    """
    (low, high), (first, last) = sizes[-2:], values[-2:]
    return (
        math.log(last / first) / math.log((high - 1) / (low - 1)) if first > 0 and last > 0 else 0.0
    )


def series(runs: list[dict[str, Any]], name: str, key: str) -> tuple[list[int], list[float]]:
    """Return the sizes that executed an operation, and the numbers there."""
    points = [
        (run["ranks"], run["operations"][name][key]) for run in runs if name in run["operations"]
    ]
    return [size for size, _ in points], [value for _, value in points]


def amount(value: float) -> str:
    """Format a number of bytes."""
    return (
        f"{value:,.0f}"
        if value < 1e4
        else f"{value / 1e3:,.0f} k"
        if value < 1e7
        else f"{value / 1e6:,.0f} M"
    )


def table(
    runs: list[dict[str, Any]],
    key: str,
    form: Callable[[float], str],
    last: int | None,
    names: list[str],
) -> str:
    """Return a Markdown table of one number of each operation.

    `last` is the size to extrapolate to.
    """
    sizes = [run["ranks"] for run in runs]
    heads = [*map(str, sizes), *([f"{last:,} (line)"] if last else []), "exponent"]

    lines = ["| ranks | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name in names:
        own, values = series(runs, name, key)
        by_size = dict(zip(own, values, strict=True))
        cells = [form(by_size[size]) if size in by_size else "" for size in sizes]
        cells += [form(extrapolated(own, values, last))] if last else []
        lines.append(
            f"| {OPERATIONS[name]} | " + " | ".join([*cells, f"{exponent(own, values):.2f}"]) + " |"
        )

    return "\n".join(lines)


WIDTH = 760
HEIGHT = 420
LEFT = 70
TOP = 20
RIGHT = 560
BOTTOM = 370
COLOURS = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
    "#111",
)


def figure(runs: list[dict[str, Any]], last: int) -> str:
    """Draw the bytes that a rank sends over the number of ranks, on logarithmic axes.

    Extrapolated lines are dashed.
    """
    sizes = [run["ranks"] for run in runs]
    measured = {name: series(runs, name, "sent") for name in OPERATIONS}
    most = max(extrapolated(own, values, last) for own, values in measured.values())
    least = min(value for _, values in measured.values() for value in values if value)

    def x(size: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(size / sizes[0]) / math.log(last / sizes[0])

    def y(value: float) -> float:
        height = math.log(max(value, least) / least) / math.log(most / least)
        return BOTTOM - (BOTTOM - TOP) * height

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="#888"/>',
    ]
    for size in [*sizes, last]:
        parts.append(
            f'<text x="{x(size):.0f}" y="{BOTTOM + 18}" text-anchor="middle">{size:,}</text>'
        )

    for power in range(math.ceil(math.log10(least)), math.floor(math.log10(most)) + 1):
        parts.append(
            f'<path d="M{LEFT} {y(10**power):.0f}H{RIGHT}" stroke="#ddd"/><text x="{LEFT - 6}"'
            f' y="{y(10**power) + 4:.0f}" text-anchor="end">{amount(10**power)}</text>'
        )

    ends = sorted(
        (y(extrapolated(own, values, last)), name) for name, (own, values) in measured.items()
    )
    place = 0.0
    for end, name in ends:
        own, values = measured[name]
        colour = COLOURS[list(OPERATIONS).index(name)]
        place = max(end + 4, place + 15)
        points = " ".join(
            f"{x(size):.1f},{y(value):.1f}" for size, value in zip(own, values, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/><path'
            f' d="M{x(own[-1]):.1f} {y(values[-1]):.1f}L{x(last):.1f} {end:.1f}" stroke="{colour}"'
            f' stroke-dasharray="4 3"/><text x="{RIGHT + 8}" y="{place:.0f}"'
            f' fill="{colour}">{name}: {OPERATIONS[name]}</text>'
        )

    low = sizes[len(sizes) // 2]
    parts.append(
        f'<path d="M{x(low):.1f} {y(30 * least):.1f}L{x(last):.1f}'
        f' {y(30 * least * last / low):.1f}" stroke="#bbb" stroke-width="4" opacity="0.6"/>'
    )
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 8}">bytes sent by the rank that sends most, over the number'
        " of ranks; grey: linear; dashed: extrapolated</text></svg>"
    )

    return "\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> None:
    flags = {
        "--ranks": [2, 8, 32, 64, 128, 256],
        "--simulated": [64, 256, 1024],
        "--rows": (8, "responses of a rank, a multiple of four"),
        "--collector_ranks": (256, "most ranks that also collect, in further groups"),
        "--checkpoint_ranks": (128, "most ranks that also write and read a checkpoint"),
    }
    parser = parser_of(__doc__, flags)
    parser.add_argument("--figure", type=Path, help="SVG to write")
    parser.add_argument(
        "--slow_polls",
        action="store_true",
        help="let threads of gloo wake ten times a second (needs cc)",
    )
    args = parser.parse_args(argv)
    if len(set(args.ranks)) < 2:
        parser.error("--ranks: growth needs at least two numbers of ranks")
    if args.slow_polls:
        run_again_with_slow_polls()
    runs = []
    simulated = []

    for size in args.ranks:
        began = time.perf_counter()
        runs.append(run(size, args))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        print(
            f"{size} processes: {time.perf_counter() - began:.0f} s, {runs[-1]['memory_mb']:.0f} MB"
            " each",
            flush=True,
        )

    for size in args.simulated:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            simulated.append({"ranks": size, **pool.apply(simulate, (size, args.rows))})

    last = args.simulated[-1]
    communicating = list(OPERATIONS)
    print("\nbytes that a rank sends\n" + table(runs, "sent", amount, last, communicating))
    print("\nbytes that a rank receives\n" + table(runs, "received", amount, last, communicating))
    print(
        "\nsegments that a rank sends\n"
        + table(runs, "segments", "{:,.0f}".format, last, communicating)
    )

    print(
        "\nCPU seconds of a rank (median)\n"
        + table(runs, "cpu_median", "{:.3f}".format, None, communicating)
    )
    print(
        "\nbytes of the store, all ranks together\n"
        + table(runs, "served", amount, None, ["meet", "watchdog", "mesh", "groups"])
    )
    names = [name for name in simulated[0] if name != "ranks"]
    print(
        "\none rank alone\n| ranks | "
        + " | ".join(f"{each['ranks']:,}" for each in simulated)
        + " |\n|---"
        + "|---" * len(simulated)
        + "|"
    )
    for name in names:
        print(f"| {name} | " + " | ".join(f"{each[name]:.4g}" for each in simulated) + " |")
    if args.figure is not None:
        args.figure.write_text(figure(runs, last))

    growth = {
        name: {
            key: round(exponent(*series(runs, name, key)), 3)
            for key in ("sent", "received", "segments")
        }
        for name in OPERATIONS
    }
    print(json.dumps({"runs": runs, "simulated": simulated, "exponents": growth}))


if __name__ == "__main__":
    main()
