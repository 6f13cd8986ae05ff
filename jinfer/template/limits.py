"""Bounds of what a template may do: time, characters, sizes of values.

Templates come with checkpoints, so they are a stranger's program, and one that needs no more than
milliseconds. Time is the thread's own CPU time: a busy machine does not make a template fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

from jinfer.template.errors import TemplateError

MAX_SECONDS = 1.0
MAX_SIZE = 1 << 24  # characters written in all; characters and items of one value
ITEM_SIZE = 64  # what an item of a container counts, beside its own characters
MAX_BITS = 4096  # of a whole number


class _Budget:
    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_SECONDS
        self.written = 0


_budget: ContextVar[_Budget] = ContextVar("template budget")


@contextmanager
def limited() -> Iterator[None]:
    """Starts the clock and the count for the `check` and `write` calls inside."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def check() -> None:
    """Raises: TemplateError: the time is over."""
    if time.thread_time() > _budget.get().deadline:
        raise TemplateError(f"the template ran for more than {MAX_SECONDS:g} s")


def write(count: int) -> None:
    """Counts characters written, also into variables. Raises: TemplateError: too many."""
    check()
    budget = _budget.get()
    budget.written += count
    if budget.written > MAX_SIZE:
        raise TemplateError(f"the template wrote more than {MAX_SIZE} characters")


def allow(size: int) -> None:
    """Raises: TemplateError: a value of this many characters is too large."""
    if size > MAX_SIZE:
        raise TemplateError(f"the template made a value of more than {MAX_SIZE} characters")


def measure(value: Any) -> int:
    """Characters and items a value has when all of it is written out.

    What is shared counts each time, because writing and comparing visit it each time.

    Raises:
        TemplateError: more than `MAX_SIZE`, which is also how a cycle ends.
    """
    size = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Namespace):
            item = vars(item)["_Namespace__attrs"]
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            size += ITEM_SIZE * len(item)
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple | Set | range):
            size += ITEM_SIZE * len(item)
            allow(size)
            if not isinstance(item, range):
                stack += item
        size += 1
        allow(size)
    return size


def collect(items: Iterable[Any]) -> list[Any]:
    """A list of what an iterable gives, measured on the way. Raises: TemplateError: too large."""
    found: list[Any] = []
    size = 0
    for item in items:
        size += ITEM_SIZE + measure(item)
        allow(size)
        found.append(item)
    return found
