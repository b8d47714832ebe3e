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

PROGRAM_MODULES = ("program", "solution")
"""Modules from which tests import the names of the program."""
OUT_OF_REACH = frozenset(
    "ast asyncio concurrent contextlib.redirect_stderr contextlib.redirect_stdout ctypes dis gc"
    " importlib inspect io multiprocessing pathlib shutil signal socket subprocess sys.stdin"
    " sys.stdout tempfile threading unittest.main unittest.mock weakref".split()
)
"""Modules and names for a look into the interpreter of the program, or at its files and output."""
NAMED_PARTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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
        more_defined, more_used = _symbols(child)
        defined |= more_defined
        used |= more_used
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

    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    statements = [node for node in tree.body if not isinstance(node, NAMED_PARTS)]
    parts = [part for node in statements for part in ast.walk(node)]
    asserts = any(isinstance(part, ast.Assert | ast.Raise) for part in parts)
    asserts |= any(isinstance(part, ast.Name) and part.id in own for part in parts)
    if not (functions or cases or asserts):
        raise ValueError("the tests assert nothing: a function `check(candidate)` must be called")
    return functions, cases


def _check_uses(tree: ast.Module, names: set[str]) -> bool:
    """Return whether the tests look at arguments after a call.

    Raise ValueError for what the program cannot get, and for what it would decide itself.
    """
    own = {node.name: node for node in ast.walk(tree) if isinstance(node, NAMED_PARTS)}
    # A function of the tests may get the program's under another name, as check(candidate) does.
    for call in _calls(tree):
        function = own.get(ast.unparse(call.func))
        if isinstance(function, ast.FunctionDef):
            parameters = zip(function.args.args, call.args, strict=False)
            names |= {name.arg for name, given in parameters if ast.unparse(given) in names}

    def of_program(call: ast.Call) -> bool:
        return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(call.func))

    given = set()
    for call in filter(of_program, _calls(tree)):
        for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
            text = ast.unparse(value)
            made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            is_own = text in own or isinstance(own.get(made), ast.ClassDef)
            if is_own or isinstance(value, ast.Lambda):
                raise ValueError(
                    f"the tests pass {text:.80} to the program, which gets numbers, texts and"
                    " containers of them alone"
                )
            given |= {value.id} if isinstance(value, ast.Name) else set()

    results = {
        part.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(map(of_program, _calls(node.value)))
        for target in node.targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name)
    }

    watched = ""
    expected = ""
    for operands in _compared(tree):
        if any(of_program(call) for each in operands for call in _calls(each)):
            continue
        used = [
            {part.id for part in ast.walk(each) if isinstance(part, ast.Name)} for each in operands
        ]
        for one, other in combinations(used, 2):
            if both := one & other & given:
                raise ValueError(
                    f"the tests compare {both.pop()} with what they compute from it after the"
                    " program could change it: compute the expectation before the call"
                )
        for place, one in enumerate(used):
            if read := one & given:
                others = set().union(*used[:place], *used[place + 1 :])
                # Beside an answer of the program it is what the answer should be.
                if others & (given | results):
                    expected = read.pop()
                else:
                    watched = read.pop()

    if watched and expected:
        raise ValueError(
            f"the tests look at what the program does to {watched}, and compute an expectation from"
            f" {expected} after it could change that: compute the expectation before the call"
        )
    return bool(watched)


def _compared(tree: ast.Module) -> Iterator[list[ast.expr]]:
    """Yield the operands of each comparison."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.assert"):
            yield node.args
