"""AOT serialization: compiled programs as bytes, and back, ready to run without a trace.

JAX can do this too (`jax.experimental.serialize_executable`), but with pickle, which would run
any code that a file contains. Here XLA reads its own format, and the rest is JSON: shapes, types,
and which arguments are used.

What is read of JAX's objects changes from version to version. A program whose parts are not as
expected is not serialized, and is compiled at each start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.known_jaxlib import is_known
from jinfer.engine.runner.sampler_output import SamplerOutput
from jinfer.nn.row_edits import EditTable
from jinfer.ops.attention.kv_cache import IndexedCache, LayerCache
from jinfer.ops.cpu_library import known_calls, register_calls
from jinfer.quant.kv_vectors import QuantizedVectors
from jinfer.quant_format import QuantFormat
from jinfer.sampling.sampling_metadata import SamplerState, SamplingMetadata

_RECORDS = {
    each.__name__: each
    for each in (
        *(SamplerOutput, LayerCache, IndexedCache, SamplerState, SamplingMetadata, State),
        *(FlatBatch, EditTable),
    )
}
_LENGTH = 8  # bytes of the JSON's length, which come first
_log = logging.getLogger("jinfer")


class _NotSerializableError(Exception):
    """The program is of a kind that this module does not handle."""


@dataclass(frozen=True)
class Reader:
    """A program that JAX dispatches, of whose first argument few arrays are used.

    JAX checks the type and sharding of each array it is passed, used or not.

    Attributes:
        compiled: takes the used ones alone.
        read: their indices.
    """

    compiled: jax.stages.Compiled
    read: tuple[int, ...]

    def __call__(self, arrays: Sequence[Any], *rest: Any) -> Any:
        """Runs the program; arguments as of the function it was compiled from."""
        return self.compiled(tuple([arrays[i] for i in self.read]), *rest)

    def as_text(self) -> str:
        """The optimized HLO."""
        return self.compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """XLA's figures of the memory it takes."""
        return self.compiled.memory_analysis()


def reader(program: jax.stages.Compiled) -> Any:
    """The same program, which takes only the arrays of its first argument that it uses.

    Args:
        program: for one device. One that cannot be converted is returned unchanged.
    """
    if not is_known():
        return program
    try:
        return _program(_header(program), _inside(program).xla_executable)
    except Exception as error:
        _log.debug("a program takes all its arguments: %s", error)
        return program


def dumped(program: jax.stages.Compiled) -> bytes | None:
    """Serializes a program for one device; None if that is not possible."""
    try:
        header, content = _header(program), bytes(_inside(program).xla_executable.serialize())
    except Exception as error:
        _log.debug("a program cannot be serialized: %s", error)
        return None
    text = json.dumps(header).encode()
    return len(text).to_bytes(_LENGTH, "little") + text + content


def loaded(content: bytes) -> Any:
    """Deserializes what `dumped` returned, as `reader` returns it; None if it cannot be used."""
    try:
        from jinfer.engine.runner.executable import device_list

        end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
        header = json.loads(content[_LENGTH:end])
        if not register_calls(header["calls"]):
            return None
        client = jax.local_devices()[0].client
        own = client.deserialize_executable(content[end:], executable_devices=device_list())
        return _program(header, own)
    except Exception as error:
        _log.debug("a serialized program cannot be used: %s", error)
        return None


def _inside(program: Any) -> Any:
    return program._executable._unloaded_executable


def _header(program: Any) -> dict[str, Any]:
    """All of a program but XLA's executable."""
    inside = _inside(program)
    (device,) = inside.device_list
    _check(program, inside, device)
    (first, *rest), named = jax.tree.map(_aval, program.args_info)
    kept, read = sorted(inside.kept_var_idx), None
    if type(first) is tuple and all(hasattr(one, "shape") for one in first):
        count, read = len(first), [i for i in kept if i < len(first)]
        first = tuple(first[i] for i in read)
        # The unused ones are no longer arguments.
        kept = [*range(len(read)), *(i - count + len(read) for i in kept if i >= count)]
    return {
        "name": inside.name,
        "arguments": _coded(((first, *rest), named)),
        "kept": kept,
        "read": read,
        "results": _coded(jax.tree.unflatten(program.out_tree, inside.output_avals)),
        "calls": sorted(known_calls()),
    }


