"""pydantic-ai."""

import importlib
from typing import Any

from tests.server.clients.checks import Checks, Server, raised
from tests.server.clients.openai_sdk import LONG, City

ai: Any = importlib.import_module("pydantic_ai")
models: Any = importlib.import_module("pydantic_ai.models.openai")
providers: Any = importlib.import_module("pydantic_ai.providers.openai")

CHECKS = Checks()


def agent(server: Server, *, responses: bool = False, **more: Any) -> Any:
    kind = models.OpenAIResponsesModel if responses else models.OpenAIChatModel
    provider = providers.OpenAIProvider(base_url=server.url, api_key="none")
    settings = {"temperature": 0.0, "max_tokens": more.pop("max_tokens", 120)}
    return ai.Agent(kind(server.model, provider=provider), model_settings=settings, **more)


@CHECKS
def text(server: Server) -> None:
    for responses in (False, True):
        assert agent(server, responses=responses).run_sync("Say hello.").output


@CHECKS
def outputs(server: Server) -> None:
    for responses in (False, True):
        for kind in (ai.NativeOutput, ai.ToolOutput):
            asked = agent(server, responses=responses, output_type=kind(City))
            assert isinstance(asked.run_sync("A city.").output, City), kind


@CHECKS.by_model
def output_by_prompt(server: Server) -> None:
    asked = agent(server, output_type=ai.PromptedOutput(City))
    assert isinstance(asked.run_sync("A city.").output, City)


@CHECKS
def a_loop_of_tools(server: Server) -> None:
    """The model has to call: its output is a tool too."""
    for responses in (False, True):
        asked = agent(server, responses=responses, output_type=ai.ToolOutput(City))

        @asked.tool_plain
        def weather(city: str) -> str:
            """The weather of a city."""
            return f"It rains in {city}."

        assert isinstance(asked.run_sync("A city.").output, City)


@CHECKS
def history(server: Server) -> None:
    for responses in (False, True):
        asked = agent(server, responses=responses, max_tokens=40)
        first = asked.run_sync("Say hello.")
        assert asked.run_sync("And now?", message_history=first.all_messages()).output


@CHECKS
async def stream(server: Server) -> None:
    async with agent(server, max_tokens=20).run_stream("Say hello.") as found:
        assert [item async for item in found.stream_text()]
        usage = found.usage
        assert (usage() if callable(usage) else usage).output_tokens


@CHECKS
def a_context_that_is_full(server: Server) -> None:
    error = raised(Exception, agent(server).run_sync, LONG)
    assert "context_length_exceeded" in f"{error} {getattr(error, 'body', '')}", error
