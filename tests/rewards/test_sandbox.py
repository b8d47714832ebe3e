"""What a program in a response can write, use and pretend, in each kind of sandbox."""

import json
import os
import shutil
import subprocess
import time

import pytest

from lightrft.rewards.verifiers import sandbox
from lightrft.rewards.verifiers.sandbox import output_of, passes


@pytest.fixture(scope="module", params=["bwrap", "unshare"], autouse=True)
def kind(request):
    """Run in each kind of sandbox."""
    found = shutil.which
    (other,) = {"bwrap", "unshare"} - {request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(sandbox.WITHOUT_SANDBOX, raising=False)
        patch.setattr(sandbox.shutil, "which", lambda name: None if name == other else found(name))
        patch.setattr(sandbox, "RUN_SECONDS", 6)
        patch.setattr(sandbox, "MEMORY_BYTES", 400 << 20)
        sandbox.find_sandbox.cache_clear()
        try:
            sandbox.find_sandbox()
        except ValueError:
            pytest.skip(f"{request.param} does not work here")
        yield request.param
        sandbox.find_sandbox.cache_clear()


# -- what it can write


WRITABLE = """
import json, os, re
found = []
for top in ("/proc", "/sys"):
    for folder, _, files in os.walk(top):
        if re.match(r"/proc/\\d+", folder):
            continue  # of a process of the sandbox
        for name in files:
            try:
                os.close(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_NONBLOCK))
                found.append(os.path.join(folder, name))
            except OSError:
                pass
print(json.dumps(found))
"""


def test_nothing_of_the_kernel_opens_for_writing():
    code, output = output_of(WRITABLE, errors=subprocess.STDOUT)
    assert (code, json.loads(output)) == (0, [])


def test_a_sandbox_that_its_user_makes_hides_as_much(kind):
    if (
        kind == "bwrap"
        or not (command := sandbox._unshare(by_root=False))
        or not sandbox._works(command)
    ):
        pytest.skip("it is that of every user")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "find_sandbox", lambda: command)
        assert output_of(WRITABLE, errors=subprocess.STDOUT) == (0, "[]\n")
        assert passes("def f(x): return x", ["assert f(2) == 2"])
        assert output_of("import os; os.mkdir('/new')")[0] != 0


def test_a_program_is_not_root_and_has_no_capabilities():
    status = (
        "print([l.split()[1:] for l in open('/proc/self/status') if "
        "l.startswith(('CapEff', 'CapBnd', 'NoNewPrivs'))])"
    )
    assert output_of(status)[1].strip() == "[['0000000000000000'], ['0000000000000000'], ['1']]"

    if os.getuid() == 0:
        seen = []
        with sandbox.running("program", "import time; time.sleep(60)") as process:
            deadline = time.monotonic() + 20
            while not seen and time.monotonic() < deadline:
                seen = [uid for uid in _users_below(process.pid) if uid >= sandbox.FIRST_USER_ID]
        assert seen


def _users_below(process: int) -> list[int]:
    import psutil

    users = []
    for child in psutil.Process(process).children(recursive=True):
        try:
            users.append(child.uids().real)
        except psutil.NoSuchProcess:
            continue
    return users


FOLDERS = """
import os
for folder in ("/", "/tmp", "/dev", "/dev/shm", "/usr", "/proc", "/proc/sys"):
    try:
        os.mkdir(folder + "/new")
        print(folder)
    except OSError:
        pass
"""


def test_two_folders_can_be_written():
    assert output_of(FOLDERS)[1].split() == ["/tmp", "/dev/shm"]


def test_standard_streams_have_their_usual_names():
    assert output_of("print(open('/dev/stdin').read(), file=open('/dev/stdout', 'w'))", "4 5") == (
        0,
        "4 5\n",
    )


# -- what it can use


