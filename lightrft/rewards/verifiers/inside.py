"""What runs inside the sandbox: a watcher, and below it a program, or the asserts about one.

sandbox.py passes this file as text to an interpreter without installed packages, so it imports the
standard library only.

Asserts run in a process of their own, in another sandbox than the program: they call its functions
over a socket. Arguments and results are copied, and what cannot be copied stays where it is and is
represented by a `Remote`. So a program can change its own interpreter as it likes, and never sees a
test or the value that a test expects.
"""

import builtins
import collections
import ctypes
import importlib
import json
import operator
import os
import resource
import signal
import socket
import struct
import sys
import time
import types
from typing import Any

POLL_SECONDS = 0.05
"""Time between two looks at the memory of all processes."""
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
DENIED_CALLS = {
    "x86_64": (0xC000003E, (29, 64, 68, 165, 240, 248, 319, 425, 430, 447)),
    "aarch64": (0xC00000B7, (194, 190, 186, 40, 180, 217, 279, 425, 430, 447)),
}
"""Architecture and numbers of shmget, semget, msgget, mount, mq_open, add_key, memfd_create,
io_uring_setup, fsopen and memfd_secret: the calls that allocate memory of no process, where no
limit counts it.
"""


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
    while time.monotonic() < deadline and not _uses_more(settings["memory"]):
        signal.sigtimedwait({signal.SIGCHLD}, POLL_SECONDS)
        while (ended := _ended_child()) is not None:
            if ended[0] == child:
                os._exit(os.waitstatus_to_exitcode(ended[1]) & 255)
    os.killpg(child, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


def _ended_child() -> tuple[int, int] | None:
    ended = os.waitpid(-1, os.WNOHANG)
    return ended if ended[0] else None


def _uses_more(memory: int) -> bool:
    """Return True if all processes of the sandbox use more than so many bytes. Pages that they
    share count once."""
    if os.getpid() != 1 or not os.path.isdir("/proc/1"):
        return False  # without a sandbox, /proc shows the processes of everybody
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    alone = [_kilobytes(name, "status", "VmRSS:") for name in processes]
    if sum(alone) << 10 <= memory:
        return False
    shared = [_kilobytes(name, "smaps_rollup", "Pss:") for name in processes]
    return sum(one or other for one, other in zip(shared, alone, strict=True)) << 10 > memory


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
        "NOFILE": 64,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
        "CORE": 0,
    }
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.uname().machine in DENIED_CALLS:
        _deny(library, *DENIED_CALLS[os.uname().machine])


