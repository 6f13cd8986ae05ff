"""Schemas of /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jinfer.server.schemas.chat import ChatTemplateFields, Message
from jinfer.server.schemas.schema_base import MAX_ITEMS, Ids, RequestModel, ResponseModel


class TokenizeRequest(ChatTemplateFields):
    """A text (`content`: llama.cpp, `prompt`: vLLM) or a conversation (`messages`: vLLM)."""

    # Exactly one of three fields is given.
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_ITEMS)  # type: ignore[assignment]
    model: str | None = None
    content: str | list[str | int] | None = None
    add_special: bool | None = Field(None, description="of content; false where not given")
    parse_special: bool | None = Field(None, description="of content; true where not given")
    with_pieces: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="of prompt; true where not given")
    return_token_strs: bool | None = None


class TokenizeResponse(ResponseModel):
    """Token ids; for llama.cpp's clients optionally objects with an id and its piece."""

    tokens: list[int | dict[str, Any]]
    count: int | None = None
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """A request to /detokenize."""

    model: str | None = None
    tokens: Ids


class DetokenizeResponse(ResponseModel):
    """The text, under llama.cpp's name and vLLM's."""

    content: str
    prompt: str


class TokenizerInfo(ResponseModel):
    """A tokenizer's class, special tokens and chat template."""

    tokenizer_class: str
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None


class ApplyTemplateRequest(ChatTemplateFields):
    """A request to /apply-template."""

    model: str | None = None


class ApplyTemplateResponse(ResponseModel):
    """The rendered prompt."""

    prompt: str