HOARDS = {
    "memfds": (
        "for i in range(100): f = os.memfd_create('x'); os.truncate(f, 16 << 20); "
        "keep.append(mmap(f, 16 << 20))"
    ),
    "shared memory": (
        "\nfor i in range(100):\n  n = libc.shmget(0, 16 << 20, 0o1600)\n"
        "  assert n >= 0\n  libc.shmat(n, 0, 0)"
    ),
    "/dev/shm": "\nfor i in range(30): open(f'/dev/shm/{i}', 'wb').write(b'1' * (15 << 20))",
    "/tmp": "\nfor i in range(30): open(f'/tmp/{i}', 'wb').write(b'1' * (15 << 20))",
    "/dev": "\nfor i in range(30): open(f'/dev/{i}', 'wb').write(b'1' * (15 << 20))",
    "a new file system": "assert libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, b'') == 0",
    "processes": "\nfor i in range(1000): os.fork() or time.sleep(100)",
    "memory of several processes": (
        "\nfor i in range(6):\n"
        "  if os.fork() == 0: x = b'1' * (150 << 20); time.sleep(100)\ntime.sleep(2)"
    ),
    "memory of processes in sessions of their own": (
        "\nfor i in range(6):\n"
        "  if os.fork() == 0: os.setsid(); x = b'1' * (150 << 20); time.sleep(100)\n"
        "time.sleep(2)"
    ),
    "the watcher": "\nos.kill(1, 9); os.kill(1, 19); time.sleep(.2); open('/proc/1/mem', 'r+b')",
}


@pytest.mark.parametrize("case", HOARDS)
def test_memory_and_processes_are_bounded_together(case):
    names = "import ctypes, os, time\nfrom mmap import mmap\nkeep, libc = [], ctypes.CDLL(None)"
    code, output = output_of(f"{names}\n{HOARDS[case]}\nprint('done')")
    assert code != 0 and "done" not in output


def test_what_a_right_program_needs_is_not_denied():
    program = """
import os, multiprocessing, threading, tempfile
from concurrent.futures import ThreadPoolExecutor
x = b'1' * (100 << 20)
for i in range(5):                      # the pages of forks are shared
    if os.fork() == 0: os._exit(sum(x[:100]) != 4900)
    assert os.wait()[1] == 0
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
with ThreadPoolExecutor(4) as threads: assert list(threads.map(abs, [-1, 2])) == [1, 2]
with tempfile.TemporaryFile() as file: file.write(b'1' * (1 << 20))
print('done')
"""
    assert output_of(program, errors=subprocess.STDOUT) == (0, "done\n")


# -- what it can pretend


ASSERTS = [
    "assert f(2) == 4",
    "assert abs(f(3) - 9) < 1e-6",
    "assert f(4) in (16, 17) and [f(1)] == [1]",
]
PRETENDS = {
    "reads the frames": (
        "import sys\ndef f(x):\n  i = 1\n  while True: print(sys._getframe(i).f_locals); i += 1"
    ),
    "searches the heap": (
        "import gc\ndef f(x):\n  for o in gc.get_objects():\n"
        "    if isinstance(o, dict) and 'nonce' in o: print(o)\n  return 0"
    ),
    "replaces compile and exec": (
        "import builtins\nbuiltins.compile = builtins.exec = lambda *a, **k: None\n"
        "def f(x): return 0"
    ),
    "replaces AssertionError": (
        "import builtins\nclass E(Exception): pass\nbuiltins.AssertionError = E\ndef f(x): return 0"
    ),
    "replaces abs": (
        "import builtins\nbuiltins.abs = lambda x: 0\nabs = builtins.abs\ndef f(x): return 4"
    ),
    "traces": "import sys, os\nsys.settrace(lambda *a: os._exit(0))\ndef f(x): return 0",
    "ends": "import os\ndef f(x): os._exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "ends at exit": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)"
    ),
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "raises the assertion": "def f(x): raise AssertionError",
    "equals everything": (
        "class A:\n  __eq__ = __lt__ = __gt__ = lambda s, o: True\n"
        "  __hash__ = None\ndef f(x): return A()"
    ),
    "subtracts to zero": (
        "class A:\n  __eq__ = __ne__ = lambda s, o: True\n"
        "  __sub__ = __rsub__ = __abs__ = lambda s, *o: 0\ndef f(x): return A()"
    ),
    "a number that equals everything": (
        "class A(int):\n  __eq__ = lambda s, o: True\n  __sub__ = lambda s, o: 0\n"
        "def f(x): return A()"
    ),
    "answers by itself": (
        "import os, json, socket, threading, time\n"
        "def answer():\n"
        "  while True:\n"
        "    for fd in range(3, 20):\n"
        "      try: os.write(fd, b'[\"answer\", 4, []]\\n')\n"
        "      except OSError: pass\n"
        "    time.sleep(.01)\n"
        "threading.Thread(target=answer, daemon=True).start()\ndef f(x): time.sleep(1)"
    ),
    "kills": "import os\ndef f(x): os.kill(-1, 9); os.kill(0, 9)",
    "hangs": "import time\ndef f(x): time.sleep(100)",
    "writes garbage": (
        "import os\ndef f(x):\n  for fd in range(3, 20):\n"
        "    try: os.write(fd, b'{' * 9 + b'\\n')\n    except OSError: pass"
    ),
    "writes deep JSON": (
        "import os\ndef f(x):\n  for fd in range(3, 20):\n"
        "    try: os.write(fd, b'[' * 200_000 + b'\\n')\n    except OSError: pass"
    ),
}


