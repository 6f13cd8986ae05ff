"""Schemas of /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jinfer.server.schemas.chat import Message, Rendering
from jinfer.server.schemas.schema_base import MOST_PARTS, Answer, Ids, Strict


class TokenizeRequest(Rendering):
    """A text (`content`: llama.cpp, `prompt`: vLLM) or a conversation (`messages`: vLLM)."""

    # Exactly one of three fields is given.
    messages: list[Message] | None = Field(None, min_length=1, max_length=MOST_PARTS)  # type: ignore[assignment]
    model: str | None = None
    content: str | list[str | int] | None = None
    add_special: bool | None = Field(None, description="of content; false where not given")
    parse_special: bool | None = Field(None, description="of content; true where not given")
    with_pieces: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="of prompt; true where not given")
    return_token_strs: bool | None = None


class TokenizeAnswer(Answer):
    """Token ids; for llama.cpp's clients optionally objects with an id and its piece."""

    tokens: list[int | dict[str, Any]]
    count: int | None = None
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    """A request to /detokenize."""

    model: str | None = None
    tokens: Ids


class DetokenizeAnswer(Answer):
    """The text, under llama.cpp's name and vLLM's."""

    content: str
    prompt: str


class TokenizerInfo(Answer):
    """A tokenizer's class, special tokens and chat template."""

    tokenizer_class: str
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None


class TemplateRequest(Rendering):
    """A request to /apply-template."""

    model: str | None = None


class TemplateAnswer(Answer):
    """The rendered prompt."""

    prompt: str
