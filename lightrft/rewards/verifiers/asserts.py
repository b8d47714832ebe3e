"""Read asserts about a program: which names are the program's, and whether they can be judged.

Tests and program share plain values alone (inside.py). What needs more is refused here, by name,
before anything is trained.
"""

import ast
import builtins
import symtable
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from lightrft.rewards.verifiers.inside import CLASSES

PROGRAM_MODULES = ("program", "solution")
"""Modules from which tests import the names of the program."""
OUT_OF_REACH = frozenset(
    "ast asyncio concurrent contextlib.redirect_stderr contextlib.redirect_stdout ctypes dis gc"
    " importlib inspect io multiprocessing pathlib shutil signal socket subprocess sys.stdin"
    " sys.stdout tempfile threading unittest.main unittest.mock weakref".split()
)
"""Modules and names for a look into the interpreter of the program, or at its files and output."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Asserts:
    """Tests of a program, as inside.py runs them."""

    texts: list[str]
    """Python code. All texts share their names."""
    names: list[str]
    """Names that the program defines, besides those that the tests import."""
    modules: list[str] = field(default_factory=list)
    """Modules that the texts use without an import."""
    functions: list[str] = field(default_factory=list)
    """Functions of the texts that are tests."""
    cases: list[str] = field(default_factory=list)
    """Classes of the texts that are derived from unittest.TestCase."""
    watches: bool = False
    """Whether the texts look at what the program does to its arguments."""


def read_asserts(texts: list[str]) -> Asserts:
    """Read tests. Raises ValueError for any that cannot be judged."""
    source = "\n".join(texts)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
            tree.body = [node for node in tree.body if not _is_script(node)]
            table = symtable.symtable(source, "tests", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not Python: {error}") from error

    imported = set(_imports(tree))
    for name in imported:
        top = name.partition(".")[0]
        if name in OUT_OF_REACH or top in OUT_OF_REACH:
            raise ValueError(f"the tests use {name}: the program runs in a process of its own")
        if top not in sys.stdlib_module_names and top not in PROGRAM_MODULES:
            raise ValueError(f"the tests import {name}, which is no part of Python")

    defined, used = _symbols(table)
    functions, cases = _tests_of(tree, used)
    declared = any(name.partition(".")[0] in PROGRAM_MODULES for name in imported)
    free = used - defined - set(dir(builtins))
    called = {node.func.id for node in _calls(tree) if isinstance(node.func, ast.Name)}
    modules = sorted((free & sys.stdlib_module_names) - called)
    # The task may be about a function that is called like a builtin one.
    names = sorted(free.difference(modules)) or (
        [] if declared else sorted(called & used - defined)
    )
    if not names and not declared:
        raise ValueError("the tests call no function that they do not define themselves")
    if len(names) > 1 or names and declared:
        raise ValueError(
            f"the tests use {' and '.join(names)}, and do not say which of them is the program's:"
            " import that (`from program import f`), and define the others"
        )

    watches = _check_uses(tree, {*names, *_from_program(tree)})
    return Asserts(texts, names, modules, functions, cases, watches)


def _symbols(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """Return the global names that a table and the tables in it define, and use."""
    symbols = table.get_symbols()
    if table.get_type() != "module":
        symbols = [symbol for symbol in symbols if symbol.is_global()]
    defined = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    used = {each.get_name() for each in symbols if each.is_referenced()}
    for child in table.get_children():
        child_defined, child_used = _symbols(child)
        defined |= child_defined
        used |= child_used
    return defined, used


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of what is imported, and of what is used of a module by its name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from OUT_OF_REACH.intersection(f"{module}.{each.name}" for each in names)
            case ast.Attribute(value=ast.Name(id=module), attr=attribute):
                if f"{module}.{attribute}" in OUT_OF_REACH:
                    yield f"{module}.{attribute}"


def _is_script(node: ast.stmt) -> bool:
    """Return True for `if __name__ == "__main__"`, which does not hold."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _from_program(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in PROGRAM_MODULES:
            yield from (name.asname or name.name for name in node.names)


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _tests_of(tree: ast.Module, used: set[str]) -> tuple[list[str], list[str]]:
    """Return the functions and the classes that are tests. Raises ValueError if nothing is one."""
    functions = []
    cases = []
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) if name.startswith("test") and name not in used:
                if node.args.args or node.decorator_list:
                    raise ValueError(f"the tests want {name} to be run by pytest")
                functions.append(name)
            case ast.ClassDef(name=name, bases=bases):
                written = [ast.unparse(base).rpartition(".")[2] for base in bases]
                if {"TestCase", *cases}.intersection(written):
                    cases.append(name)
                elif name.startswith("Test"):
                    raise ValueError(f"the class {name} is not derived from unittest.TestCase")

    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    statements = [node for node in tree.body if not isinstance(node, DEFINITIONS)]
    nodes = [inner for node in statements for inner in ast.walk(node)]
    asserts = any(isinstance(inner, ast.Assert | ast.Raise) for inner in nodes)
    asserts |= any(isinstance(inner, ast.Name) and inner.id in defined for inner in nodes)
    if not (functions or cases or asserts):
        raise ValueError("the tests assert nothing: a function `check(candidate)` must be called")
    return functions, cases


