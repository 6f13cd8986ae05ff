"""Quantize a model offline: `jinfer quantize SOURCE OUT --weights q3.5`.

OUT is a folder that loads instantly: its files are memory-mapped and used as they are. With
`--orbax` its arrays are in an Orbax folder, of which every process reads its devices' shards. With
`--layout` it is what other engines read: `gptq`, `compressed-tensors` or `gguf`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jinfer.cli.quantize.export_checkpoint import (
    LAYOUTS,
    check_layout,
    export,
    exported_quantization,
    exported_storages,
)
from jinfer.cli.quantize.importance_matrix import text_windows
from jinfer.cli.quantize.write_native import (
    OrbaxWriter,
    copy_companions,
    new_folder,
    write_specification,
)
from jinfer.cli.run_command import JSON, SET, SOURCE, command, overrides_of, width, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.engine.scheduling.cache_size import free_memory
from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.checkpoint.native_checkpoint import (
    NativeCheckpoint,
    PackedFormat,
    native_metadata,
)
from jinfer.loader.checkpoint.orbax import orbax_api
from jinfer.loader.checkpoint.safetensors import SHARD_BYTES, Writer
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.config.unused_config import check_unused
from jinfer.loader.model_files import adapter_files, merged_checkpoint, tokenizer_path
from jinfer.loader.open_model import open_files, open_model
from jinfer.loader.resolve_model import resolve_model
from jinfer.loader.weights.bit_budget import with_budget
from jinfer.loader.weights.layer_forward import default_texts
from jinfer.loader.weights.layerwise_gptq import LayerwiseGPTQ
from jinfer.loader.weights.native_parameters import packing, part_names, weight_settings
from jinfer.loader.weights.plan_weights import (
    TOKENS,
    WeightPlan,
    gptq_names,
    obstacle,
    with_gptq,
    without_gptq,
)
from jinfer.loader.weights.read_parameter import read_parameter
from jinfer.loader.weights.storage_plan import (
    PER_BYTE,
    Storage,
    choose_storages,
    per_weight,
    stored_types,
    with_fp8,
    with_types,
)
from jinfer.loader.weights.tensor_mapping import Origin, find_origins, parameter_shapes
from jinfer.modelspec.quantization_table import current_method
from jinfer.modelspec.toml_tables import merge
from jinfer.nn.abstract_model import build_abstract_model
from jinfer.progress import task
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor
from jinfer.quant.calibration_stats import InputStats
from jinfer.quant.quantize_matrix import Method
from jinfer.quant.quantized_tensor import to_codes
from jinfer.quant.round_to_nearest import dequantize, split_into_blocks

_ROWS = 256  # of a matrix whose results are compared, about
BITS = "of a weight, with its share of scales, bases and padding"
ERRORS = "of the weights, and of their products with the inputs that were read; root mean square"
UNKNOWN = (
    "products with inputs were not measured, as no text was read, and the error of weights alone "
    "does not rank methods: below 5 bits that of gptq is larger, and it loses several times "
    "less quality; --method gptq and --calibration TEXT read one"
)


@dataclass(frozen=True)
class FormatRow:
    """Parameters of the same format.

    Attributes:
        format: "q4", "Q4_1 as it was", "float32".
        parameters, weights, nbytes: their numbers and size.
        error: root of the mean squared error over that of the mean square; None: not quantized.
        outputs: the same for the outputs on the recorded inputs, a mean over matrices; None:
            nothing was recorded.
    """

    format: str
    parameters: int
    weights: int
    nbytes: int
    error: float | None
    outputs: float | None = None

    @property
    def bits(self) -> float:
        """Bits per weight, everything included."""
        return 8 * self.nbytes / max(1, self.weights)


@dataclass
class ErrorSums:
    """Sums of squares over all pieces of a quantized parameter.

    Attributes:
        squares, errors: of its weights and of their errors.
        given, wrong: of its outputs on the recorded inputs, and of their errors.
    """

    squares: float = 0.0
    errors: float = 0.0
    given: float = 0.0
    wrong: float = 0.0

    def add(
        self,
        tensor: QuantizedTensor | OutlierTensor,
        values: np.ndarray,
        inputs: InputStats | None = None,
    ) -> None:
        """Add a tensor, and the values it was quantized from."""
        rounded = tensor.rounded if isinstance(tensor, OutlierTensor) else tensor
        values = values.astype(np.float32)  # sums of squares are beyond float16
        for index in np.ndindex(*rounded.stack):
            ours = _values(rounded[index or ...])
            if isinstance(tensor, OutlierTensor):
                import jax

                sparse = jax.tree.map(lambda part, i=index: part[i], tensor.outliers)
                there = sparse.rows < sparse.outputs
                ours[sparse.rows[there], sparse.columns[there]] += sparse.values[there]
            difference = ours - values[index]
            self.errors += float(np.vdot(difference, difference))
            if inputs is not None:
                mean = inputs.mean[index]
                self.given += _energy(values[index], mean)
                self.wrong += _energy(difference, mean)
        self.squares += float(np.vdot(values, values))

    @property
    def outputs(self) -> float | None:
        """The relative squared error of the outputs; None if unknown."""
        return self.wrong / self.given if self.given else None


@dataclass(frozen=True)
class WrittenParameter:
    """A parameter that was written.

    Attributes:
        format: as in `FormatRow`.
        weights, nbytes: number and size.
        measured: its errors; None if not quantized.
    """

    format: str
    weights: int
    nbytes: int
    measured: ErrorSums | None = field(default=None)


def done(
    tensor: Any, storage: Storage | None, origin: Origin, measured: ErrorSums
) -> WrittenParameter:
    """The report of a written parameter."""
    count = math.prod(tensor.shape)
    if storage is None:
        return WrittenParameter(str(tensor.dtype), count, tensor.nbytes)
    if storage.as_in_file:
        return WrittenParameter(
            f"{origin.tensors[0].type} as it was", count, tensor.nbytes, ErrorSums(1.0)
        )
    label = storage.format.name + (" and outliers" if isinstance(tensor, OutlierTensor) else "")
    return WrittenParameter(label, count, tensor.nbytes, measured)


def summary(rows: Sequence[WrittenParameter]) -> list[FormatRow]:
    """A row for each format, the quantized ones first."""
    formats = dict.fromkeys(row.format for row in sorted(rows, key=lambda row: not row.measured))
    found = []
    for format in formats:
        alike = [row for row in rows if row.format == format]
        measured = [row.measured for row in alike if row.measured is not None]
        squares, errors = (sum(getattr(m, n) for m in measured) for n in ("squares", "errors"))
        known = [
            (row.weights, row.measured.outputs)
            for row in alike
            if row.measured is not None and row.measured.outputs is not None
        ]
        count = sum(weights for weights, _ in known)
        found.append(
            FormatRow(
                format,
                len(alike),
                sum(row.weights for row in alike),
                sum(row.nbytes for row in alike),
                math.sqrt(errors / squares) if squares else None,
                math.sqrt(sum(w * error for w, error in known) / count) if known else None,
            )
        )
    return found


def to_text(rows: Sequence[FormatRow]) -> str:
    """A table of all formats and the total, with an explanation of its columns."""
    head = f"{'format':<20}{'parameters':>11}{'weights':>15}{'MiB':>10}{'bits':>8}"
    lines = [f"{head}{'error':>9}{'outputs':>9}"]
    for row in (*rows, total(rows)):
        error, outputs = ("" if x is None else f"{x:.2%}" for x in (row.error, row.outputs))
        lines.append(
            f"{row.format:<20}{row.parameters:>11}{row.weights:>15,}"
            f"{row.nbytes / 2**20:>10.1f}{row.bits:>8.3f}{error:>9}{outputs:>9}"
        )
    lines.append(f"bits: {BITS}")
    if any(row.error for row in rows):
        read = any(row.outputs is not None for row in rows)
        lines.append(f"error, outputs: {ERRORS}" if read else f"outputs: {UNKNOWN}")
    return "\n".join(lines)


def total(rows: Sequence[FormatRow]) -> FormatRow:
    """The sum over all parameters."""
    parameters, weights = sum(row.parameters for row in rows), sum(row.weights for row in rows)
    return FormatRow("all", parameters, weights, sum(row.nbytes for row in rows), None)


def _values(matrix: QuantizedTensor) -> np.ndarray:
    """A dequantized matrix of NumPy arrays, without compiling anything."""
    codes, numbers, _ = to_codes(matrix)
    base = None if matrix.format.symmetric else numbers[..., 1]
    blocks = dequantize(
        split_into_blocks(codes, matrix.format.block), numbers[..., 0], base, matrix.format
    )
    return blocks.reshape(codes.shape)[:, : matrix.inputs]


def _energy(rows: np.ndarray, mean: np.ndarray) -> float:
    """Mean square of the outputs of some rows for inputs of these second moments, summed.

    Args:
        mean: of the inputs' products [inputs, inputs], or of their squares [inputs].
    """
    rows = rows[:: max(1, len(rows) // _ROWS)]
    weighted = rows * mean if mean.ndim == 1 else rows @ mean
    return max(0.0, float(np.vdot(weighted, rows)))


def convert(
    source: str,
    out: Path,
    overrides: Mapping[str, Any],
    *,
    calibration: str | None = None,
    tokens: int = TOKENS,
    progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
    orbax: bool = False,
    layout: str | None = None,
) -> list[FormatRow]:
    """Write a native checkpoint; return one row for each format.

    Memory holds no more than one of its files, and a decoded tensor per thread; if the model reads
    a text, also a layer and the vectors of all tokens.

    Args:
        source: anything a model is loaded from.
        out: a new or empty folder.
        overrides: tables laid over the source's specification.
        calibration: a calibration text, for GPTQ or importance (imatrix).
        tokens: max tokens of it.
        progress: show a bar.
        shard_bytes: size of a file.
        orbax: write the arrays with Orbax, instead of to safetensors files.
        layout: write another engine's checkpoint, one of `LAYOUTS`.

    Raises:
        SourceError, SpecError, CheckpointError, LoadError: one line each.
    """
    if orbax:
        orbax_api(out)  # missing, it is missed before anything is done
    with new_folder(out) as folder:
        files = open_files(source, overrides)
        checkpoint = files.checkpoint
        if isinstance(checkpoint, NativeCheckpoint):
            reason = "is converted already; give the checkpoint that it was made from"
            raise CheckpointError(checkpoint.path, reason)
        if layout is not None:
            check_layout(layout, files)
        spec, left = resolve_model(files, overrides)
        check_unused(left, files.config, spec)
        spec = replace(spec, quantization=exported_quantization(layout, spec.quantization))
        # Not this machine's choice of a type: the checkpoint's precision must not be lost.
        model = build_abstract_model(spec, "float32" if spec.dtype == "auto" else spec.dtype)
        adapters = adapter_files(spec, files, overrides)
        checkpoint = merged_checkpoint(checkpoint, adapters, model, spec.tensors)
        origins = find_origins(model, checkpoint, spec.tensors)
        model = with_types(model, stored_types(model, spec.quantization, origins))
        storages = choose_storages(model, spec.quantization, origins, "float", spec.path)
        if layout is None:
            model = with_fp8(model, spec.quantization, origins)
        else:
            plan = WeightPlan(model, spec, checkpoint, origins, storages)
            storages = exported_storages(layout, plan)
        storages = with_gptq(model, spec, origins, storages)
        free = free_memory()
        hindered = gptq_names(storages) and obstacle(model, spec, storages, tokens, free)
        if hindered:
            print(f"{hindered}; weights are quantized without GPTQ", file=sys.stderr)
            storages = without_gptq(storages)
        measured = defaultdict[str, ErrorSums](ErrorSums)
        parameters: Iterable[tuple[str, Any]]
        plan = WeightPlan(model, spec, checkpoint, origins, storages)
        if gptq_names(storages) or calibration is not None:
            if calibration is not None:
                texts = text_windows(open_model(source, overrides), calibration, tokens)
            else:
                texts = default_texts(plan, tokens=tokens, progress=progress)
            if gptq_names(storages):
                plan = with_budget(plan, texts, progress=progress)
                storages = dict(plan.storages)
            parameters = LayerwiseGPTQ(
                plan, texts,
                weighed=calibration is not None,
                watched=lambda name: measured[name].add, progress=progress,
            )  # fmt: skip
        else:
            parameters = _separately(plan, origins, measured, progress)
        packed, rows = dict[str, PackedFormat](), list[WrittenParameter]()
        if layout is not None:
            copy_companions(folder, files, tokenizer_path(files, overrides))
            for name, tensor in export(layout, folder, files, plan, parameters):
                rows.append(done(tensor, storages.get(name), origins[name], measured[name]))
                origins[name].release()
            return summary(rows)
        writer = OrbaxWriter(folder, shard_bytes) if orbax else Writer(folder, shard_bytes)
        for name, tensor in parameters:
            writer.add({part: np.asarray(array) for part, array in part_names(name, tensor)})
            if isinstance(tensor, QuantizedTensor | OutlierTensor | ReorderedTensor):
                packed[name] = packing(tensor)
            rows.append(done(tensor, storages.get(name), origins[name], measured[name]))
            origins[name].release()
        shared = {name: first for name, first in plan.same.items() if name != first}
        writer.finish(
            native_metadata(checkpoint, packed, shared, weight_settings(spec.quantization))
        )
        companions = copy_companions(folder, files, tokenizer_path(files, overrides))
        write_specification(
            folder,
            files,
            overrides,
            {**companions, "quantization": _given(asdict(spec.quantization))},
        )
    return summary(rows)


def _given(value: Any) -> Any:
    """Tables without keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list | tuple) else value


