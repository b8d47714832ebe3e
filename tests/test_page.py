"""How the package looks on the page: paragraphs, comments, sentences, and names of constants."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lightrft"
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
LONG = 15
"""Lines of a body above which a function has paragraphs."""
SHORT = 5
"""Lines of a function that hardly does anything by itself."""
WORDS = {
    "in which": (
        r"\b(of|in|for|from|to|by|with|on|at|after|before|under) (which|whom|whose)\b",
        0.4,
    ),
    "that of": (r"\b(those|that) of\b", 0.2),
    "which": (r", which\b", 1.2),
    "its": (r"\b(its|their)\b", 5.0),
}
"""Patterns of chained sentences, and how often they may occur in 1,000 words of docstrings."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes(source: str) -> list[ast.AST]:
    """Return all nodes of a file, the module first."""
    return list(ast.walk(ast.parse(source)))


def functions(source: str) -> Iterator[Function]:
    return (node for node in nodes(source) if isinstance(node, Function))


def body(source: str, function: Function) -> list[str]:
    """Return the lines of a function below its docstring."""
    statements = function.body
    if ast.get_docstring(function):
        statements = statements[1:]
    first = statements[0].lineno if statements else function.end_lineno + 1
    return source.split("\n")[first - 1 : function.end_lineno]


def solid(source: str) -> list[str]:
    """Return the long functions without a blank line."""
    bodies = [(function.name, body(source, function)) for function in functions(source)]
    return [name for name, lines in bodies if len(lines) > LONG and all(lines)]


def bundled(source: str) -> list[int]:
    """Return the lines that assign more than two values at once."""
    return [
        node.lineno
        for node in nodes(source)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) > 2
    ]


def texts(source: str) -> Iterator[str]:
    """Return the docstrings of a file, and those below fields and constants."""
    return (
        node.value.value
        for node in nodes(source)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def constants(source: str) -> Iterator[tuple[str, str]]:
    """Return name and value of each constant of a module; type variables are none."""
    for node in nodes(source)[0].body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id.isupper() and len(target.id) > 1:
            yield target.id, ast.dump(node.value)


def ambiguous(sources: dict[Path, str]) -> dict[str, list[str]]:
    """Return names of constants that have different values in different files."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path, source in sources.items():
        for name, value in constants(source):
            found[name][value] = path.name
    return {name: list(values.values()) for name, values in found.items() if len(values) > 1}


def test_long_functions_have_paragraphs():
    assert {path: names for path, source in SOURCES.items() if (names := solid(source))} == {}


def test_most_long_functions_say_why():
    long = [
        lines
        for source in SOURCES.values()
        for function in functions(source)
        if len(lines := body(source, function)) >= LONG
    ]
    commented = [lines for lines in long if any(re.search(r"(^|  )\s*# ", line) for line in lines)]
    assert len(commented) >= 0.55 * len(long)


def test_few_functions_hardly_do_anything():
    lengths = [
        function.end_lineno - function.lineno + 1
        for source in SOURCES.values()
        for function in functions(source)
    ]
    assert sum(length <= SHORT for length in lengths) <= 0.35 * len(lengths)


def test_the_formatter_is_never_fought_and_no_line_bundles_assignments():
    skipped = [path for path, source in SOURCES.items() if re.search(r"# fmt: (skip|off)", source)]
    assert skipped == []
    assert {path: lines for path, source in SOURCES.items() if (lines := bundled(source))} == {}


@pytest.mark.parametrize("name", WORDS)
def test_sentences_are_not_chained(name):
    pattern, most = WORDS[name]
    all_texts = [text for source in SOURCES.values() for text in texts(source)]
    words = sum(len(text.split()) for text in all_texts)
    assert sum(len(re.findall(pattern, text)) for text in all_texts) <= most * words / 1000


def test_a_constant_has_one_meaning():
    assert ambiguous(SOURCES) == {}


def test_what_is_looked_for_is_found():
    lines = "\n".join(f"    x{number} = {number}" for number in range(LONG + 1))
    assert solid(f'def f():\n    """Text.\n\n    More.\n    """\n{lines}\n') == ["f"]
    assert solid(f"def f():\n{lines}\n\n    return x0\n") == []
    assert bundled("a, b, c = 1, 2, 3\n") == [1]
    assert bundled("a, b = 1, 2\n") == []
    assert list(texts('"""One."""\nX = 1\n"""Two."""\n')) == ["One.", "Two."]

    sources = {Path("one.py"): "SIZE = 1\nT = 1\n", Path("two.py"): "SIZE: int = 2\nT = 2\n"}
    assert ambiguous(sources) == {"SIZE": ["one.py", "two.py"]}
    assert ambiguous({Path("one.py"): "SIZE = 1\n", Path("two.py"): "SIZE = 1\n"}) == {}


# -- the size of the package

MOST_CODE_LINES = 50_578


def code_lines(source: str) -> int:
    """Count lines without docstrings, comments and blank lines."""
    texts = {
        line
        for node in nodes(source)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(source.split("\n"), 1)
    return sum(
        1
        for number, line in lines
        if line.strip() and not line.strip().startswith("#") and number not in texts
    )


def test_the_package_pays_for_what_it_adds():
    assert code_lines('"""Text."""\n\n# why\nx = 1\ny = """\ntwo"""\n') == 3
    assert sum(map(code_lines, SOURCES.values())) <= MOST_CODE_LINES
