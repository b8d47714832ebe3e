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
GETS = "it gets numbers, texts, dates, and containers of them alone"


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

    calls = [call for call in _calls(tree) if _names_in(call.func) & names]
    _check_arguments(tree, calls, own)
    for node in own.values():
        if any(_names_in(each) & names for each in node.decorator_list):
            raise ValueError(f"the tests decorate {node.name} with the program: {GETS}")
    _check_results(tree, calls, names)
    return _look_at_arguments(tree, calls)


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield each variable that one value is assigned to, and the value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from (
                (each.id, node.value) for each in node.targets if isinstance(each, ast.Name)
            )


def _check_arguments(
    tree: ast.Module, calls: list[ast.Call], own: dict[str, ast.FunctionDef | ast.ClassDef]
) -> None:
    """Raise ValueError for functions and own objects among the arguments of calls."""
    parts = [part for part in ast.walk(tree) if isinstance(part, ast.Name | ast.arg)]
    stored = {
        each.arg if isinstance(each, ast.arg) else each.id
        for each in parts
        if isinstance(each, ast.arg) or isinstance(each.ctx, ast.Store)
    }
    functions = {*own, *(ast.unparse(call.func) for call in calls), *{*dir(builtins)} - stored}
    functions |= {name for name, value in _assigned(tree) if isinstance(value, ast.Lambda)}

    for value in (value for call in calls for value in _arguments(call)):
        text = ast.unparse(value)
        made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if (
            text in functions
            or isinstance(value, ast.Lambda)
            or isinstance(own.get(made), ast.ClassDef)
        ):
            raise ValueError(f"the tests pass {text:.80} to the program: {GETS}")


def _check_results(tree: ast.Module, calls: list[ast.Call], names: set[str]) -> None:
    """Raise ValueError for functions that calls return, and for operators of objects they make."""
    results = {name: value for name, value in _assigned(tree) if value in calls}
    for call in _calls(tree):
        if call.func in calls or ast.unparse(call.func) in results:
            raise ValueError(
                f"the tests call what the program returns, {ast.unparse(call.func):.80}, and a"
                " function cannot be sent"
            )

    def is_object(node: ast.expr) -> bool:
        call = results.get(node.id) if isinstance(node, ast.Name) else node
        return call in calls and isinstance(call.func, ast.Name) and call.func.id[0].isupper()

    sources = names.union(name for name, value in results.items() if is_object(value))
    sums = ([node.left, node.right] for node in ast.walk(tree) if isinstance(node, ast.BinOp))
    for operands in (*_compared(tree), *sums):
        of_program = [
            each
            for each in operands
            if is_object(each) or any(_names_in(call.func) & sources for call in _calls(each))
        ]
        if len(of_program) > 1 and any(map(is_object, of_program)):
            raise ValueError(
                f"the tests compare or add {' and '.join(map(ast.unparse, of_program)):.80}, so the"
                " program would decide what they are: compare attributes or results that are plain"
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
        for place, one in enumerate(used):
            others = set().union(*used[:place], *used[place + 1 :])
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
    """Yield the operands of each comparison, except for those of identity."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if not all(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
                yield [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith("self.assert") and not name.startswith("self.assertIs"):
                yield node.args
