"""Why: a reward for code is worth nothing if a program can pass tests without solving the task."""

import re
from collections import Counter

import pytest
from loguru import logger

from lightrft.rewards.verifiers import code, sandbox
from lightrft.rewards.verifiers.asserts import read_asserts
from lightrft.rewards.verifiers.code import _parse_tests, _passes


@pytest.fixture(scope="module", autouse=True)
def _short():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(sandbox.WITHOUT_SANDBOX, raising=False)
        patch.setattr(sandbox, "RUN_SECONDS", 3)
        sandbox.find_sandbox.cache_clear()
        yield
        sandbox.find_sandbox.cache_clear()


def judged(program: str, tests: object) -> bool:
    return _passes(program, _parse_tests(tests))


# -- programs that cheat

SQUARE = [
    "assert f(2) == 4",
    "assert abs(f(3) - 9) < 1e-6",
    "assert f(4) in (16, 17) and [f(1)] == [1] and round(f(5)) == 25 and not f(0)",
]
CHEATS = {
    "a class with every operator": (
        "class f:\n  def __init__(s, x): pass\n"
        "  __eq__ = __ne__ = __lt__ = __gt__ = __bool__ = __contains__ = lambda s, *o: True\n"
        "  __sub__ = __rsub__ = __abs__ = __round__ = __int__ = __float__ = lambda s, *o: 0.0\n"
        "  __hash__ = lambda s: 4"
    ),
    "a class with a swapped operator": "class f:\n  def __init__(s, x): pass\n  __rsub__ = lambda s, o: 0.0",
    "an object that equals everything": (
        "class A:\n  __eq__ = __lt__ = __gt__ = lambda s, o: True\n  __hash__ = None\n"
        "def f(x): return A()"
    ),
    "a number that equals everything": (
        "class A(int):\n  __eq__ = lambda s, o: True\n  __sub__ = __round__ = lambda s, *o: 25\n"
        "  __hash__ = lambda s: 16\ndef f(x): return A()"
    ),
    "a text that equals everything": (
        "class A(str):\n  __eq__ = lambda s, o: True\n  __sub__ = lambda s, o: 0\ndef f(x): return A('4')"
    ),
    "a list that contains everything": (
        "class A(list):\n  __eq__ = __contains__ = lambda s, o: True\ndef f(x): return A()"
    ),
    "a metaclass that equals everything": (
        "class M(type):\n  __eq__ = __call__ = lambda s, *o: True\nclass f(metaclass=M): pass"
    ),
    "an exception in place of a result": "class f(Exception):\n  __eq__ = lambda s, o: True",
    "a property of the module": (
        "import sys, types\nclass M(types.ModuleType):\n  f = property(lambda s: lambda x: True)\n"
        "sys.modules['program'].__class__ = M"
    ),
    "its own frames": (
        "import sys\ndef f(x):\n  i = 0\n  while True:\n    try: values = sys._getframe(i).f_locals\n"
        "    except ValueError: return 0\n    i += 1\n"
        "    for each in values.values():\n      if each in (4, 9): return each"
    ),
    "the heap": (
        "import gc\ndef f(x):\n  texts = [o for o in gc.get_objects() if 'assert' in repr(o)[:99]]\n"
        "  return len(texts) and {2: 4, 3: 9}[x]"
    ),
    "other processes": (
        "import os, re\ndef f(x):\n  for p in os.listdir('/proc'):\n    if p.isdigit() and int(p) != os.getpid():\n"
        "      try:\n        for name in ('cmdline', 'environ', 'mem', 'fd/3', 'fd/4', 'fd/5'):\n"
        "          found = re.search(rb'assert f\\(.*?== (\\d+)', open(f'/proc/{p}/{name}', 'rb').read(1 << 20))\n"
        "          if found: return int(found[1])\n      except OSError: pass\n  return 0"
    ),
    "files": (
        "import os, re\ndef f(x):\n  for top in ('/tmp', '/dev/shm', '/proc/self/fd', '.'):\n"
        "    for name in os.listdir(top):\n      try:\n"
        "        found = re.search(rb'assert f\\(.*?== (\\d+)', open(f'{top}/{name}', 'rb').read(1 << 20))\n"
        "        if found: return int(found[1])\n      except OSError: pass\n  return 0"
    ),
    "a trace of another process": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "def f(x): return sum(libc.ptrace(16, i, 0, 0) == 0 for i in range(2, 300)) and x * x"
    ),
    "the end of the process": "import os\ndef f(x): os._exit(0)",
    "the end at once": "import os\nos._exit(0)",
    "the end of the module": "import sys\ndef f(x): return 0\nsys.exit(0)",
    "the end at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "AssertionError": "def f(x): raise AssertionError",
    "SkipTest": "import unittest\ndef f(x): raise unittest.SkipTest",
    "a derived StopIteration": "class E(StopIteration): pass\ndef f(x): raise E",
    "a killed group": "import os\ndef f(x): os.kill(-1, 9); os.kill(0, 9)",
    "a signal": (
        "import signal, os\nsignal.signal(signal.SIGTERM, lambda *a: os._exit(0))\n"
        "def f(x): os.kill(os.getpid(), signal.SIGTERM)"
    ),
    "a trace": "import sys, os\nsys.settrace(lambda *a: os._exit(0))\ndef f(x): return 0",
    "builtins": (
        "import builtins\nbuiltins.abs = builtins.round = builtins.compile = builtins.exec = lambda *a: 0\n"
        "builtins.AssertionError = type('E', (Exception,), {})\nabs = round = lambda x: 0\ndef f(x): return 4"
    ),
    "json, sockets and standard streams": (
        "import json, socket, sys, io\njson.dumps = lambda *a, **k: '[\"value\", [true]]'\n"
        "json.loads = lambda x: ['get', 0, 'f', [], {'dict': []}]\n"
        "sys.stdout = sys.stderr = io.StringIO()\nsocket.socket = None\ndef f(x): return True"
    ),
    "answers before the question": (
        "import os\n"
        "for fd in range(3, 20):\n  for text in (b'[\"value\", [true]]', b'[\"value\", [4]]', b'ok', b'passed'):\n"
        "    try: os.write(fd, text + b'\\n')\n    except OSError: pass\ndef f(x): return 0"
    ),
    "answers of a thread": (
        "import os, threading, time\ndef answer():\n  while True:\n    for fd in range(3, 20):\n"
        "      try: os.write(fd, b'[\"value\", [4]]\\n')\n      except OSError: pass\n    time.sleep(.01)\n"
        "threading.Thread(target=answer, daemon=True).start()\ndef f(x): time.sleep(1)"
    ),
    "a child that answers later": (
        "import os, time\nif os.fork() == 0:\n  for i in range(99):\n    for fd in range(3, 20):\n"
        "      try: os.write(fd, b'[\"value\", [4]]\\n')\n      except OSError: pass\n    time.sleep(.01)\n"
        "def f(x): return 4"
    ),
    "an object in an answer": (
        "import os\ndef f(x):\n  for fd in range(3, 20):\n    for text in (\n"
        '        b\'["object", 0]\', b\'["callable", null]\', b\'["value", [{"object": 0}]]\',\n'
        '        b\'["value", [{"eval": ["4"]}]]\', b\'["exception", [["SystemExit", true]]]\',\n'
        '        b\'["raise", [[["SystemExit", true]], [0]]]\', b\'["raise", [[["exit", true]], [0]]]\'):\n'
        "      try: os.write(fd, text + b'\\n')\n      except OSError: pass"
    ),
    "garbage": (
        "import os\ndef f(x):\n  for fd in range(3, 20):\n"
        "    try: os.write(fd, b'{' * 9 + b'\\n')\n    except OSError: pass"
    ),
    "deep JSON": (
        "import os\ndef f(x):\n  for fd in range(3, 20):\n"
        "    try: os.write(fd, b'[' * 200_000 + b'\\n')\n    except OSError: pass"
    ),
    "a huge result": "def f(x): return 'x' * (300 << 20)",
    "a result in itself": "def f(x):\n  found = []\n  found.append(found)\n  return found",
    "a recursion": "def f(x): return f(x)",
    "a generator without end": "def f(x):\n  while True: yield 4",
    "a wait": "import time\ndef f(x): time.sleep(100)",
    "a function": "def f(x): return lambda *o: 4",
    "the module of the tests": "from tests import *\nimport __main__\nf = getattr(__main__, 'test', None)",
}


