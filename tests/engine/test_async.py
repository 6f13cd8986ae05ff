"""The front door for services: coroutines, cancellation, deadlines, a bounded queue."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, AsyncLLM, SamplingParams
from jinfer.engine.requests import DeadlineError, QueueFullError

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama2"
PROMPTS = [np.random.default_rng(i).integers(3, 320, 5 + 7 * i).tolist() for i in range(6)]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    keys: dict[str, Any] = {"dtype": "float32", "engine.slots": 2, "engine.queue": 3}
    with LLM(GOLDEN, **keys) as llm:
        llm.generate(PROMPTS[:2], GREEDY)  # programs for one and for two are there
        yield llm


def held(llm: LLM) -> int:
    llm.session.thread.run(lambda engine: None)
    return llm.stats().blocks_held


def test_many_at_a_time(llm: LLM) -> None:
    expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]

    async def streamed(model: AsyncLLM, prompt: list[int]) -> list[int]:
        return [id async for chunk in model.stream(prompt, GREEDY) for id in chunk.token_ids]

    async def run() -> None:
        model = AsyncLLM(llm)
        assert await asyncio.gather(*(streamed(model, p) for p in PROMPTS[:4])) == expected[:4]
        answers = await model.generate(PROMPTS[:3], GREEDY)
        assert [answer.token_ids for answer in answers] == expected[:3]
        (logits,) = await model.logits([PROMPTS[1]])
        assert logits.shape == (len(PROMPTS[1]), 320)
        three = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=4)
        assert len(await model.generate(PROMPTS[1], three)) == 3

    asyncio.run(run())
    assert held(llm) == 0


def test_a_closed_iterator_and_a_cancelled_task_end_their_requests(llm: LLM) -> None:
    async def run() -> None:
        model = AsyncLLM(llm)
        stream = model.stream(PROMPTS[0], LONG)
        await anext(stream)
        task = asyncio.create_task(model.generate([PROMPTS[1]], LONG))
        async with asyncio.timeout(60):
            while llm.stats().running < 2:
                await asyncio.sleep(0.001)
        await stream.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(held, llm)
        assert llm.stats().running == 0

    asyncio.run(run())
    assert held(llm) == 0


def test_a_deadline_ends_a_request(llm: LLM) -> None:
    async def run() -> None:
        model = AsyncLLM(llm)
        with pytest.raises(DeadlineError, match="deadline has passed"):
            await model.generate([PROMPTS[0]], LONG, timeout=0.0)
        assert len(await model.generate([PROMPTS[0]], GREEDY, timeout=100)) == 1

    asyncio.run(run())
    assert held(llm) == 0


def test_a_full_queue_says_so(llm: LLM) -> None:
    async def run() -> None:
        model = AsyncLLM(llm)
        results = await asyncio.gather(
            *(model.generate([PROMPTS[i % 6]], LONG) for i in range(12)), return_exceptions=True
        )
        full = [result for result in results if isinstance(result, QueueFullError)]
        assert full
        assert all("3 requests wait already" in str(error) for error in full)
        assert len(full) + sum(isinstance(result, list) for result in results) == 12

    asyncio.run(run())
    assert held(llm) == 0


def test_priorities(llm: LLM) -> None:
    """What comes while the engine is busy is taken by priority, not as it came."""
    order: list[int] = []
    began, release = threading.Event(), threading.Event()

    def hold(engine: object) -> None:
        began.set()
        release.wait(60)

    async def ask(model: AsyncLLM, priority: int) -> None:
        async for _ in model.stream(PROMPTS[2], LONG, priority=priority):
            if priority not in order:
                order.append(priority)

    async def run() -> None:
        model = AsyncLLM(llm)
        busy = asyncio.create_task(asyncio.to_thread(llm.session.thread.run, hold))
        assert await asyncio.to_thread(began.wait, 60)
        tasks = [asyncio.create_task(ask(model, priority)) for priority in (5, 0, -5, 1)]
        while llm.session.thread._loop.inbox.qsize() < len(tasks):
            await asyncio.sleep(0.01)
        release.set()
        await asyncio.gather(busy, *tasks)

    asyncio.run(run())
    assert set(order[:2]) == {-5, 0}
    assert order[2:] == [1, 5]
