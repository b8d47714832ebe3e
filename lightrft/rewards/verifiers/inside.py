"""Programs inside the sandbox: a watcher, and below it a program, or the asserts about one.

sandbox.py passes this file as text to an interpreter without installed packages, so it imports the
standard library only.

Asserts run in a process of their own, in another sandbox than the program: they call its functions
over a socket. Arguments and results are copied, and what cannot be copied stays where it is and is
represented by a `Remote`. So a program can change its own interpreter as it likes, and never sees a
test or the value that a test expects.
"""

import builtins
import collections
import copy
import ctypes
import functools
import importlib
import json
import operator
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

MEMORY_POLL_SECONDS = 0.05
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
"""Architecture and numbers of the kernel's calls that allocate memory of no process.

No limit counts such memory. They are shmget, semget, msgget, mount, mq_open, add_key, memfd_create,
io_uring_setup, fsopen and memfd_secret.
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
        signal.sigtimedwait({signal.SIGCHLD}, MEMORY_POLL_SECONDS)
        while (ended := _ended_child()) is not None:
            if ended[0] == child:
                os._exit(os.waitstatus_to_exitcode(ended[1]) & 255)
    os.killpg(child, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


def _ended_child() -> tuple[int, int] | None:
    ended = os.waitpid(-1, os.WNOHANG)
    return ended if ended[0] else None


def _uses_more(memory: int) -> bool:
    """Return True if all processes of the sandbox use more than so many bytes.

    Pages that they share count once.
    """
    if os.getpid() != 1 or not os.path.isdir("/proc/1"):
        return False  # without a sandbox, /proc shows the processes of everybody
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    alone = [_kilobytes(name, "status", "VmRSS:") for name in processes]
    # The exact sum is slow to read, so it is asked for only when this upper bound is too large.
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

    # The program ends with its watcher, and gains no rights from files with the setuid bit.
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.uname().machine in DENIED_CALLS:
        _deny(library, *DENIED_CALLS[os.uname().machine])


def _deny(library: ctypes.CDLL, architecture: int, calls: tuple[int, ...]) -> None:
    """Let these calls of the kernel fail, and all calls of another architecture."""
    load = 0x20
    equal = 0x15
    at_least = 0x35
    end = 0x06
    allow = 0x7FFF0000  # the latter with EPERM
    refuse = 0x00050001

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


MAPPINGS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)
MUTABLE = (list, set, bytearray, collections.deque, *MAPPINGS)
"""Classes of containers that are one object at both ends, while a question is answered."""
BY_NAME = {kind.__name__: kind for kind in (tuple, frozenset, *MUTABLE)}
VIEWS = {
    type({}.keys()): lambda values: dict.fromkeys(values).keys(),
    type({}.values()): lambda values: dict(enumerate(values)).values(),
    type({}.items()): lambda values: dict(values).items(),
}
VIEWS_BY_NAME = {kind.__name__: make for kind, make in VIEWS.items()}
AS_TEXT = (str, lambda kind, text: kind(text))
AS_ISO = (str, lambda kind, text: kind.fromisoformat(text))
STANDARD = {
    ("decimal", "Decimal"): AS_TEXT,
    ("fractions", "Fraction"): AS_TEXT,
    ("uuid", "UUID"): AS_TEXT,
    ("pathlib", "PosixPath"): AS_TEXT,
    ("pathlib", "PurePosixPath"): AS_TEXT,
    ("datetime", "date"): AS_ISO,
    ("datetime", "datetime"): AS_ISO,
    ("datetime", "time"): AS_ISO,
    ("datetime", "timedelta"): (
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda kind, text: kind(*map(int, text.split())),
    ),
}
"""Classes of the standard library whose objects are copied as text: how it is written and read."""
MAX_KEPT = 64
"""How many containers of attributes stay one object at both ends."""
MAX_ITEMS = 1000
"""How many items such a container may have, with the ones inside it."""
NAMES_OF_FUNCTIONS = ("__name__", "__qualname__", "__doc__", "__module__")
LENT = ("_io", "random", "_random", "queue", "unittest.mock")
"""Modules with classes whose objects a test can give to a program to use their methods."""
RAISED = (Exception, SystemExit, KeyboardInterrupt)
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
    "__format__": format,
    "__copy__": copy.copy,
    "__deepcopy__": lambda one, *_: copy.deepcopy(one),
    "__aiter__": aiter,
    "__anext__": anext,
    "__aenter__": lambda one: type(one).__aenter__(one),
    "__aexit__": lambda one, *about: type(one).__aexit__(one, *about),
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
UNARY = ("__neg__", "__pos__", "__abs__", "__invert__", "__index__")
ITEMS = ("__getitem__", "__setitem__", "__delitem__")
ARITHMETIC = frozenset(
    [*UNARY] + [f"__{swap}{name}__" for name in BINARY for swap in ("", "r", "i")]
)
SWAPPED = frozenset(f"__r{name}__" for name in BINARY)
FORWARDED = frozenset(
    [*FROM_BUILTINS, *ITEMS, *ARITHMETIC, "__contains__"] + [f"__{name}__" for name in COMPARISONS]
)


class Remote:
    """An object of the other process: attributes and methods are asked for there."""

    __slots__ = ("_remote_",)

    def __init__(self, about: "About"):
        object.__setattr__(self, "_remote_", about)

    @property
    def __class__(self) -> type:
        about = self._remote_
        kind = INTERNAL_TYPES.get(about.kind, Remote)
        return kind if about.plain is ABSENT else type(about.plain)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return _ask(self, "call", *values, named=named)

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
        return _ask(self, "special", "__hash__") if plain is ABSENT else hash(plain)

    def __contains__(self, one: Any) -> bool:
        about = self._remote_
        if about.made or type(one) is Remote or not about.channel.tests:
            return _ask(self, "special", "__contains__", one)
        return one in list(self)

    def __await__(self) -> Any:
        yield from ()
        return _ask(self, "run")


class About:
    """A record of an object of the other process."""

    def __init__(self, channel: "Channel", number: int, kind: str, plain: Any):
        self.channel = channel
        self.number = number
        self.kind = kind
        self.plain = plain
        """The value as an object of a builtin class, if its class is derived from that."""
        self.made = False
        """True if the test has made the object, by calling a class or by arithmetic with such an
        object, and no function has returned it since. An object that a function has returned could
        answer arithmetic as it likes."""


ABSENT = object()
INTERNAL_TYPES = {"function": types.FunctionType, "generator": types.GeneratorType}


def _ask(one: Remote, verb: str, *values: Any, named: dict[str, Any] | None = None) -> Any:
    about = one._remote_
    result = about.channel.ask(verb, about.number, values, named or {})
    if type(result) is Remote:
        constructs = verb == "call" and about.kind == "class"
        computes = verb == "special" and about.made and values[0] in ARITHMETIC
        result._remote_.made = constructs or computes
    return result


def _forwarded(name: str) -> Any:
    return lambda self, *values: _ask(self, "special", name, *values)


def _binary(name: str, form: str = "") -> Any:
    """Return an operator, in the form `r` (swapped) or `i` (in place) if asked.

    An object that the program has returned does not meet values of the test: it could answer as it
    likes.
    """
    function = getattr(operator, f"__{name}__")

    def apply(self: Remote, other: Any) -> Any:
        about = self._remote_
        asks = (
            not about.channel.tests
            or type(other) is Remote
            or (about.made and name not in COMPARISONS)
        )
        if asks:
            return _ask(self, "special", f"__{form}{name}__", other)
        if about.plain is ABSENT:
            return NotImplemented

        # A value of a derived class computes here, as one of the builtin class.
        if type(about.plain) in MUTABLE:
            about.plain = _ask(self, "plain")
        return function(other, about.plain) if form == "r" else function(about.plain, other)

    return apply


for _name in (*FROM_BUILTINS, *ITEMS, *UNARY):
    if _name != "__hash__":
        setattr(Remote, _name, _forwarded(_name))
for _name in (*BINARY, *COMPARISONS):
    setattr(Remote, f"__{_name}__", _binary(_name))
for _name in BINARY:
    for _form in ("r", "i"):
        setattr(Remote, f"__{_form}{_name}__", _binary(_name, _form))
for _name in ("__doc__", "__module__"):  # or they would describe Remote
    setattr(Remote, _name, property(operator.methodcaller("__getattr__", _name)))


class Containers:
    """Containers of a message.

    Each is written once, however often it occurs. An answer begins with the containers of the
    question, so that they are the same objects afterwards.
    """

    def __init__(self, channel: "Channel", known: Sequence[tuple[Any, Any]] = ()):
        self.channel = channel
        self.all = [container for container, _ in known]
        self.known = [parts for _, parts in known]
        """Keys and items of each when both ends knew them."""
        self._places = {id(container): place for place, container in enumerate(self.all)}

    def place(self, container: Any) -> int:
        if id(container) not in self._places:
            self._places[id(container)] = len(self.all)
            self.all.append(container)
            self.known.append(None)
        return self._places[id(container)]

    def table(self) -> list[Any]:
        """Return the content of each container, null for one that has not changed."""
        table = []
        for place, container in enumerate(self.all):  # their number grows meanwhile
            last_parts = self.known[place]
            parts = _parts(container)
            same = (
                last_parts
                and len(last_parts) == len(parts)
                and all(map(operator.is_, last_parts, parts))
            )
            table.append(None if same else self._content(container))
            self.known[place] = parts
        return table

    def read(self, table: list[Any]) -> None:
        """Take over a table of the other end."""
        for name, _, *more in table[len(self.all) :]:
            limit = {"maxlen": more[0]} if name == "deque" else {}
            self.place(BY_NAME[name](**limit))
        changed = [place for place, content in enumerate(table) if content is not None]
        for place in changed:
            self._replace(self.all[place], table[place])
        for place in changed:
            self.known[place] = _parts(self.all[place])

    def _content(self, container: Any) -> list[Any]:
        kind = type(container)
        encode = partial(self.channel.encode, containers=self)
        if kind is bytearray:
            return [kind.__name__, repr(bytes(container))]
        if kind in MAPPINGS:
            items = [[encode(key), encode(each)] for key, each in container.items()]
            more = [encode(container.default_factory)] if kind is collections.defaultdict else []
            return [kind.__name__, items, *more]
        more = [container.maxlen] if kind is collections.deque else []
        return [kind.__name__, [encode(each) for each in container], *more]

    def _replace(self, container: Any, content: list[Any]) -> None:
        """Give a container the content that the other end has written."""
        decode = partial(self.channel.decode, containers=self)
        _, items, *more = content
        if isinstance(container, bytearray):
            container[:] = _literal("bytes", items)
        elif isinstance(container, MAPPINGS):
            new = {decode(key): decode(each) for key, each in items}
            container.clear()
            container.update(new)
            if isinstance(container, collections.defaultdict):
                container.default_factory = decode(more[0])
        else:
            every = list(map(decode, items))
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(every)


def _parts(container: Any) -> list[Any]:
    """Return the keys and items of a container, and the kind, so that the list is never empty."""
    if isinstance(container, MAPPINGS):
        return [type(container), *container, *container.values()]
    return [type(container), *container]


class Channel:
    """One end of the connection between a program and the tests."""

    def __init__(self, descriptor: int, *, tests: bool):
        self.tests = tests
        """True at the end that runs the tests. It answers little, as it must not be taken over."""
        self._file = socket.socket(fileno=descriptor).makefile("rwb")
        self._lock = threading.RLock()
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._exceptions: dict[int, type] = {}
        self._kept: list[tuple[Any, Any]] = []
        """Containers of the program's attributes that tests have asked for, each with the parts
        that both ends knew last."""

    def ask(self, verb: str, number: int, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return what the other end answers, and answer the questions meanwhile.

        Raises the exception that the other end has raised.
        """
        with self._lock:
            containers = Containers(self, self._kept if self.tests else ())
            arguments = [self.encode(each, containers) for each in (values, list(named.items()))]
            self._send([verb, [number, *arguments], containers.table()])

            # The other end may call back before it answers, as sorted(key=...) does.
            while True:
                answer, content, table = self._receive()
                if answer in ("answer", "raise"):
                    break
                self.answer(answer, content, table)
            first = len(containers.all)
            containers.read(table)
            result = self.decode(content, containers)
            if self.tests:
                self._keep(verb if answer == "answer" else "", containers, first)
        if answer == "raise":
            raise _raised(*result)
        return result

    def serve(self) -> None:
        """Answer questions for ever."""
        while True:
            self.answer(*self._receive())

    def answer(self, verb: str, content: Any, table: list[Any]) -> None:
        """Answer a question, with the containers that were changed in place."""
        containers = Containers(self, () if self.tests else self._kept)
        first = 0
        try:
            containers.read(table)
            first = len(containers.all)
            number, *arguments = content
            values, named = (self.decode(each, containers) for each in arguments)
            result = self._do(verb, self._objects[number], values, dict(named))
            reply = ["answer", self.encode(result, containers)]
        except BaseException as error:
            # Whatever the question raises belongs to the asking end, SystemExit included.
            kind = type(error) if isinstance(error, RAISED) else RuntimeError
            about = (kind, *map(_simple, (error.args, vars(error))))
            reply = ["raise", self.encode(about, containers)]

        self._send([*reply, containers.table()])
        if not self.tests:
            self._keep(verb if reply[0] == "answer" else "", containers, first)

    def _keep(self, verb: str, containers: Containers, first: int) -> None:
        """Keep the containers of an attribute, from the `first` on."""
        pairs = list(zip(containers.all, containers.known, strict=True))
        for place, pair in enumerate(pairs[: len(self._kept)]):
            if pair[0] is self._kept[place][0]:
                self._kept[place] = pair
        size = sum(len(parts) for _, parts in pairs[first:])
        if verb in ("get", "special") and size <= MAX_ITEMS:
            self._kept = [*self._kept, *pairs[first:]][-MAX_KEPT:]

    def _do(self, verb: str, one: Any, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
        # The program may read what a test has lent it, and no more: it would find expected values.
        if self.tests and verb != "call":
            public = verb in ("get", "set") and not str(values[0]).startswith("_")
            iterates = verb == "special" and values[0] in ("__next__", "__iter__", "__len__")
            lent = type(one).__module__ in LENT and verb == "get" and public
            named = type(one) is types.FunctionType and values[:1] in zip(NAMES_OF_FUNCTIONS)
            if not (iterates or lent or named and verb == "get") and not (
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
            case "plain":
                return _plain(one)[0]
            case "run":
                return _completed(one)
            case "special":
                return _special(one, *values)

        raise ValueError(verb)

    def encode(self, value: Any, containers: Containers) -> Any:
        """Return the value in terms of JSON."""
        kind = type(value)
        encode = partial(self.encode, containers=containers)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if value.bit_length() < 4096 else {"int": hex(value)}

        if kind in MUTABLE:
            # By its place, so that both ends change one container.
            return {"shared": containers.place(value)}
        if kind in (tuple, frozenset) or kind in VIEWS:
            return {kind.__name__: [encode(each) for each in value]}
        if kind is slice:
            return {"slice": [encode(each) for each in (value.start, value.stop, value.step)]}
        if kind in (bytes, complex, range):
            return {kind.__name__: repr(value)}

        if (name := (kind.__module__, kind.__name__)) in STANDARD:
            return {"standard": [*name, STANDARD[name][0](value)]}
        if kind is Remote and value._remote_.channel is self:
            return {"own": value._remote_.number}
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}

        if isinstance(value, type) and issubclass(value, RAISED):
            for number, other in self._exceptions.items():
                if other is value:
                    return {"own": number}
            bases = [each for each in value.__mro__ if issubclass(each, RAISED)]
            named = [[self._number(each), each.__module__, each.__name__] for each in bases]
            return {"exception": named}

        return {"object": [self._number(value), _kind(value), *map(encode, _plain(value))]}

    def decode(self, content: Any, containers: Containers) -> Any:
        """Return the value of an encoded one."""
        if not isinstance(content, dict):
            return content

        decode = partial(self.decode, containers=containers)
        ((name, inner),) = content.items()
        match name:
            case "shared":
                return containers.all[inner]
            case "int":
                return int(inner, 16)
            case "slice":
                return slice(*map(decode, inner))
            case "bytes" | "complex" | "range":
                return _literal(name, inner)
            case "standard":
                module, kind, text = inner
                _, read = STANDARD[module, kind]
                return read(getattr(importlib.import_module(module), kind), text)
            case "own":
                return self._objects[inner]
            case "builtin":
                # A message names classes only: a function such as exec would be a way out.
                found = getattr(builtins, inner)
                return found if isinstance(found, type) else None
            case "exception":
                return self._exception(inner)
            case "object":
                number, kind, *plain = inner
                one = self._remote(number, kind)
                one._remote_.plain = decode(plain[0]) if plain else ABSENT
                return _awaited(one) if kind == "coroutine" else one
            case "dict_keys" | "dict_values" | "dict_items":
                return VIEWS_BY_NAME[name](list(map(decode, inner)))

        return BY_NAME[name](map(decode, inner))

    def _remote(self, number: int, kind: str) -> Remote:
        if number not in self._remotes:
            self._remotes[number] = Remote(About(self, number, kind, ABSENT))
        return self._remotes[number]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _exception(self, bases: list[list[Any]]) -> type:
        """Return the class of an exception here.

        It comes from the standard library, or stands for a class of the other end.
        """
        (number, module, name), *rest = bases
        if module.partition(".")[0] in sys.stdlib_module_names:
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type) and issubclass(found, RAISED):
                return found
        if number not in self._exceptions:
            base = self._exception(rest) if rest else Exception
            self._exceptions[number] = type(name, (base,), {})
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
    kind = type(value)
    if isinstance(value, type):
        return "class"
    if hasattr(kind, "__await__") and kind.__module__ == "builtins":
        return "coroutine"
    return kind.__name__ if kind in INTERNAL_TYPES.values() else ""


