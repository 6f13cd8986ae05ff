"""Schemas of activations: arrays in JSON, edits, steering vectors, and the routes of these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from jinfer.server.http.schema_base import RequestModel, ResponseModel


class NpyArray(RequestModel):
    """An array as base64 of a .npy file."""

    npy: str


Numbers = float | list[Any] | NpyArray
# A slice is [start, stop].
Tokens = Literal["all", "prompt", "answer"] | list[int | None]


class EditField(RequestModel):
    """A change of a named activation, as `Edit` of Python."""

    name: str
    operation: Literal["add", "set", "scale", "project_out"]
    value: Numbers = Field(description="a number, nested lists, or base64 of a .npy file")
    tokens: Tokens = Field("all", description="all, prompt, answer, or [start, stop]")
    head: int | None = None


class VectorField(RequestModel):
    """A steering vector at one activation."""

    name: str
    vector: Numbers
    scale: float = Field(1.0, allow_inf_nan=False)


class SteerField(RequestModel):
    """A steering vector, as `Steer` of Python, or one that the server keeps, by its name."""

    name: str | None = None
    vector: Numbers | None = None
    steering: str | None = Field(None, description="a name of /v1/steering, in place of both")
    scale: float = Field(1.0, allow_inf_nan=False)
    tokens: Tokens = "all"


class KeepSteering(RequestModel):
    """A request to keep steering vectors under a name."""

    name: str = Field(min_length=1, max_length=200)
    path: str | None = Field(None, description="a control vector (GGUF), where the server is")
    vectors: list[VectorField] | None = Field(None, description="in place of path")
    model: str | None = Field(None, description="the model that they are for; by default the first")


class SteeringState(ResponseModel):
    """Steering vectors that are kept under a name."""

    name: str
    activations: list[str]


class SteeringStates(RootModel[list[SteeringState]]):
    """The list of them."""


class CapturedArray(ResponseModel):
    """A captured activation [tokens, ...], float32."""

    shape: list[int]
    npy: str | None = None
    values: list[Any] | None = None
