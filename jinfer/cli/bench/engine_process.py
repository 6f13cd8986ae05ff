"""Engines of a benchmark, each in its own process: the tasks they get and their answers.

A process is given a task per line, such as "decode 4". It writes lines in JSON, among others: one
when it has started, with the "kinds" of tasks it knows; a "rate" in tokens per second for each
task; and its peak memory "rss" in MiB when there are no more.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.api.llm import LLM
from jinfer.cli.bench.llama_peer import DRAWN, ending_hint
from jinfer.sampling.sampling_params import SamplingParams

OWN, PEER = "jinfer", "llama.cpp"
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class BenchTask:
    """What is measured: decoding, greedy or sampled, prefill, or decoding after it ("deep")."""

    kind: str
    size: int

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"{self.kind} {self.size}"


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine under test.

    Attributes:
        name: as in the table.
        command: starts it, without the model and what follows.
        options: follow the model.
        folder: a checkout to run from.
        model: what it loads, if not the common one.
    """

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    folder: Path | None = None
    model: str | None = None


class EngineProcess:
    """An engine in its own process, which measures one task at a time."""

    def __init__(self, side: EngineUnderTest, model: str) -> None:
        # Only jinfer's own processes need to find its folder; all have bytecode.
        root = side.folder or (_ROOT if side.name == OWN else None)
        found = {"PYTHONDONTWRITEBYTECODE": ""} | ({"PYTHONPATH": str(root)} if root else {})
        self.side, begun = side, time.perf_counter()
        self.process = subprocess.Popen(
            [*side.command, side.model or model, *side.options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **found},
            cwd=side.folder,
        )
        # From outside: a process knows its own begin by processor time, which NumPy's threads spin.
        try:
            self.started = {**self._answer(), "seconds": time.perf_counter() - begun}
        except BaseException:
            self.stop()
            raise

    def measure(self, task: BenchTask) -> float:
        """Tokens per second."""
        assert self.process.stdin is not None, "the process reads its tasks"
        with contextlib.suppress(BrokenPipeError):  # one that has ended gives no answer
            os.write(self.process.stdin.fileno(), f"{task.kind} {task.size}\n".encode())
        return float(self._answer("rate")["rate"])

    def close(self) -> dict[str, Any]:
        """End the process; return its memory report."""
        assert self.process.stdin is not None, "the process reads its tasks"
        self.process.stdin.close()
        memory = self._answer("rss")
        self.process.wait()
        return memory

    def stop(self) -> None:
        """Kill the process, if it still runs."""
        self.process.kill()
        with self.process:  # closes its pipes, and waits
            pass

    def _answer(self, key: str | None = None) -> dict[str, Any]:
        """The next line in JSON, which has a positive number by this name."""
        assert self.process.stdout is not None, "the process writes its answers"
        for line in self.process.stdout:
            if line.startswith("{"):
                return self._understood(line, key)
        with self.process:
            status = self.process.wait()
        hint = ending_hint(status) if self.side.name.startswith(PEER) else ""
        raise OSError(f"{self.side.name} ended without an answer (status {status}){hint}")

    def _understood(self, line: str, key: str | None) -> dict[str, Any]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = dict(json.loads(line))
            known = isinstance(found.get("kinds", []), list)
            if known if key is None else 0 < found[key] < math.inf:
                return found
        when = "at its start" if key is None else f"where {key} is expected"
        raise OSError(
            f"{self.side.name} answers in another way than this version, {line.strip()!r:.100} "
            f"{when}: compare with a checkout whose `bench cpu` answers alike"
        )


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
