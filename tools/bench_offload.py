"""CPU offload benchmark (GPU and host): `python -m tools.bench_offload MODEL [--json FILE]`.

The same prompts on the device alone, and with layers, embeddings, a share of the KV cache or
streamed weights on the host. Each split runs in its own process, so that its memory can be
measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.cli.run_command import JSON, command, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.loader.checkpoint import CheckpointError

PROMPT = 150  # tokens
ANSWER = 64
TOGETHER = 4  # prompts at a time
KV_TOKENS = 1024  # little more than these prompts and answers fill, so that the host has a part
_SECONDS = 120  # a split may take


def splits(layers: int) -> dict[str, dict[str, Any]]:
    """The compared splits: a name, and keys of `[partition]`."""
    return {
        "device alone": {},
        "2 layers on the host": {"cpu_layers": 2},
        "embeddings on the host": {"host_embeddings": True},
        "half of the KV cache on the host": {"host_kv_cache": 0.5},
        "half of the layers streamed": {"streamed_layers": max(3, layers // 2)},
        "all at once": {
            "host_embeddings": True,
            "host_kv_cache": 0.5,
            "streamed_layers": max(3, layers // 2),
        },
    }


def measure_split(source: str, keys: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Tokens, rates and memory of one split, in this process."""
    import jax
    import numpy as np

    from jinfer import LLM

    overrides = {f"partition.{key}": value for key, value in keys.items()}
    begun = time.perf_counter()
    llm = LLM(source, **{"dtype": dtype, "engine.kv_tokens": KV_TOKENS, **overrides})
    loaded = time.perf_counter() - begun
    rng = np.random.default_rng(0)
    vocab = llm.spec.dims["vocab"]
    rows = rng.integers(3, vocab, (3 * TOGETHER, PROMPT)).tolist()
    options: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}

    def answers(prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        begun = time.perf_counter()
        found = [list(item.token_ids) for item in llm.generate(prompts, **options)]
        return found, time.perf_counter() - begun

    first, _ = answers(rows[:1])
    started = time.perf_counter() - begun
    several, _ = answers(rows[:TOGETHER])
    answers(rows[TOGETHER : 2 * TOGETHER])  # compiled programs depend on arrival order
    _, took = answers(rows[2 * TOGETHER :])
    _, alone = answers(rows[-1:])
    stats = jax.devices()[0].memory_stats() or {}
    plan = getattr(llm.session.engine.runner.programs.pipeline, "memory", "")
    llm.close()
    return {
        "tokens": [*first, *several],
        "load_seconds": loaded,
        "first_answer_seconds": started,
        "tokens_per_second": ANSWER / alone,
        "tokens_per_second_together": TOGETHER * ANSWER / took,
        "bytes_in_use": stats.get("bytes_in_use", 0),
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
        "plan": str(plan),
    }


def in_a_process(source: str, keys: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """`measure_split` in a new process; or its error output."""
    command = [sys.executable, "-m", "tools.bench_offload", source, "--dtype", dtype]
    try:
        done = subprocess.run(
            [*command, "--split", json.dumps(keys)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {_SECONDS} s"}
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return {"error": (lines or [f"status {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(source: str, layers: int, dtype: str, out: Path | None) -> dict[str, Any]:
    """All splits, each with whether its tokens equal the device's alone.

    Results are written after each split, so that an aborted run keeps those it has.
    """
    found: dict[str, Any] = {}
    expected: Any = None
    for name, keys in splits(layers).items():
        row = in_a_process(source, keys, dtype)
        tokens = row.pop("tokens", None)
        expected = tokens if expected is None else expected
        if "error" in row:
            print(f"{name:<34} {row['error']}", flush=True)
        else:
            row["equal"] = tokens == expected
            verdict = "equal" if row["equal"] else "OTHER TOKENS"
            started = f"first answer after {row['first_answer_seconds']:.0f} s"
            print(
                f"{name:<34} {row['tokens_per_second']:8.1f} tokens/s, {TOGETHER} together "
                f"{row['tokens_per_second_together']:8.1f}, {row['bytes_in_use'] / 2**20:8.0f} MiB "
                f"on the device, {started}, {verdict}",
                flush=True,
            )
        found[name] = row
        write_json(out, found)
    return found


@command(
    "Compares splits between a GPU and its host with the GPU alone.",
    argument("source", help="a model"),
    argument(
        "--dtype",
        default="float32",
        help="type of the computation (float32, in which tokens must be equal)",
    ),
    JSON,
    argument("--split", help=argparse.SUPPRESS),
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if options.split is not None:
        print(json.dumps(measure_split(options.source, json.loads(options.split), options.dtype)))
        return 0
    from jinfer.loader.open_model import open_files
    from jinfer.loader.resolve_model import resolve_model

    spec = resolve_model(open_files(options.source, {}), {})[0]
    if spec.decoder is None:
        raise CheckpointError(options.source, "has no decoder, whose layers could be divided")
    found = compare(options.source, len(spec.decoder.layers), options.dtype, options.json)
    return 0 if all(row.get("equal") for row in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