@pytest.mark.parametrize("case", CHEATS)
def test_a_cheat_earns_nothing(case):
    assert not judged(CHEATS[case], SQUARE)


UNITS = (
    "import unittest\nclass T(unittest.TestCase):\n"
    "  def test_a(self): self.assertEqual(f([3, 1, 2]), 3)\n"
    "  def test_b(self): self.assertAlmostEqual(g(), 7)\n"
    "from program import f, g"
)
DECEITS = {
    "a test that is skipped": (
        "import unittest\ndef f(x): raise unittest.SkipTest\ndef g(): raise unittest.SkipTest",
        [UNITS],
    ),
    "a test that is skipped by another name": (
        "class SkipTest(Exception): pass\nSkipTest.__module__ = 'builtins'\n"
        "def f(x): raise SkipTest\ng = f",
        [UNITS],
    ),
    "a test whose module is replaced": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "unittest.TestCase.assertAlmostEqual = lambda *a: None\ndef f(x): return 0\ndef g(): return 0",
        [UNITS],
    ),
    "an iteration that ends early": (
        "def f(x): raise StopIteration",
        ["assert all(map(f, [2, 3, 5]))", "assert list(map(f, [4])) == []"],
    ),
    "an argument that is emptied": (
        "def f(x):\n  x.clear()\n  return []",
        ["x = [3, 1]", "assert f(x) == sorted(x)"],
    ),
    "an argument that is emptied before its length": (
        "def f(x):\n  x.clear()\n  return 0",
        ["x = [3, 1]", "assert f(x) == sum(x)", "y = f(x)\nassert y == len(x)"],
    ),
    "a dictionary that is emptied": (
        "def f(d):\n  d.clear()\n  return {}",
        ["d = {1: [2]}", "assert f(d) == {v: k for k, (v,) in d.items()}"],
    ),
    "an argument that must not change": (
        "def f(x):\n  x.sort()\n  return list(x)",
        ["x = [3, 1]\ny = f(x)\nassert y == [1, 3]\nassert x == [3, 1]"],
    ),
    "an argument that is emptied in a test that watches another": (
        "def f(x, y):\n  y.clear()\n  return 0",
        ["x = [3, 1]\nk = f(x, [1])\nassert x[:2] == [1, 3] and k == 0"],
    ),
    "a method that is told the expectation": (
        "class A:\n  startswith = lambda s, x: True\ndef f(x): return A()",
        ["assert f('abc').startswith('ab')"],
    ),
    "a forged object": (
        "import os\ndef f(x):\n  for fd in range(3, 20):\n    for text in (\n"
        "        b'[\"object\", 0]', b'[\"callable\", null]', b'[\"value\", [true]]'):\n"
        "      try: os.write(fd, text + b'\\n')\n      except OSError: pass",
        ["assert f('abc').startswith('ab')"],
    ),
    "a forged function": (
        "import os\ndef f(x):\n  for fd in range(3, 20):\n    for text in (\n"
        "        b'[\"callable\", null]', b'[\"value\", [true]]'):\n"
        "      try: os.write(fd, text + b'\\n')\n      except OSError: pass",
        ["assert next(map(f, ['abc']))('ab')"],
    ),
    "a class with a method of texts": (
        "class f:\n  def __init__(s, x): pass\n  startswith = lambda s, x: True",
        ["assert f('abc').startswith('ab')"],
    ),
    "an operator of an object": (
        "class S:\n  __sub__ = __rsub__ = __xor__ = __abs__ = lambda s, *o: 0.0\n  area = property(lambda s: s)",
        ["from program import S", "assert abs(S() - 9) < 1e-6 or S() ^ 3 == 0"],
    ),
    "an object that contains everything": (
        "class S:\n  __contains__ = lambda s, x: True\n  __iter__ = lambda s: iter([])",
        ["from program import S", "assert 3 in S()"],
    ),
    "an object that is like all others": (
        "class S:\n  def __init__(s, x): pass\n  __eq__ = lambda s, o: True\n"
        "  def double(s): return S(0)",
        ["from program import S", "a, b = S(2), S(4)\nassert a.double() == b"],
    ),
    "objects that are alike": (
        "class S:\n  def __init__(s, x): pass\n  __eq__ = __le__ = lambda s, o: True",
        ["from program import S", "a, b = S(2), S(4)\nassert a == b and not a < 3"],
    ),
    "records without content": (
        "from dataclasses import dataclass\n@dataclass\nclass P: pass\n"
        "def f(x): return P()\ndef g(x): return P()",
        ["from program import f\nassert f('abc') == ('abc',)"],
    ),
    "a record that is called like a builtin": (
        "from collections import namedtuple\n"
        "int = namedtuple('int', 'x')\nint.__eq__ = lambda s, o: True\n"
        "def f(x): return int(x)",
        ["assert f('abc') == 3 or f('abc') == ('ab',)"],
    ),
    "a record with methods of texts": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  startswith: object\n"
        "def f(x): return P(lambda x: True)\n",
        ["assert f('abc').startswith('ab')"],
    ),
    "a record like that of the tests": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\n"
        "  __eq__ = lambda s, o: True\ndef f(x): return P(0)",
        [
            "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\n",
            "from program import f\nassert f(2) == P(2)",
        ],
    ),
    "a class that is like all others": (
        "class M(type):\n  __eq__ = lambda s, o: True\n  __hash__ = type.__hash__\n"
        "class int(metaclass=M): pass\ndef f(x): return int",
        ["assert f('abc') == str or f('abc') is int"],
    ),
    "a number with an operator": (
        "import decimal, fractions\nclass D(decimal.Decimal):\n  __eq__ = lambda s, o: True\n"
        "D.__module__ = 'decimal'; D.__qualname__ = D.__name__ = 'Decimal'\n"
        "def f(x): return D(0)",
        ["from decimal import Decimal\nassert f(2) == Decimal(4)"],
    ),
    "a forged record": (
        "import os\ndef f(x):\n  for fd in range(3, 20):\n    for text in (\n"
        '        b\'["value", [{"record": ["P", true, ["__eq__"], [4]]}]]\',\n'
        '        b\'["value", [{"record": ["f", false, ["__class__", "x"], [4, 4]]}]]\',\n'
        '        b\'["value", [{"record": ["f", false, ["x=exit(0)"], [4]]}]]\',\n'
        '        b\'["value", [{"os.system": ["true"]}]]\', b\'["unplain", 4]\'):\n'
        "      try: os.write(fd, text + b'\\n')\n      except OSError: pass",
        ["assert f(2) == 4 or f(2) == (4,) or f(2).x == 4 or f(2) == 0"],
    ),
    "a module that tests do not import": (
        "class math:\n  isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
        ["assert math.isclose(f(2), 4)"],
    ),
    "a function that a method of tests uses": (
        "def sorted(x): return []\ndef all(x): return True\ndef f(x): return []",
        ["assert sorted(f([2, 1])) == [1, 2] and all([False] * len(f([1])))"],
    ),
    "in place": (
        "class S:\n  __isub__ = __sub__ = lambda s, o: 0\ndef f(x): return S()",
        ["x = f(3)\nx -= 9\nassert abs(x) < 1e-6"],
    ),
    "outputs that print all": (
        "print('4\\n9\\n16')",
        {"inputs": ["2", "3"], "outputs": ["4", "9"]},
    ),
    "outputs at the end of the process": (
        "import os\nos._exit(0)",
        {"inputs": ["2"], "outputs": ["4"]},
    ),
    "a result of a call that is a class": (
        "class A(list):\n  __eq__ = lambda s, o: True\nclass Solution:\n  def f(s, x): return A()",
        {"fn_name": "f", "inputs": ["2"], "outputs": ["4"]},
    ),
}