@pytest.mark.parametrize("case", PRETENDS)
def test_asserts_are_not_passed_without_solving_them(case):
    assert not passes(PRETENDS[case], ASSERTS)


DECEIVES = {
    "an object that the test has made": (
        "class S:\n  def f(s, x): return s\n  __sub__ = lambda s, o: s\n  __abs__ = lambda s: 0",
        ["s = S()", "assert abs(s.f(3) - 9) < 1e-6"],
    ),
    "an object of one that the test has made": (
        "class Z:\n  __sub__ = lambda s, o: 0\nclass S:\n  area = property(lambda s: Z())\n"
        "  def f(s, x): return Z()",
        ["assert abs(S().f(3) - 9) < 1e-6"],
    ),
    "an attribute": (
        "class S:\n  area = property(lambda s: s)\n  __sub__ = lambda s, o: 0",
        ["assert abs(S().area - 9) < 1e-6"],
    ),
    "in place": (
        "class S:\n  __isub__ = __sub__ = lambda s, o: 0\ndef f(x): return S()",
        ["x = f(3)\nx -= 9\nassert abs(x) < 1e-6"],
    ),
    "reads a test": (
        "def f(g):\n"
        "  for name in ('__globals__', '__code__', '__closure__', '__defaults__', '__self__'):\n"
        "    try: getattr(g, name)\n    except AttributeError: pass\n    else: return 9\n"
        "  return 0",
        ["assert f(lambda: 9) == 9"],
    ),
}


@pytest.mark.parametrize("case", DECEIVES)
def test_objects_of_a_program_do_not_deceive_asserts_about_numbers(case):
    assert not passes(*DECEIVES[case])


