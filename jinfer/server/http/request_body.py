"""Request body: read with size limits, parsed and validated against its schema (pydantic)."""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from jinfer.modelspec.spec_errors import nearest_hint
from jinfer.server.http.client_shares import Shares, client_address
from jinfer.server.http.http_errors import ApiError, invalid_request
from jinfer.server.http.schema_base import Ignored, ReplayedModel
from jinfer.server.http.server_settings import ServerSettings

_SHOWN = 200  # characters of client input quoted in an error
# Values in a body. Parsing holds the GIL, so larger bodies would block all other threads.
MAX_VALUES = 1 << 18
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


@dataclass(eq=False)
class UnfinishedBody:
    """A partly received body, in memory.

    Attributes:
        address: the client's, from `client_address`.
        deadline: time limit of the body.
        displaced: whether other requests needed the memory.
    """

    address: str
    deadline: asyncio.Timeout
    displaced: bool = False

    def give_way(self) -> None:
        """End its request."""
        self.displaced = True
        if not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())


async def read_body(
    request: Request, settings: ServerSettings, bodies: Shares[UnfinishedBody]
) -> bytes:
    """Read the body of a request.

    Args:
        bodies: shares of the bodies that are being read.

    Raises:
        ApiError: the body is too long, compressed, or late.
        ClientDisconnect: the client has disconnected.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise _encoded(encoding)
    too_long = ApiError(
        413,
        f"the body is longer than the {settings.max_body} bytes that are allowed",
        code="body_too_large",
        headers={"connection": "close"},
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > settings.max_body:
        raise too_long
    data = bytearray()
    unfinished = UnfinishedBody(
        client_address(request.scope.get("client")), asyncio.timeout(settings.body_seconds)
    )
    try:
        async with unfinished.deadline:
            async for part in request.stream():
                data += part
                if len(data) > settings.max_body:
                    raise too_long
                bodies.take(unfinished, len(part))
    except TimeoutError:
        late = f"within {settings.body_seconds:g} seconds"
        why = "before other requests needed its memory" if unfinished.displaced else late
        message = f"the body did not arrive {why}"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    finally:
        bodies.release(unfinished)
    for begin, name in _COMPRESSED.items():  # sent without the header
        if data.startswith(begin):
            raise _encoded(name)
    return bytes(data.removeprefix(BOM_UTF8))


def _encoded(name: str) -> ApiError:
    return ApiError(
        415,
        f"the server does not read the encoding {name[:40]!r}; send it without Content-Encoding",
        code="unsupported_encoding",
        headers={"accept-encoding": "identity", "connection": "close"},
    )


def parse_body[B: BaseModel](data: bytes, model: type[B]) -> B:
    """Parse a body. Raises `ApiError` that names the first wrong field."""
    if data.count(b",") > MAX_VALUES:
        _check_values(data)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid_request(
            f"the body is not JSON: {error}"[:_SHOWN], code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise invalid_request("the body must be a JSON object", code="invalid_json")
    if model.model_config.get("extra") == "forbid":
        # A single error is enough; collecting all of them would take long.
        names = _names(model)
        sent = (name for name, item in value.items() if item is not None)
        if (unknown := next((name for name in sent if name not in names), None)) is not None:
            raise _unknown(unknown, model)
    return validated(value, model)


def _check_values(data: bytes) -> None:
    """Count the values of a body by its commas outside strings."""
    count = end = 0
    while count <= MAX_VALUES and (begin := data.find(b'"', end)) >= 0:
        count += data.count(b",", end, begin)
        text = _TEXT.match(data, begin)
        # An unterminated string is left to the JSON parser's error.
        end = len(data) if text is None else text.end()
    if count + data.count(b",", end) > MAX_VALUES:
        raise ApiError(
            413,
            f"the body has more than the {MAX_VALUES} values that are allowed",
            code="body_too_large",
        )


def validated[B: BaseModel](value: dict[str, Any], model: type[B]) -> B:
    """Validate values. Raises `ApiError` that names the first wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_error(error, value, model) from None


def _first_error(error: ValidationError, value: Any, model: type[BaseModel]) -> ApiError:
    """Create the error for the first wrong field, over all alternatives of a union."""
    found: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        place = _place(detail["loc"], value, detail["type"] in ("missing", "extra_forbidden"))
        kinds.setdefault(place, detail["type"])
        texts = found.setdefault(place, [])
        if detail["msg"] not in texts:
            texts.append(detail["msg"])
    # In a union, the deepest error is relevant: the others are alternatives that the client did not
    # mean.
    place = next(iter(found))
    deeper = [other for other in found if other.startswith(f"{place}.")]
    place = deeper[0] if deeper else place
    if kinds[place] == "extra_forbidden":
        return _unknown(place, model)
    text = " or ".join(found[place])
    return invalid_request(
        f"{place[:_SHOWN]}: {text[: 2 * _SHOWN]}", place[:_SHOWN], "invalid_type"
    )


def _unknown(path: str, model: type[BaseModel]) -> ApiError:
    hint = "" if "." in path else f"; {nearest_hint(path, _names(model))}"
    return invalid_request(f"{path[:_SHOWN]}: unknown field{hint}", path[:_SHOWN], "unknown_field")


@cache
def _names(model: type[BaseModel]) -> Mapping[str, None]:
    return {field.alias or name: None for name, field in model.model_fields.items()}


def _place(path: tuple[int | str, ...], value: Any, named: bool) -> str:
    """Return the path to a field, without steps that name an alternative of a union.

    Args:
        named: whether the last step is a field that is missing or forbidden.
    """
    names: list[str] = []
    for number, step in enumerate(path, 1):
        listed = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if listed or (isinstance(value, dict) and step in value):
            value = value[step]
        elif not named or number < len(path):
            continue
        names.append(str(step))
    return ".".join(names) or str(path[0] if path else "body")


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