@pytest.mark.parametrize("case", DECEITS)
def test_a_deceit_earns_nothing(case):
    assert not judged(*DECEITS[case])


# -- tests that cannot be judged

REFUSED = {
    "a helper of nobody": (["assert is_close(f(3), 9)"], "use f and is_close"),
    "a helper of nobody beside an import": (
        ["from program import f", "assert is_close(f(3), 9)"],
        "use is_close",
    ),
    "two builtin names": (["assert sum(10, 15) == abs(6)"], "use abs and sum"),
    "no name": (["assert 1 + 1 == 2"], "call no function"),
    "no assertion": (
        ["def check(candidate):\n  assert candidate(1) == 1", "x = f"],
        "assert nothing",
    ),
    "a package": (["import numpy as np", "assert np.allclose(f(1), 1)"], "import numpy"),
    "pytest": (["import pytest\ndef test_f():\n  assert f(1) == 1"], "import pytest"),
    "fixtures": (["def test_f(capsys):\n  assert f(1) == 1"], "run by pytest"),
    "a class for pytest": (
        ["class TestF:\n  def test_f(self): assert f(1) == 1"],
        "not derived from unittest.TestCase",
    ),
    "a function as an argument": (["assert f(lambda x: x, [1]) == [1]"], "pass lambda x: x"),
    "an own function as an argument": (["def g(): pass", "assert f(g) == 1"], "pass g to"),
    "a builtin function as an argument": (["assert f(sorted, [1]) == [1]"], "pass sorted"),
    "a function of the program as an argument": (
        ["from program import f, g", "assert g(1) == f(g, 1)"],
        "pass g to",
    ),
    "a lambda with a name": (["g = lambda: 1\nassert f(g) == 1"], "pass g to"),
    "a decorator": (["@f\ndef g(): return 1\nassert g() == 1"], "pass g to"),
    "an own object as an argument": (["class N: pass", "assert f(N()) == 1"], "pass N() to"),
    "an own function for a candidate": (
        ["def check(candidate):\n  assert candidate(lambda: 1) == 1", "check(f)"],
        "pass lambda",
    ),
    "an expectation that the program changes": (
        ["x = [3, 1]\nf(x)\nassert x == sorted(x)"],
        "compare x with what they compute",
    ),
    "the same in a unittest": (
        [
            "import unittest\nclass T(unittest.TestCase):\n  def test(self):\n    x = [3, 1]\n"
            "    f(x)\n    self.assertEqual(x, sorted(x))"
        ],
        "compare x with what they compute",
    ),
    "an argument that is watched beside one that is an expectation": (
        ["x = [3, 1]\ny = [1]\nk = f(x, y)\nassert x == [1, 3]\nassert k == len(y)"],
        "look at what the program does to x, and compute an expectation from y",
    ),
    "the output": (
        ["import contextlib, io\nwith contextlib.redirect_stdout(None): f()\nassert True"],
        "a process of its own",
    ),
    "a patch": (
        ["from unittest.mock import patch\nwith patch('program.g'): assert f() == 1"],
        "use unittest.mock",
    ),
    "coroutines": (["import asyncio\nassert asyncio.run(f(1)) == 1"], "use asyncio"),
    "unittest.main": (
        ["import unittest\nclass T(unittest.TestCase):\n  def test(self): f()", "unittest.main()"],
        "use unittest.main",
    ),
    "no Python": (["assert f(1) = 1"], "not Python"),
    "no name of a function": (
        {"fn_name": "a b", "inputs": [[]], "outputs": [1]},
        "no name of Python",
    ),
    "a method of an object": (
        ["s = S()", "assert s.f('abc').startswith('ab')"],
        "use s.f, and only",
    ),
    "an attribute of an object": (["from program import N\nassert N(2).x == 2"], "use N(2).x, and"),
    "a function that is returned": (["assert f(1)(2) == 3"], "use f(1)(2), and only plain values"),
    "a function that is returned and named": (
        ["g = f(1)", "assert g(2) == 3"],
        "use g(2), and only",
    ),
    "no arguments": ({"fn_name": "f", "inputs": [3], "outputs": [1]}, "no list of arguments"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tests_that_cannot_be_judged_are_refused_by_name(case):
    tests, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        _parse_tests(tests)


def test_an_argument_that_cannot_be_sent_is_refused_when_it_occurs():
    tests = ["import re\nx = re.compile('a')", "try:\n  f(x)\nexcept Exception: pass", "assert 1"]
    with pytest.raises(ValueError, match="object of the class Pattern, which cannot be sent"):
        judged("def f(x): return x", tests)


UNJUDGED = {
    "an object": ("class A: pass\ndef f(): return [A()]", ["assert f() == 1"], "class 'A'"),
    "a function": ("def f(): return f", ["assert f() == 1"], "f gives .* class 'function'"),
    "a member": (
        "import enum\nclass C(enum.Enum): RED = 1\ndef f(): return C.RED",
        ["from program import C, f\nassert f() == C.RED"],
        "f gives .* class 'C'",
    ),
    "an object of a class": (
        "class N:\n  def __init__(s, x): s.x = x",
        ["from program import N\nassert N(2) == 2"],
        "N gives .* class 'N'",
    ),
    "a dictionary of a class of its own": (
        "class Table(dict): pass",
        ["t = Table()\nt[1] = 2\nassert t[1] == 2"],
        "Table gives .* class 'Table'",
    ),
    "an attribute of a class": (
        "class N: limit = 3",
        ["from program import N\nassert N.limit == 3"],
        "they use limit of N",
    ),
    "a record": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\ndef f(x): return P(x)",
        ["assert f(2).x == 2"],
        "f gives .* class 'P'",
    ),
    "a function of a function": (
        "def f(x): return lambda y: x + y",
        ["assert f(1) == 3"],
        "f gives .* class 'function'",
    ),
    "an argument that is filled": (
        "class A: pass\ndef f(x): x.append(A())",
        ["x = []\nf(x)\nassert x == [1]"],
        "class 'A'",
    ),
    "an object for a unittest": (
        "def f(): return object()",
        [
            "import unittest\nclass T(unittest.TestCase):\n"
            "  def test(self): self.assertEqual(f(), 3)"
        ],
        "f gives .* class 'object'",
    ),
}


@pytest.mark.parametrize("case", UNJUDGED)
def test_a_program_that_cannot_be_judged_is_named(case):
    program, tests, message = UNJUDGED[case]
    with pytest.raises(sandbox.UnjudgedError, match=message):
        sandbox.passes(program, _parse_tests(tests))


def test_the_log_names_the_row_and_how_often(monkeypatch):
    lines = []
    sink = logger.add(lines.append, format="{message}")
    monkeypatch.setattr(code, "unjudged", Counter())
    try:
        for _ in range(11):
            assert not _passes("def f(): return f", read_asserts(["assert f() == 1"]), "d.jsonl:3")
        for number in range(code.MOST_REASONS + 5):
            code._warn(f"a name that a program chose: {number}", "d.jsonl:4")
    finally:
        logger.remove(sink)

    said = [line for line in lines if "d.jsonl:3" in line]
    assert ["(1 times" in said[0], "(10 times" in said[1], len(said)] == [True, True, 2]
    assert "f gives an object of the class 'function'" in said[0]
    assert len(lines) == 2 + (code.MOST_REASONS - 1) + 1
    assert "other reasons" in lines[-1]


# -- programs that solve their task

HUMAN_EVAL = [
    "\n\nMETADATA = {'author': 'jt'}\n\n\ndef check(candidate):\n"
    "    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True\n"
    "    assert candidate([1.0, 2.0, 5.9, 4.0, 5.0], 0.95) == True, 'two are close'\n"
    "    assert candidate([1.0, 2.0, 3.0], 0.5) is False\n    assert True, 'end'\n",
    "check(has_close_elements)",
]
POLY = [
    "import math\n\ndef poly(xs, x):\n    'Evaluate.'\n"
    "    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])\n\n\n"
    "def find_zero(xs):\n    'Find x such that poly(x) = 0.'\n",
    "from program import find_zero",
    "def check(candidate):\n    import math, random, copy\n    rng = random.Random(42)\n"
    "    for _ in range(20):\n        a, b = rng.randint(-9, 9), rng.randint(1, 9)\n"
    "        coeffs = [a, b]\n        solution = candidate(copy.deepcopy(coeffs))\n"
    "        assert math.fabs(poly(coeffs, solution)) < 1e-4\n",
    "check(find_zero)",
]
SOLVES = {
    "plain": ("def f(x): return x * x", SQUARE),
    "a list of HumanEval": (
        "def has_close_elements(n, t): return any(abs(a - b) < t for i, a in enumerate(n) for b in n[:i])",
        HUMAN_EVAL,
    ),
    "a helper of a prompt of HumanEval": (
        "def poly(*a): return 0\ndef find_zero(xs): return -xs[0] / xs[1]",
        POLY,
    ),
    "sets and sorting of MBPP": (
        "def similar(a, b): return tuple(set(a) & set(b))\n",
        [
            "assert set(similar((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
            "assert sorted(similar((1, 2),(2, 1))) == [1, 2]",
            "import math\nassert math.isclose(len(similar((), ())), 0, rel_tol=0.001)",
        ],
    ),
    "a counter of MBPP": (
        "import collections\ndef freq_count(x): return collections.Counter(x)",
        ["assert freq_count([10, 10, 20])==({10: 2, 20: 1}) "],
    ),
    "a builtin name of MBPP": ("def sum(a, b): return a + b", ["assert sum(10, 15) == 25"]),
    "a capital name of MBPP": (
        "def Find_Max(x): return max(map(len, x))",
        ["assert Find_Max([[1],[1,2]]) == 2"],
    ),
    "a method of LiveCodeBench": (
        "class Solution:\n  def twoSum(self, nums, target): return (0, 1)",
        {
            "fn_name": "twoSum",
            "inputs": ["[2, 7]\n9", "[1, 3]\n4"],
            "outputs": ["[0, 1]", "[0, 1]"],
        },
    ),
    "a function of APPS": (
        "def solve(a, b): return [a, True, None, 1.5, {'x': (b,)}]",
        {
            "fn_name": "solve",
            "inputs": [[1, [2]]],
            "outputs": [[[1, True, None, 1.5, {"x": [[2]]}]]],
        },
    ),
    "outputs": ("print(int(input()) ** 2)", {"inputs": ["2", "3"], "outputs": ["4", "9\n"]}),
    "arguments by name": (
        "def f(verb, number, *, name, self): return [verb, number, name, self]",
        ["assert f(1, number=2, name=3, self=4) == [1, 2, 3, 4]"],
    ),
    "an argument in place": (
        "def f(x): x.sort(); x.append(9)",
        ["x = [2, 1]", "assert f(x) is None and x == [1, 2, 9]"],
    ),
    "a matrix and a dictionary in place": (
        "def f(m, *, d): m[0][0], m[1] = 5, [6]; d['a'] = 1",
        ["m = [[1], [2]]; d = {}\nf(m, d=d)\nassert m == [[5], [6]] and d == {'a': 1}"],
    ),
    "an argument that is used up": (
        "def f(x):\n  found = []\n  while x: found.append(x.pop())\n  return found[::-1]",
        ["x = [3, 1]", "assert f(x) == x", "assert sorted(f(x)) == sorted(x)"],
    ),
    "every value": (
        "def f(*x, **k): return [*x, k]",
        [
            "v = [1, -2**90000, .5, 1j, None, True, 'a\\ud800', b'b', (1, (2,)), {3}, range(3)]\n"
            "v += [bytearray(b'c'), frozenset({4}), {(1, 2): [3]}, set(), (), {}, -0.0]\n"
            "assert f(*v, a=1) == [*v, {'a': 1}]\n"
            "assert [type(x) for x in f(*v)[:-1]] == list(map(type, v))",
            "import math; assert math.isnan(f(math.nan)[0]) and f(math.inf)[0] == math.inf",
            "assert str(f(-0.0)[0]) == '-0.0'",
        ],
    ),
    "values of derived classes": (
        "import enum\nfrom collections import *\nP = namedtuple('P', 'x y')\n"
        "class E(enum.IntEnum): A = 1\nclass L(list): pass\n"
        "def f(): return [deque([1]), P(1, 2), E.A, L([3]), defaultdict(int, a=1).keys(), OrderedDict(b=2)]",
        [
            "from collections import deque",
            "assert f() == [deque([1]), (1, 2), 1, [3], ['a'], {'b': 2}]",
        ],
    ),
    "numbers and dates": (
        "def f(*x): return list(x)",
        [
            "from collections import deque\nfrom decimal import Decimal\n"
            "from datetime import date, datetime, time, timedelta, timezone\n"
            "from fractions import Fraction",
            "v = [Decimal('1.50'), Fraction(-1, 3), date(2024, 2, 29), time(1, 2, 3, 4)]\n"
            "v += [datetime(2024, 1, 2, 3, tzinfo=timezone(timedelta(hours=2))), timedelta(1, 2, 3)]\n"
            "v += [deque([1, Decimal(2)]), timezone.utc, {date(2024, 1, 1): [Fraction(1, 2)]}]\n"
            "assert f(*v) == v and list(map(type, f(*v))) == list(map(type, v))",
            "assert str(f(Decimal('1.50'))[0]) == '1.50' and f(deque([1], 3))[0].maxlen == 3",
            "assert f(Decimal('NaN'))[0].is_nan() and f(Fraction(1, 3))[0] * 3 == 1",
        ],
    ),
    "classes": (
        "def only(values, kind): return [x for x in values if type(x) is kind] + [kind]",
        ["assert only([1, 'a', True], int) == [1, int] and only(['b'], kind=str)[1] is str"],
    ),
    "names of builtins for variables": (
        "def f(x): return x",
        [
            "def check(candidate):\n  for input, sum in [(1, 1), ([2], [2])]:\n"
            "    assert candidate(input) == sum\n  max = 3\n  assert candidate(max) == 3",
            "check(f)\nassert all((lambda min: f(min) == min)(n) for n in range(3))",
        ],
    ),
    "a queue in place": (
        "def f(x): x.rotate(1)",
        ["from collections import deque\nx = deque([1, 2, 3])\nf(x)\nassert list(x) == [3, 1, 2]"],
    ),
    "a decimal of a function with a capital letter": (
        "from decimal import Decimal\ndef Half(x): return Decimal(x) / 2",
        ["from decimal import Decimal\nassert Half(3) == Decimal('1.5')"],
    ),
    "a method of LeetCode": (
        "class Solution:\n  def add(self, a, b): return a + b\n  def put(self, x): x.append(1)",
        [
            "def check(candidate):\n  assert candidate(a=1, b=2) == 3",
            "check(Solution().add)",
            "s = Solution()\nx = []\ns.put(x)\nassert s.add(2, 3) == 5 and x == [1]",
        ],
    ),
    "generators": (
        "def f(n):\n  yield from range(n)",
        [
            "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0 and sum(f(4)) == 6",
            "assert [x + 1 for x in f(2)] == [1, 2]",
            "import itertools\nassert list(itertools.islice(f(10**9), 3)) == [0, 1, 2]",
        ],
    ),
    "a generator as an argument": (
        "def f(xs): return sum(xs)",
        ["assert f(x for x in range(4)) == 6 and f(iter([1, 2])) == 3"],
    ),
    "exceptions": (
        "class Low(ValueError): pass\ndef f(x):\n  if x < 0: raise Low('too low')\n  return {}[x]",
        [
            "from program import Low, f\ntry: f(-1)\nexcept Low as error:\n"
            "  assert str(error) == 'too low' and error.args == ('too low',)\nelse: assert False",
            "try: f(-1)\nexcept ValueError: pass\nelse: assert False",
            "try: f(1)\nexcept KeyError: pass\nelse: assert False",
        ],
    ),
    "exceptions with arguments of their own": (
        "class E(Exception):\n  def __init__(s, code, text): super().__init__(text)\n"
        "def f(x):\n  if x: raise E(5, 'x')\n  b'\\xff'.decode()",
        [
            "try: f(0)\nexcept UnicodeDecodeError as e: assert e.start == 0\nelse: assert 0",
            "try: f(1)\nexcept Exception as e: assert str(e) == 'x'\nelse: assert 0",
        ],
    ),
    "unittest": (
        "def f(x):\n  if not x: raise ValueError\n  return max(x)\ndef g(): return 7.0000000001",
        [
            UNITS,
            "class U(T):\n  def test_c(self):\n    with self.assertRaises(ValueError): f([])\n"
            "    self.assertRaises(ValueError, f, [])\n"
            "if __name__ == '__main__':\n  unittest.main()",
        ],
    ),
    "functions for pytest": (
        "def f(x): return x",
        [
            "from solution import f\n\ndef test_one():\n  assert f(1) == 1\n\ndef test_two():\n  assert f([]) == []"
        ],
    ),
    "modules that nobody imports": (
        "import math\ndef f(x): return math.sqrt(x)",
        ["assert math.isclose(f(2) ** 2, 2) and random.choice([f(4)]) == 2"],
    ),
    "decorated": ("import functools\n@functools.cache\ndef f(x): return x", ["assert f(3) == 3"]),
    "what is done to an argument beside a result": (
        "def f(nums):\n  nums[:] = sorted(set(nums))\n  return len(nums)",
        ["nums = [2, 1, 2]\nk = f(nums)\nassert k == 2\nassert nums[:k] == [1, 2]"],
    ),
    "what is done to an argument that is returned": (
        "def f(x):\n  x.sort()\n  return x",
        ["def check(candidate):\n  x = [3, 1]\n  candidate(x)\n  assert x == [1, 3]", "check(f)"],
    ),
    "an expectation that was made before": (
        "def f(x):\n  x.reverse()\n  return 1",
        ["x = [3, 1]\nwanted = x[::-1]\nassert f(x) == 1\nassert x == wanted"],
    ),
    "a watched argument in a unittest": (
        "def f(x):\n  x['a'] = 1\n  return True",
        [
            "import unittest\nclass T(unittest.TestCase):\n  def test(self):\n    x = {}\n"
            "    self.assertTrue(f(x))\n    self.assertEqual(x, {'a': 1})"
        ],
    ),
    "constants": (
        "LIMIT = 5\nnames = ['a']",
        ["from program import LIMIT, names\nassert LIMIT == 5 and names == ['a']"],
    ),
}


@pytest.mark.parametrize("case", SOLVES)
def test_an_honest_program_passes(case):
    program, tests = SOLVES[case]
    assert judged(program, tests)
    if isinstance(tests, list):
        assert not judged(program, [*tests, "assert False"])
        assert not judged("", tests)
