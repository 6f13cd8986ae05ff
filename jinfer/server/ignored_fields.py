"""What a request asks that changes nothing here: told in a header and in the log, or refused.

Clients send what another service reads: how much a model should say, whether an answer is to be
kept. A service that refuses each such field answers few of them; one that drops them without a word
is no better. So the schemas mark them (`Ignored`), the answer names them in `HEADER`, and the log
in `ignored`; with `--strict` they are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from jinfer.server.http_errors import invalid
from jinfer.server.schemas.schema_base import Ignored, Replayed

HEADER = "x-jinfer-ignored"
MOST_NAMED = 32  # fields of one request
_MOST_LETTERS = 128  # of a name in the header
_SIGN = re.compile(r"[^A-Za-z0-9_.:/$-]")

# Tells of a field, and why it changes nothing. Raises `ApiError` where the service is strict.
type Ignore = Callable[[str, str], None]


def ignored_fields(body: BaseModel, place: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a request that change nothing, by their schemas, and why.

    Raises:
        ApiError: a field that is not known, where a message is no earlier answer.
    """
    marks = _marks(type(body))
    for name in type(body).model_fields:
        if name not in body.model_fields_set:
            continue
        value, path = getattr(body, name), f"{place}{name}"
        mark = marks.get(name)
        if mark is not None and value is not None and value not in mark.but:
            yield path, mark.why
        if isinstance(value, BaseModel):
            yield from ignored_fields(value, f"{path}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for number, one in enumerate(value):
                if isinstance(one, BaseModel):
                    yield from ignored_fields(one, f"{path}.{number}.")
    if isinstance(body, Replayed):
        for name, value in (body.model_extra or {}).items():
            if not body.was_answer:
                path = f"{place}{name[:_MOST_LETTERS]}"
                raise invalid(f"{path}: unknown field", path, "unknown_field")
            if value not in (None, "", [], {}):
                yield f"{place}{name}", "nothing here reads it"


@cache
def _marks(model: type[BaseModel]) -> dict[str, Ignored]:
    found: dict[str, Ignored] = {}
    for name, field in model.model_fields.items():
        for one in field.metadata:
            if isinstance(one, Ignored):
                found[name] = one
    return found


def header(names: Sequence[str]) -> str:
    """The header's value: names, of which a client may have chosen parts."""
    return ", ".join(_SIGN.sub("?", name[:_MOST_LETTERS]) for name in names)


def note(notes: dict[str, Any], name: str) -> None:
    """Keeps a field's name for the header and the log."""
    names: list[str] = notes.setdefault("ignored", [])
    if name not in names and len(names) < MOST_NAMED:
        names.append(name)
