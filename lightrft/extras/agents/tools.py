"""Tools: typed functions with docstrings that the model calls; it reads the results."""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from loguru import logger

from lightrft.extras.agents.messages import Message, ToolCall


@dataclass(frozen=True)
class DescribedTool:
    """A tool that has a JSON schema already, instead of types and a docstring."""

    schema: dict[str, Any]
    """Schema as chat templates take it."""
    function: Callable[..., Awaitable[Any]]

    async def __call__(self, /, **arguments: Any) -> Any:
        return await self.function(**arguments)


Tools = Mapping[str, Callable[..., Any]]
"""Functions by name, sync or async."""
ENVIRONMENT_METHODS = ("reset", "step", "get_reward", "close")
"""Methods of an environment that are no tools."""
RUNNING: set[asyncio.Future[Any]] = set()
"""Calls of sync functions that have not returned, perhaps after the time limit."""
MAX_RESULT_CHARACTERS = 20_000
"""Characters of a result that the model reads; the middle of a longer one is left out."""


def tools_of(owner: Any, name: str = "") -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment or a module, or a function that is chosen by its name.

    They are the public methods of an environment, and the public functions that a module defines
    itself. Raises ValueError for an object that is meant as a tool and is no function.
    """
    if is_function(owner):
        return {owner.__name__: owner}
    if name:
        _check_tool(name, owner, type(owner).__module__)

    if isinstance(owner, ModuleType):
        public = {name: one for name, one in vars(owner).items() if not name.startswith("_")}
        for key, one in public.items():
            _check_tool(key, one, owner.__name__)
        module = owner.__name__
        return {
            key: one for key, one in public.items() if is_function(one) and one.__module__ == module
        }
    methods = inspect.getmembers(owner, callable)
    return {
        name: one
        for name, one in methods
        if not name.startswith("_") and name not in ENVIRONMENT_METHODS
    }


def is_function(one: Any) -> bool:
    """Return True for a function or a bound method, also with a decorator such as cache."""
    return inspect.isroutine(inspect.unwrap(one))


def _check_tool(name: str, one: Any, module: str) -> None:
    """Raise ValueError for an object that is called like a function, and has no types to describe.

    Other libraries make such tools of functions. Objects of other classes are left out, as a warning
    says.
    """
    kind = type(one)
    of_other_library = kind.__name__.endswith("Tool") or isinstance(one, partial)
    callable_object = callable(one) and not isinstance(one, type) and not is_function(one)
    of_module = callable_object and kind.__module__ == module
    problem = (
        f"{name} is an object of the class {kind.__name__}, and a tool is a function: define one that"
        f" calls it, with types and a docstring, and rename it to _{name}"
    )
    if of_other_library or of_module:
        raise ValueError(problem)
    describes_types = kind.__module__ in ("types", "typing", "typing_extensions")
    if callable_object and not describes_types:
        logger.warning(f"--tools leaves out an object that is called like a function: {problem}")


def _check_call(name: str, tool: Callable[..., Any]) -> None:
    """Raise ValueError for a function whose arguments have no names, or that returns no value."""
    for argument in inspect.signature(tool).parameters.values():
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise ValueError(
                f"tool {name}: a model names each argument, and {argument} has no name"
            )
    function = inspect.unwrap(tool)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"tool {name} is a generator: let it return a list of what it yields")


def schemas(tools: Tools) -> list[dict[str, Any]]:
    """Return the JSON schema of each tool as chat templates take it.

    It comes from types and docstring, unless the tool is described already. Raises ValueError for a
    tool without types, or without a description of itself or of an argument.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    json_schemas = []
    for name, tool in tools.items():
        if isinstance(tool, DescribedTool):
            json_schemas.append(tool.schema)
            continue
        _check_call(name, tool)
        try:
            schema = get_json_schema(tool)
        except Exception as error:  # transformers raises several classes
            raise ValueError(
                f"tool {name}: {error}. A tool has a type for each argument, and a docstring that"
                " describes it and, under `Args:`, each argument"
            ) from error
        schema["function"]["name"] = name  # it may be called otherwise where it is defined
        json_schemas.append(schema)
    return json_schemas


async def call_function(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, sync or async.

    A sync one runs in a separate thread, so no later call has to wait for it.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await _in_thread(partial(function, *args, **kwargs))
    return await result if inspect.isawaitable(result) else result


async def _in_thread(function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    RUNNING.add(future)

    def finish(result: Any, error: BaseException | None) -> None:
        if not future.done():  # it is, if the caller does not wait any longer
            future.set_result(result) if error is None else future.set_exception(error)

    def call() -> None:
        try:
            result = function()
            error = None
        # A future does not take the first one, and the others would end the process.
        except (StopIteration, SystemExit, KeyboardInterrupt) as raised:
            result = None
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
            error.__cause__ = raised
        except BaseException as raised:
            result = None
            error = raised

        RUNNING.discard(future)
        loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=call, daemon=True).start()
    return await future


class CountCall(Protocol):
    """Function that counts a call that began at this time.perf_counter()."""

    def __call__(self, began: float, *, failed: bool) -> None: ...


async def answers(
    tools: Tools, calls: list[ToolCall], count: CountCall, seconds: float
) -> list[Message]:
    """Call tools at the same time, each for at most `seconds`; return a message for each call.

    The content of the message of a failed call is the error.
    """
    return list(await asyncio.gather(*(_answer(tools, call, count, seconds) for call in calls)))


async def _answer(tools: Tools, call: ToolCall, count: CountCall, seconds: float) -> Message:
    began = time.perf_counter()
    failed = True
    try:
        if call.problem:
            content = f"Error: {call.problem}"
        elif call.name not in tools:
            content = (
                f"Error: there is no tool {call.name!r}, only {', '.join(sorted(tools)) or 'none'}"
            )
        else:
            # Wrong arguments fail here, with a message about the call and not about the tool's
            # inside.
            inspect.signature(tools[call.name]).bind(**call.arguments)
            content = text_of(
                await asyncio.wait_for(call_function(tools[call.name], **call.arguments), seconds)
            )
            failed = False
    except TimeoutError:
        content = f"Error: {call.name} took more than {seconds:g} s"
    except Exception as error:
        content = f"Error: {type(error).__name__}: {error}"[:MAX_RESULT_CHARACTERS]

    count(began, failed=failed)
    # Names of files, and the text of others, may have what no tokenizer reads.
    readable = content.encode(errors="replace").decode()
    return {"role": "tool", "name": call.name, "content": readable}


def text_of(result: Any) -> str:
    """Return what the model reads of a result.

    A text stays as it is; other values become JSON where that is possible.
    """
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            result = str(result)

    if len(result) > MAX_RESULT_CHARACTERS:
        half = MAX_RESULT_CHARACTERS // 2
        result = (
            f"{result[:half]}\n... {len(result) - MAX_RESULT_CHARACTERS} characters are left out"
            f" ...\n{result[-half:]}"
        )

    return result
