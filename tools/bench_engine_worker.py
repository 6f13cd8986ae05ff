"""Benchmark worker of jinfer: prefill and decoding of given lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jinfer import LLM, SamplingParams

from .llama_peer import DRAWN


class TimedEngine:
    """The engine of this checkout."""

    def __init__(self, source: str, keys: Mapping[str, Any]) -> None:
        self.llm = LLM(source, **keys)
        self.fresh, self.words = 0, min(1000, self.llm.spec.dims["vocab"] - 100)

    def run(self, prompt: int, rows: int, steps: int = 0, *, drawn: bool = False) -> float:
        """Seconds to compute prompts and then so many tokens of each, greedy or sampled."""
        # New tokens every time: nothing of a prompt is in the cache yet.
        self.fresh += 1
        return self._again(prompt, rows, steps, drawn)

    def _again(self, prompt: int, rows: int, steps: int, drawn: bool) -> float:
        """The same prompts as last time, if their number and length are the same."""
        prompts = [
            [(self.fresh * 31 + row * 7 + i * 3) % self.words + 100 for i in range(prompt)]
            for row in range(rows)
        ]
        how: Mapping[str, Any] = DRAWN if drawn else {"temperature": 0.0}
        params = SamplingParams(max_tokens=steps + 1, ignore_eos=True, **how)
        begun = time.perf_counter()
        self.llm.generate(prompts, params)
        return time.perf_counter() - begun

    def timed(self, prompt: int, rows: int, steps: int, *, drawn: bool = False) -> float:
        """Seconds of the decoding alone, or of the prefill if there are no steps."""
        computed = self.run(prompt, rows, drawn=drawn)
        if not steps:
            return computed
        # The prefix cache has the prompts now: a long one's time would hide that of its decoding.
        whole = self._again(prompt, rows, steps, drawn)
        decoding = whole - self._again(prompt, rows, 0, drawn)
        # A tiny model's tokens take less time than two runs differ by.
        return decoding if decoding > 0 else whole
