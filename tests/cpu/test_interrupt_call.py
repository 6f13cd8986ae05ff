"""Flags by which the host ends a loop of a running program."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jinfer.cpu import build_library
from jinfer.cpu.library_calls import Flag, interrupted

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
STEPS = 7
OUTSIDE = [-1, -1024, -(2**31), 1024, 2**31 - 1]


@pytest.fixture
def flag() -> Iterator[Flag]:
    """One that is lowered afterwards: a later model may share it."""
    flag = Flag()
    yield flag
    flag.set(False)


def looks(number: int) -> bool:
    return bool(interrupted(jnp.int32(number), jnp.int32(0)))


def library() -> Any:
    opened = build_library.opened_already()
    assert opened is not None
    opened.jinfer_set_interrupt.restype = ctypes.c_bool
    return opened


def test_flag_is_raised_and_lowered(flag: Flag) -> None:
    other = Flag()
    assert not looks(flag.number)
    flag.set(True)
    assert looks(flag.number)
    assert not looks(other.number)
    flag.set(False)
    assert not looks(flag.number)


@pytest.mark.parametrize("number", [0, 1023])
def test_first_and_last_flag(number: int) -> None:
    before = looks(number)
    for raised in (not before, before):
        assert library().jinfer_set_interrupt(number, raised)
        assert looks(number) == raised


@pytest.mark.parametrize("number", OUTSIDE)
def test_unknown_flag_is_an_error(number: int) -> None:
    """Nobody can raise it, and a program that asks for it fails."""
    assert not library().jinfer_set_interrupt(number, True)
    with pytest.raises(Exception, match="there is no such flag"):
        looks(number)


def test_raised_flag_ends_a_loop_early(flag: Flag) -> None:
    """The same program before, while and after its flag is raised."""

    def raise_at(step: Any, last: Any) -> None:
        if int(step) == int(last):
            flag.set(True)

    @jax.jit
    def taken(number: Any, last: Any) -> Any:
        def goes_on(step: Any) -> Any:
            return (step < STEPS) & ~interrupted(number, step)

        def body(step: Any) -> Any:
            jax.debug.callback(raise_at, step, last, ordered=True)
            return step + 1

        return jax.lax.while_loop(goes_on, body, jnp.int32(0))

    number = jnp.int32(flag.number)
    assert taken(number, -1) == STEPS
    flag.set(True)
    assert taken(number, -1) == 0
    flag.set(False)
    assert taken(number, 2) == 3
    flag.set(False)
    assert taken(number, -1) == STEPS
