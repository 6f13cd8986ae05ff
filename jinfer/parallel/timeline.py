"""Pipeline timeline: records when each stage was busy, to measure how far stages overlap."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import jax


@dataclass(frozen=True)
class StageCall:
    """A call of a stage.

    Attributes:
        lane: the micro-batch that it computed.
        begin, end: seconds of `time.perf_counter`.
    """

    stage: int
    lane: int
    begin: float
    end: float


@dataclass
class Timeline:
    """Records when stages begin and end, in threads that wait for them and delay nothing else.

    A call begins when its input is ready and the stage's previous call has ended.
    """

    busy: list[StageCall] = field(default_factory=list)
    _queues: dict[int, SimpleQueue[Any]] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)

    def note(self, stage: int, lane: int, given: Any, out: Any) -> None:
        """Records a launched call by its input and a result; neither may be donated."""
        if stage not in self._queues:
            queue = self._queues[stage] = SimpleQueue()
            thread = threading.Thread(target=self._watch, args=(stage, queue), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[stage].put((lane, given, out))

    def close(self) -> list[StageCall]:
        """Waits for all recorded calls, and returns them, the earliest first."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._queues, self._threads = {}, []
        return sorted(self.busy, key=lambda call: call.begin)

    def _watch(self, stage: int, queue: SimpleQueue[Any]) -> None:
        while (call := queue.get()) is not None:
            lane, x, out = call
            jax.block_until_ready(x)
            begin = time.perf_counter()
            jax.block_until_ready(out)
            self.busy.append(StageCall(stage, lane, begin, time.perf_counter()))


def overlap_fraction(busy: list[StageCall]) -> float:
    """The fraction of the time with any stage busy in which several were."""
    edges = sorted([(call.begin, 1) for call in busy] + [(call.end, -1) for call in busy])
    some = several = 0.0
    count, before = 0, edges[0][0] if edges else 0.0
    for at, change in edges:
        some += at - before if count > 0 else 0.0
        several += at - before if count > 1 else 0.0
        count, before = count + change, at
    return several / some if some else 0.0
