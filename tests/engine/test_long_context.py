"""A long context costs what is held of it, not what could be."""

from pathlib import Path
from typing import Any

import jax
import pytest

from jinfer import LLM, SamplingParams
from jinfer.cpu import build_library

STORIES = Path(__file__).parents[1] / "goldens" / "stories260K"
CONTEXT, SLOTS = 65_536, 16
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_grows_with_what_is_held() -> None:
    keys: dict[str, Any] = {"engine.context": CONTEXT, "dims.context": CONTEXT}
    keys |= {"engine.slots": SLOTS, "engine.kv_tokens": SLOTS * CONTEXT}
    with LLM(STORIES, **keys) as llm:
        size = sum(pool.nbytes for pool in jax.tree.leaves(llm._engine.runner.cache))
        a_token = size // (SLOTS * CONTEXT)
        assert size > 1 << 29
        llm.generate([[5, 6, 7]], PARAMS)
        before = resident()
        llm.generate([[3 + i % 500 for i in range(4000)]], PARAMS)
        grown = resident() - before
        assert grown < 4 * 4000 * a_token + (64 << 20)
        assert grown < size // 8
