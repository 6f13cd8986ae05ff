"""Steering: routes that list, store and delete steering vectors by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, RootModel

from jinfer.api.activation_checks import check_steering
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.requests import RequestError
from jinfer.loader.adapters.control_vectors import read_control_vector
from jinfer.sampling.activation_edits import Steer
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.request_activations import OFF, read_array
from jinfer.server.core.sampling_fields import Numbers
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import ApiError, as_api_error, invalid_request
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import RequestModel, ResponseModel
from jinfer.server.models.served_model import ServedModel

routes = Routes(tag="OpenAI")


class VectorField(RequestModel):
    """A steering vector at one activation."""

    name: str
    vector: Numbers
    scale: float = Field(1.0, allow_inf_nan=False)


class KeepSteering(RequestModel):
    """A request to store steering vectors under a name."""

    name: str = Field(min_length=1, max_length=200)
    path: str | None = Field(None, description="a control vector (GGUF) on the server")
    vectors: list[VectorField] | None = Field(None, description="alternative to path")
    model: str | None = Field(None, description="name of the model; default: the first")


class SteeringState(ResponseModel):
    """Steering vectors stored under a name."""

    name: str
    activations: list[str]


class SteeringStates(RootModel[list[SteeringState]]):
    """The stored steering vectors."""


@routes.add("GET /v1/steering", SteeringStates)
async def list_steering(request: RequestContext[Any]) -> HttpResponse:
    """List the steering vectors of a model."""
    _check_allowed(request)
    async with request.service.models.use(request.http.query_params.get("model")) as model:
        kept = model.session.steering.kept
    return HttpResponse([_state(name, vectors) for name, vectors in kept.items()])


@routes.add("POST /v1/steering", SteeringState)
async def keep_steering(request: RequestContext[KeepSteering]) -> HttpResponse:
    """Store steering vectors under a name."""
    _check_allowed(request)
    body = request.body
    if (body.path is None) == (body.vectors is None):
        raise invalid_request("give path or vectors", "path")
    async with request.service.models.use(body.model) as model:
        vectors = await request.service.in_thread(_vectors, body, model)
        steering = model.session.steering
        steering.max_bytes = request.service.settings.inspection_bytes
        try:
            steering.keep(body.name, vectors)
        except RequestError as error:
            raise as_api_error(error, param="name") from error
    return HttpResponse(_state(body.name, vectors))


@routes.add("DELETE /v1/steering/{name:path}", SteeringState)
async def forget_steering(request: RequestContext[Any]) -> HttpResponse:
    """Delete steering vectors."""
    _check_allowed(request)
    name = request.http.path_params["name"]
    async with request.service.models.use(request.http.query_params.get("model")) as model:
        kept = model.session.steering.kept.get(name, ())
        try:
            model.session.steering.forget(name)
        except RequestError as error:
            raise ApiError(404, str(error), param="name", code="steering_not_found") from error
    return HttpResponse(_state(name, kept))


def _vectors(body: KeepSteering, model: ServedModel) -> list[Steer]:
    """Read the vectors of a request, and check them against the model. Raises `ApiError`."""
    try:
        vectors = [
            Steer(vector.name, read_array(vector.vector, f"vectors.{i}.vector"), vector.scale)
            for i, vector in enumerate(body.vectors or ())
        ]
        if body.path is not None:
            vectors = read_control_vector(Path(body.path))
        check_steering(model.session.engine, vectors)
    except USER_ERRORS as error:
        field = "path" if body.path is not None else "vectors"
        raise as_api_error(error, param=field) from error
    return vectors


def _state(name: str, vectors: Any) -> dict[str, Any]:
    return {"name": name, "activations": [vector.name for vector in vectors]}


def _check_allowed(request: RequestContext[Any]) -> None:
    if not request.service.settings.allow_inspection:
        raise ApiError(403, OFF, code="not_allowed")
