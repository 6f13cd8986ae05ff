"""Bounds of what a template may do: time, characters, sizes of values.

Templates come with checkpoints, so they are a stranger's program, and one that needs no more than
milliseconds. Time is the thread's own CPU time: a busy machine does not make a template fail.

A step that nothing here can bound (a filter that is seldom used, values that grow and are kept) is
`heavy`: what does it runs again in a process of its own, which the operating system bounds.
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
ITEM_SIZE = 64  # what an item of a container counts, beside its own characters
MAX_BITS = 4096  # of a whole number
MAX_MADE = 1 << 26  # characters of all values made outside a process of its own


class Heavy(BaseException):
    """A template does what only a process of its own may; no `except Exception` catches it."""


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
    """Starts the clock and the counts for the calls inside.

    Args:
        confined: this is a process of its own, in which `heavy` steps are allowed.
    """
    token = _budget.set(_Budget(seconds, confined))
    try:
        yield
    finally:
        _budget.reset(token)


def heavy() -> None:
    """A step follows whose cost is not known. Raises: Heavy: here it may not be made."""
    if not _budget.get().confined:
        raise Heavy


def made(size: int) -> None:
    """Counts a value of this many characters. Raises: Heavy: they are too many to be kept here."""
    budget = _budget.get()
    budget.made += size
    if budget.made > MAX_MADE and not budget.confined:
        raise Heavy


def check() -> None:
    """Raises: TemplateError: the time is over."""
    budget = _budget.get()
    if time.thread_time() > budget.deadline:
        raise TemplateError(f"the template ran for more than {budget.seconds:g} s")


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
