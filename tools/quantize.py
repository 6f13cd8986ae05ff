"""Quantizes a model once and for all: `python -m tools.quantize SOURCE OUT --weights q3.5`.

OUT is a folder that loads at once: its files are memory-mapped, and used as they are. With
`--orbax` its arrays are in a folder of Orbax's, of which every process reads what its devices hold.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from tqdm import tqdm

from jinfer import LLM
from jinfer.checkpoint import CheckpointError
from jinfer.checkpoint.converted import ConvertedCheckpoint, Packed, written
from jinfer.checkpoint.mapped import release
from jinfer.checkpoint.orbax import orbax_api
from jinfer.commands.program import program
from jinfer.model import AbstractModel, build
from jinfer.opening.recognize import open_source
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration import Inputs, Kind
from jinfer.quant.nearest import decoded, in_blocks
from jinfer.quant.quantize import Method
from jinfer.quant.tensor import to_codes
from jinfer.spec.files import parse_override
from jinfer.spec.quantization import PLAIN
from jinfer.spec.resolve import merge
from jinfer.weights.converted import packing, part_names, weight_settings
from jinfer.weights.load import find_origins, parameter_shapes, quantized, read_values, same_arrays
from jinfer.weights.mapping import Origin
from jinfer.weights.storage import Storage, choose_storages, in_types, kept_types

from .calibration import MOST_TOKENS, collect_inputs
from .command import run
from .converted_files import (
    SHARD_BYTES,
    OrbaxWriter,
    Writer,
    copy_companions,
    new_folder,
    write_specification,
)


@dataclass(frozen=True)
class Row:
    """Parameters that are stored alike.

    Attributes:
        format: "q4", "Q4_1 as it was", "float32".
        parameters, weights, nbytes: how many, and what they take.
        error: root of the mean squared error over that of the mean square; None: not quantized.
    """

    format: str
    parameters: int
    weights: int
    nbytes: int
    error: float | None

    @property
    def bits(self) -> float:
        """Bits of a weight."""
        return 8 * self.nbytes / max(1, self.weights)


@dataclass(frozen=True)
class _Done:
    """A parameter that is ready to be written.

    Attributes:
        arrays: by their names in the file.
        packed: None where it is not quantized.
        format: as in `Row`.
        weights, nbytes: how many, and what they take.
        squares, errors: sums over all weights, of its squares and of those of its errors; None
            where it is not quantized.
    """

    arrays: Mapping[str, np.ndarray]
    packed: Packed | None
    format: str
    weights: int
    nbytes: int
    squares: float = 0.0
    errors: float | None = None


def convert(
    source: str,
    out: Path,
    overrides: Mapping[str, Any],
    *,
    calibration: str | None = None,
    method: Method | None = None,
    tokens: int = MOST_TOKENS,
    progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
    orbax: bool = False,
) -> list[Row]:
    """Writes a converted checkpoint, and says what is in it, one row for each format.

    Memory holds no more than one of its files, and a decoded tensor per thread.

    Args:
        source: anything that a model is loaded from.
        out: a folder that is not there yet, or empty.
        overrides: tables laid over the source's specification.
        calibration: a text; the model reads it first, to learn which weights matter.
        method: instead of the specification's. "feedback" without a calibration text reads tokens
            by chance.
        tokens: that are read at most.
        progress: show a bar.
        shard_bytes: size of a file.
        orbax: write the arrays with Orbax, instead of to safetensors files.

    Raises:
        SourceError, SpecError, CheckpointError, LoadError: one line each.
    """
    if orbax:
        orbax_api(out)  # missing, it is missed before anything is done
    with new_folder(out) as folder:
        located = open_source(source, overrides)
        checkpoint = located.checkpoint
        if isinstance(checkpoint, ConvertedCheckpoint):
            reason = "is converted already; give the checkpoint that it was made from"
            raise CheckpointError(checkpoint.path, reason)
        spec = located.spec(overrides)
        # Not this machine's choice of a type: what the checkpoint says must not be lost.
        model = build(spec, "float32" if spec.dtype == "auto" else spec.dtype)
        origins = find_origins(model, checkpoint, spec.tensors)
        model = in_types(model, kept_types(model, spec.quantization, origins))
        storages = choose_storages(model, spec.quantization, origins, "float", spec.path)
        if method is not None:
            storages = {name: replace(each, method=method) for name, each in storages.items()}
        inputs: Mapping[str, Inputs] = {}
        if calibration is not None or method == "feedback":
            inputs = _calibrated(source, overrides, model, storages, calibration, tokens, progress)
        # What is multiplied with nothing, such as a table of vectors, has no error to feed back.
        storages = {
            name: each
            if name in inputs or each.method != "feedback"
            else replace(each, method="search")
            for name, each in storages.items()
        }
        same = same_arrays(model, origins, storages)
        writer = OrbaxWriter(folder, shard_bytes) if orbax else Writer(folder, shard_bytes)
        packed, rows = dict[str, Packed](), list[_Done]()
        firsts = list(dict.fromkeys(same.values()))
        convert_one = partial(_convert, model, origins, storages, inputs)
        with _bar(origins, firsts, progress) as bar:
            for name, done in _ahead(convert_one, firsts):
                writer.add(done.arrays)
                if done.packed is not None:
                    packed[name] = done.packed
                rows.append(replace(done, arrays={}))
                bar.update(origins[name].nbytes)
        shared = {name: first for name, first in same.items() if name != first}
        settings = weight_settings(spec.quantization) | (
            {} if method is None else {"method": method}
        )
        writer.finish(written(checkpoint, packed, shared, settings))
        said = copy_companions(folder, located, located.tokenizer(overrides))
        write_specification(
            folder, located, overrides, {**said, "quantization": _given(asdict(spec.quantization))}
        )
    return _summary(rows)


def _given(value: Any) -> Any:
    """Tables without keys that have no value."""
    if isinstance(value, Mapping):
        return {key: _given(each) for key, each in value.items() if each is not None}
    return [_given(each) for each in value] if isinstance(value, list | tuple) else value


def _calibrated(
    source: str,
    overrides: Mapping[str, Any],
    model: AbstractModel,
    storages: Mapping[str, Storage],
    text: str | None,
    tokens: int,
    progress: bool,
) -> dict[str, Inputs]:
    """What the weights that will be quantized are multiplied with while the model reads."""
    plain = {"weights": PLAIN, "embedding": PLAIN, "head": PLAIN, "rules": []}
    llm = LLM(source, progress=progress, **{**overrides, "quantization": plain})
    kinds: dict[str, Kind] = {
        name: "products" if storage.method == "feedback" else "squares"
        for name, storage in storages.items()
        if not storage.kept and storage.method != "nearest"
    }
    return collect_inputs(llm, text, kinds, most=tokens, progress=progress)


def _bar(origins: Mapping[str, Origin], names: Iterable[str], progress: bool) -> tqdm:
    return tqdm(
        total=sum(origins[name].nbytes for name in names),
        desc="quantizing", unit="B", unit_scale=True, leave=False, disable=not progress,
    )  # fmt: skip


def _ahead(work: Callable[[str], _Done], names: Sequence[str]) -> Iterator[tuple[str, _Done]]:
    """Works in threads, at most one result per thread ahead of who takes them."""
    threads = min(4, os.cpu_count() or 1)
    waiting = deque[tuple[str, Future[_Done]]]()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for name in names:
                waiting.append((name, pool.submit(work, name)))
                if len(waiting) > threads:
                    first, result = waiting.popleft()
                    yield first, result.result()
            for first, result in waiting:
                yield first, result.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _convert(
    model: AbstractModel,
    origins: Mapping[str, Origin],
    storages: Mapping[str, Storage],
    inputs: Mapping[str, Inputs],
    name: str,
) -> _Done:
    origin, storage, shapes = origins[name], storages.get(name), parameter_shapes(model)
    count = math.prod(shapes[name])
    tensor: QuantizedTensor | OutlierTensor
    if storage is None:
        dtype = model.parameters[model.names.index(name)].dtype
        values = np.ascontiguousarray(read_values(model, origin, shapes, dtype), dtype)
        done = _Done({name: values}, None, str(dtype), count, values.nbytes)
    else:
        if storage.kept:
            tensor = storage.read(origin, shapes)
            label, squares, errors = f"{origin.files[0].type} as it was", 1.0, 0.0
        else:
            measured = _Measured()
            tensor = quantized(model, origin, shapes, storage, inputs.get(name), measured.add)
            label, squares, errors = storage.format.name, measured.squares, measured.errors
            if isinstance(tensor, OutlierTensor):
                label += " and outliers"
        arrays = {part: np.asarray(array) for part, array in part_names(name, tensor)}
        done = _Done(arrays, packing(tensor), label, count, tensor.nbytes, squares, errors)
    for file in origin.files:
        release(file.raw())
    return done


class _Measured:
    """Sums over all weights, of their squares and of those of their errors."""

    def __init__(self) -> None:
        self.squares = self.errors = 0.0

    def add(self, tensor: QuantizedTensor | OutlierTensor, values: np.ndarray) -> None:
        """Adds a tensor, and the values that it was quantized from."""
        rounded = tensor.rounded if isinstance(tensor, OutlierTensor) else tensor
        values = values.astype(np.float32)  # sums of squares are beyond float16
        for index in np.ndindex(*rounded.stack):
            ours = _values(rounded[index or ...])
            if isinstance(tensor, OutlierTensor):
                sparse = jax.tree.map(lambda part, i=index: part[i], tensor.outliers)
                there = sparse.rows < sparse.outputs
                ours[sparse.rows[there], sparse.columns[there]] += sparse.values[there]
            difference = ours - values[index]
            self.errors += float(np.vdot(difference, difference))
        self.squares += float(np.vdot(values, values))


def _values(matrix: QuantizedTensor) -> np.ndarray:
    """What a matrix of NumPy's arrays stands for, without compiling anything for its shape."""
    codes, numbers, _ = to_codes(matrix)
    base = None if matrix.format.symmetric else numbers[..., 1]
    blocks = decoded(in_blocks(codes, matrix.format.block), numbers[..., 0], base, matrix.format)
    return blocks.reshape(codes.shape)[:, : matrix.inputs]


