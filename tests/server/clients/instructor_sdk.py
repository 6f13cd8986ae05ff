"""Instructor, in its modes."""

import importlib
from typing import Any

from tests.server.clients.checks import Checks, Server
from tests.server.clients.openai_sdk import City, client

instructor: Any = importlib.import_module("instructor")

CHECKS = Checks()


def create(server: Server, mode: str, **more: Any) -> Any:
    asked = instructor.from_openai(client(server), mode=getattr(instructor.Mode, mode))
    fields = {"messages": [{"role": "user", "content": "A city, as JSON."}], "max_retries": 0}
    how = {"model": server.model, "response_model": City, "temperature": 0, "max_tokens": 120}
    return asked.chat.completions.create(**{**fields, **how, **more})


@CHECKS
def tools(server: Server) -> None:
    for mode in ("TOOLS", "TOOLS_STRICT"):
        assert isinstance(create(server, mode), City), mode


@CHECKS
def schema(server: Server) -> None:
    assert isinstance(create(server, "JSON_SCHEMA"), City)


@CHECKS
def partial_stream(server: Server) -> None:
    partial = instructor.Partial[City]
    pieces = list(create(server, "TOOLS", response_model=partial, stream=True))
    assert pieces[-1].name


@CHECKS
def responses(server: Server) -> None:
    asked = instructor.from_openai(client(server), mode=instructor.Mode.RESPONSES_TOOLS)
    found = asked.responses.create(
        model=server.model, input="A city.", response_model=City, max_output_tokens=120,
        temperature=0, max_retries=0,
    )  # fmt: skip
    assert isinstance(found, City)


@CHECKS.by_model
def by_prompt(server: Server) -> None:
    for mode in ("JSON", "MD_JSON"):
        assert isinstance(create(server, mode), City), mode
