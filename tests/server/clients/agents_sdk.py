"""openai-agents."""

import importlib
from typing import Any

from tests.server.clients.checks import Checks, Server
from tests.server.clients.openai_sdk import City

openai: Any = importlib.import_module("openai")
agents: Any = importlib.import_module("agents")
agents.set_tracing_disabled(True)

CHECKS = Checks()
_KEPT: list[Any] = []


@agents.function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def agent(server: Server, *, responses: bool, tokens: int = 200, **more: Any) -> Any:
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
    _KEPT.append(client)  # its connections belong to a loop that is closed by the time it goes
    choice = more.pop("tool_choice", None)
    return agents.Agent(
        name="a",
        instructions="Be brief.",
        model=kind(model=server.model, openai_client=client),
        model_settings=agents.ModelSettings(temperature=0, max_tokens=tokens, tool_choice=choice),
        **more,
    )


@CHECKS
async def text(server: Server) -> None:
    for responses in (False, True):
        found = await agents.Runner.run(agent(server, responses=responses), "Say hello.")
        assert found.final_output


@CHECKS
async def output_type(server: Server) -> None:
    for responses in (False, True):
        asked = agent(server, responses=responses, output_type=City)
        found = await agents.Runner.run(asked, "A city.")
        assert isinstance(found.final_output, City)


@CHECKS
async def stream(server: Server) -> None:
    for responses in (False, True):
        found = agents.Runner.run_streamed(agent(server, responses=responses), "Say hello.")
        assert [stream_event async for stream_event in found.stream_events()]
        assert found.final_output


@CHECKS
async def a_loop_of_tools(server: Server) -> None:
    """Force a tool call; the following answer ends the run."""
    for responses in (False, True):
        asked = agent(server, responses=responses, tools=[weather], tool_choice="required")
        found = await agents.Runner.run(asked, "What is the weather in Paris?", max_turns=4)
        kinds = [item.type for item in found.new_items]
        assert "tool_call_output_item" in kinds, kinds
