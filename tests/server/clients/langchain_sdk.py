"""langchain-openai."""

import importlib
from typing import Any

from tests.server.clients.checks import Checks, Server, raised
from tests.server.clients.openai_sdk import LONG, City

langchain: Any = importlib.import_module("langchain_openai")
core: Any = importlib.import_module("langchain_core.messages")
tools: Any = importlib.import_module("langchain_core.tools")

CHECKS = Checks()
ASKED = "What is the weather in Paris?"


@tools.tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def chat(server: Server, **more: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 120, "max_retries": 0, **more}
    return langchain.ChatOpenAI(model=server.model, base_url=server.url, api_key="none", **fields)


@CHECKS
def invoke(server: Server) -> None:
    found = chat(server, max_tokens=8).invoke(ASKED)
    assert found.content
    assert found.usage_metadata["output_tokens"] == 8


@CHECKS
def stream(server: Server) -> None:
    pieces = list(chat(server, max_tokens=8, stream_usage=True).stream(ASKED))
    assert "".join(piece.content for piece in pieces)
    assert any(piece.usage_metadata for piece in pieces)


@CHECKS
def a_loop_of_tools(server: Server) -> None:
    """Whole and streamed."""
    bound = chat(server).bind_tools([weather], tool_choice="weather")
    found = bound.invoke(ASKED)
    streamed = None
    for piece in bound.stream(ASKED):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    for message in (found, streamed):
        (call,) = message.tool_calls
        assert call["name"] == "weather"
        said = [core.HumanMessage(ASKED), message, weather.invoke(call)]
        assert chat(server, max_tokens=8).bind_tools([weather]).invoke(said)


@CHECKS
def structured(server: Server) -> None:
    for method in ("json_schema", "function_calling"):
        found = chat(server).with_structured_output(City, method=method).invoke("A city.")
        assert isinstance(found, City), method


@CHECKS.by_model
def structured_by_prompt(server: Server) -> None:
    asked = chat(server).with_structured_output(City, method="json_mode")
    assert isinstance(asked.invoke("A city as JSON with the keys name and big."), City)


@CHECKS
def responses(server: Server) -> None:
    one = chat(server, use_responses_api=True, max_tokens=16)
    first = one.invoke(ASKED)
    assert first.text
    assert one.invoke([core.HumanMessage(ASKED), first, core.HumanMessage("And Rome?")]).text


@CHECKS
def vectors(server: Server) -> None:
    given = {"model": server.model, "base_url": server.url, "api_key": "none"}
    found = langchain.OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    assert len(found.embed_documents(["a", "b"])) == 2


@CHECKS
def texts(server: Server) -> None:
    given = {"model": server.model, "base_url": server.url, "api_key": "none", "max_tokens": 8}
    assert langchain.OpenAI(**given).invoke("Once upon a time")


@CHECKS
def several_with_log_probabilities(server: Server) -> None:
    asked = chat(server, n=2, temperature=1, max_tokens=4, logprobs=True)
    (found,) = asked.generate([[core.HumanMessage(ASKED)]]).generations
    assert len(found) == 2
    assert found[0].message.response_metadata["logprobs"]["content"]


@CHECKS
def a_context_that_is_full(server: Server) -> None:
    error = raised(Exception, chat(server).invoke, LONG)
    assert "Overflow" in type(error).__name__, error
