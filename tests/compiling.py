"""How programs of tests are compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from jinfer.engine.runner.compiled_programs import CompiledPrograms, Program
from jinfer.engine.runner.step_key import StepKey

_programs: dict[str, Program] = {}  # by their key in the program cache
FLAG = "jax_disable_most_optimizations"


@contextmanager
def optimized() -> Iterator[None]:
    """Programs that this process makes meanwhile are optimized like those of users."""
    before = jax.config.values[FLAG]
    jax.config.update(FLAG, False)
    try:
        yield
    finally:
        jax.config.update(FLAG, before)


@contextmanager
def shared_programs() -> Iterator[None]:
    """Models opened meanwhile on one device share equal programs, each traced once in a process.

    Not where a test replaces code that is traced: programs are equal if the program cache says so.
    """
    compile_now = CompiledPrograms._compile

    def compile_once(self: CompiledPrograms, key: StepKey) -> Program:
        if self.program_cache is not None or self.pipeline is not None or self.device is not None:
            return compile_now(self, key)
        entry = self._cache_entry(key)
        if entry not in _programs:
            _programs[entry] = compile_now(self, key)
        return _programs[entry]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledPrograms, "_compile", compile_once)
        yield


def forget_programs() -> None:
    """Frees the shared programs."""
    _programs.clear()
