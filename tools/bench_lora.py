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
from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.run_command import overrides_of, run, write_json
from jinfer.cli.terminal.argument_parser import CliParser
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rate(llm: LLM, adapters: Sequence[str | None], tokens: int) -> float:
    """Tokens a second that are decoded in all streams together, one stream for each adapter."""
    params = SamplingParams(max_tokens=tokens + 1, ignore_eos=True)

    def answer(row: int) -> float:
        prompt = [100 + row + i for i in range(_PROMPT)]
        (one,) = llm.generate([prompt], params, adapter=adapters[row])
        return one.usage.decode_seconds

    with ThreadPoolExecutor(len(adapters)) as pool:
        seconds = [*pool.map(answer, range(len(adapters)))]
    return len(adapters) * tokens / statistics.median(seconds)


def _measure(options: argparse.Namespace) -> int:
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
    if options.json:
        write_json(options.json, result)
    return 0


def _line(streams: int, rounds: Sequence[dict[str, float]]) -> dict[str, object]:
    rates = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    found: dict[str, object] = {"streams": streams, "rates": rates}
    text = f"{streams:2} streams: {rates[PLAIN]:.1f} tokens/s without room"
    for name in (UNUSED, USED):
        ratios = sorted(one[name] / one[PLAIN] for one in rounds)
        found[name] = {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        text += f"; {name} {rates[name]:.1f}: {spread}"
    print(text, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each number of streams; return the exit status."""
    parser = CliParser(
        prog=prog_of_module(__spec__.name), description="Measures the cost of LoRA adapters."
    )
    add = parser.add_argument
    add("source", help="a .gguf, or a model whose weights are one")
    add("--adapters", type=int, default=4, help="number of adapters; streams take them in turn")
    add("--rank", type=int, default=16, help="rank of the adapters")
    add("--streams", type=int, nargs="+", metavar="N", default=[1, 8], help="concurrent answers")
    add("--tokens", type=int, default=48, help="tokens per answer")
    add("--rounds", type=int, default=9)
    add("--set", action="append", metavar="KEY=VALUE", help="set any key of the spec")
    add("--json", metavar="FILE", help="also write all figures as JSON")
    return run(_measure, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