def _deny(library: ctypes.CDLL, architecture: int, calls: tuple[int, ...]) -> None:
    """Let these calls of the kernel fail, and all calls of another architecture."""
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF0000, 0x00050001  # the latter with EPERM
    last = len(calls) + 5
    program = [
        (load, 0, 0, 4),
        (equal, 0, last - 2, architecture),
        (load, 0, 0, 0),
        (at_least, last - 4, 0, 0x40000000),  # the calls of x32
        *((equal, last - 5 - place, 0, call) for place, call in enumerate(calls)),
        (end, 0, 0, allow),
        (end, 0, 0, refuse),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


# -- values that are copied, and objects that stay where they are


COPIED = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
BY_NAME = {name: kind for kind, name in COPIED.items()}
STANDARD = {
    ("decimal", "Decimal"): str,
    ("fractions", "Fraction"): str,
    ("datetime", "date"): "fromisoformat",
    ("datetime", "datetime"): "fromisoformat",
    ("datetime", "time"): "fromisoformat",
}
"""Classes of the standard library whose objects are copied as text, and how the text is read."""
MUTABLE = (list, dict, set, bytearray, collections.deque)
FROM_BUILTINS = {
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__hash__": hash,
    "__int__": int,
    "__float__": float,
    "__round__": round,
    "__reversed__": reversed,
    "__divmod__": divmod,
    "__enter__": lambda one: type(one).__enter__(one),
    "__exit__": lambda one, *about: type(one).__exit__(one, *about),
}
BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
FORWARDED = frozenset(
    [
        *FROM_BUILTINS,
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__contains__",
        "__neg__",
        "__abs__",
        "__index__",
    ]
    + [f"__{name}__" for name in BINARY + COMPARISONS]
)


class Remote:
    """An object of the other process, whose attributes and methods are asked for there."""

    __slots__ = ("_remote_",)

    def __init__(self, about: "About"):
        object.__setattr__(self, "_remote_", about)

    @property
    def __class__(self) -> type:
        about = self._remote_
        return Remote if about.plain is NOTHING else type(about.plain)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return _ask(self, "call", *values, named=named, constructs=self._remote_.kind == "class")

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delete", name)

    def __instancecheck__(self, one: Any) -> bool:
        return isinstance(one, Remote) and bool(_ask(self, "has_instance", one))

    def __subclasscheck__(self, one: Any) -> bool:
        return isinstance(one, Remote) and bool(_ask(self, "has_subclass", one))

    def __hash__(self) -> int:
        plain = self._remote_.plain
        return _ask(self, "special", "__hash__") if plain is NOTHING else hash(plain)

    def __contains__(self, one: Any) -> bool:
        about = self._remote_
        if about.made or type(one) is Remote or not about.channel.tests:
            return _ask(self, "special", "__contains__", one)
        return one in list(self)

    def __await__(self) -> Any:
        yield from ()
        return _ask(self, "run")


class About:
    """What is known about an object of the other process."""

    def __init__(self, channel: "Channel", number: int, kind: str, plain: Any):
        self.channel = channel
        self.number = number
        self.kind = kind
        self.plain = plain
        """The value as one of a builtin class, if its class is derived from that."""
        self.made = False
        """True if the test has made the object, by calling a class."""


NOTHING = object()


def _ask(
    one: Remote,
    verb: str,
    *values: Any,
    named: dict[str, Any] | None = None,
    constructs: bool = False,
) -> Any:
    about = one._remote_
    result = about.channel.ask(verb, about.number, values, named or {})
    if type(result) is Remote:
        result._remote_.made = constructs or about.made
    return result


def _forwarded(name: str) -> Any:
    return lambda self, *values: _ask(self, "special", name, *values)


def _binary(name: str, *, swapped: bool = False) -> Any:
    """Return an operator. An object that the program has returned does not meet values of the test:
    it could answer as it likes."""
    function = getattr(operator, f"__{name}__")

    def apply(self: Remote, other: Any) -> Any:
        about = self._remote_
        asks = (
            not about.channel.tests
            or type(other) is Remote
            or (about.made and name not in COMPARISONS)
        )
        if asks:
            return _ask(self, "special", f"__r{name}__" if swapped else f"__{name}__", other)
        if about.plain is NOTHING:
            return NotImplemented
        return function(other, about.plain) if swapped else function(about.plain, other)

    return apply


for _name in (
    *FROM_BUILTINS,
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__neg__",
    "__abs__",
    "__index__",
):
    if _name != "__hash__":
        setattr(Remote, _name, _forwarded(_name))
for _name in (*BINARY, *COMPARISONS):
    setattr(Remote, f"__{_name}__", _binary(_name))
for _name in BINARY:
    setattr(Remote, f"__r{_name}__", _binary(_name, swapped=True))


class Channel:
    """One end of the connection between a program and its tests."""

    def __init__(self, descriptor: int, *, tests: bool):
        self.tests = tests
        """True at the end of the tests, which answers little: it must not be taken over."""
        self._file = socket.socket(fileno=descriptor).makefile("rwb")
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._exceptions: dict[int, type] = {}

    def ask(self, verb: str, number: int, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return what the other end answers; answer its questions meanwhile. Raises the exception
        that it has raised."""
        self._send([verb, number, self.encode(values), self.encode(named)])
        while True:
            verb, *content = self._receive()
            if verb == "answer":
                result, changed = content
                for place, value in changed:
                    _replace(values[place], self.decode(value))
                return self.decode(result)
            if verb == "raise":
                kind, values = self.decode(content[0]), self.decode(content[1])
                raise (
                    kind(*values)
                    if isinstance(kind, type) and issubclass(kind, Exception)
                    else RuntimeError(values)
                )
            self.answer(verb, *content)

    def serve(self) -> None:
        """Answer questions for ever."""
        while True:
            self.answer(*self._receive())

    def answer(self, verb: str, number: int, encoded: Any, named: Any) -> None:
        """Answer a question, with the arguments that were changed in place."""
        try:
            one, values = self._objects[number], self.decode(encoded)
            result = self._do(verb, one, values, self.decode(named))
            changed = [
                (place, after)
                for place, (value, before) in enumerate(zip(values, encoded["tuple"], strict=True))
                if type(value) in MUTABLE and (after := self.encode(value)) != before
            ]
            reply = ["answer", self.encode(result), changed]
        except BaseException as error:
            kind = type(error) if isinstance(error, Exception) else RuntimeError
            reply = ["raise", self.encode(kind), self.encode(tuple(map(_simple, error.args)))]
        self._send(reply)

    def _do(self, verb: str, one: Any, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.tests and verb != "call":
            public = verb in ("get", "set") and not str(values[0]).startswith("_")
            iterates = verb == "special" and values[0] in ("__next__", "__iter__", "__len__")
            if not iterates and not (
                type(one).__module__ == "program" and (public or verb == "special")
            ):
                raise AttributeError(f"this object of the test permits no {verb}")
        match verb:
            case "call":
                return one(*values, **named)
            case "get":
                return getattr(one, *values)
            case "set":
                return setattr(one, *values)
            case "delete":
                return delattr(one, *values)
            case "has_instance":
                return isinstance(values[0], one)
            case "has_subclass":
                return issubclass(values[0], one)
            case "run":
                import asyncio

                return asyncio.run(one)
            case "special":
                return _special(one, *values)
        raise ValueError(verb)

    def encode(self, value: Any) -> Any:
        """Return the value in terms of JSON."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if value.bit_length() < 4096 else {"int": hex(value)}
        if kind in COPIED:
            return {COPIED[kind]: [self.encode(each) for each in value]}
        if kind in (dict, collections.Counter, collections.OrderedDict, collections.defaultdict):
            return {"dict": [[self.encode(key), self.encode(each)] for key, each in value.items()]}
        if kind in (bytes, bytearray, complex, range):
            return {kind.__name__: repr(value)}
        if (kind.__module__, kind.__name__) in STANDARD:
            return {"standard": [kind.__module__, kind.__name__, str(value)]}
        if kind is Remote and value._remote_.channel is self:
            return {"own": value._remote_.number}
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        if isinstance(value, type) and issubclass(value, Exception):
            bases = [each for each in value.__mro__[:-1] if issubclass(each, Exception)]
            return {"exception": [[self._number(each), each.__name__] for each in bases]}
        return {"object": [self._number(value), _kind(value), *self._plain(value)]}

    def decode(self, content: Any) -> Any:
        """Return the value of an encoded one."""
        if not isinstance(content, dict):
            return content
        ((name, inner),) = content.items()
        match name:
            case "int":
                return int(inner, 16)
            case "dict":
                return {self.decode(key): self.decode(each) for key, each in inner}
            case "bytes" | "bytearray" | "complex" | "range":
                return _literal(name, inner)
            case "standard":
                module, kind, text = inner
                read, found = STANDARD[module, kind], getattr(importlib.import_module(module), kind)
                return found(text) if read is str else getattr(found, read)(text)
            case "own":
                return self._objects[inner]
            case "builtin":
                found = getattr(builtins, inner)
                return found if isinstance(found, type) else None
            case "exception":
                return self._exception(inner)
            case "object":
                number, kind, *plain = inner
                if kind == "coroutine":
                    return _awaited(Remote(About(self, number, kind, NOTHING)))
                return Remote(
                    About(self, number, kind, self.decode(plain[0]) if plain else NOTHING)
                )
        return BY_NAME[name](self.decode(each) for each in inner)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _plain(self, value: Any) -> list[Any]:
        """Return the value of an object whose class is derived from that of a value."""
        for kind in (int, float, str, list, tuple, dict, set, frozenset):
            if isinstance(value, kind):
                return [self.encode(kind(value) if kind is not str else str.__str__(value))]
        return []

    def _exception(self, bases: list[list[Any]]) -> type:
        """Return the class of an exception here: a builtin one, or one that stands for that of the
        other end."""
        (number, name), *rest = bases
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
        if number not in self._exceptions:
            self._exceptions[number] = type(
                name, (self._exception(rest) if rest else Exception,), {}
            )
        return self._exceptions[number]

    def _send(self, message: Any) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def _receive(self) -> Any:
        line = self._file.readline()
        if not line:
            os._exit(1)  # the other end has ended
        return json.loads(line)


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return "class"
    return "coroutine" if isinstance(value, types.CoroutineType) else ""


async def _awaited(coroutine: Remote) -> Any:
    return _ask(coroutine, "run")


def _literal(name: str, text: str) -> Any:
    """Return a value of its repr, whose only name is that of its class."""
    import ast

    arguments = text.removeprefix(name).strip("()") if name in ("bytearray", "range") else text
    found = ast.literal_eval(f"({arguments},)" if name != "complex" else f"({text.strip('()')},)")
    return found[0] if name in ("bytes", "complex") else getattr(builtins, name)(*found)


def _simple(value: Any) -> Any:
    return (
        value
        if isinstance(value, str | int | float | bool | None | tuple | list | dict)
        else str(value)
    )


def _special(one: Any, name: str, *values: Any) -> Any:
    if name.startswith("__r") and f"__{name[3:]}" in {f"__{each}__" for each in BINARY}:
        return getattr(operator, f"__{name[3:]}")(*values, one)
    if name not in FORWARDED:
        raise AttributeError(name)
    function = FROM_BUILTINS.get(name) or getattr(operator, name)
    return function(one, *values)


def _replace(value: Any, new: Any) -> None:
    """Give a container the content of another one."""
    if isinstance(value, list | bytearray):
        value[:] = new
    elif isinstance(value, MUTABLE):
        value.clear()
        value.extend(new) if isinstance(value, collections.deque) else value.update(new)


# -- what is run


def execute(program: str, name: str) -> types.ModuleType:
    """Run a program as a module of this name, and return the module."""
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(program, "program.py", "exec"), module.__dict__)
    return module


def serve(program: str, descriptor: int) -> None:
    """Run a program, then answer what its tests ask about it."""
    module = execute(program, "program")
    channel = Channel(descriptor, tests=False)
    channel._send([channel._number(module), sorted(module.__dict__)])
    channel.serve()


class Scope(dict):
    """Names of the tests, and after them those of the program."""

    def __init__(self, program: Remote, names: dict[str, bool]):
        super().__init__(__name__="program", __builtins__=builtins)
        self.program = program
        self.names = names
        """Names of the program, with False for modules that the tests import themselves."""

    def __missing__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        if self.names[name]:
            return getattr(self.program, name)
        return importlib.import_module(name)


def test(tests: list[str], descriptor: int) -> None:
    """Run asserts about the program at the other end of a socket."""
    channel = Channel(descriptor, tests=True)
    number, names = channel._receive()
    program = Remote(About(channel, number, "", NOTHING))
    codes = [compile(text, f"test {place}", "exec") for place, text in enumerate(tests)]

    # A program may be about a function that is called like a builtin one or a module; it replaces
    # none that tests use beside it.
    used = set().union(*map(_names, codes)).intersection(names)
    known = {*dir(builtins), *sys.stdlib_module_names}
    own = (
        {name: True for name in names if name not in known}
        if used - known
        else dict.fromkeys(names, True)
    )
    scope = Scope(program, dict.fromkeys(sys.stdlib_module_names.intersection(names), False) | own)
    sys.modules["program"] = program
    for code in codes:
        exec(code, scope)


def _names(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def main() -> None:
    settings = json.loads(sys.argv.pop())
    watch(settings)
    with os.fdopen(settings["job"]) as file:
        job = json.load(file)
    if settings["what"] == "program":
        execute(job, "__main__")
        return
    try:
        {"module": serve, "tests": test}[settings["what"]](job, settings["socket"])
    except BaseException:
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