def _summary(rows: Sequence[_Done]) -> list[Row]:
    """A row for each format, the quantized ones first."""
    formats = dict.fromkeys(row.format for row in sorted(rows, key=lambda row: row.errors is None))
    found = []
    for format in formats:
        alike = [row for row in rows if row.format == format]
        weights, nbytes = sum(row.weights for row in alike), sum(row.nbytes for row in alike)
        squares = sum(row.squares for row in alike)
        errors = [row.errors for row in alike if row.errors is not None]
        error = math.sqrt(sum(errors) / squares) if errors and squares else None
        found.append(Row(format, len(alike), weights, nbytes, error))
    return found


def to_text(rows: Sequence[Row]) -> str:
    """A table of all formats, and of all together."""
    lines = [f"{'format':<20}{'parameters':>11}{'weights':>15}{'MiB':>11}{'bits':>8}{'error':>10}"]
    for row in (*rows, total(rows)):
        error = "" if row.error is None else f"{row.error:.2%}"
        lines.append(
            f"{row.format:<20}{row.parameters:>11}{row.weights:>15,}"
            f"{row.nbytes / 2**20:>11.1f}{row.bits:>8.3f}{error:>10}"
        )
    return "\n".join(lines)


def total(rows: Sequence[Row]) -> Row:
    """All parameters."""
    parameters, weights = sum(row.parameters for row in rows), sum(row.weights for row in rows)
    return Row("all", parameters, weights, sum(row.nbytes for row in rows), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors are one line, never a traceback."""
    return run(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program(__spec__.name),
        description="Writes a quantized checkpoint that loads at once.",
    )
    add = parser.add_argument
    add("source", help="a spec (.toml), a checkpoint folder or file, package://..., hf://...")
    add("out", type=Path, help="the folder to write")
    add("--weights", metavar="FORMAT", help="as quantization.weights: q4, q3.5, q4_b64_sym, ...")
    add("--method", choices=get_args(Method), help="how weights are quantized (search)")
    add("--calibration", metavar="TEXT", help="a file; which weights matter is learnt from it. "
        "Without one, --method feedback reads tokens by chance")  # fmt: skip
    add("--tokens", type=int, default=MOST_TOKENS, help=f"read to learn that ({MOST_TOKENS})")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the spec")
    add("--orbax", action="store_true", help="write the arrays with Orbax, to be read in shards")
    add("--json", metavar="FILE", help="write the table as JSON too")
    return parser


def _run(options: argparse.Namespace) -> int:
    overrides: dict[str, Any] = {}
    for text in options.set:
        overrides = merge(overrides, parse_override(text))
    method = options.method
    for key, value in (("weights", options.weights), ("method", method)):
        if value not in (None, "feedback"):  # which no specification can ask for
            overrides = merge(overrides, {"quantization": {key: value}})
    text = options.calibration and Path(options.calibration).read_text(encoding="utf-8")
    begun = time.perf_counter()
    rows = convert(
        options.source,
        options.out,
        overrides,
        calibration=text,
        method=method if method == "feedback" else None,
        tokens=options.tokens,
        progress=sys.stderr.isatty(),
        orbax=options.orbax,
    )
    seconds = time.perf_counter() - begun
    print(to_text(rows))
    print(f"{options.out}: {seconds:.1f} s")
    if options.json:
        every = (*rows, total(rows))
        report = {"source": options.source, "out": str(options.out), "seconds": seconds,
                  "formats": [{**asdict(row), "bits": row.bits} for row in every]}  # fmt: skip
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
