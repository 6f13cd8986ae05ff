"""Schemas of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from jinfer.server.core.chat_schemas import AnyTool
from jinfer.server.http import schema_base as base

_HOLDS = base.Ignored("loading options of a served model cannot be changed")
_UNSAMPLED = base.Ignored("embeddings are not sampled")
Loading = Annotated[Any, _HOLDS]
KeepAlive = str | float | None  # ignored if models stay in memory


class OllamaOptions(base.RequestModel):
    """`options`: parameters of sampling, and of loading."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    seed: int | None = Field(None, description="-1: random")
    num_predict: int | None = Field(None, description="0 or less: up to the end of the context")
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: Annotated[
        bool | None, base.Ignored("newlines are penalized like other tokens", (True,))
    ] = None
    num_ctx: Annotated[int | None, base.Ignored("use --ctx-size")] = None
    num_keep: Annotated[int | None, base.Ignored("the context is never shifted")] = None
    num_batch: Loading = None
    num_gpu: Loading = None
    main_gpu: Loading = None
    num_thread: Loading = None
    numa: Loading = None
    low_vram: Loading = None
    f16_kv: Loading = None
    logits_all: Loading = None
    vocab_only: Loading = None
    use_mmap: Loading = None
    use_mlock: Loading = None
    embedding_only: Loading = None


class OllamaFunction(base.ReplayedModel):
    """A function call by the model, with its arguments as an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(base.ReplayedModel):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaMessage(base.ReplayedModel):
    """A message of a conversation."""

    role: str = Field(description="system, user, assistant, tool, or a template's own")
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = Field(None, description="in base64")
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = Field(None, description="name of the function with this result")
    tool_call_id: str | None = None

    @property
    def was_answer(self) -> bool:
        """Return whether the message is an earlier answer."""
        return self.role == "assistant"


class _Generates(base.RequestModel):
    """Common fields of the routes that generate."""

    model: str | None = None
    stream: bool | None = Field(None, description="default: true")
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description="json, or a JSON schema; an empty schema means json"
    )
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class OllamaChatRequest(_Generates):
    """A request to /api/chat; without messages the model is only loaded."""

    messages: list[OllamaMessage] | None = Field(None, max_length=base.MAX_ITEMS)
    tools: list[AnyTool] | None = Field(None, max_length=base.MAX_ITEMS)


class OllamaGenerateRequest(_Generates):
    """A request to /api/generate; without a prompt the model is only loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="do not apply the chat template")
    context: list[int] | None = Field(None, description="tokens of an earlier answer")
    suffix: str | None = Field(None, description="rejected; use /infill")
    template: str | None = Field(None, description="rejected; models have their own templates")
    images: list[str] | None = Field(None, description="in base64")


class OllamaEmbedRequest(base.RequestModel):
    """A request to /api/embed."""

    model: str | None = None
    input: str | list[str]
    truncate: bool | None = Field(None, description="default: true")
    dimensions: int | None = Field(None, ge=1)
    options: Annotated[OllamaOptions | None, _UNSAMPLED] = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(base.RequestModel):
    """A request to the older /api/embeddings."""

    model: str | None = None
    prompt: str | None = None
    options: Annotated[OllamaOptions | None, _UNSAMPLED] = None
    keep_alive: KeepAlive = None


class OllamaShowRequest(base.RequestModel):
    """A request to /api/show."""

    model: str | None = None
    name: str | None = Field(None, description="older name of model")
    verbose: bool | None = Field(None, description="has no effect")


class OllamaError(BaseModel):
    """The response of a failed request."""

    error: str


class OllamaFigures(base.ResponseModel):
    """Statistics of a whole answer, or of the last line of a stream; times in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaAnswerMessage(base.ResponseModel):
    """A message generated by the model."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaChatResponse(OllamaFigures):
    """The response of /api/chat."""

    message: OllamaAnswerMessage


class OllamaGenerateResponse(OllamaFigures):
    """The response of /api/generate."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaEmbedResponse(base.ResponseModel):
    """The response of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(base.ResponseModel):
    """The response of /api/embeddings."""

    embedding: list[float]


class OllamaDetails(base.ResponseModel):
    """The details of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(base.ResponseModel):
    """A model of /api/tags or /api/ps."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(base.ResponseModel):
    """The response of /api/tags and /api/ps."""

    models: list[OllamaModel]


class OllamaShowResponse(base.ResponseModel):
    """The response of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(base.ResponseModel):
    """The response of /api/version."""

    version: str
