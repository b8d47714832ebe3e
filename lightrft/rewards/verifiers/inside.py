"""Programs inside the sandbox: a watcher, and below it a program, or the asserts about one.

sandbox.py passes this file as text to an interpreter without installed packages, so it imports the
standard library only.

Asserts run in a process of their own, in another sandbox than the program: they call its functions
over a socket. Only plain values go to and fro: None, numbers, texts, bytes, dates, and containers
of them. So a program can change its own interpreter as it likes, and never sees a test or the value
that a test expects, and asserts compare nothing but values of Python's own classes.
"""

import builtins
import collections
import ctypes
import importlib
import itertools
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

MEMORY_POLL_SECONDS = 0.05
"""Time between two looks at the memory of all processes."""
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
M_ARENA_MAX = -8
DENIED_CALLS = {
    "x86_64": (0xC000003E, (29, 64, 68, 165, 206, 240, 248, 319, 425, 430, 447)),
    "aarch64": (0xC00000B7, (194, 190, 186, 40, 0, 180, 217, 279, 425, 430, 447)),
}
"""Architecture and numbers of the kernel's calls that allocate memory of no process.

No limit counts such memory. They are shmget, semget, msgget, mount, io_setup, mq_open, add_key,
memfd_create, io_uring_setup, fsopen and memfd_secret.
"""
SOCKET_CALLS = {"x86_64": (41, 54), "aarch64": (198, 208)}
"""Numbers of socket and setsockopt."""
BYTES_OF_SOCKET = 208 << 10
"""What the kernel buffers for a socket. It counts for every file, as each may be a socket."""
MOST_OPEN_FILES = 64


# -- limits


