"""Check responses against a JSON schema with the library jsonschema."""

import json
import re
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry

from lightrft.core.samples import Sample
from lightrft.rewards.functions import reads

JSON_FENCE = "```json"
NO_REFERENCES: Registry = Registry()
"""Registry that fetches no schema from elsewhere."""


def _schema(value: Any) -> Any:
    """Return a schema that has been checked. Raise ValueError for one that is none."""
    try:
        schema = json.loads(value) if isinstance(value, str) else {} if value is None else value
        validator_for(schema).check_schema(schema)
    except (ValueError, RecursionError, SchemaError) as error:
        raise ValueError(
            f"the column schema is no JSON schema: {error!s:.200}: {value!r:.200}"
        ) from error
    return schema


@reads(schema=_schema)
def satisfies_schema(
    samples: list[Sample], schema: list[Any] | None = None, **_: Any
) -> list[float]:
    """Return 1 if the response is JSON that satisfies the schema, else 0.

    If the response has ```json blocks, only the last one counts. The column `schema` has a
    dictionary, a boolean, or JSON text; null accepts any JSON. Raises ValueError if it is not a
    schema.
    """
    schemas = schema or [None] * len(samples)
    candidates = [_candidate(sample.text) for sample in samples]
    return [float(_satisfies(*pair)) for pair in zip(candidates, schemas, strict=True)]


def _candidate(text: str) -> str:
    """Return the last ```json block, or the whole text without one.

    The block ends at the next line that begins with ```.
    """
    _, marker, rest = text.rpartition(JSON_FENCE)
    return re.split(r"^[ \t]*```", rest, maxsplit=1, flags=re.MULTILINE)[0] if marker else text


def _satisfies(text: str, schema: Any) -> bool:
    schema = _schema(schema)
    try:
        value = json.loads(text, parse_constant=_refuse)
        return validator_for(schema)(schema, registry=NO_REFERENCES).is_valid(value)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
