"""Send the requests of a recording to a server again, and say where replies differ in form.

lightrft agents replay agent.sqlite --base_url http://localhost:8000/v1

--agent_record writes the recording. The server is for example `lightrft serve`, or another program
that an agent works with. Types, fields, reasons for the end of a turn, and the order of the
events of streams are compared, and no text. A turn may be sampled otherwise than it was: any form
is right that the recording has for a request with the same fields. MODEL_API_KEY is the key. Exit
code 1 means that a reply differs.
"""

import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from lightrft.app.cli import command_parser, user_errors
from lightrft.config.errors import ConfigError
from lightrft.config.references import MODEL_KEY

Form = tuple[int, tuple[str, ...], frozenset[str]]
"""Status of a reply, types of its events in their order, and the forms of all fields."""
WORDS = ("type", "object", "role", "status", "stop_reason", "finish_reason", "code")
"""Fields whose words are compared. Of other fields the type is."""
UNCOMPARED = ("input", "arguments", "tools", "schema")
"""Fields whose content the model or the client has written."""
RECORDED_EXCHANGES = """
SELECT draw, prompt_group, slot, number, path, request, status, reply FROM exchanges ORDER BY rowid
"""
REPLY_SECONDS = 600.0
"""Longest time of a reply."""


def main(argv: list[str] | None = None) -> None:
    options = command_parser("agents", __doc__).parse_args(argv)

    with user_errors(ConfigError):
        exchanges = [each for file in options.files for each in read(file)]
        same = []
        for name, problems in islice(replayed(exchanges, options.base_url), options.limit):
            same.append(not problems)
            sys.stdout.write("".join(f"{name}: {problem}\n" for problem in problems))

    sys.stdout.write(f"{len(same)} requests; {sum(same)} replies have a recorded form\n")
    sys.exit(not all(same))


def read(file: str) -> list[tuple[Any, ...]]:
    """Return the exchanges of a file. Raises ConfigError if it is no recording."""
    try:
        uri = Path(file).expanduser().resolve().as_uri()
        with closing(sqlite3.connect(f"{uri}?mode=ro", uri=True)) as connection:
            return connection.execute(RECORDED_EXCHANGES).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{file} is no recording of --agent_record: {error}") from error


def replayed(exchanges: list[tuple[Any, ...]], base_url: str) -> Iterator[tuple[str, list[str]]]:
    """Send requests, and yield the name of each with the differences of its reply.

    Raises ConfigError if the server does not answer.
    """
    import httpx

    key = os.environ.get(MODEL_KEY, "none")
    headers = {"authorization": f"Bearer {key}", "x-api-key": key}
    headers |= {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    known = {(kind_of(*each[4:6]), form_of(each[6], parts(each[7]))) for each in exchanges}
    new_ids: dict[str, dict[str, str]] = {}
    root = base_url.removesuffix("/").removesuffix("/v1")
    with httpx.Client(base_url=root, timeout=REPLY_SECONDS) as http:
        for draw, group, slot, number, path, sent, status, reply in exchanges:
            request = sent
            headers["x-session-id"] = f"{draw}-{group}-{slot}"
            ids = new_ids.setdefault(headers["x-session-id"], {})
            for recorded, new in ids.items():  # previous_response_id
                request = request.replace(f'"{recorded}"', f'"{new}"')
            try:
                answer = http.post(path, content=request.encode(), headers=headers)
            except httpx.HTTPError as error:
                raise ConfigError(f"--base_url {base_url}: {error!r}") from error

            before, after = parts(reply), parts(answer.text)
            ids |= dict(zip(_responses(before), _responses(after), strict=False))
            name = f"group {group}, episode {slot}, request {number}, {path}"
            was, now = form_of(status, before), form_of(answer.status_code, after)
            is_known = (kind_of(path, sent), now) in known
            yield name, [] if is_known else differences(was, now, after)


def _responses(found: list[Any]) -> list[str]:
    """Return the id of a response of OpenAI's Responses, which later requests refer to."""
    bodies = [each.get("response", each) for each in found[-1:] if isinstance(each, dict)]
    return [body["id"] for body in bodies if body.get("object") == "response"]


def parts(reply: str) -> list[Any]:
    """Return the body of a reply, or the events of a stream."""
    lines = [line.removeprefix("data:") for line in reply.splitlines() if line.startswith("data:")]
    texts = lines or [reply]
    return [json.loads(text) if text.lstrip().startswith("{") else text.strip() for text in texts]


def kind_of(path: str, request: str) -> tuple[str | bool, ...]:
    """Return the route of a request, its fields, and whether it asks for a stream."""
    try:
        body = json.loads(request)
        return path, bool(body.get("stream")), *sorted(body)
    except (ValueError, AttributeError):
        return path, False


def form_of(status: int, found: list[Any]) -> Form:
    """Return the status of a reply, the order of its parts, and the forms of all fields."""
    order = tuple(name for name, _ in groupby(map(_name, found)))
    return status, order, frozenset(form for part in found for form in _forms(part, _name(part)))


def differences(before: Form, after: Form, found: list[Any]) -> list[str]:
    """Return a sentence for each difference of the form after, of the parts `found`."""
    (status, events, was), (new_status, new_events, now) = before, after
    if status != new_status:
        return [f"the status was {status} and is {new_status}: {found[0]!r:.300}"]

    order = [f"the events were {[*events]} and are {[*new_events]}"] if events != new_events else []
    lost = [f"{form} is missing" for form in sorted(was - now)]
    return order + lost + [f"{form} is new" for form in sorted(now - was)]


def _name(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part.get("type") or part.get("object") or "error")


def _forms(value: Any, path: str) -> Iterator[str]:
    """Yield the type, or the word, of each field of a part of a reply."""
    field = path.rpartition(".")[2]
    if isinstance(value, dict) and field not in UNCOMPARED:
        for name, inner in value.items():
            yield from _forms(inner, f"{path}.{name}")
    elif isinstance(value, list) and field not in UNCOMPARED:
        for inner in value:
            yield from _forms(inner, f"{path}[]")
    elif isinstance(value, str) and field in WORDS:
        yield f"{path} {value!r}"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        yield f"{path} ({'number' if number else 'null' if value is None else type(value).__name__})"
