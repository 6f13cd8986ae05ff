"""Sleep mode: what is given back, what stays, and that answers are the same afterwards."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, AsyncLLM, RequestError

GOLDENS = Path(__file__).parent / "goldens"
IDS = [5, 6, 7, 8]
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def arrays() -> int:
    """Bytes of the arrays that JAX has."""
    gc.collect()
    return sum(one.nbytes for one in jax.live_arrays())


def test_a_model_sleeps() -> None:
    with LLM(GOLDENS / "llama2", dtype="float32", engine={"slots": 2}) as llm:
        before = llm.generate(IDS, **GREEDY)[0].token_ids
        compiled, awake = llm.compilations, arrays()
        weights = sum(one.nbytes for one in llm.session.engine.runner.weights)
        llm.sleep()
        assert llm.is_sleeping
        assert arrays() < awake  # the KV cache
        for refused in (lambda: llm.generate(IDS, **GREEDY), lambda: llm.logits(IDS)):
            with pytest.raises(RequestError, match=r"the model sleeps; wake it with wake_up\(\)"):
                refused()
        llm.sleep(level=2)  # deeper
        assert not llm.session.engine.runner.leaves
        assert arrays() <= awake - weights
        llm.wake_up()
        llm.wake_up()  # nothing happens
        assert llm.session.sleep_level == 0
        assert llm.generate(IDS, **GREEDY)[0].token_ids == before
        assert llm.compilations == compiled
        # As on a device with a memory of its own: the weights go through the host's.
        llm.sleep()
        engine = llm.session.engine
        llm.session.weights_at_host = tuple(np.asarray(leaf) for leaf in engine.runner.weights)
        engine.runner.leaves = ()
        llm.wake_up()
        assert llm.generate(IDS, **GREEDY)[0].token_ids == before
        with pytest.raises(RequestError, match="a level of sleep is 3; allowed: 1, 2"):
            llm.sleep(3)


def test_a_model_that_answers_does_not_sleep() -> None:
    async def scene() -> None:
        async with AsyncLLM(GOLDENS / "llama2", dtype="float32") as llm:
            pieces = llm.stream(IDS, **{**GREEDY, "max_tokens": 40})
            await anext(pieces)
            with pytest.raises(RequestError, match="requests run; let the model sleep when none"):
                await llm.sleep()
            assert llm.session.sleep_level == 0
            rest = [one async for one in pieces]
            assert rest[-1].finish_reason == "length"
            await llm.sleep(2)
            assert llm.is_sleeping
            await llm.wake_up()
            assert await llm.generate(IDS, **GREEDY)

    asyncio.run(scene())


def test_files_that_have_changed(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((GOLDENS / "llama2" / name).read_bytes())
    with LLM(tmp_path, dtype="float32") as llm:
        llm.sleep(2)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=str(tmp_path)):
            llm.wake_up()
        assert llm.is_sleeping
        (tmp_path / "model.safetensors").write_bytes(
            (GOLDENS / "llama2" / "model.safetensors").read_bytes()
        )
        llm.wake_up()
        assert llm.generate(IDS, **GREEDY)
