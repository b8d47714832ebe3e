"""A rank that fails, dies or does not come ends all, and every rank's log says which one it was and
where it is.
"""

import os
import resource
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loguru import logger

from lightrft.models.launch import heartbeat, monitor
from lightrft.models.launch.connection import PENDING, Connection, ConnectionLost
from lightrft.models.launch.heartbeat import is_secondary
from lightrft.strategy import FSDPStrategy
from ranks import exit_codes, run_ranks

LIMIT = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def no_launcher_to_wait_for(monkeypatch):
    monkeypatch.setattr("lightrft.models.launch.heartbeat.GRACE", 0.4)


def start(folder: Path, limit: timedelta = LIMIT, **layout) -> FSDPStrategy:
    """A strategy whose log is the rank's own file; also the rank's process id."""
    logger.remove()
    logger.add(folder / f"log{dist.get_rank()}", format="{message}")
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    made = FSDPStrategy(args={"fsdp": True, **layout})
    made.setup_distributed(limit)
    return made


def ended(folder: Path, world_size: int, function, *args) -> list[str]:
    """The logs of ranks that all end by themselves, and not well."""
    codes = exit_codes(world_size, function, folder, *args)
    assert all(codes), codes
    return logs(folder, world_size)


def logs(folder: Path, world_size: int) -> list[str]:
    files = [folder / f"log{rank}" for rank in range(world_size)]
    return [file.read_text() if file.exists() else "" for file in files]


def oversleep():
    time.sleep(60)


def late(folder, layout, rank):
    made = start(folder, **layout)
    made.announce("reward")
    if dist.get_rank() == rank:
        oversleep()
    made.announce("train")
    made.mesh.tp.sum(torch.ones(1))
    made.mesh.world.sum(torch.ones(1))


@pytest.mark.slow
def test_every_rank_says_who_is_late_and_where_all_are(tmp_path):
    for said in ended(tmp_path, 3, late, {}, 1):
        assert (
            "this run ends: a collective has waited for more than 1 s (--timeout_minutes). Late:"
            " rank 1." in said
        )
        where = (
            f"rank 1 (pid {(tmp_path / 'pid1').read_text()} on {socket.gethostname()}): late: has"
            " begun 0 of 1 collectives"
        )
        assert (
            where in said
            and "in phase reward, at tests/models/launch/test_heartbeat.py:"
            in said.replace(f"{os.getcwd()}/", "")
        )
        assert "(oversleep)" in said
        assert "ranks 0, 2: in phase train, at lightrft/models/parallel/collectives.py:" in said


def test_a_stall_in_a_subgroup_is_noticed_too(tmp_path):
    """Rank 2 waits in a tensor-parallel group, ranks 0 and 1 in the group of all."""
    for said in ended(tmp_path, 4, late, {"tp_size": 2}, 3):
        assert "Late: ranks 2-3." in said and "in mesh_tp #" in said and "in phase reward" in said


def crossed(folder):
    """Two groups of the same ranks in a different order: none would ever come."""
    made = start(folder)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)
    made.close()


def test_collectives_in_crossed_order(tmp_path):
    for said in ended(tmp_path, 2, crossed):
        assert "Late: ranks 0-1." in said and said.count("late: has begun 0 of 1 collectives") == 2


def stopped(folder, rank):
    made = start(folder)
    made.announce("generate")
    while dist.get_rank() and made._watchdog._phase_of_rank_0 != "generate":
        time.sleep(0.01)  # rank 0 sends its phase in a thread, which stops with it
    made.mesh.world.barrier()
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    made.announce("train")
    made.mesh.world.sum(torch.ones(1))


def test_a_process_that_stands_still_is_left_to_the_launcher(tmp_path):
    with pytest.raises(RuntimeError, match="rank 0 ended with 1"):
        run_ranks(2, stopped, tmp_path, 1, timeout=30)
    said = logs(tmp_path, 2)[0]
    assert "Late: rank 1." in said and "; no heartbeat for " in said


