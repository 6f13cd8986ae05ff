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
from dataclasses import asdict, replace
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
from jinfer.cli.quantize.quantize_table import (
    ErrorSums,
    FormatRow,
    WrittenParameter,
    done,
    summary,
    to_text,
    total,
)
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
        return {key: _given(each) for key, each in value.items() if each is not None}
    return [_given(each) for each in value] if isinstance(value, list | tuple) else value


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
