"""LiteLLM, by several of its names for a server like OpenAI's."""

import asyncio
import importlib
import json
from typing import Any

from tests.server.clients.checks import Checks, Server, raised
from tests.server.clients.openai_sdk import CALL, LONG, USER, WEATHER, City

litellm: Any = importlib.import_module("litellm")

CHECKS = Checks()


def given(server: Server, provider: str = "openai", **more: Any) -> dict[str, Any]:
    return {
        "model": f"{provider}/{server.model}",
        "api_base": server.url,
        "api_key": "none",
        "num_retries": 0,
        **more,
    }


def asked(server: Server, provider: str = "openai", **more: Any) -> Any:
    fields = {"messages": USER, "max_tokens": 60, "temperature": 0, **more}
    return litellm.completion(**given(server, provider, **fields))


@CHECKS
def answers(server: Server) -> None:
    for provider in ("openai", "hosted_vllm", "custom_openai", "llamafile", "lm_studio"):
        assert asked(server, provider, max_tokens=8).choices[0].message.content, provider


@CHECKS
def stream(server: Server) -> None:
    pieces = list(asked(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert any(getattr(piece, "usage", None) for piece in pieces)


@CHECKS
def a_loop_of_tools(server: Server) -> None:
    found = asked(server, tools=[WEATHER], tool_choice=CALL).choices[0].message
    (call,) = found.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    for message in (found, found.model_dump()):
        more = asked(server, messages=[*USER, message, result], tools=[WEATHER], max_tokens=8)
        assert more.choices


@CHECKS
def schema(server: Server) -> None:
    found = asked(server, response_format=City, max_tokens=120)
    City.model_validate_json(found.choices[0].message.content)


@CHECKS
def vectors(server: Server) -> None:
    found = litellm.embedding(**given(server, input=["a", "b"]))
    assert len(found.data) == 2


@CHECKS
def texts(server: Server) -> None:
    for provider in ("text-completion-openai", "openai"):
        found = litellm.text_completion(**given(server, provider, prompt="Once", max_tokens=6))
        assert found.choices[0].text, provider


@CHECKS
def responses(server: Server) -> None:
    found = litellm.responses(**given(server, input="Hello", max_output_tokens=12))
    assert found.output


@CHECKS
def messages_of_anthropic(server: Server) -> None:
    """Bridged to responses, with what Anthropic's clients ask for."""
    messages = [{"role": "user", "content": "Hello"}]
    fields = given(server, messages=messages, max_tokens=12)
    found = asyncio.run(litellm.anthropic.messages.acreate(**fields))
    assert found["content"]


@CHECKS
def a_context_that_is_full(server: Server) -> None:
    messages = [{"role": "user", "content": LONG}]
    raised(litellm.ContextWindowExceededError, asked, server, messages=messages)