SOLVES = {
    "plain": ("def f(x): return x * x", ASSERTS),
    "an argument in place": (
        "def f(x): x.sort(); x.append(9)",
        ["x = [2, 1]", "assert f(x) is None and x == [1, 2, 9]"],
    ),
    "a matrix in place": (
        "def f(m): m[0][0], m[1] = 5, [6]",
        ["m = [[1], [2]]\nf(m)\nassert m == [[5], [6]]"],
    ),
    "every value": (
        "def f(*x, **k): return [*x, k]",
        [
            "v = [1, -2**9000, .5, 1j, None, True, 'a\\ud800', b'b', (1, (2,)), {3}, range(3)]\n"
            "v += [bytearray(b'c'), frozenset({4}), {(1, 2): [3]}]\n"
            "assert f(*v, a=1) == [*v, {'a': 1}]\n"
            "assert [type(x) for x in f(*v)[:-1]] == list(map(type, v))",
            "import math; assert math.isnan(f(math.nan)[0]) and f(math.inf)[0] == math.inf",
        ],
    ),
    "standard classes": (
        "from collections import *\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "import datetime\nP = namedtuple('P', 'x y')\n"
        "def f(): return [Counter('aab'), deque([1]), Decimal('1.5'), Fraction(1, 3), P(1, 2), "
        "datetime.date(2020, 1, 2), defaultdict(int, a=1)]",
        [
            (
                "import collections, datetime\nfrom decimal import Decimal\n"
                "from fractions import Fraction"
            ),
            "assert f() == [{'a': 2, 'b': 1}, collections.deque([1]), Decimal('1.5'), "
            "Fraction(1, 3), (1, 2), "
            "datetime.date(2020, 1, 2), {'a': 1}]",
            "assert f()[4].x == 1 and isinstance(f()[4], tuple) and len(f()[4]) == 2",
        ],
    ),
    "a class": (
        "class Stack:\n  def __init__(s): s.items = []\n  def push(s, x): s.items.append(x)\n"
        "  def pop(s): return s.items.pop()\n"
        "  def __len__(s): return len(s.items)\n  def __contains__(s, x): return x in s.items",
        [
            "s = Stack(); s.push(3); s.push(4)",
            "assert len(s) == 2 and 3 in s and 5 not in s and s.pop() == 4 and s.items == [3]",
            "assert isinstance(s, Stack) and not isinstance(3, Stack)",
            "s.items = [7]\nassert s.pop() == 7 and not s",
        ],
    ),
    "operators of a class": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass V:\n  x: int\n  y: int\n"
        "  def __add__(s, o): return V(s.x + o.x, s.y + o.y)\n"
        "  def __mul__(s, k): return V(s.x * k, s.y * k)\n  __rmul__ = __mul__",
        [
            (
                "assert V(1, 2) + V(3, 4) == V(4, 6) and (V(1, 2) * 3).x == 3 and (2 * V(1, 2)).y"
                " == 4 and V(1, 2) != V(2, 1)"
            ),
            "assert {V(1, 2): 5}[V(1, 2)] == 5 and str(V(1, 2)) == 'V(x=1, y=2)'",
        ],
    ),
    "a class of the tests": (
        (
            "def f(node):\n  total = 0\n"
            "  while node: total += node.value; node.value = 0; node = node.next\n"
            "  return total"
        ),
        [
            "class Node:\n  def __init__(s, value, next=None): s.value, s.next = value, next",
            "n = Node(1, Node(2)); assert f(n) == 3 and n.next.value == 0",
        ],
    ),
    "functions as arguments": (
        "def f(g, xs): return sorted(map(g, xs), key=g)",
        [
            "assert f(lambda x: -x, [1, 3, 2]) == [-1, -2, -3]",
            "assert f(abs, [-1]) == [1] and f(int, ['4']) == [4]",
            "calls = []\nf(calls.append, [5])\nassert calls == [5, None]",
        ],
    ),
    "generators": (
        "def f(n):\n  yield from range(n)",
        [
            "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0 and sum(f(4)) == 6",
            "assert [x + 1 for x in f(2)] == [1, 2]",
        ],
    ),
    "a generator as an argument": (
        "def f(xs): return sum(xs)",
        ["assert f(x for x in range(4)) == 6 and f(iter([1, 2])) == 3"],
    ),
    "exceptions": (
        "class Low(ValueError): pass\ndef f(x):\n  if x < 0: raise Low('too low')\n  return {}[x]",
        [
            (
                "try: f(-1)\n"
                "except Low as error: "
                "assert str(error) == 'too low' and error.args == ('too low',)\n"
                "else: assert False"
            ),
            "try: f(-1)\nexcept ValueError: pass\nelse: assert False",
            "try: f(1)\nexcept KeyError: pass\nelse: assert False",
        ],
    ),
    "coroutines": (
        "import asyncio\nasync def f(x):\n  await asyncio.sleep(0)\n  return x + 1",
        [
            "import asyncio\nassert asyncio.run(f(1)) == 2",
            "async def all_of(): return await asyncio.gather(f(1), f(2))",
            "assert asyncio.run(all_of()) == [2, 3]",
        ],
    ),
    "a function called like a builtin one": (
        "def sum(a, b): return a + b",
        ["assert sum(10, 15) == 25"],
    ),
    "a function of the tests": (
        "def g(x): return x",
        ["def check(c):\n  assert c(1) == 1\n  assert c([2]) == [2]", "check(g)"],
    ),
    "decorated": (
        "import functools\n@functools.cache\ndef f(x): return x",
        ["assert f(3) == 3 and f.cache_info().hits == 0"],
    ),
    "imports of the program": (
        "import math\ndef f(): return math.pi",
        ["from program import f as g\nassert math.floor(g()) == 3"],
    ),
    "an argument that is returned": (
        "def f(x): x.append(1); return x\ndef g(m): m[0].append(2); m.append(m)",
        [
            "a = []; b = f(a)\nassert b is a and a == [1]",
            "row = [1]; m = [row]; g(m)\nassert m[0] is row and row == [1, 2] and m[1] is m",
        ],
    ),
    "containers of an object": (
        "state = []\nclass C:\n  def __init__(s): s.log, s.seen, s.grid = [], {}, [[0], [0]]\n"
        "  def go(s, x): s.log.append(x); s.seen[x] = 1; s.grid[1][0] = x; state.append(x)",
        [
            "c = C(); log = c.log; grid = c.grid\nc.log.append(1); c.seen['a'] = 2; c.log += [2]",
            "c.go(3)\nassert log is c.log == [1, 2, 3] and c.seen == {'a': 2, 3: 1}",
            "grid[0].clear()\nassert c.grid == [[], [3]] and state == [3]\nstate.clear()",
            "c.go(4)\nassert state == [4]",
        ],
    ),
    "objects that are the same": (
        "import enum\nclass N:\n  def __init__(s, next=None): s.next = next\n"
        "class E(enum.Enum): A = 1; B = 2\n"
        "def f(x): return E.A if x else E.B\ndef last(n): return last(n.next) if n.next else n",
        [
            "a = N(); b = N(a)\nassert b.next is a and last(b) is a and a == a and a != b",
            "assert f(1) is E.A and {E.A: 5}[f(1)] == 5 and [e.name for e in E] == ['A', 'B']",
        ],
    ),
    "items and slices of an object": (
        "class M:\n  def __init__(s, d): s.d = d\n  def __getitem__(s, i): return s.d[i]\n"
        "  def __iadd__(s, x): s.d.append(x); return s\n  def __invert__(s): return s.d[::-1]\n"
        "  def __format__(s, how): return how\ndef f(d): return M(d)",
        [
            "m = f([1, 2, 3])\nassert m[0] == 1 and m[1:] == [2, 3] and ~m == [3, 2, 1]",
            "m = M([1]); m += 2\nassert m.d == [1, 2] and f'{m:>3}' == '>3'",
            "import copy\nn = copy.deepcopy(m); n.d.append(3)",
            "assert m.d == [1, 2] and n.d == [1, 2, 3]",
        ],
    ),
    "views, counters and times": (
        "import collections, datetime\ndef f(s): return collections.Counter(s)\n"
        "def g(d): return d.keys(), d.items(), d.values()\n"
        "def h(): return datetime.timedelta(days=1), collections.deque([1, 2], maxlen=2)\n"
        "def d():\n  found = collections.defaultdict(int); found['a'] += 1; return found",
        [
            "assert f('aab').most_common(1) == [('a', 2)] and f('a')['b'] == 0 and d()['b'] == 0",
            "k, i, v = g({1: 2})\nassert k == {1} and list(i) == [(1, 2)] and sum(v) == 2",
            "time, last = h(); last.append(3)\nassert time.days == 1 and list(last) == [2, 3]",
        ],
    ),
    "a list of a class of its own": (
        "class S(list):\n  def push(s, x): s.append(x)",
        ["s = S(); s.push(1); s.append(2)\nassert s == [1, 2] and s != [1] and len(s) == 2"],
    ),
    "threads of the tests": (
        "import threading\nclass C:\n  def __init__(s): s.n = 0\n  def add(s): s.n += 1",
        [
            "import threading\nc = C()\ndef adds():\n  for _ in range(50): c.add()",
            "ts = [threading.Thread(target=adds) for _ in range(3)]\n"
            "for t in ts: t.start()\nfor t in ts: t.join()\nassert c.n == 150",
        ],
    ),
    "exceptions of other forms": (
        "import json, sys\nclass E(Exception):\n"
        "  def __init__(s, code, text): super().__init__(text); s.code = code\n"
        "def f(): raise E(5, 'x')\ndef g(h): return h()\n"
        "def h(n): return [json.loads, lambda b: b.decode('ascii'), sys.exit][n]",
        [
            "try: f()\nexcept E as e: assert e.code == 5 and str(e) == 'x'\nelse: assert 0",
            "import json\ntry: h(0)('{')\nexcept json.JSONDecodeError as e: assert e.pos == 1\n"
            "else: assert 0",
            "try: h(1)(b'\\xff')\nexcept UnicodeDecodeError: pass\nelse: assert 0",
            "try: h(2)(3)\nexcept SystemExit as e: assert e.code == 3\nelse: assert 0",
            "class Mine(Exception): pass\ndef bad(): raise Mine(1)\n"
            "try: g(bad)\nexcept Mine as e: assert e.args == (1,)\nelse: assert 0",
        ],
    ),
    "objects of the standard library as arguments": (
        "def f(file, call, chance): file.write(call(chance.choice('a')))",
        [
            "import io, random\nfrom unittest.mock import Mock\nfile = io.StringIO()",
            "call = Mock(return_value='b')\nf(file, call, random.Random(0))",
            "call.assert_called_once_with('a')\nassert file.getvalue() == 'b'",
        ],
    ),
    "asynchronous generators and contexts": (
        "import asyncio\nasync def f(n):\n  for i in range(n): yield i\nclass A:\n"
        "  async def __aenter__(s): return 7\n  async def __aexit__(s, *about): return True",
        [
            "import asyncio\nasync def all_of():\n  async with A() as x:\n"
            "    assert [i async for i in f(3)] == [0, 1, 2] and x == 7\n    raise ValueError\n"
            "  return 1",
            "assert asyncio.run(all_of()) == 1",
        ],
    ),
    "what functions say of themselves": (
        "import functools\ndef f(x: int, y=2):\n  'A sum.'\n  return x + y\n"
        "def wrap(g):\n  @functools.wraps(g)\n  def h(*x): return g(*x)\n  return h\n"
        "async def c(): pass\ndef many(): yield 1",
        [
            "import asyncio, inspect, types",
            "assert f.__doc__ == 'A sum.' and f.__name__ == 'f' and asyncio.iscoroutinefunction(c)",
            "assert list(inspect.signature(f).parameters) == ['x', 'y']",
            "assert isinstance(many(), types.GeneratorType)",
            "@wrap\ndef mine(x):\n  'Mine.'\n  return x",
            "assert mine(3) == 3 and mine.__name__ == 'mine' and mine.__doc__ == 'Mine.'",
        ],
    ),
    "context managers": (
        "from contextlib import contextmanager\n@contextmanager\ndef f(): yield 3",
        ["with f() as x: assert x == 3"],
    ),
}


FEW = "plain", "a class", "generators", "exceptions", "coroutines", "context managers"
"""Forms of the quick tests; all take seconds."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FEW else pytest.mark.slow) for case in SOLVES]
)
def test_asserts_of_every_form_reach_the_program(case):
    program, tests = SOLVES[case]
    assert passes(program, tests)
    assert not passes(program, [*tests, "assert False"])
