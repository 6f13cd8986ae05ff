"""Schemas of the routes of LoRA adapters."""

from __future__ import annotations

from pydantic import Field, RootModel

from jinfer.server.schemas.schema_base import RequestModel, ResponseModel


class LoadAdapter(RequestModel):
    """A request to load an adapter, in vLLM's words."""

    lora_name: str = Field(description="what requests call it, as their model")
    lora_path: str = Field(description="a folder of PEFT, or a GGUF file, where the server is")
    model: str | None = Field(None, description="the model that it is for; by default the first")


class UnloadAdapter(RequestModel):
    """A request to unload an adapter, in vLLM's words."""

    lora_name: str


class AdapterChange(ResponseModel):
    """What was done."""

    status: str


class AdapterState(ResponseModel):
    """An adapter, as llama.cpp's /lora-adapters."""

    id: int
    name: str
    path: str
    scale: float


class AdapterStates(RootModel[list[AdapterState]]):
    """The list of adapters."""