def _separately(
    plan: WeightPlan,
    origins: Mapping[str, Origin],
    measured: Mapping[str, ErrorSums],
    progress: bool,
) -> Iterator[tuple[str, Any]]:
    """Each parameter as stored, independently of the others; with a bar."""
    shapes, storages = parameter_shapes(plan.plain), plan.storages
    rates = {name: per_weight(storages.get(name)) for name in shapes}
    firsts = list(dict.fromkeys(plan.same.values()))
    reading = {name: origins[name].nbytes * PER_BYTE for name in firsts}
    total = sum(reading[name] + rates[name] * math.prod(shapes[name]) for name in firsts)
    with task("quantizing", total, unit="%", shown=progress or None) as bar:

        def read(name: str) -> Any:
            def watch(piece: Any, values: np.ndarray, inputs: InputStats | None) -> None:
                measured[name].add(piece, values, inputs)
                bar.update(rates[name] * values.size)

            return read_parameter(plan.plain, origins[name], storages.get(name), watch=watch)

        for name, tensor in _ahead(read, firsts):
            bar.update(reading[name])
            yield name, tensor


def _ahead(work: Callable[[str], Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Run in threads, at most one result per thread ahead of the consumer."""
    threads = min(4, os.cpu_count() or 1)
    waiting = deque[tuple[str, Future[Any]]]()
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


@command(
    "Writes a quantized checkpoint, which loads without conversion.",
    SOURCE,
    argument("out", type=Path, help="the folder to write"),
    argument(
        "--weights",
        metavar="FORMAT",
        type=width,
        help='as quantization.weights: q4, q3.5, q4_b64_nl, "4.25 bits", ...',
    ),
    argument(
        "--method",
        type=current_method,
        choices=get_args(Method),
        help="as quantization.method (auto): mse takes a fraction of the time of gptq, and below 5 "
        "bits loses several times as much quality; rtn loses more still",
    ),
    argument(
        "--calibration",
        metavar="TEXT",
        help="a text file to calibrate with; by default, texts that the model generates",
    ),
    argument("--tokens", type=int, default=TOKENS, help=f"tokens to calibrate with ({TOKENS})"),
    SET,
    argument(
        "--layout",
        choices=LAYOUTS,
        help="write a GPTQ or compressed-tensors folder for "
        "transformers and vLLM, or from a GGUF file another GGUF file for llama.cpp",
    ),
    argument(
        "--orbax",
        action="store_true",
        help="write the arrays with Orbax, which can be read in shards",
    ),
    JSON,
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if options.orbax and options.layout:
        raise SourceError("--layout and --orbax: give one of them")
    overrides = overrides_of(options.set)
    for key, value in (("weights", options.weights), ("method", options.method)):
        if value is not None:
            overrides = merge(overrides, {"quantization": {key: value}})
    text = options.calibration and Path(options.calibration).read_text(encoding="utf-8-sig")
    begun = time.perf_counter()
    rows = convert(
        options.source,
        options.out,
        overrides,
        calibration=text,
        tokens=options.tokens,
        progress=sys.stderr.isatty(),
        orbax=options.orbax,
        layout=options.layout,
    )
    seconds = time.perf_counter() - begun
    print(to_text(rows))
    print(f"{options.out}: {seconds:.1f} s")
    every = (*rows, total(rows))
    report = {"source": options.source, "out": str(options.out), "seconds": seconds,
              "formats": [{**asdict(row), "bits": row.bits} for row in every]}  # fmt: skip
    write_json(options.json, report)
    return 0
