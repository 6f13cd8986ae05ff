"""Quality against size: `jinfer quality SOURCE --text FILE`.

For each quantization: bits per weight, error of the weights, perplexity of a text, and distance
from the source in float32 (Kullback-Leibler divergence, and how often the most likely token is the
same). In addition, the same for llama.cpp's types, made from the same GGUF file, if a Python with
llama-cpp-python is given.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from jinfer.api.llm import LLM
from jinfer.cli.bench.bench_figures import check_plot, plot, table
from jinfer.cli.bench.bench_figures import row as table_row
from jinfer.cli.bench.llama_peer import ask
from jinfer.cli.perplexity import TEXT, Window, perplexity, summary, text_windows
from jinfer.cli.quantize.importance_matrix import importance_matrix
from jinfer.cli.run_command import JSON, SVG, command, width, write_json
from jinfer.cli.terminal.argument_parser import argument, several
from jinfer.modelspec.quantization_table import current_method
from jinfer.progress import track
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor
from jinfer.quant.quantize_matrix import Method

WIDTHS = ("q2", "q3", "q3.5", "q4", "q5", "q6", "q8")
METHODS = get_args(Method)
# GPTQ (`jinfer.quant.gptq`) takes a minute or more for each format.
QUICK = ("rtn", "mse")
_HEADS = ("engine", "weights", "bits/weight", "error", "perplexity", "divergence", "same token")
PEER_TYPES = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")


@dataclass(frozen=True)
class QualityRow:
    """Results of one quantization.

    Attributes:
        engine, name: engine and format.
        bits: per weight, over all matrices and tables, scales included.
        rmse: of the weights, relative to their root mean square.
        perplexity, error: of the text, with one standard error.
        divergence: mean Kullback-Leibler divergence from the source, nats per token.
        agreement: share of tokens whose most likely token is the source's.
    """

    engine: str
    name: str
    bits: float
    rmse: float | None
    perplexity: float
    error: float
    divergence: float
    agreement: float


@dataclass(frozen=True)
class Reference:
    """The source in float32.

    Attributes:
        weights: its matrices by name.
        logits: after each scored token, of the first windows.
    """

    weights: dict[str, np.ndarray]
    logits: np.ndarray


def bits_per_weight(llm: LLM) -> float:
    """Bits per weight of all matrices and tables; shared ones count once."""
    bits = weights = 0
    seen: set[int] = set()
    engine = llm._engine
    for leaf, role in zip(engine.runner.parameters, engine.runner.model.roles, strict=True):
        if role == "plain" or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        weights += int(np.prod(leaf.shape))
        bits += 8 * leaf.nbytes
    return bits / weights


def weight_error(llm: LLM, weights: dict[str, np.ndarray]) -> float:
    """Root mean square error of the matrices, relative to their root mean square."""
    wrong = total = 0.0
    for name, leaf in zip(
        llm._engine.runner.model.names, llm._engine.runner.parameters, strict=True
    ):
        if isinstance(leaf, QuantizedTensor | OutlierTensor | ReorderedTensor):
            difference = np.asarray(leaf.dequantize()) - weights[name]
            wrong += float(np.square(difference, dtype=np.float64).sum())
            total += float(np.square(weights[name], dtype=np.float64).sum())
    return (wrong / total) ** 0.5 if total else 0.0


def divergence(logits: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Mean divergence from the reference, and how often the most likely token agrees."""
    given, true = _log_softmax(logits), _log_softmax(expected)
    apart = np.sum(np.exp(true) * (true - given), axis=-1)
    return float(apart.mean()), float(np.mean(given.argmax(-1) == true.argmax(-1)))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def counted_logits(llm: LLM, parts: Sequence[Window]) -> np.ndarray:
    """Logits before each scored token: [tokens, vocab]."""
    return np.concatenate([llm.logits([part.ids])[0][part.first - 1 : -1] for part in parts])


def reference(source: str, parts: Sequence[Window], context: int) -> tuple[Reference, QualityRow]:
    """The source in float32."""
    keys: dict[str, Any] = {"dtype": "float32", "quantization.weights": "plain"}
    keys["engine.context"] = context
    llm = LLM(source, **keys)
    weights = {
        name: np.asarray(leaf)
        for name, leaf, role in zip(
            llm._engine.runner.model.names,
            llm._engine.runner.parameters,
            llm._engine.runner.model.roles,
            strict=True,
        )
        if role != "plain"
    }
    logits = counted_logits(llm, parts[:2])
    found = perplexity(llm, parts, progress=sys.stderr.isatty())
    row = QualityRow("jinfer", "f32", 32.0, 0.0, found.value, found.error, 0.0, 1.0)
    return Reference(weights, logits), row


def measure(
    source: str, name: str, keys: dict[str, Any], parts: Sequence[Window], baseline: Reference
) -> QualityRow:
    """The results of one quantization."""
    llm = LLM(source, **keys)
    apart, same = divergence(counted_logits(llm, parts[:2]), baseline.logits)
    found = perplexity(llm, parts, progress=sys.stderr.isatty())
    bits, rmse = bits_per_weight(llm), weight_error(llm, baseline.weights)
    del llm
    gc.collect()
    return QualityRow("jinfer", name, bits, rmse, found.value, found.error, apart, same)


