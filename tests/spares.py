"""Processes kept ready for `multiprocessing`'s method "spawn".

They are forked from a warm parent, so they have imported everything. A rank has threads and a
process group by the time that it wants them, and cannot fork them then. So they are forked when it
begins.
"""

import io
import os
import pickle
import socket
from multiprocessing import (
    context,
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    process,
    reduction,
    spawn,
)

NUMBER = 6
"""Number for each rank. Whoever wants more gets ordinary processes."""
kept: list[tuple[int, socket.socket]] = []
"""Spare processes of this rank: process and the line to it, which ends when either does."""


def for_each_child() -> None:
    """Let every process that this one forks from now on begin with spare ones."""
    parent = os.getpid()
    os.register_at_fork(after_in_child=lambda: _keep() if os.getppid() == parent else None)
    context.SpawnProcess._Popen = staticmethod(
        lambda wanted: (_Popen if kept else popen_spawn_posix.Popen)(wanted)
    )


class _Popen(popen_fork.Popen):
    """A spare process that runs what it is given, with the environment that this one has now."""

    DupFd = popen_forkserver._DupFd

    def __init__(self, wanted: process.BaseProcess):
        self.files: list[int] = []
        super().__init__(wanted)

    def duplicate_for_child(self, file: int) -> int:
        self.files.append(file)
        return len(self.files) - 1

    def _launch(self, wanted: process.BaseProcess) -> None:
        said = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(wanted.name), said)
            reduction.dump(wanted, said)
        finally:
            context.set_spawning_popen(None)

        self.pid, self.line = kept.pop()
        self.sentinel = self.line.fileno()
        with os.fdopen(os.memfd_create("spawned"), "wb") as file:
            file.write(said.getbuffer())
            file.seek(0)
            socket.send_fds(
                self.line, [pickle.dumps(dict(os.environ))], [file.fileno(), *self.files]
            )


def _keep() -> None:
    for _ in range(NUMBER):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            for _, line in kept:
                line.close()
            here.close()
            _wait(there)
        there.close()
        kept.append((pid, here))


def _wait(line: socket.socket) -> None:
    code = 1
    try:
        environment, files, *_ = socket.recv_fds(line, 2**20, 64)
        if files:
            os.environ.clear()
            os.environ.update(pickle.loads(environment))
            forkserver._forkserver._inherited_fds = files[1:]
            code = spawn._main(files[0], line.fileno())
    finally:
        os._exit(code)