def _program(header: Mapping[str, Any], xla_executable: Any) -> Any:
    if not _is_cpu():
        return _of_jax(header, xla_executable)
    # Here: only of known versions can this module be imported.
    from jinfer.engine.runner.executable import Executable

    arguments, _ = _decoded(header["arguments"])
    results = _decoded(header["results"])
    return Executable(xla_executable, arguments, header["kept"], header["read"], results)


def _of_jax(header: Mapping[str, Any], xla_executable: Any) -> Any:
    """A program that JAX dispatches."""
    from jax._src.interpreters.pxla import UnloadedMeshExecutable

    from jinfer.engine.runner.executable import device_list

    device, devices = jax.local_devices()[0], device_list()
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=_memory(device))
    flat, arguments = jax.tree.flatten(_decoded(header["arguments"]))
    out, results = jax.tree.flatten(_decoded(header["results"]))
    taken = [flat[i] for i in header["kept"]]
    executable = UnloadedMeshExecutable(
        xla_executable=xla_executable,
        device_list=devices,
        backend=device.client,
        input_avals=taken,
        input_shardings=[sharding] * len(taken),
        output_avals=out,
        output_shardings=[sharding] * len(out),
        committed=False,
        name=header["name"],
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(header["kept"]),
        mut=None,
        xla_in_layouts=[None] * len(taken),  # None: the usual one
        dispatch_in_layouts=[None] * len(taken),
        xla_out_layouts=[None] * len(out),
        all_args_info=None,
        pgle_profiler=None,
    )
    info = jax.tree.unflatten(arguments, [jax.stages.ArgInfo(one, False) for one in flat])
    compiled = jax.stages.Compiled(executable.load(), [], info, results)
    return compiled if header["read"] is None else Reader(compiled, tuple(header["read"]))


def _is_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _check(program: Any, inside: Any, device: Any) -> None:
    """Raises if the program has a part that `_program` would drop."""
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=_memory(device))
    odd: Sequence[Any] = (
        program._params.const_args,
        program._no_kwargs,
        inside.unordered_effects,
        inside.ordered_effects,
        inside.host_callbacks,
        inside.mut,
        inside.committed,
        inside.keepalive,
        device != jax.local_devices()[0],
        any(layout is not None for layout in inside.dispatch_in_layouts),
        any(one != sharding for one in (*inside.input_shardings, *inside.output_shardings)),
    )
    if any(odd):
        raise _NotSerializableError(f"{inside.name}: {odd}")


def _memory(device: Any) -> str:
    return str(device.default_memory().kind)


def _aval(info: Any) -> Any:
    return getattr(info, "_aval", None) or info.aval


def _coded(tree: Any) -> Any:
    """A tree of abstract arrays as JSON."""
    match tree:
        case None:
            return None
        case dict():
            return {"dict": [[key, _coded(value)] for key, value in tree.items()]}
        case QuantizedVectors():
            format = vars(tree.format)
            return {"vectors": [_coded(tree.words), _coded(tree.scales), format, tree.width]}
        case tuple() if type(tree).__name__ in _RECORDS:
            return {type(tree).__name__: [_coded(value) for value in tree]}
        case tuple() if type(tree) is tuple:
            return {"tuple": [_coded(value) for value in tree]}
        case _ if hasattr(tree, "shape"):
            return [list(tree.shape), np.dtype(tree.dtype).name, bool(tree.weak_type)]
        case _:
            raise _NotSerializableError(f"a tree with a {type(tree).__name__}")


def _decoded(coded: Any) -> Any:
    if coded is None:
        return None
    if isinstance(coded, list):
        shape, type_name, weak = coded
        return jax.core.ShapedArray(shape, type_name, weak)
    ((kind, parts),) = coded.items()
    if kind == "dict":
        return {key: _decoded(value) for key, value in parts}
    if kind == "tuple":
        return tuple(_decoded(value) for value in parts)
    if kind == "vectors":
        words, scales, format, width = parts
        return QuantizedVectors(_decoded(words), _decoded(scales), _format(format), width)
    return _RECORDS[kind](*(_decoded(value) for value in parts))


def _format(fields: Mapping[str, Any]) -> QuantFormat:
    codebook = fields["codebook"]
    return QuantFormat(**{**fields, "codebook": None if codebook is None else tuple(codebook)})
