"""Steering vectors over HTTP: routes that list, keep and forget them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinfer.api.activation_checks import check_steering
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.requests import RequestError
from jinfer.sampling.activation_edits import Steer
from jinfer.server.activation_arrays import read_array
from jinfer.server.http_errors import ApiError, as_api_error, invalid_request
from jinfer.server.http_responses import HttpResponse
from jinfer.server.request_activations import OFF
from jinfer.server.schemas.activations import KeepSteering
from jinfer.server.served_model import ServedModel
from jinfer.server.service import RequestContext
from jinfer.weights.control_vectors import read_control_vector


async def list_steering(call: RequestContext[Any]) -> HttpResponse:
    """The steering vectors of a model."""
    _check_allowed(call)
    async with call.service.models.use(call.request.query_params.get("model")) as hosted:
        kept = hosted.session.steering.kept
    return HttpResponse([_state(name, vectors) for name, vectors in kept.items()])


async def keep_steering(call: RequestContext[KeepSteering]) -> HttpResponse:
    """Keeps steering vectors under a name, in place of those it had."""
    _check_allowed(call)
    body = call.body
    if (body.path is None) == (body.vectors is None):
        raise invalid_request("give path or vectors", "path")
    async with call.service.models.use(body.model) as hosted:
        vectors = await call.service.in_thread(_vectors, body, hosted)
        steering = hosted.session.steering
        steering.max_bytes = call.service.settings.inspection_bytes
        try:
            steering.keep(body.name, vectors)
        except RequestError as error:
            raise as_api_error(error, param="name") from error
    return HttpResponse(_state(body.name, vectors))


async def forget_steering(call: RequestContext[Any]) -> HttpResponse:
    """Forgets the steering vectors of a name."""
    _check_allowed(call)
    name = call.request.path_params["name"]
    async with call.service.models.use(call.request.query_params.get("model")) as hosted:
        kept = hosted.session.steering.kept.get(name, ())
        try:
            hosted.session.steering.forget(name)
        except RequestError as error:
            raise ApiError(404, str(error), param="name", code="steering_not_found") from error
    return HttpResponse(_state(name, kept))


def _vectors(body: KeepSteering, hosted: ServedModel) -> list[Steer]:
    """The vectors of a request, which fit the model. Raises `ApiError`."""
    try:
        vectors = [
            Steer(one.name, read_array(one.vector, f"vectors.{i}.vector"), one.scale)
            for i, one in enumerate(body.vectors or ())
        ]
        if body.path is not None:
            vectors = read_control_vector(Path(body.path))
        check_steering(hosted.session.engine, vectors)
    except USER_ERRORS as error:
        field = "path" if body.path is not None else "vectors"
        raise as_api_error(error, param=field) from error
    return vectors


def _state(name: str, vectors: Any) -> dict[str, Any]:
    return {"name": name, "activations": [one.name for one in vectors]}


def _check_allowed(call: RequestContext[Any]) -> None:
    if not call.service.settings.allow_inspection:
        raise ApiError(403, OFF, code="not_allowed")
