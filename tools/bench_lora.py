"""LoRA benchmark: `python -m tools.bench_lora MODEL.gguf [--json FILE]`.

Decoding with adapters of random numbers in all projections, and with room for them that no request
uses, against the same model without room. All three are in one process and take turns; a ratio is
the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np

from jinfer import LLM, SamplingParams
from jinfer.cli.bench.bench_figures import spread, spread_text
from jinfer.cli.quantize.write_gguf import finish
from jinfer.cli.run_command import JSON, SET, command, overrides_of, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.open_model import open_files
from jinfer.modelspec.toml_tables import merge

PLAIN, UNUSED, USED = "plain", "unused", "used"
_PROMPT = 4  # tokens


def write_random_adapter(model: Path, out: Path, rank: int, seed: int) -> None:
    """A GGUF adapter for the matrices of all layers of a GGUF model."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, tensor in open_checkpoint(model).tensors.items():
        if name.startswith("blk.") and len(tensor.shape) == 2:
            outputs, inputs = tensor.shape
            for part, size in (("a", (rank, inputs)), ("b", (outputs, rank))):
                matrix = rng.normal(0, 0.01, size).astype(np.float32)
                writer.add_tensor(f"{name}.lora_{part}", matrix)
    finish(writer)


def rate(llm: LLM, adapters: Sequence[str | None], tokens: int) -> float:
    """Tokens a second that are decoded in all streams together, one stream for each adapter."""
    params = SamplingParams(max_tokens=tokens + 1, ignore_eos=True)

    def answer(row: int) -> float:
        prompt = [100 + row + i for i in range(_PROMPT)]
        (answer,) = llm.generate([prompt], params, adapter=adapters[row])
        return answer.usage.decode_seconds

    with ThreadPoolExecutor(len(adapters)) as pool:
        seconds = [*pool.map(answer, range(len(adapters)))]
    return len(adapters) * tokens / statistics.median(seconds)


@command(
    "Measures the cost of LoRA adapters.",
    argument("source", help="a .gguf, or a model whose weights are one"),
    argument(
        "--adapters", type=int, default=4, help="number of adapters; streams take them in turn"
    ),
    argument("--rank", type=int, default=16, help="rank of the adapters"),
    argument(
        "--streams", type=int, nargs="+", metavar="N", default=[1, 8], help="concurrent answers"
    ),
    argument("--tokens", type=int, default=48, help="tokens per answer"),
    argument("--rounds", type=int, default=9),
    SET,
    JSON,
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    path = open_files(options.source, {}).weights
    if open_checkpoint(path).format != "gguf":
        raise CheckpointError(path, "is no GGUF file; write one with tools/bench_models.py")
    room = {"engine": {"max_adapters": options.adapters, "max_adapter_rank": options.rank}}
    given = merge({"engine": {"context": 512}}, overrides_of(options.set))
    names = [f"adapter{number}" for number in range(options.adapters)]
    result = []
    with LLM(path, **given) as plain, LLM(path, **merge(given, room)) as adapted:
        with tempfile.TemporaryDirectory() as folder:
            for seed, name in enumerate(names):
                file = Path(folder) / f"{name}.gguf"
                write_random_adapter(path, file, options.rank, seed)
                adapted.load_adapter(name, file)
        for streams in options.streams:
            nobody: list[str | None] = [None] * streams
            everyone: list[str | None] = [names[row % len(names)] for row in range(streams)]
            turns = {PLAIN: (plain, nobody), UNUSED: (adapted, nobody), USED: (adapted, everyone)}
            rounds = [
                {name: rate(*turn, options.tokens) for name, turn in turns.items()}
                for _ in range(options.rounds + 1)
            ][1:]  # the first is a warm-up
            result.append(_line(streams, rounds))
    write_json(options.json, result)
    return 0


def _line(streams: int, rounds: Sequence[dict[str, float]]) -> dict[str, object]:
    rates = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    found: dict[str, object] = {"streams": streams, "rates": rates}
    text = f"{streams:2} streams: {rates[PLAIN]:.1f} tokens/s without room"
    for name in (UNUSED, USED):
        found[name] = ratios = spread([row[name] / row[PLAIN] for row in rounds])
        text += f"; {name} {rates[name]:.1f}: {spread_text(ratios)}"
    print(text, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
