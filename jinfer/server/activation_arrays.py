"""Arrays of activations in JSON: nested lists, or base64 of a .npy file."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any, Literal

import numpy as np

from jinfer.server.http_errors import invalid_request
from jinfer.server.schemas.activations import NpyArray, Numbers

_MAX_HEADER = 4096
_TYPES = ("<f2", "<f4", "<f8")


def read_array(given: Numbers, field: str) -> np.ndarray:
    """An array in float32. Raises `ApiError`.

    Args:
        field: where it stands in the request.
    """
    if isinstance(given, NpyArray):
        return _read_npy(given.npy, f"{field}.npy")
    try:
        found = np.array(given)
    except ValueError:
        raise invalid_request("its lists are not of one length", field) from None
    if found.dtype.kind not in "if" or not found.size:
        raise invalid_request("give numbers, in lists of one length", field)
    return found.astype(np.float32)


def _read_npy(text: str, field: str) -> np.ndarray:
    """The header is read, and the rest has to be as long as it says: nothing else is allocated."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_request("it is no base64", field) from None
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, turned, dtype = read(file, max_header_size=_MAX_HEADER)
    except (ValueError, KeyError, EOFError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise invalid_request("it is no .npy file", field) from None
    if dtype.str not in _TYPES or turned:
        what = "Fortran order" if turned else dtype.str
        raise invalid_request(f"the .npy file has {what}; write C-ordered float32", field)
    rest, count = data[file.tell() :], 1
    for length in shape:
        count *= length
    if len(rest) != count * dtype.itemsize or not count:
        raise invalid_request("the .npy file has not the length that its shape says", field)
    return np.frombuffer(rest, dtype).reshape(shape).astype(np.float32)


def write_array(values: np.ndarray, form: Literal["npy", "list"]) -> dict[str, Any]:
    """A captured activation in JSON; see `CapturedArray`."""
    shape = list(values.shape)
    if form == "list":
        return {"shape": shape, "values": values.tolist()}
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(values, np.float32), allow_pickle=False)
    return {"shape": shape, "npy": base64.b64encode(file.getvalue()).decode()}
