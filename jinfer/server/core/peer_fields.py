"""Peer fields: fields of other servers without effect here, reported as ignored or rejected.

docs/serving.md has the table of all their fields; `python -m tests.server.peer_tables` writes it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jinfer.server.http.schema_base import Ignored, Keep, No, RequestModel, Zero, rejected_field

_FOUND = "the prefix cache works without it"
_TEXT = "models read text only"
_RENDERED = "use /apply-template and /tokenize"
_GRAMMAR = "a grammar applies from the start of the answer, or from the end of the thought"
_ADAPTIVE = "there is no such sampler; mirostat is similar"


class PeerFields(RequestModel):
    """Fields of all routes that generate."""

    # llama.cpp
    n_cache_reuse: Annotated[int | None, Ignored(_FOUND, (0,))] = None
    backend_sampling: Annotated[
        bool | None, Ignored("sampling is always on the device", (True,))
    ] = None
    sse_ping_interval: Annotated[int | None, Ignored("--ping sets it for all streams")] = None
    n_keep: Keep | None = Field(None, description="the context is never shifted")
    n_indent: Zero | None = None
    n_discard: Zero | None = None
    min_keep: Zero | None = None
    adaptive_target: Annotated[float | None, rejected_field(_ADAPTIVE, -1)] = None
    adaptive_decay: Annotated[float | None, Ignored(_ADAPTIVE)] = None
    grammar_lazy: Annotated[No | None, rejected_field(_GRAMMAR)] = None
    grammar_triggers: Annotated[None, rejected_field(_GRAMMAR, [])] = None
    preserved_tokens: Annotated[
        list[str] | None, Ignored("parsers receive the special tokens that they need", ([],))
    ] = None
    # vLLM
    request_id: Annotated[str | None, Ignored("the header X-Request-Id names a request")] = None
    session_id: Annotated[str | None, Ignored(_FOUND)] = None
    stream_interval: Annotated[int | None, Ignored("chunks are sent immediately", (1,))] = None
    spaces_between_special_tokens: Annotated[
        bool | None, Ignored("special tokens are written without spaces", (True,))
    ] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, Ignored(_TEXT)] = None
    media_io_kwargs: Annotated[dict[str, Any] | None, Ignored(_TEXT)] = None
    return_mm_kwargs: Annotated[bool | None, Ignored(_TEXT, (True, False))] = None
    return_token_offsets: Annotated[bool | None, Ignored(_RENDERED, (False,))] = None
    routed_experts_prompt_start: Annotated[
        int | None, Ignored("routed experts are not reported", (0,))
    ] = None
    cache_salt: Annotated[
        None, rejected_field("use cache_prompt: false to keep a prompt private")
    ] = None
    watermarking: Annotated[No | None, rejected_field("answers are not watermarked")] = None
    repetition_detection: Annotated[
        None, rejected_field("use penalties or DRY against repetition")
    ] = None
    kv_transfer_params: Annotated[None, rejected_field("prefill is not disaggregated")] = None
    ec_transfer_params: Annotated[None, rejected_field("prefill is not disaggregated")] = None
    vllm_xargs: Annotated[None, rejected_field("custom arguments are not supported")] = None