def _plain(value: Any) -> list[Any]:
    """Return the value of an object whose class is derived from a value's class."""
    for kind in (int, float, str, list, tuple, dict, set, frozenset):
        if isinstance(value, kind):
            return [kind(value) if kind is not str else str.__str__(value)]
    return []


def _raised(kind: Any, values: Any, attributes: Any) -> BaseException:
    """Return an exception of the other end."""
    if not (isinstance(kind, type) and issubclass(kind, RAISED)):
        return RuntimeError(values)
    try:
        error = kind(*values)
    except TypeError:  # its class makes the arguments of others
        error = kind.__new__(kind, *values)
    for name, value in attributes.items():
        if not name.startswith("__"):
            setattr(error, name, value)
    return error


@functools.cache
def _loop() -> Any:
    import asyncio

    return asyncio.new_event_loop()


def _completed(one: Any) -> Any:
    """Return what an awaitable object returns.

    All share one loop, as generators and locks need.
    """

    async def waits() -> Any:
        return await one

    return _loop().run_until_complete(waits())


async def _awaited(coroutine: Remote) -> Any:
    return _ask(coroutine, "run")


def _literal(name: str, text: str) -> Any:
    """Return a value from a repr; the only name in it is the class."""
    import ast

    if name == "range":
        return range(*ast.literal_eval(text.removeprefix(name)))
    return complex(text) if name == "complex" else ast.literal_eval(text)


