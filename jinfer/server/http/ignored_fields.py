"""Ignored fields: request fields without effect, reported in a header and the log, or rejected.

Clients send fields that other servers read (verbosity, whether to store the answer). Rejecting each
of them would break most clients; dropping them silently would mislead. So schemas mark them with
`Ignored`, responses list them in the header `HEADER`, the log in `ignored`, and with `--strict`
they are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from jinfer.server.http.http_errors import invalid_request
from jinfer.server.http.schema_base import Ignored, ReplayedModel

HEADER = "x-jinfer-ignored"
MAX_NAMED = 32  # fields of one request
_MAX_NAME = 128  # characters of a name in the header
_SIGN = re.compile(r"[^A-Za-z0-9_.:/$-]")

# Records a field without effect and the reason. Raises `ApiError` if the server is strict.
type Ignore = Callable[[str, str], None]


def ignored_fields(body: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a request without effect, according to its schemas, and the reasons.

    Raises:
        ApiError: an unknown field in a message that is not an earlier answer.
    """
    marks = _marks(type(body))
    for name in type(body).model_fields:
        if name not in body.model_fields_set:
            continue
        value, path = getattr(body, name), f"{prefix}{name}"
        mark = marks.get(name)
        if mark is not None and value is not None and value not in mark.allowed:
            yield path, mark.reason
        if isinstance(value, BaseModel):
            yield from ignored_fields(value, f"{path}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for number, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from ignored_fields(item, f"{path}.{number}.")
    if isinstance(body, ReplayedModel):
        for name, value in (body.model_extra or {}).items():
            if not body.was_answer:
                path = f"{prefix}{name[:_MAX_NAME]}"
                raise invalid_request(f"{path}: unknown field", path, "unknown_field")
            if value not in (None, "", [], {}):
                yield f"{prefix}{name}", "it has no effect here"


@cache
def _marks(model: type[BaseModel]) -> dict[str, Ignored]:
    fields = model.model_fields.items()
    marks = ((name, mark) for name, field in fields for mark in field.metadata)
    return {name: mark for name, mark in marks if isinstance(mark, Ignored)}


def ignored_header(names: Sequence[str]) -> str:
    """Return the header's value; clients may choose parts of the names."""
    return ", ".join(_SIGN.sub("?", name[:_MAX_NAME]) for name in names)


def note_ignored(notes: dict[str, Any], name: str) -> None:
    """Record a field's name for the header and the log."""
    names: list[str] = notes.setdefault("ignored", [])
    if name not in names and len(names) < MAX_NAMED:
        names.append(name)