def test_the_others_notice_that_rank_0_stands_still(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 ended with 1"):
        run_ranks(3, stopped, tmp_path, 0, timeout=30)
    for said in logs(tmp_path, 3)[1:]:
        assert (
            f"rank 0 (pid {(tmp_path / 'pid0').read_text()} on {socket.gethostname()}) has sent no"
            " heartbeat" in said
        )
        assert (
            "for more than 1 s (--timeout_minutes), the last one in phase generate: its process is"
            " suspended" in said
        )


def together(folder, phase):
    """No rank waits for another: each waits for a thread's work that does not end."""
    made = start(folder, timedelta(minutes=1), phase_minutes=1 / 60)
    made.announce(phase)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(3 if not phase else None)
    made.close()
    os._exit(0)


def work():
    oversleep()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_phase_that_never_ends_on_any_rank(tmp_path, world_size):
    for said in ended(tmp_path, world_size, together, "generate"):
        assert (
            "this run ends: phase generate has taken " in said
            and "more than 1 s (--phase_minutes)" in said
        )
        assert "test_heartbeat.py:" in said and "(together)" in said


@pytest.mark.slow
def test_a_program_that_says_nothing_has_no_phases(tmp_path):
    assert exit_codes(2, together, tmp_path, "") == [0, 0]


def killed(folder, rank):
    """By a signal, while a child of it lives on."""
    made = start(folder, timedelta(minutes=1))
    made.announce("experience")
    made.mesh.world.barrier()

    if dist.get_rank() == rank:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        (folder / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    made.mesh.world.sum(torch.ones(1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_at_once(tmp_path, rank):
    said = ended(tmp_path, 3, killed, rank)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    for other in {0, 1, 2} - {rank}:
        assert (
            f"this run ends: rank {rank} (pid {(tmp_path / f'pid{rank}').read_text()}"
            in said[other]
        )
        assert (
            "ended without an error message in phase experience: it was killed or crashed"
            in said[other]
        )


def fails(folder):
    """Rank 1 by itself, the others because of it."""
    made = start(folder, timedelta(minutes=1))
    made.announce("train")
    try:
        made.mesh.world.barrier()
        if dist.get_rank() == 1:
            raise ValueError("bad luck")
        made.mesh.world.sum(torch.ones(1))
    except Exception as error:
        made.fail(error)


def test_the_first_cause_is_said_and_not_its_echoes(tmp_path):
    said = ended(tmp_path, 3, fails)
    assert "Traceback" in said[1] and said[1].rstrip().endswith("ValueError: bad luck")
    for other in (0, 2):
        assert (
            said[other].count("\n") == 1
            and "failed in phase train: ValueError: bad luck" in said[other]
        )


def all_fail(folder):
    made = start(folder, timedelta(minutes=1))
    made.fail(ValueError("no such file"), code=2, brief=True)


def test_an_error_of_all_ranks_is_said_once(tmp_path):
    assert sorted(ended(tmp_path, 3, all_fail)) == ["", "", "no such file\n"]


def timed_out(folder):
    """The collective's own timeout comes before the watchdog's."""
    monitor.REPORT_SECONDS = 0.3
    made = start(folder, timedelta(minutes=1))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    made.announce("train")
    if dist.get_rank() == 1:
        oversleep()
    try:
        made.mesh.world.sum(torch.ones(1))
    except Exception as error:
        made.fail(error)


def test_a_broken_collective_without_a_cause_shows_where_all_are(tmp_path):
    for said in ended(tmp_path, 2, timed_out):
        assert "failed in phase train: RuntimeError" in said and "Timed out waiting 1000ms" in said
        assert "No rank died or failed otherwise. Late: rank 1." in said and "(oversleep)" in said


def leaves_in_order(folder):
    """Rank 0 first; then nobody watches, and no strange bytes have done any harm."""
    made = start(folder, timedelta(minutes=1))
    if dist.get_rank() == 1:
        for bytes_of_a_stranger in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[" * 60_000 + b"\n",
            b"[" * 1000 + b"\n",
            b"x" * 2000,
            b"5\n",
        ):
            with socket.create_connection(("127.0.0.1", made._watchdog._rank_0["port"])) as strange:
                strange.sendall(bytes_of_a_stranger)
                with suppress(ConnectionResetError):
                    assert strange.recv(1) == b""

    if dist.get_rank() == 0:
        assert made._watchdog._monitor._listening.getsockname()[0] == "127.0.0.1"
    made.mesh.world.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    else:
        assert made._watchdog._monitor._thread.is_alive()

    made.close()
    made.close()
    return True


def test_ranks_that_leave_in_order_leave_in_silence(tmp_path):
    assert run_ranks(2, leaves_in_order, tmp_path) == [True, True]
    assert logs(tmp_path, 2) == ["", ""]


def absent(folder):
    monitor.ARRIVAL = 0.5
    if dist.get_rank() == 0:
        start(folder, timedelta(minutes=1))
    oversleep()


def test_a_rank_that_never_says_where_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="rank 0 ended with 1"):
        run_ranks(2, absent, tmp_path, timeout=30)
    assert (
        "this run ends: rank 1 ended, or hung, before it could send its position"
        in logs(tmp_path, 2)[0]
    )


def test_errors_that_come_from_another_rank():
    gloo = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
        " [127.0.0.1]:1"
    )
    wrapped = ValueError("the engine failed")
    wrapped.__cause__ = gloo
    assert is_secondary(gloo) and is_secondary(wrapped)
    assert is_secondary(dist.DistBackendError("NCCL error: remote process exited"))
    assert not is_secondary(ValueError("bad luck")) and not is_secondary(
        OSError("Connection reset by peer")
    )


def test_a_receiver_who_does_not_read_stops_nobody():
    ours, theirs = (Connection(end) for end in tcp_pair())
    for number in range(10_000):
        ours.send({"phase": str(number), "place": "x" * 1000})
    assert len(ours._unsent) < 2 * PENDING
    first = list(theirs.receive())
    assert [message["phase"] for message in first[:2]] == ["0", "1"]
    theirs.close()

    with pytest.raises(ConnectionLost):
        for _ in range(1000):
            list(ours.receive())
            time.sleep(0.001)


def tcp_pair() -> list[socket.socket]:
    with socket.create_server(("localhost", 0)) as listening:
        connecting = socket.create_connection(listening.getsockname())
        return [connecting, listening.accept()[0]]


def test_libraries_of_an_environment_beneath_are_not_named():
    """A function whose file is torch's, in another environment than this one."""
    scope = {}
    exec(
        compile(
            "def call(inner): return inner()",
            "/base/lib/python3.11/site-packages/torch/optim/adam.py",
            "exec",
        ),
        scope,
    )
    ready = threading.Event()
    done = threading.Event()

    def train():
        scope["call"](lambda: (ready.set(), done.wait()))

    thread = threading.Thread(target=train)
    thread.start()
    ready.wait()
    said = heartbeat.code_position(thread.ident)
    done.set()
    thread.join()
    assert (
        "(test_libraries_of_an_environment_beneath_are_not_named.<locals>.train)" in said
        and "adam.py" not in said
    )


def test_where_rank_0_listens(monkeypatch):
    """Rank 0 listens on the address that ranks use.

    It listens on all addresses if a name of this machine may mean something else to others.
    """
    found = {"fabric": "10.1.2.3", "debian": "127.0.1.1"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: [(socket.AF_INET, 1, 6, "", (found[host], 0))]
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name, address in (("fabric", "fabric"), ("debian", None)):
        monkeypatch.setenv("MASTER_ADDR", name)
        assert heartbeat._listening_address(4) == address
    assert heartbeat._listening_address(2) == "127.0.0.1"


def test_ranks_are_named_by_spans():
    assert (
        monitor.names({0, 1, 2, 5, 7, 8}) == "ranks 0-2, 5, 7-8" and monitor.names([3]) == "rank 3"
    )


def test_strangers_and_too_many_files_do_not_end_the_monitor(monkeypatch):
    monkeypatch.setattr("lightrft.models.launch.monitor.ARRIVAL", 1.0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    made = monitor.Monitor(
        1, address="127.0.0.1", limit=60.0, phase_limit=60.0, beat=0.2, token="secret"
    )
    monkeypatch.setattr(made, "_check", lambda now: None)
    address = "127.0.0.1", made.port
    strangers = [socket.create_connection(address) for _ in range(4)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(b"[" * 900 + b"\n")

    try:
        late = [socket.socket() for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # no further file can be opened
        for opened in late:
            opened.connect(address)
        time.sleep(0.5)
        assert made._thread.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    for opened in strangers:
        opened.settimeout(10)
        assert opened.recv(1) == b"", "a stranger is closed, also a silent one"

    rank = Connection(socket.create_connection(address))
    rank.send({"hello": {"token": "secret", "rank": 0, "host": "a", "pid": 1, "node": "n"}})
    deadline = time.monotonic() + 10
    while 0 not in made.statuses and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 0 in made.statuses
    made.closing.set()
    made.join()
    for opened in (*strangers, *late, rank):
        opened.close()
