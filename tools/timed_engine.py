"""This engine as one that is measured: prompts and answers of given lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jinfer import LLM, SamplingParams


class TimedEngine:
    """This engine, greedy."""

    def __init__(self, source: str, keys: Mapping[str, Any]) -> None:
        self.llm = LLM(source, **keys)
        self.fresh, self.words = 0, min(1000, self.llm.spec.dims["vocab"] - 100)

    def run(self, prompt: int, rows: int, steps: int = 0) -> float:
        """Seconds to compute prompts and then so many tokens of each."""
        # New tokens every time: nothing of a prompt is in the cache yet.
        self.fresh += 1
        prompts = [
            [(self.fresh * 31 + row * 7 + i * 3) % self.words + 100 for i in range(prompt)]
            for row in range(rows)
        ]
        begun = time.perf_counter()
        self.llm.generate(prompts, SamplingParams(max_tokens=steps + 1, ignore_eos=True))
        return time.perf_counter() - begun

    def timed(self, prompt: int, rows: int, steps: int) -> float:
        """Seconds of the decoding alone, or of the prefill where there are no steps."""
        whole = self.run(prompt, rows, steps)
        decoding = whole - self.run(prompt, rows) if steps else whole
        # A tiny model's tokens take less time than two runs differ by.
        return decoding if decoding > 0 else whole