def _check_uses(tree: ast.Module, names: set[str]) -> bool:
    """Return whether the tests look at arguments after a call.

    Raise ValueError for what the program cannot get, and for what it would decide itself.
    """
    nodes = {node.name: node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
    # A function of the tests may get the program's under another name, as check(candidate) does.
    for call in _calls(tree):
        function = nodes.get(ast.unparse(call.func))
        if isinstance(function, ast.FunctionDef):
            parameters = zip(function.args.args, call.args, strict=False)
            names |= {name.arg for name, given in parameters if ast.unparse(given) in names}

    calls = [call for call in _calls(tree) if _names_in(call.func) & names]
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    passed = [value for call in calls for value in _arguments(call)]
    for name, node in nodes.items():  # a decorator gets what it decorates
        passed += [ast.Name(name) for each in node.decorator_list if _names_in(each) & names]
    _check_passed(passed, tree, nodes, assigned)
    _check_results(tree, calls, {name: each for name, each in assigned.items() if each in calls})
    return _look_at_arguments(tree, calls)


def _check_results(tree: ast.Module, calls: list[ast.Call], results: dict[str, ast.Call]) -> None:
    """Raise ValueError for calls of functions that the program returns, and for uses of objects
    that it makes. `results` has the variables of its results.
    """
    for node in ast.walk(tree):
        of = getattr(node, "func", getattr(node, "value", None))
        made = results.get(ast.unparse(of), of) if isinstance(of, ast.expr) else None
        if made not in calls:
            continue
        name = ast.unparse(made.func)
        is_object = isinstance(node, ast.Attribute) and name[0].isupper() and name != "Solution"
        if isinstance(node, ast.Call) or (is_object and name.isidentifier()):
            raise ValueError(
                f"the tests use {ast.unparse(node):.80}, and only plain values can be sent: no"
                " functions and no objects that the program makes"
            )


def _names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _check_passed(
    passed: list[ast.expr], tree: ast.Module, nodes: dict[str, Any], assigned: dict[str, ast.expr]
) -> None:
    """Raise ValueError for functions and objects of the tests that the program would get."""
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    stored = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store))
    bound |= {node.id for node in stored if isinstance(node, ast.Name)}
    bound |= {name for name, kind in vars(builtins).items() if kind in CLASSES.values()}
    functions = {*nodes, *(ast.unparse(call.func) for call in _calls(tree)), *dir(builtins)} - bound

    def is_of_tests(value: ast.expr) -> bool:
        made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        return isinstance(value, ast.Lambda) or isinstance(nodes.get(made), ast.ClassDef)

    functions |= {name for name, value in assigned.items() if is_of_tests(value)}
    for value in passed:
        if is_of_tests(value) or ast.unparse(value) in functions:
            raise ValueError(
                f"the tests pass {ast.unparse(value):.80} to the program, which gets numbers, texts,"
                " dates, and containers of them alone"
            )


def _look_at_arguments(tree: ast.Module, calls: list[ast.Call]) -> bool:
    """Return whether the tests look at arguments after a call.

    Raise ValueError if they compute from one what they expect of the program then.
    """
    given = {each.id for call in calls for each in _arguments(call) if isinstance(each, ast.Name)}
    results = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(call in calls for call in _calls(node.value))
        for target in node.targets
        for name in _names_in(target)
    }

    watched = ""
    expected = ""
    for operands in _compared(tree):
        if any(call in calls for each in operands for call in _calls(each)):
            continue

        used = list(map(_names_in, operands))
        for one, other in combinations(used, 2):
            if both := one & other & given:
                raise ValueError(
                    f"the tests compare {both.pop()} with what they compute from it after the"
                    " program could change it: compute the expectation before the call"
                )
        for index, one in enumerate(used):
            others = set().union(*used[:index], *used[index + 1 :])
            # Beside an answer of the program it is what the answer should be.
            if others & (given | results):
                expected = next(iter(one & given), expected)
            else:
                watched = next(iter(one & given), watched)

    if watched and expected:
        raise ValueError(
            f"the tests look at what the program does to {watched}, and compute an expectation from"
            f" {expected} after it could change that: compute the expectation before the call"
        )
    return bool(watched)


def _compared(tree: ast.Module) -> Iterator[list[ast.expr]]:
    """Yield the operands of each comparison, except for identity."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if not all(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
                yield [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith("self.assert") and not name.startswith("self.assertIs"):
                yield node.args
