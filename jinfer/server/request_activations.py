"""Activations of a request: what its fields capture, steer and edit, and captured ones in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel

from jinfer.api.session import Session
from jinfer.engine.requests import RequestError
from jinfer.sampling.activation_edits import Edit, Steer
from jinfer.sampling.sampling_params import ACTIVATIONS
from jinfer.server.activation_arrays import read_array, write_array
from jinfer.server.http_errors import ApiError, as_api_error, invalid_request
from jinfer.server.schemas.activations import EditField, SteerField, Tokens
from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.server_settings import ServerSettings

OFF = "activations are not shown or changed over HTTP here; serve with --allow-inspection"


def check_inspection(body: BaseModel, settings: ServerSettings) -> None:
    """Raises `ApiError` if a request captures or edits activations, and the server allows none."""
    if settings.allow_inspection or not isinstance(body, SamplingFields):
        return
    for name in ACTIVATIONS:
        if getattr(body, name):
            raise ApiError(403, OFF, param=name, code="not_allowed")


def activation_params(body: SamplingFields, session: Session) -> dict[str, Any]:
    """The sampling parameters `capture`, `steer` and `edits` of a request. Raises `ApiError`."""
    found: dict[str, Any] = {}
    if body.capture:
        found["capture"] = body.capture
    try:
        if body.steer:
            fields = enumerate(body.steer)
            found["steer"] = [one for i, each in fields for one in _steers(each, i, session)]
        if body.edits:
            found["edits"] = [_edit(each, i) for i, each in enumerate(body.edits)]
    except RequestError as error:
        field = str(error).split(" ", 1)[0].rstrip(":")
        raise as_api_error(error, param=field if field in ACTIVATIONS else "steer") from error
    return found


def _steers(given: SteerField, number: int, session: Session) -> list[Steer]:
    field, tokens = f"steer.{number}", _tokens(given.tokens, f"steer.{number}.tokens")
    if given.steering is not None:
        if given.name is not None or given.vector is not None:
            raise invalid_request("steering stands in place of name and vector", field)
        return [*session.steering.find(given.steering, given.scale, tokens)]
    if given.name is None or given.vector is None:
        raise invalid_request("give name and vector, or steering", field)
    vector = read_array(given.vector, f"{field}.vector")
    return [Steer(given.name, vector, given.scale, tokens)]


def _edit(given: EditField, number: int) -> Edit:
    tokens = _tokens(given.tokens, f"edits.{number}.tokens")
    value = read_array(given.value, f"edits.{number}.value")
    return Edit(given.name, given.operation, value, tokens, given.head)


def _tokens(given: Tokens, field: str) -> Any:
    if isinstance(given, str):
        return given
    if len(given) != 2:
        raise invalid_request("a range of tokens is [start, stop]", field)
    return slice(*given)


def captured(values: Mapping[str, np.ndarray], body: SamplingFields) -> dict[str, Any]:
    """The captured activations of an answer, as a part of its choice; {} if none were asked for."""
    if not body.capture:
        return {}
    form = body.capture_format or "npy"
    return {"captured": {name: write_array(each, form) for name, each in values.items()}}