def peer_rows(
    python: str,
    gguf: str,
    types: Sequence[str],
    parts: Sequence[Window],
    baseline: Reference,
    imatrix: Mapping[str, np.ndarray] | None = None,
) -> Iterator[QualityRow]:
    """Results of llama.cpp's types, made from a GGUF file, with an importance matrix or without."""
    matrices = sum(weight.size for weight in baseline.weights.values())
    with tempfile.TemporaryDirectory() as folder:
        weighed = None if imatrix is None else str(Path(folder) / "imatrix.npz")
        if weighed is not None:
            np.savez(weighed, **cast("dict[str, Any]", imatrix))
        for name in types:
            model, out = str(Path(folder) / f"{name}.gguf"), str(Path(folder) / "scores.npz")
            ask(python, {"quantize": [gguf, model, name, weighed]})
            request = {"model": model, "length": max(len(part.ids) for part in parts),
                       "windows": [[list(part.ids), part.first] for part in parts],
                       "with_logits": 2, "out": out}  # fmt: skip
            ask(python, {"score": request})
            with np.load(out) as found:
                score = summary(found["losses"], len(parts))
                apart, same = divergence(found["logits"], baseline.logits)
                bits = 8 * float(found["size"]) / matrices
            Path(model).unlink()
            name = name if imatrix is None else f"{name} imatrix"
            yield QualityRow("llama.cpp", name, bits, None, score.value, score.error, apart, same)


def cells(row: QualityRow) -> list[str]:
    """The cells of a row."""
    rmse = "" if row.rmse is None else f"{row.rmse:.4f}"
    value, apart = f"{row.perplexity:.3f} ± {row.error:.3f}", f"{row.divergence:.5f}"
    return [row.engine, row.name, f"{row.bits:.2f}", rmse, value, apart, f"{row.agreement:.1%}"]


def draw(rows: Sequence[QualityRow], file: str) -> None:
    """Perplexity, divergence and error against bits per weight, as SVG or PNG."""
    plain = next((row for row in rows if row.bits >= 32), None)
    series: dict[str, list[QualityRow]] = {}
    for row in sorted(rows, key=lambda row: row.bits):
        if row.bits < 32:
            kind = row.name.partition(" ")[2] or "as it is"
            label = row.engine if row.engine != "jinfer" else f"jinfer, {kind}"
            series.setdefault(label, []).append(row)
    titles = {"perplexity": "perplexity", "divergence": "divergence, nats", "rmse": "RMS error"}
    with plot(file, 1, 3, figsize=(15, 4.5)) as axes:
        for axis, (field, title) in zip(axes, titles.items(), strict=True):
            for label, members in series.items():
                shown = [row for row in members if getattr(row, field) is not None]
                if shown:
                    values = [getattr(row, field) for row in shown]
                    axis.plot([row.bits for row in shown], values, marker="o", label=label)
            axis.set(xlabel="bits per weight", ylabel=title, yscale="log")
            axis.grid(alpha=0.3)
        if plain is not None:
            axes[0].axhline(plain.perplexity, color="gray", linestyle=":", label="float32")
        axes[0].legend()


@command(
    "Measures quality against bits per weight.",
    argument("source", help="unquantized: a spec (.toml), a checkpoint folder or file"),
    *TEXT,
    several("--weights", type=width, metavar="FORMAT", help="default: every width"),
    several("--method", type=current_method, choices=METHODS, help="default: rtn, mse"),
    several("--calibrated", metavar="FOLDER", help="also a folder that `jinfer quantize` wrote"),
    several("--kv-cache", metavar="KIND", help="also with this KV cache"),
    argument(
        "--peer-python", metavar="FILE", help="a Python that has llama_cpp; SOURCE is a .gguf then"
    ),
    several("--peer-type", metavar="TYPE", help="such as Q4_K_M"),
    argument(
        "--peer-imatrix",
        nargs="?",
        const="",
        metavar="TEXT",
        help="with an importance matrix of this text, or of the one that the model writes",
    ),
    JSON,
    SVG,
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    check_plot(options.svg)
    text = Path(options.text).read_text(encoding="utf-8-sig")
    calibration = options.peer_imatrix and Path(options.peer_imatrix).read_text("utf-8-sig")
    first = LLM(options.source, **{"engine.context": options.length})
    parts = text_windows(first, text, options.length, None, "halves")[: options.windows]
    del first
    begun = time.perf_counter()
    baseline, row = reference(options.source, parts, options.length)
    rows = [row]
    for name, source, keys in track(list(_ways(options)), "measuring", unit="way"):
        keys = {"engine.context": options.length, **keys}
        rows.append(measure(source, name, keys, parts, baseline))
        print(table_row(cells(rows[-1])))
    if options.peer_python:
        types, imatrix = options.peer_type or PEER_TYPES, None
        if calibration is not None:
            imatrix = importance_matrix(options.source, calibration=calibration or None)
        peer = (options.peer_python, options.source, types, parts, baseline, imatrix)
        for found in peer_rows(*peer):
            rows.append(found)
            print(table_row(cells(rows[-1])))
    print(table(_HEADS, map(cells, rows)))
    print(f"{len(parts)} windows of {options.length}, {time.perf_counter() - begun:.0f} s")
    report = {"source": options.source, "text": options.text, "windows": len(parts),
              "length": options.length, "rows": [asdict(row) for row in rows]}  # fmt: skip
    write_json(options.json, report)
    if options.svg:
        draw(rows, options.svg)
    return 0


def _ways(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, source and keys of each quantization of weights or cache."""
    for method in options.method or QUICK:
        for weights in options.weights or WIDTHS:
            keys = {"quantization.weights": weights, "quantization.method": method}
            yield f"{weights} {method}", options.source, keys
    for folder in options.calibrated:
        yield Path(folder).name, folder, {}
    for kind in options.kv_cache:
        keys = {"dtype": "float32", "quantization.kv_cache": kind}
        yield f"f32 cache {kind}", options.source, keys
