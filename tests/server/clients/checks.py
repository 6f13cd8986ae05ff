"""What a check of somebody else's client is, and how they are run."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Client -> the package it needs; its checks are in the module of that name beside this one.
CLIENTS = {
    "openai_sdk": "openai",
    "litellm_sdk": "litellm",
    "langchain_sdk": "langchain_openai",
    "instructor_sdk": "instructor",
    "pydantic_ai_sdk": "pydantic_ai",
    "agents_sdk": "agents",
    "llm_command": "llm",
    "lm_eval_command": "lm_eval",
}


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: where it is, with /v1.
        model: what it calls its model.
    """

    url: str
    model: str


@dataclass(frozen=True)
class Check:
    """Something that a client does.

    Attributes:
        name: of it.
        run: does it; raises where the answer is not what it should be.
        by_model: a small model may say what the client cannot use: then it proves nothing.
    """

    name: str
    run: Callable[[Server], Any]
    by_model: bool = False


class Checks(list[Check]):
    """The checks of a client; calling it adds a check."""

    def __call__(self, run: Callable[[Server], Any]) -> Callable[[Server], Any]:
        self.append(Check(run.__name__, run))
        return run

    def by_model(self, run: Callable[[Server], Any]) -> Callable[[Server], Any]:
        """Add a check that depends on the model's answer."""
        self.append(Check(run.__name__, run, by_model=True))
        return run


def raised(kind: Any, call: Callable[..., Any], *args: Any, **fields: Any) -> Any:
    """The error of this kind that a call raises."""
    try:
        call(*args, **fields)
    except kind as error:
        return error
    raise AssertionError("no error was raised")


def missing(client: str) -> str:
    """Why a client cannot be tried; "": it can."""
    try:
        importlib.import_module(CLIENTS[client])
    except ImportError as error:
        return f"needs the package {CLIENTS[client]} ({error})"
    return ""


def run(client: str, server: Server) -> Iterator[tuple[Check, str]]:
    """Each check of a client, and what was wrong, or ""."""
    module = importlib.import_module(f"{__package__}.{client}")
    for check in module.CHECKS:
        try:
            result = check.run(server)
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in at if frame.filename == module.__file__][-1:]
            line = f"line {own[0].lineno}: " if own else ""
            yield check, f"{line}{type(error).__name__}: {error}"[:600] or "failed"
        else:
            yield check, ""
