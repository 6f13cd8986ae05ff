"""Schemas of Cohere's embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jinfer.server.schemas.schema_base import RequestModel, ResponseModel, rejected_field

VectorType = Literal["float", "base64", "binary", "ubinary"]


class CohereEmbedRequest(RequestModel):
    """A request to /v2/embed."""

    texts: list[str] = Field(min_length=1)
    model: str | None = None
    input_type: str | None = Field(None, description="which of the model's prompts stands before")
    embedding_types: list[VectorType] | None = Field(None, min_length=1)
    output_dimension: int | None = Field(None, ge=1, description="only the first so many numbers")
    max_tokens: int | None = Field(None, ge=1, description="of each text")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="which end of a text is left out where it is too long; by default END"
    )
    user: str | None = Field(None, description="is logged")
    images: Annotated[Any, rejected_field("models read text alone", [])] = None
    inputs: Annotated[Any, rejected_field("give texts; models read text alone", [])] = None
    priority: Annotated[Any, rejected_field("vectors are computed in their order", 0)] = None


class CohereVectors(ResponseModel):
    """The vectors, by type; one of numbers' signs as bytes of eight each."""

    float: list[list[Any]] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbedResponse(ResponseModel):
    """The response of /v2/embed."""

    id: str
    embeddings: CohereVectors
    texts: list[str]
    response_type: Literal["embeddings_by_type"]
    meta: dict[str, Any]
