"""Activations of a request: the fields `capture`, `steer` and `edits`, and arrays in JSON."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from jinfer.api.session import Session
from jinfer.engine.requests import RequestError
from jinfer.sampling.activation_edits import Edit, Steer
from jinfer.sampling.sampling_params import ACTIVATIONS
from jinfer.server.core.sampling_fields import (
    EditField,
    NpyArray,
    Numbers,
    SamplingFields,
    SteerField,
    Tokens,
)
from jinfer.server.http.http_errors import ApiError, as_api_error, invalid_request
from jinfer.server.http.server_settings import ServerSettings

_MAX_HEADER = 4096
_TYPES = ("<f2", "<f4", "<f8")


def read_array(value: Numbers, field: str) -> np.ndarray:
    """Read an array as float32. Raises `ApiError`.

    Args:
        field: path of the array in the request.
    """
    if isinstance(value, NpyArray):
        return _read_npy(value.npy, f"{field}.npy")
    try:
        array = np.array(value)
    except ValueError:
        raise invalid_request("nested lists must have the same length", field) from None
    if array.dtype.kind not in "if" or not array.size:
        raise invalid_request("give numbers, in nested lists of the same length", field)
    return array.astype(np.float32)


def _read_npy(text: str, field: str) -> np.ndarray:
    """Read a .npy file whose length matches its header: nothing more is allocated."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_request("it is not base64", field) from None
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, turned, dtype = read(file, max_header_size=_MAX_HEADER)
    except (ValueError, KeyError, EOFError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise invalid_request("it is not a .npy file", field) from None
    if dtype.str not in _TYPES or turned:
        what = "Fortran order" if turned else dtype.str
        raise invalid_request(f"the .npy file has {what}; write C-ordered float32", field)
    rest, count = data[file.tell() :], 1
    for length in shape:
        count *= length
    if len(rest) != count * dtype.itemsize or not count:
        raise invalid_request("the length of the .npy file does not match its shape", field)
    return np.frombuffer(rest, dtype).reshape(shape).astype(np.float32)


def write_array(values: np.ndarray, form: Literal["npy", "list"]) -> dict[str, Any]:
    """Convert a captured activation to JSON; see `CapturedArray`."""
    shape = list(values.shape)
    if form == "list":
        return {"shape": shape, "values": values.tolist()}
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(values, np.float32), allow_pickle=False)
    return {"shape": shape, "npy": base64.b64encode(file.getvalue()).decode()}


OFF = "the server does not allow inspection of activations; serve with --allow-inspection"


def check_inspection(body: BaseModel, settings: ServerSettings) -> None:
    """Raise `ApiError` if a request inspects activations and the server does not allow it."""
    if settings.allow_inspection or not isinstance(body, SamplingFields):
        return
    for name in ACTIVATIONS:
        if getattr(body, name):
            raise ApiError(403, OFF, param=name, code="not_allowed")


def activation_params(body: SamplingFields, session: Session) -> dict[str, Any]:
    """Read the parameters `capture`, `steer` and `edits`. Raises `ApiError`."""
    params: dict[str, Any] = {}
    if body.capture:
        params["capture"] = body.capture
    try:
        if body.steer:
            fields = enumerate(body.steer)
            params["steer"] = [vector for i, item in fields for vector in _steers(item, i, session)]
        if body.edits:
            params["edits"] = [_edit(item, i) for i, item in enumerate(body.edits)]
    except RequestError as error:
        field = str(error).split(" ", 1)[0].rstrip(":")
        raise as_api_error(error, param=field if field in ACTIVATIONS else "steer") from error
    return params


def _steers(steer: SteerField, number: int, session: Session) -> list[Steer]:
    field, tokens = f"steer.{number}", _tokens(steer.tokens, f"steer.{number}.tokens")
    if steer.steering is not None:
        if steer.name is not None or steer.vector is not None:
            raise invalid_request("give name and vector, or steering, not both", field)
        return [*session.steering.find(steer.steering, steer.scale, tokens)]
    if steer.name is None or steer.vector is None:
        raise invalid_request("give name and vector, or steering", field)
    vector = read_array(steer.vector, f"{field}.vector")
    return [Steer(steer.name, vector, steer.scale, tokens)]


def _edit(edit: EditField, number: int) -> Edit:
    tokens = _tokens(edit.tokens, f"edits.{number}.tokens")
    value = read_array(edit.value, f"edits.{number}.value")
    return Edit(edit.name, edit.operation, value, tokens, edit.head)


def _tokens(tokens: Tokens, field: str) -> Any:
    if isinstance(tokens, str):
        return tokens
    if len(tokens) != 2:
        raise invalid_request("a range of tokens is [start, stop]", field)
    return slice(*tokens)


def captured(values: Mapping[str, np.ndarray], body: SamplingFields) -> dict[str, Any]:
    """Return the captured activations of an answer, for its choice; {} without `capture`."""
    if not body.capture:
        return {}
    form = body.capture_format or "npy"
    return {"captured": {name: write_array(array, form) for name, array in values.items()}}
