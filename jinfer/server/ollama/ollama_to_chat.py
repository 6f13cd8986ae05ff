"""Ollama to chat: translates Ollama's requests to chat requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.http.http_errors import invalid_request
from jinfer.server.http.request_body import validated
from jinfer.server.ollama.ollama_schemas import (
    OllamaChatRequest,
    OllamaFunction,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)

# Field of a chat request -> Ollama's name.
_NAMES: Mapping[str, str] = {
    "response_format": "format",
    "json_schema": "format",
    "n_predict": "options.num_predict",
    "reasoning_effort": "think",
    "thinking": "think",
}
_IMAGE = re.compile(r"(messages\.\d+)\.content\.(\d+)\.image_url")


def ollama_name(field: str, body: OllamaChatRequest | OllamaGenerateRequest) -> str:
    """Return Ollama's name of a chat request's field."""
    if (image := _IMAGE.fullmatch(field)) is not None:
        message = "" if isinstance(body, OllamaGenerateRequest) else f"{image[1]}."
        return f"{message}images.{image[2]}"
    if field == "messages" and isinstance(body, OllamaGenerateRequest):
        return "prompt"
    first = field.split(".", 1)[0]
    if first not in _NAMES and field in OllamaOptions.model_fields:
        return f"options.{field}"
    return _NAMES.get(first, field)


def chat_request(body: OllamaChatRequest | OllamaGenerateRequest) -> ChatRequest:
    """Translate a request to a chat request.

    Raises:
        ApiError: the request has unsupported content.
    """
    chat: dict[str, Any] = {"model": body.model}  # which may be the name of an adapter
    chat |= {**_sampling(body.options), **_thinking(body.think)}
    if isinstance(body, OllamaChatRequest):
        chat |= {"messages": _messages(body.messages or []), "tools": body.tools or None}
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = _content(body.prompt or "", body.images, "images")
        chat["messages"] = [*system, {"role": "user", "content": content}]
    if body.format or body.format == {}:
        chat["response_format"] = {"type": "json_object"}  # Ollama treats {} as json
        if isinstance(body.format, dict) and body.format:
            schema = {"schema": body.format}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return validated({k: v for k, v in chat.items() if v is not None}, ChatRequest)


def _sampling(options: OllamaOptions | None) -> dict[str, Any]:
    """Translate the sampling options to fields of chat requests."""
    fields = {} if options is None else options.given_fields()
    sampling = {k: v for k, v in fields.items() if k in ChatRequest.model_fields}
    if fields.get("num_predict", 0) > 0:
        sampling["n_predict"] = fields["num_predict"]
    return sampling


def _thinking(think: bool | str | None) -> dict[str, Any]:
    """Translate `think` to fields of chat requests."""
    if think is None or isinstance(think, str):
        return {"reasoning_effort": think}
    return {"thinking": {"type": "enabled" if think else "disabled"}}


def _content(text: str, images: list[str] | None, path: str) -> str | list[dict[str, Any]]:
    """Translate a text and its images, which come first. Raises `ApiError`."""
    if not images:
        return text
    for number, image in enumerate(images):
        if image.startswith(("data:", "http:", "https:")):
            message = "give the image's bytes in base64 alone, without a URL or data:...;base64,"
            raise invalid_request(message, f"{path}.{number}")
    urls = [{"url": f"data:;base64,{image}"} for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Translate messages. Calls without an id and their results get an id."""
    waiting: list[tuple[str, str]] = []  # names and ids of calls without an answer
    result = []
    for number, item in enumerate(messages):
        message: dict[str, Any] = {
            "role": item.role,
            "content": _content(item.content or "", item.images, f"messages.{number}.images"),
            "reasoning_content": item.thinking,
            "name": item.tool_name,
            "tool_call_id": item.tool_call_id,
        }
        if item.tool_calls:
            ids = [call.id or f"call_{number}_{i}" for i, call in enumerate(item.tool_calls)]
            functions = [call.function for call in item.tool_calls]
            waiting = [(function.name, id) for function, id in zip(functions, ids, strict=True)]
            message["tool_calls"] = list(map(_call, ids, functions))
        if item.role == "tool" and waiting:
            named = [pair for pair in waiting if pair[0] == item.tool_name]
            answered = next((pair for pair in waiting if pair[1] == item.tool_call_id), None)
            answered = answered or (named or waiting)[0]
            waiting.remove(answered)
            message["tool_call_id"] = item.tool_call_id or answered[1]
        result.append({k: v for k, v in message.items() if v is not None})
    return result


def _call(id: str, function: OllamaFunction) -> dict[str, Any]:
    arguments = json.dumps(function.arguments, ensure_ascii=False)
    return {
        "id": id,
        "type": "function",
        "function": {"name": function.name, "arguments": arguments},
    }
