"""Batched chat: several conversations in a request (vLLM's /v1/chat/completions/batch)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import orjson

from jinfer.server.core.chat_schemas import ChatBatchRequest, ChatRequest
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import ApiError, invalid_request
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.openai.chat import chat


async def chat_batch(request: RequestContext[ChatBatchRequest]) -> HttpResponse:
    """Answer each conversation as a choice."""
    body = request.body
    if body.stream:
        raise invalid_request(
            "answers to several conversations are not streamed; leave it out", "stream"
        )
    if body.n is not None and body.n != 1:
        raise invalid_request("each conversation has a single answer; leave it out", "n")
    shared = {name: getattr(body, name) for name in body.model_fields_set - {"messages"}}
    chats = [ChatRequest.model_construct(messages=message, **shared) for message in body.messages]
    jobs = [asyncio.ensure_future(_answer(request, i, item)) for i, item in enumerate(chats)]
    try:
        answers = await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
    return HttpResponse(_together(answers))


async def _answer(
    request: RequestContext[ChatBatchRequest], number: int, body: ChatRequest
) -> dict[str, Any]:
    try:
        own: Any = replace(request, body=cast("Any", body))
        reply = await chat(own)
    except ApiError as error:
        if error.param and error.param.startswith("messages"):
            error.param = f"messages.{number}{error.param.removeprefix('messages')}"
        raise
    content = cast("HttpResponse", reply).content
    return cast("dict[str, Any]", orjson.loads(content) if isinstance(content, bytes) else content)


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the answers: a choice for each conversation, and the sum of the usage."""
    choices = [
        {**choice, "index": number}
        for number, answer in enumerate(answers)
        for choice in answer["choices"]
    ]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage: dict[str, Any] = {
        name: sum(answer["usage"][name] for answer in answers) for name in names
    }
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return {**answers[0], "choices": choices, "usage": usage}
