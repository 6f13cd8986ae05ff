"""Tensor / pipeline parallelism benchmark: `python -m tools.bench_partition SOURCE --devices "0;1"`

For each split: weights and communication of its devices, latency of one sequence and throughput of
all requests. Virtual devices of one CPU share its cores, so for these only communication,
computation and the overlap of stages are reported.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from jinfer import LLM, SamplingParams
from jinfer.cli.inspect.inspect_partition import PlanView, view
from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.run_command import overrides_of, run, write_json
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.html.svg_drawing import svg
from jinfer.modelspec.toml_tables import merge
from jinfer.parallel.pipeline import Pipeline

_PROMPT = 32  # tokens
_COLOURS = ("#3d5a80", "#c8553d", "#7fa677", "#b8a468", "#6b8fb5", "#8a5a83", "#588157", "#5c636d")


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


@dataclass(frozen=True)
class SplitResult:
    """Results of a split.

    Attributes:
        weights: bytes on the fullest device.
        exchanges: all-reduces and all-gathers of a step, in all stages.
        moved: bytes passed between stages per token.
        latency: seconds per token of a single request.
        rate: tokens per second of all requests together.
        together: share of the time in which several stages were busy.
    """

    devices: str
    weights: int
    exchanges: int
    moved: int
    latency: float
    rate: float
    together: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Errors are one line, never a traceback."""
    return run(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CliParser(
        prog=prog_of_module(__spec__.name), description="Measures splits of a model over devices."
    )
    add = parser.add_argument
    add("source", help="a spec (.toml), a checkpoint folder or file, ...")
    add("--devices", action="append", metavar="DEVICES", help='as partition.devices: "0&1;2&3"')
    add("--requests", type=int, default=8, help="concurrent requests (8)")
    add("--tokens", type=int, default=32, help="tokens per answer (32)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the spec")
    add("--svg", metavar="FILE", help="draw when the stages of the last split were busy")
    add("--json", metavar="FILE", help="write the figures as JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    overrides = overrides_of(options.set)
    every, busy = list[SplitResult](), list[StageCall]()
    for devices in options.devices or ["0"]:
        found, busy = _measure(options, overrides, devices)
        every.append(found)
    print(to_text(every))
    if options.json:
        write_json(options.json, [asdict(each) for each in every])
    if options.svg:
        Path(options.svg).write_text(to_svg(busy), encoding="utf-8")
    return 0


def _measure(
    options: argparse.Namespace, overrides: dict[str, Any], devices: str
) -> tuple[SplitResult, list[StageCall]]:
    plan = view(options.source, overrides, devices, "a100")
    keys = merge(overrides, {"partition": {"devices": devices}})
    with LLM(options.source, **{"engine.slots": options.requests, **keys}) as llm:
        rng = np.random.default_rng(1)
        prompts = [
            rng.integers(3, llm.spec.dims["vocab"], _PROMPT).tolist()
            for _ in range(options.requests)
        ]
        params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        for batch in (prompts[:1], prompts):  # warm up: compile their programs
            llm.generate(batch, params)
        begun = time.perf_counter()
        llm.generate(prompts[:1], params)
        latency = (time.perf_counter() - begun) / options.tokens
        programs = llm.session.engine.runner.programs.pipeline
        assert isinstance(programs, Pipeline), "devices are named"
        timeline = Timeline()
        programs.observe = timeline.note
        begun = time.perf_counter()
        llm.generate(prompts, params)
        rate = options.requests * options.tokens / (time.perf_counter() - begun)
        programs.observe = None
        busy = timeline.close()
    return (
        SplitResult(
            devices,
            max(stage.weights for stage in plan.stages),
            _exchanges(plan),
            plan.moved * (len(plan.stages) - 1),
            latency,
            rate,
            overlap_fraction(busy),
        ),
        busy,
    )


def _exchanges(plan: PlanView) -> int:
    return sum(sum(stage.collectives.values()) for stage in plan.stages)


def to_text(every: Sequence[SplitResult]) -> str:
    """The splits as a table."""
    virtual = jax.default_backend() == "cpu"
    heads = ["devices", "weights of one", "exchanges", "passed on", "stages together"]
    heads += [] if virtual else ["ms a token", "tokens/s"]
    rows = [
        [
            f'"{each.devices}"',
            f"{each.weights / 2**20:.1f} MiB",
            str(each.exchanges),
            f"{each.moved} B",
            f"{each.together:.0%}",
            *([] if virtual else [f"{each.latency * 1e3:.2f}", f"{each.rate:.1f}"]),
        ]
        for each in every
    ]
    note = [
        f"{len(jax.devices())} virtual devices share this machine's cores: no speed is reported; "
        "exchanges and bytes are of a token"
    ]
    return "\n".join([*_table(heads, rows), *(["", *note] if virtual else [])])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def to_svg(busy: Sequence[StageCall]) -> str:
    """When each stage was busy, in the colour of its micro-batch."""
    width, height, left = 860.0, 26.0, 70.0
    begin, end = min(call.begin for call in busy), max(call.end for call in busy)
    scale = (width - left - 10) / max(end - begin, 1e-9)
    stages = 1 + max(call.stage for call in busy)
    parts = [
        f'<text x="8" y="{20 + height * stage + 13:.0f}">stage {stage}</text>'
        for stage in range(stages)
    ]
    for call in busy:
        x, y = left + (call.begin - begin) * scale, 20 + height * call.stage
        parts.append(
            f'<rect x="{x:.2f}" y="{y:.0f}" width="{max((call.end - call.begin) * scale, 0.3):.2f}"'
            f' height="18" fill="{_COLOURS[call.lane % len(_COLOURS)]}"/>'
        )
    bottom = 20 + height * stages
    shown = f"{(end - begin) * 1e3:.0f} ms; a colour is a lane"
    parts.append(f'<text x="{left:.0f}" y="{bottom + 14:.0f}">{shown}</text>')
    return svg("jb", width, bottom + 24, "".join(parts)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
