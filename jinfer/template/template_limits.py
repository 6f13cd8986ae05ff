"""Template limits: CPU time, output size and value sizes of a rendering.

Templates come with checkpoints, so they are untrusted programs that need only milliseconds. Time is
the thread's CPU time, so a busy machine does not make a template fail.

A step that cannot be bounded here (a rare filter, values that keep growing) raises `NeedsSandbox`:
the rendering is repeated in a child process that the operating system bounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

from jinfer.template.template_errors import TemplateError

MAX_SECONDS = 1.0
MAX_SIZE = 1 << 24  # characters written in all; characters and items of one value
ITEM_SIZE = 64  # size of a container's item, besides its own characters
MAX_BITS = 4096  # of an integer
MAX_MADE = 1 << 26  # characters of all values made outside the sandbox process


class NeedsSandbox(BaseException):
    """A step that only the sandbox process may do; no `except Exception` catches it."""


class _Budget:
    def __init__(self, seconds: float, confined: bool) -> None:
        self.seconds = seconds
        self.deadline = time.thread_time() + seconds
        self.written = 0
        self.made = 0
        self.confined = confined


_budget: ContextVar[_Budget] = ContextVar("template budget")


@contextmanager
def limited(seconds: float, *, confined: bool = False) -> Iterator[None]:
    """Starts the clock and the counters for the calls inside.

    Args:
        confined: this is the sandbox process, in which costly steps are allowed.
    """
    token = _budget.set(_Budget(seconds, confined))
    try:
        yield
    finally:
        _budget.reset(token)


def require_sandbox() -> None:
    """Announces a step of unknown cost. Raises `NeedsSandbox` outside the sandbox process."""
    if not _budget.get().confined:
        raise NeedsSandbox


def count_made(size: int) -> None:
    """Counts the size of a new value. Raises `NeedsSandbox` if the total is too large."""
    budget = _budget.get()
    budget.made += size
    if budget.made > MAX_MADE and not budget.confined:
        raise NeedsSandbox


def check_time() -> None:
    """Raises `TemplateError` if the time is up."""
    budget = _budget.get()
    if time.thread_time() > budget.deadline:
        raise TemplateError(f"the template ran for more than {budget.seconds:g} s")


def count_written(count: int) -> None:
    """Counts characters written, also into variables. Raises `TemplateError` above the limit."""
    check_time()
    budget = _budget.get()
    budget.written += count
    if budget.written > MAX_SIZE:
        raise TemplateError(f"the template wrote more than {MAX_SIZE} characters")


def check_size(size: int) -> None:
    """Raises `TemplateError` if a value of that many characters is too large."""
    if size > MAX_SIZE:
        raise TemplateError(f"the template made a value of more than {MAX_SIZE} characters")


def measure(value: Any) -> int:
    """The characters and items that a value has when written out.

    Shared values count each time, because writing and comparing visit them each time.

    Raises:
        TemplateError: more than `MAX_SIZE`, which also stops cycles.
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
            check_size(size)
            if not isinstance(item, range):
                stack += item
        size += 1
        check_size(size)
    return size


def collect(items: Iterable[Any]) -> list[Any]:
    """Collects an iterable into a list, measuring it. Raises `TemplateError` if it is too large."""
    result: list[Any] = []
    size = 0
    for item in items:
        size += ITEM_SIZE + measure(item)
        check_size(size)
        result.append(item)
    return result
