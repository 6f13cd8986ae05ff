"""Data frames: results as tables of pandas, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.sampling.request_errors import RequestError


def import_pandas() -> Any:
    """The module. Raises `RequestError` where it is not installed."""
    try:
        import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise RequestError("to_pandas needs pandas: pip install pandas") from None
    return pandas


def data_frame(columns: Mapping[str, Any]) -> Any:
    """A pandas.DataFrame of columns by name. Raises `RequestError` without pandas."""
    return import_pandas().DataFrame(dict(columns))
