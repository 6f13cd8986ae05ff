"""Tensor / pipeline parallelism benchmark: `python -m tools.bench_partition SOURCE --devices "0;1"`

For each split: weights and communication of its devices, latency of one sequence and throughput of
all requests. Virtual devices of one CPU share its cores, so for these only communication,
computation and the overlap of stages are reported.

`--predict` measures nothing: it prints the best split of well-known models on 1 to 64 devices as
the cost model estimates it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
from jinfer.parallel.cost_model import (
    HARDWARE,
    Hardware,
    ModelCost,
    device_layouts,
    estimate_decode,
)
from jinfer.parallel.pipeline import Pipeline
from jinfer.parallel.timeline import StageCall, Timeline, overlap_fraction

_PROMPT = 32  # tokens
_COUNTS = (1, 2, 4, 8)
_COLOURS = ("#3d5a80", "#c8553d", "#7fa677", "#b8a468", "#6b8fb5", "#8a5a83", "#588157", "#5c636d")


@dataclass(frozen=True)
class KnownShape:
    """A Llama-like decoder, or a mixture of experts with its attention.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, inner, vocab: its sizes.
        experts, chosen: 1 for a dense model.
        matrices: of a feed-forward: 3 if gated.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    experts: int = 1
    chosen: int = 1
    matrices: int = 3

    def work(self, bits: float) -> ModelCost:
        """Its cost with weights of so many bits, and 16 for everything else."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        expert = self.matrices * self.hidden * self.inner
        rest = 2 * self.vocab * self.hidden
        whole = self.layers * (attention + self.experts * expert) + rest
        active = self.layers * (attention + self.chosen * expert) + rest / 2
        return ModelCost(
            weights=whole * bits / 8,
            active=active * bits / 8,
            parameters=active,
            layers=self.layers,
            hidden=2 * self.hidden,
            vocab=4 * self.vocab,
            cache=4 * self.layers * self.kv_heads * self.head_dim,
            kv_heads=self.kv_heads,
            tables=rest / 2 * bits / 8,
        )


SHAPES = {
    "Llama-2-7B": KnownShape(32, 4096, 32, 32, 128, 11008, 32000),
    "Llama-2-13B": KnownShape(40, 5120, 40, 40, 128, 13824, 32000),
    "Yi-34B": KnownShape(60, 7168, 56, 8, 128, 20480, 64000),
    "Falcon-40B": KnownShape(60, 8192, 128, 8, 64, 32768, 65024, matrices=2),
    "Mixtral-8x7B": KnownShape(32, 4096, 32, 8, 128, 14336, 32000, experts=8, chosen=2),
    "Llama-2-70B": KnownShape(80, 8192, 64, 8, 128, 28672, 32000),
}


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
    add("source", nargs="?", help="a spec (.toml), a checkpoint folder or file, ...")
    add("--devices", action="append", metavar="DEVICES", help='as partition.devices: "0&1;2&3"')
    add("--requests", type=int, default=8, help="concurrent requests (8)")
    add("--tokens", type=int, default=32, help="tokens per answer (32)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the spec")
    add("--svg", metavar="FILE", help="draw when the stages of the last split were busy")
    add("--json", metavar="FILE", help="write the figures as JSON")
    add(
        "--predict",
        action="store_true",
        help="print the cost model's estimates, without a run",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.predict:
        print("\n\n".join(predictions()))
        return 0
    if options.source is None:
        print("error: name a source, or give --predict", file=sys.stderr)
        return 2
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
        programs.timeline = timeline = Timeline()
        begun = time.perf_counter()
        llm.generate(prompts, params)
        rate = options.requests * options.tokens / (time.perf_counter() - begun)
        programs.timeline = None
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


def predictions() -> list[str]:
    """The cost model's predictions for well-known models, a table for each machine and width."""
    tables = []
    for name, count in (("rtx4090", _COUNTS), ("a100", _COUNTS), ("h100", (8, 16, 32, 64))):
        for bits, word in ((16.0, "16 bits"), (4.5, "3.5 bits with their blocks' numbers")):
            heads = ["", *(f"{devices}" for devices in count)]
            rows = [
                [model, *(_cell(shape.work(bits), HARDWARE[name], n) for n in count)]
                for model, shape in SHAPES.items()
            ]
            tables.append("\n".join([f"{name}, {word}:", "", *_table(heads, rows)]))
    four = SHAPES["Llama-2-13B"].work(16)
    found = [estimate_decode(four, HARDWARE["v100"], *each) for each in device_layouts(4)]
    rows = [
        [f"{each.pipe}x{each.tensor}", f"{each.step * 1e3:.0f} ms", f"{1 / each.step:.0f}",
         f"{each.tokens:.0f}"]
        for each in found
    ]  # fmt: skip
    heads = ["stages x devices", "a token", "tokens/s, one sequence", "tokens/s, full pipeline"]
    tables.append("\n".join(["Llama-2-13B on four v100:", "", *_table(heads, rows)]))
    return tables


def _cell(work: ModelCost, machine: Hardware, devices: int) -> str:
    """The fastest split of so many devices for one sequence, and the one of highest throughput."""
    fitting = [
        found
        for pipe, tensor in device_layouts(devices)
        if pipe <= work.layers
        and tensor <= 64
        and (found := estimate_decode(work, machine, pipe, tensor, context=4096)).device
        <= 0.9 * machine.memory
    ]
    if not fitting:
        return "-"
    fast = min(fitting, key=lambda each: each.step)
    most = max(fitting, key=lambda each: each.tokens)
    return (
        f"{fast.pipe}x{fast.tensor} {fast.step * 1e3:.1f} ms, "
        f"{most.pipe}x{most.tensor} {most.tokens:.0f}/s"
    )


if __name__ == "__main__":
    sys.exit(main())