def _simple(value: Any) -> Any:
    """Return what an exception tells about itself, with text for other objects than values."""
    if type(value) is tuple:
        return tuple(map(_simple, value))
    if type(value) is dict:
        return {name: _simple(each) for name, each in value.items()}
    values = str | bytes | int | float | bool | None | list | Remote
    return value if isinstance(value, values) or type(value) is Remote else str(value)


def _special(one: Any, name: str, *values: Any) -> Any:
    if name in SWAPPED:
        return getattr(operator, f"__{name[3:]}")(*values, one)
    if name not in FORWARDED:
        raise AttributeError(name)
    function = FROM_BUILTINS.get(name) or getattr(operator, name)
    return function(one, *values)


# -- what is run


def execute(program: str, name: str) -> types.ModuleType:
    """Run a program as a module of this name, and return the module."""
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(program, "program.py", "exec"), module.__dict__)
    return module


def serve(program: str, descriptor: int) -> None:
    """Run a program, then answer what the tests ask about it."""
    module = execute(program, "program")
    channel = Channel(descriptor, tests=False)
    channel._send([channel._number(module), sorted(module.__dict__), []])
    channel.serve()


class Scope(dict):
    """Names of the tests, and after them the program's."""

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
    number, names, _ = channel._receive()
    program = Remote(About(channel, number, "", ABSENT))
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
