"""Fields of other servers that change nothing here, or cannot be followed: told, or refused.

docs/reference/peer_fields.md lists the fields of each service.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jinfer.server.schemas.schema_base import Ignored, Keep, No, RequestModel, Zero, rejected_field

_FOUND = "equal beginnings of prompts are found without it"
_TEXT = "models read text alone"
_RENDERED = "/apply-template and /tokenize say how a prompt is read"
_GRAMMAR = "a grammar holds from the answer's beginning, or from the end of its thought"
_ADAPTIVE = "there is no such sampler; mirostat follows the surprise, too"


class PeerFields(RequestModel):
    """Fields of all routes that generate."""

    # llama.cpp
    n_cache_reuse: Annotated[int | None, Ignored(_FOUND, (0,))] = None
    backend_sampling: Annotated[
        bool | None, Ignored("tokens are always chosen on the device", (True,))
    ] = None
    sse_ping_interval: Annotated[int | None, Ignored("--ping says it for all streams")] = None
    n_keep: Keep | None = Field(None, description="a context is never shifted")
    n_indent: Zero | None = None
    n_discard: Zero | None = None
    min_keep: Zero | None = None
    adaptive_target: Annotated[float | None, rejected_field(_ADAPTIVE, -1)] = None
    adaptive_decay: Annotated[float | None, Ignored(_ADAPTIVE)] = None
    grammar_lazy: Annotated[No | None, rejected_field(_GRAMMAR)] = None
    grammar_triggers: Annotated[None, rejected_field(_GRAMMAR, [])] = None
    preserved_tokens: Annotated[
        list[str] | None, Ignored("parsers see the special tokens that they need", ([],))
    ] = None
    # vLLM
    request_id: Annotated[str | None, Ignored("the header X-Request-Id names a request")] = None
    session_id: Annotated[str | None, Ignored(_FOUND)] = None
    stream_interval: Annotated[
        int | None, Ignored("pieces are sent as soon as they are there", (1,))
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None, Ignored("special tokens are spelled as they are", (True,))
    ] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, Ignored(_TEXT)] = None
    media_io_kwargs: Annotated[dict[str, Any] | None, Ignored(_TEXT)] = None
    return_mm_kwargs: Annotated[bool | None, Ignored(_TEXT, (True, False))] = None
    return_token_offsets: Annotated[bool | None, Ignored(_RENDERED, (False,))] = None
    routed_experts_prompt_start: Annotated[
        int | None, Ignored("answers do not say which experts computed them", (0,))
    ] = None
    cache_salt: Annotated[
        None, rejected_field("cache_prompt: false keeps a prompt out of what others find")
    ] = None
    watermarking: Annotated[No | None, rejected_field("answers have no watermark")] = None
    repetition_detection: Annotated[
        None, rejected_field("penalties and DRY keep answers from repetitions")
    ] = None
    kv_transfer_params: Annotated[None, rejected_field("prompts are computed where they come")] = (
        None
    )
    ec_transfer_params: Annotated[None, rejected_field("prompts are computed where they come")] = (
        None
    )
    vllm_xargs: Annotated[None, rejected_field("nothing here reads them")] = None
