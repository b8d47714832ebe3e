"""Registries of objects that users choose by name.

A user's own code is named `module:object` or `file.py:object`.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class Deferred:
    """Object that is imported when it is chosen."""

    path: str
    """`module:object`"""
    requirement: str
    """Optional package that the module needs, as pip installs it; empty if it needs none."""


OBJECTS = ModuleType("lightrft_objects")
"""Module of the objects that were given to this process without a name.

Other processes cannot import it.
"""
sys.modules[OBJECTS.__name__] = OBJECTS


class Registry:
    """Table from names to objects of one kind, chosen by one command-line flag.

    rewards = Registry("reward", flag="--reward")

    @rewards.register("exact_match")
    def exact_match(samples, label, **columns): ...

    rewards["exact_match"]              # registered here
    rewards["my_package.rewards:mine"]  # any importable object
    rewards["folder/mine.py:mine"]      # an object in a file
    """

    def __init__(self, kind: str, *, flag: str, elsewhere: Mapping[str, str] | None = None):
        """Begin an empty table. `elsewhere`: names in other libraries -> names here, for hints."""
        self.kind = kind
        self.flag = flag
        self.elsewhere = elsewhere or {}
        self._objects: dict[str, Any] = {}

    def register(self, *names: str, **properties: Any) -> Callable[[Any], Any]:
        """Register an object under names; its attribute `properties` says what is known of it."""

        def add(target: Any) -> Any:
            if properties:
                target.properties = properties
            for name in names:
                assert name not in self._objects, f"{self.kind} {name!r} is registered twice"
                self._objects[name] = target
            return target

        return add

    def register_deferred(self, name: str, path: str, requirement: str = "") -> None:
        """Register `module:object` under a name.

        It is imported when it is chosen, and may need an optional package.
        """
        self.register(name)(Deferred(path, requirement))

    def names(self) -> list[str]:
        return sorted(self._objects)

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    def __getitem__(self, name: str) -> Any:
        if name in self._objects:
            value = self._objects[name]
            return self._imported(name, value) if isinstance(value, Deferred) else value
        if ":" in name:
            return self._import(name)

        hint = _near(self.elsewhere.get(name, name), self._objects) or "."
        if name.endswith(".py"):
            hint = f"; add the name of the function: {self.flag} {name}:function."
        raise ValueError(
            f"{self.flag} {name}: no {self.kind} of this name{hint} Choices:"
            f" {', '.join(self.names()) or 'none'}; for your own: {self.flag} module:object or {self.flag}"
            " file.py:object"
        )

    def _imported(self, name: str, deferred: Deferred) -> Any:
        module, _, attribute = deferred.path.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{self.flag} {name} needs {error.name}: pip install {deferred.requirement}"
            ) from error

    def module(self, source: str, name: str = "") -> Any:
        """Import a module, or a file whose name ends in .py.

        Raises ValueError, with `name`, if that is impossible.
        """
        if source.endswith(".py") and not Path(source).is_file():
            raise ValueError(f"{self.flag} {name or source}: no file {Path(source).resolve()}")

        try:
            with kept_alive():
                if source.endswith(".py"):
                    return _load_file(Path(source))
                return importlib.import_module(source)
        except Exception as error:
            flag = f"{self.flag} {name or source}"
            raise ValueError(
                f"{flag}: cannot import {source!r}: {type(error).__name__}: {error}"
            ) from error

    def _import(self, path: str) -> Any:
        source, _, attribute = path.rpartition(":")
        module = self.module(source, path)
        try:
            return getattr(module, attribute)
        except AttributeError as error:
            raise ValueError(
                f"{self.flag} {path}: {source!r} has no object {attribute!r}"
                f"{_near(attribute, [name for name in vars(module) if name[0] != '_'])}"
            ) from error


def _near(name: str, names: Iterable[str]) -> str:
    found = get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


class ProcessEnd(RuntimeError):
    """Raised where the user's code would end the process, as if the run had succeeded."""


@contextmanager
def kept_alive() -> Iterator[None]:
    """Let sys.exit() and os._exit() raise ProcessEnd in this thread.

    Forked children and other threads end as they like.
    """
    end = os._exit
    process = os.getpid()
    thread = threading.get_ident()

    def raise_instead(code: int) -> NoReturn:
        if os.getpid() != process or threading.get_ident() != thread:
            end(code)
        raise ProcessEnd(f"it calls os._exit({code!r})")

    os._exit = raise_instead
    try:
        yield
    except SystemExit as error:
        raise ProcessEnd(f"it calls sys.exit({error.code!r})") from error
    finally:
        os._exit = end


def all_kept_alive(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values from the user's code, and keep that code from ending the process."""
    values = iter(values)
    end = object()
    while True:
        with kept_alive():
            value = next(values, end)
        if value is end:
            return
        yield value


def _load_file(path: Path) -> Any:
    """Import a file by path under a unique module name.

    So two files called `reward.py` do not collide.
    """
    path = path.resolve()
    name = f"lightrft_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]

    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")

    module = importlib.util.module_from_spec(spec)
    # Dataclasses look the module up while it is executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise

    return module