def watch(settings: dict[str, Any]) -> None:
    """Return in a child process with the limits of a program; watch it in the parent.

    The parent ends with the child, or ends all at a limit. It is the first process of the sandbox,
    so the kernel ends all others with it, and none of them can end it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        _limit(settings)
        return

    for descriptor in (0, 1, 2, settings["job"], settings.get("socket", -1)):
        if descriptor >= 0:
            os.close(descriptor)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # so that the program cannot look into this process
    deadline = time.monotonic() + settings["seconds"]
    while time.monotonic() < deadline and not _exceeds(settings["memory"]):
        signal.sigtimedwait({signal.SIGCHLD}, MEMORY_POLL_SECONDS)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                os._exit(os.waitstatus_to_exitcode(ended[1]) & 255)
    os.killpg(child, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


def _exceeds(memory: int) -> bool:
    """Return True if all processes of the sandbox use more than so many bytes.

    Pages that they share count once.
    """
    if os.getpid() != 1 or not os.path.isdir("/proc/1"):
        return False  # without a sandbox, /proc shows the processes of everybody
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    memory -= sum(map(_num_files, processes)) * BYTES_OF_SOCKET
    alone = [_kilobytes(name, "status", "VmRSS:") for name in processes]
    # The exact sum is slow to read, so it is asked for only when this upper bound is too large.
    if sum(alone) << 10 <= memory:
        return False
    shared = [_kilobytes(name, "smaps_rollup", "Pss:") for name in processes]
    return sum(one or other for one, other in zip(shared, alone, strict=True)) << 10 > memory


def _num_files(process: str) -> int:
    try:
        return len(os.listdir(f"/proc/{process}/fd"))
    except OSError:  # it has ended, or does not permit a look
        return MOST_OPEN_FILES


def _kilobytes(process: str, file: str, key: str) -> int:
    try:
        with open(f"/proc/{process}/{file}") as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
    except OSError:  # it has ended, or does not permit a look
        return 0


def _limit(settings: dict[str, Any]) -> None:
    limits = {
        "AS": settings["memory"],
        "CPU": settings["seconds"],
        "NPROC": settings["processes"],
        "FSIZE": settings["file_size"],
        "NOFILE": MOST_OPEN_FILES,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
        "CORE": 0,
    }
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))

    # The program ends with its watcher, and gains no rights from files with the setuid bit.
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Otherwise the heaps of twenty threads would take all addresses.
    library.mallopt(M_ARENA_MAX, 1)
    machine = os.uname().machine
    if machine in DENIED_CALLS:
        _deny(library, *DENIED_CALLS[machine], *SOCKET_CALLS[machine])


def _deny(
    library: ctypes.CDLL, architecture: int, calls: tuple[int, ...], socket: int, setsockopt: int
) -> None:
    """Let these calls of the kernel fail, and all calls of another architecture.

    Sockets can only be of this machine (AF_UNIX), as some families go beyond a sandbox, and keep
    the size of their buffers (SO_SNDBUF).
    """
    load = 0x20
    equal = 0x15
    at_least = 0x35
    end = 0x06
    allow = 0x7FFF0000  # the latter with EPERM
    refuse = 0x00050001

    last = len(calls) + 11
    program = [
        (load, 0, 0, 4),
        (equal, 0, last - 2, architecture),
        (load, 0, 0, 0),
        (at_least, last - 4, 0, 0x40000000),  # the calls of x32
        *((equal, last - 5 - index, 0, call) for index, call in enumerate(calls)),
        (equal, 0, 2, socket),
        (load, 0, 0, 16),  # the first argument
        (equal, 3, 4, 1),
        (equal, 0, 2, setsockopt),
        (load, 0, 0, 32),  # the third argument
        (equal, 1, 0, 7),
        (end, 0, 0, allow),
        (end, 0, 0, refuse),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


# -- plain values


FROM_ITEMS = {kind.__name__: kind for kind in (tuple, set, frozenset, bytes, bytearray, dict)}
CLASSES = {kind.__name__: kind for kind in (bool, int, float, complex, str, list)} | FROM_ITEMS
"""Classes that are values themselves, as int is in `only(values, int)`."""
REDUCED = (
    "builtins.range decimal.Decimal fractions.Fraction datetime.date datetime.time"
    " datetime.datetime datetime.timedelta datetime.timezone"
)
FROM_ARGUMENTS = dict.fromkeys(REDUCED.split(), lambda value: value.__reduce__()[1])
FROM_ARGUMENTS["builtins.complex"] = lambda number: (number.real, number.imag)
FROM_ARGUMENTS["collections.deque"] = lambda queue: ([*queue], queue.maxlen)
"""Class -> function that returns what it is called with to make an equal value."""
MOST_ITEMS = 10_000
"""How many items of an iterator are sent."""


class UnplainError(TypeError):
    """Raised for an object that cannot be sent, with the name of its class."""


def encode(value: Any, *, flatten: bool) -> Any:
    """Return a plain value in terms of JSON.

    With `flatten` a value of a derived class is sent as one of the builtin class. Raises
    UnplainError for any other object.
    """
    kind = type(value)
    inner = partial(encode, flatten=flatten)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is type and value in CLASSES.values():
        return {"class": value.__name__}
    if kind is list:
        return list(map(inner, value))
    if kind in FROM_ITEMS.values():
        return {
            kind.__name__: list(map(inner, map(list, value.items()) if kind is dict else value))
        }
    if (name := _name(kind)) in FROM_ARGUMENTS:
        return {name: list(map(inner, FROM_ARGUMENTS[name](value)))}

    if isinstance(value, Iterator):
        items = list(map(inner, itertools.islice(value, MOST_ITEMS + 1)))
        return {"iterator": [items[:MOST_ITEMS], len(items) > MOST_ITEMS]}
    if flatten and isinstance(value, (KeysView, ValuesView, ItemsView)):
        return list(map(inner, value))
    for base in CLASSES.values() if flatten else ():
        if isinstance(value, base):
            return inner(base(value))
    raise UnplainError(kind.__name__)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def decode(content: Any) -> Any:
    """Return the plain value of an encoded one. Raises an error for anything else."""
    if type(content) is list:
        return list(map(decode, content))
    if type(content) is not dict:
        return content

    ((name, inner),) = content.items()
    if name == "class":
        return CLASSES[inner]
    if name == "iterator":
        return _items(*decode(inner))
    if name in FROM_ARGUMENTS:
        module, _, called = name.rpartition(".")
        return getattr(importlib.import_module(module), called)(*decode(inner))
    return FROM_ITEMS[name](map(decode, inner))


def _items(items: list[Any], truncated: bool) -> Iterator[Any]:
    yield from items
    if truncated:
        raise RuntimeError(f"tests get the first {MOST_ITEMS} items of an iterator alone")


# -- the end of the program


def execute(program: str, name: str) -> types.ModuleType:
    """Run a program as a module of this name, and return the module."""
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(program, "program.py", "exec"), module.__dict__)
    return module


def serve(program: str, descriptor: int) -> None:
    """Run a program, then answer what the tests ask."""
    module = execute(program, "program")
    file = socket.socket(fileno=descriptor).makefile("rwb")
    for line in file:
        try:
            answer = json.dumps(_answer(module, *json.loads(line)))
        except UnplainError as error:
            answer = json.dumps(["unplain", str(error)])
        except BaseException as error:
            try:
                arguments = encode(list(error.args), flatten=True)
            except TypeError:
                arguments = [str(error)]
            answer = json.dumps(["raise", [_bases(type(error)), arguments]])
        file.write(answer.encode() + b"\n")
        file.flush()


def _answer(
    module: types.ModuleType, verb: str, name: str, values: Any, named: Any
) -> tuple[str, Any]:
    """Do what a test asks of the program; return the kind of the answer, and its content.

    `Solution.f` is the method of a new object, as the programs of LeetCode have it.
    """
    holder, _, attribute = name.rpartition(".")
    found = getattr(getattr(module, holder)() if holder else module, attribute)
    if verb == "get" and isinstance(found, type) and issubclass(found, Exception):
        return "exception", _bases(found)
    if verb == "get" and callable(found):
        return "callable", None

    if verb != "get" and isinstance(found, type):
        raise UnplainError(found.__name__)
    values, named = decode(values), decode(named)
    result = found if verb == "get" else found(*values, **named)
    # What a function does to its arguments is its result if it has no other, or tests watch it.
    counts = verb == "watch" or verb == "call" and result is None
    changed = [*values, *named.values()] if counts else []
    return "value", [encode(each, flatten=True) for each in (result, *changed)]


def _bases(kind: type) -> list[tuple[str, bool]]:
    return [(base.__name__, base.__module__ == "builtins") for base in kind.__mro__]


# -- the end of the tests


class NotPlainError(BaseException):
    """Raised where a test cannot go on. None should take it for an error of the program."""


class TestedProgram:
    """The program at the other end of a socket."""

    def __init__(self, descriptor: int):
        self.watches = False
        """Whether the tests look at what is done to arguments."""
        self.refused = ""
        """Why the tests cannot be judged, whatever the program does."""
        self.unjudged = ""
        """Why they cannot judge this program."""
        self._file = socket.socket(fileno=descriptor).makefile("rwb")
        self._exceptions: dict[str, type[Exception]] = {}

    def ask(self, verb: str, name: str, /, *values: Any, **named: Any) -> Any:
        """Return the value that the program answers, or raise its exception.

        Only what is asked for decides whether the answer can be a function or a class.
        """
        try:
            sent = [encode(each, flatten=False) for each in ([*values], named)]
        except UnplainError as error:
            self.refused = (
                f"{name}() gets an object of the class {error}, which cannot be sent to the program"
            )
            raise NotPlainError(self.refused) from error

        self._file.write(json.dumps([verb, name, *sent]).encode() + b"\n")
        self._file.flush()
        line = self._file.readline()
        if not line:
            os._exit(1)  # the program has ended
        kind, content = json.loads(line)
        match verb, kind:
            case _, "raise":
                bases, arguments = content
                raise self._made(self._exception(bases), decode(arguments))
            case _, "unplain":
                self.stop(f"{name} gives an object of the class {str(content)!a:.80}")
            case "get", "exception":
                return self._exception(content)
            case "get", "callable":
                return Function(self, name)

        result, *changed = content
        for value, new in zip([*values, *named.values()], changed, strict=False):
            _replace(value, decode(new))
        return decode(result)

    def stop(self, reason: str) -> NoReturn:
        """End the tests, which cannot judge this program."""
        self.unjudged = reason
        raise NotPlainError(reason)

    def _exception(self, bases: Any) -> type[Exception]:
        """Return a builtin class, or one that stands for the program's.

        Others could end a test that has not passed, as SystemExit, StopIteration and SkipTest do.
        """
        (name, is_builtin), *others = bases
        if is_builtin:
            found = getattr(builtins, name, None)
            usable = isinstance(found, type) and issubclass(found, Exception)
            return found if usable and not name.startswith("Stop") else RuntimeError
        if name not in self._exceptions:
            self._exceptions[name] = type(name, (self._exception(others),), {})
        return self._exceptions[name]

    def _made(self, kind: type[Exception], values: list[Any]) -> Exception:
        try:
            return kind(*values)
        except TypeError:  # its class makes the arguments of others
            return kind.__new__(kind, *values)


def _replace(old: Any, new: Any) -> None:
    """Give a container of the tests the content that a function has left in it."""
    if type(old) in (list, bytearray, collections.deque):
        old.clear()
        old += new
    elif type(old) in (dict, set):
        old.clear()
        old |= new


class Function:
    """A function of the program, or the class Solution, which makes one object for each call."""

    def __init__(self, program: TestedProgram, name: str):
        self._program = program
        self._name = name

    def __call__(self, /, *values: Any, **named: Any) -> Any:
        if self._name == "Solution":
            return self
        verb = "watch" if self._program.watches else "call"
        return self._program.ask(verb, self._name, *values, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._name != "Solution":
            self._program.stop(f"they use {name} of {self._name}")
        return self._program.ask("get", f"{self._name}.{name}")


def test(job: dict[str, Any], program: TestedProgram) -> None:
    """Run the tests that asserts.py describes; raise an exception unless they pass."""

    def member(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return program.ask("get", name)

    program.watches = job["watches"]
    for name in ("program", "solution"):
        sys.modules[name] = module = types.ModuleType(name)
        vars(module)["__getattr__"] = member
    scope = {"__name__": "tests"}
    scope |= {name: importlib.import_module(name) for name in job["modules"]}
    for name in job["names"]:
        with suppress(AttributeError):
            scope[name] = member(name)

    for index, text in enumerate(job["texts"]):
        exec(compile(text, f"test {index}", "exec"), scope)
    for name in job["functions"]:
        scope[name]()
    for name in job["cases"]:
        import unittest

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(scope[name]).run(result)
        if result.skipped or not result.testsRun or not result.wasSuccessful():
            raise AssertionError(name)


def main() -> None:
    settings = json.loads(sys.argv.pop())
    watch(settings)
    with os.fdopen(settings["job"]) as file:
        job = json.load(file)
    if settings["what"] == "program":
        execute(job, "__main__")
        return

    sys.set_int_max_str_digits(0)
    if settings["what"] == "module":
        serve(job, settings["socket"])
        return

    program = TestedProgram(settings["socket"])
    code = 1
    try:
        test(job, program)
        code = 0
    finally:
        if code and (reason := program.refused or program.unjudged):
            os.write(2, reason.encode())
            code = settings["refused" if program.refused else "unjudged"]
        os._exit(code)


if __name__ == "__main__":
    main()
