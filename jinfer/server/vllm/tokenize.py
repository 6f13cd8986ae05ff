"""Tokenization API: /tokenize, /detokenize, /apply-template and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from jinfer.api.session import Session
from jinfer.server.core import usage
from jinfer.server.core.chat_schemas import ChatTemplateFields, Message
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.prompt_builder import ChatPrompt, build_chat_prompt
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import as_api_error, invalid_request
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import MAX_ITEMS, Ids, RequestModel, ResponseModel
from jinfer.tokenizer import Tokenizer

routes = Routes(tag="tokens")


class TokenizeRequest(ChatTemplateFields):
    """A text (`content`: llama.cpp, `prompt`: vLLM) or a conversation (`messages`: vLLM)."""

    # Exactly one of three fields must be set.
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_ITEMS)  # type: ignore[assignment]
    model: str | None = None
    content: str | list[str | int] | None = None
    add_special: bool | None = Field(None, description="with content; default: false")
    parse_special: bool | None = Field(None, description="with content; default: true")
    with_pieces: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="with prompt; default: true")
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


# Fields that belong to each kind of input.
_FIELDS_OF = {
    "content": {"add_special", "parse_special", "with_pieces"},
    "prompt": {"add_special_tokens", "return_token_strs"},
    "messages": {
        "add_special_tokens",
        "return_token_strs",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
        "documents",
        "reasoning_effort",
        "reasoning",
        "thinking",
        "enable_thinking",
    },
}


@routes.add("POST /tokenize", TokenizeResponse)
async def tokenize(request: RequestContext[TokenizeRequest]) -> HttpResponse:
    """Tokenize a text or a conversation."""
    fields = request.body.given_fields()
    named = [name for name in _FIELDS_OF if name in fields]
    if len(named) != 1:
        raise invalid_request("give one of content, prompt and messages", "content")
    (name,) = named
    for other in fields.keys() - _FIELDS_OF[name] - {name, "model"}:
        raise invalid_request(f"it cannot be used with {name}", other)
    async with request.service.models.use(request.body.model) as model:
        return HttpResponse(await request.service.in_thread(_TOKENS[name], request, model.session))


@routes.add("GET /tokenizer_info", TokenizerInfo)
async def tokenizer_info(request: RequestContext[Any]) -> HttpResponse:
    """Describe a tokenizer."""
    async with request.service.models.use(request.http.query_params.get("model")) as model:
        opened, tokenizer = model.session.opened, model.session.opened.tokenizer
        if tokenizer is None:
            raise invalid_request("the model has no tokenizer", "model")

        def named(id: int | None) -> str | None:
            return None if id is None else tokenizer.token(id)

        return HttpResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "bos_token": named(tokenizer.bos_id),
                "eos_token": named(next(iter(tokenizer.eos_ids), None)),
                "pad_token": named(tokenizer.pad_id),
                "unk_token": named(tokenizer.unk_id),
                "chat_template": opened.conversation.jinja,
            }
        )


def _content(request: RequestContext[TokenizeRequest], session: Session) -> dict[str, Any]:
    """Tokenize a text, as llama.cpp does."""
    body, tokenizer = request.body, session.tokenizer
    parts = body.content if isinstance(body.content, list) else [body.content or ""]
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids += session.encode([part])
        else:
            ids += tokenizer.encode(
                part,
                special=bool(body.add_special) and i == 0,
                parse_special=body.parse_special is not False,
            )
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": id, "piece": _piece(tokenizer, id)} for id in ids]}


def _piece(tokenizer: Tokenizer, id: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are not valid UTF-8."""
    data = tokenizer.spelled(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _prompt(request: RequestContext[TokenizeRequest], session: Session) -> dict[str, Any]:
    """Tokenize a text, as vLLM does."""
    special = request.body.add_special_tokens is not False
    ids = session.tokenizer.encode(request.body.prompt or "", special=special)
    return _listed(request.body, session, ids)


def _messages(request: RequestContext[TokenizeRequest], session: Session) -> dict[str, Any]:
    """Tokenize a conversation, as vLLM does."""
    body, settings = request.body, request.service.settings
    if body.add_special_tokens:
        raise invalid_request("the chat template adds the special tokens", "add_special_tokens")
    names = _FIELDS_OF["messages"] & ChatTemplateFields.model_fields.keys() | {"messages"}
    rendering = ChatTemplateFields(**{name: getattr(body, name) for name in names})
    prompt = build_chat_prompt(rendering, session, settings, request.ignore)
    return _listed(body, session, prompt.ids())


def _listed(body: TokenizeRequest, session: Session, ids: Sequence[int]) -> dict[str, Any]:
    strings = [usage.token_text(session.tokenizer, id) for id in ids]
    return {
        "count": len(ids),
        "max_model_len": session.opened.context,
        "tokens": ids,
        "token_strs": strings if body.return_token_strs else None,
    }


_TOKENS = {"content": _content, "prompt": _prompt, "messages": _messages}


def _chat_prompt(request: RequestContext[Any], session: Session) -> ChatPrompt:
    return build_chat_prompt(request.body, session, request.service.settings, request.ignore)


@routes.add("POST /detokenize", DetokenizeResponse)
async def detokenize(request: RequestContext[DetokenizeRequest]) -> HttpResponse:
    """Decode tokens."""
    async with request.service.models.use(request.body.model) as model:
        session = model.session
        try:
            ids = session.encode(request.body.tokens)
        except ValueError as error:
            raise as_api_error(error, param="tokens") from error
        text = await request.service.in_thread(session.tokenizer.decode, ids, skip_special=False)
        return HttpResponse({"content": text, "prompt": text})


@routes.add("POST /apply-template", ApplyTemplateResponse)
async def apply_template(request: RequestContext[ApplyTemplateRequest]) -> HttpResponse:
    """Render the prompt of a conversation."""
    async with request.service.models.use(request.body.model) as model:
        prompt = await request.service.in_thread(_chat_prompt, request, model.session)
        return HttpResponse({"prompt": await request.service.in_thread(prompt.text)})
