"""QuaRot-style weight rotation: `jinfer rotate SOURCE.gguf OUT.gguf`.

The weights of a quantized checkpoint lie on the grid of its format, which flatters that format. If
every block reads the residual stream through an RMSNorm, the norms' weights can be folded into the
following matrices and the stream be rotated by any orthogonal matrix Q (the model's function stays:
an RMSNorm without weights commutes with Q; QuaRot, arXiv 2404.00456, section 3), after which the
weights lie on no grid.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from jinfer.cli.quantize.write_gguf import add_tensor, copy_metadata, finish
from jinfer.cli.run_command import command
from jinfer.cli.terminal.argument_parser import argument
from jinfer.loader.checkpoint import Checkpoint, CheckpointError
from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.open_model import open_files

# The tensors of a layer that read the stream, by the norm they read it through; that write to it.
_READERS = {
    "attn_norm": ("attn_q", "attn_k", "attn_v"),
    "ffn_norm": ("ffn_gate", "ffn_up"),
}
_WRITERS = ("attn_output", "ffn_down")
_FREQUENCIES = "rope_freqs.weight"  # of positions, nothing of the stream
_TYPES = ("F32", "F16", "Q8_0", "Q4_0")


def rotated(checkpoint: Checkpoint, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the equivalent model, float32.

    Args:
        seed: of the orthogonal matrix.

    Raises:
        CheckpointError: the model has unsupported tensors.
    """
    _check(checkpoint)
    tensors = {name: tensor.read().astype(np.float64) for name, tensor in checkpoint.tensors.items()
               if name in ("token_embd.weight", "output.weight")}  # fmt: skip
    embed = tensors["token_embd.weight"]
    turn = orthogonal(embed.shape[1], seed)

    def vector(name: str) -> np.ndarray:
        return checkpoint.tensors[name].read().astype(np.float64)

    yield "token_embd.weight", (embed @ turn).astype(np.float32)
    head = tensors.get("output.weight", embed)
    yield "output.weight", ((head * vector("output_norm.weight")) @ turn).astype(np.float32)
    yield "output_norm.weight", np.ones(embed.shape[1], np.float32)
    for name, tensor in checkpoint.tensors.items():
        if name == _FREQUENCIES:
            yield name, tensor.read().astype(np.float32)
        layer = re.fullmatch(r"(blk\.\d+)\.(\w+)\.weight", name)
        if layer is None:
            continue
        block, part = layer.groups()
        if part in _READERS:
            yield name, np.ones(embed.shape[1], np.float32)
            continue
        values = tensor.read().astype(np.float64)
        if part in _WRITERS:
            yield name, (turn.T @ values).astype(np.float32)
            continue
        norm = next(norm for norm, readers in _READERS.items() if part in readers)
        yield name, ((values * vector(f"{block}.{norm}.weight")) @ turn).astype(np.float32)


def orthogonal(size: int, seed: int) -> np.ndarray:
    """A random orthogonal matrix (arXiv math-ph/0609050)."""
    gauss = np.random.default_rng(seed).standard_normal((size, size))
    q, r = np.linalg.qr(gauss)
    return q * np.sign(np.diagonal(r))


def _check(checkpoint: Checkpoint) -> None:
    """Raises `CheckpointError` for a model with unknown or missing tensors."""
    path, names = checkpoint.path, checkpoint.tensors
    if checkpoint.format != "gguf":
        raise CheckpointError(path, f"is {checkpoint.format}; convert it to GGUF first")
    parts = {*_READERS, *_WRITERS, *(part for readers in _READERS.values() for part in readers)}
    layers = {name.rsplit(".", 2)[0] for name in names if name.startswith("blk.")}
    needed = {"token_embd.weight", "output_norm.weight"}
    needed |= {f"{layer}.{part}.weight" for layer in layers for part in parts}
    if other := sorted(names.keys() - needed - {"output.weight", _FREQUENCIES}):
        reason = f"{other[0]} is no tensor of a model with RMS norms before its blocks"
        raise CheckpointError(path, reason)
    if missing := sorted(needed - names.keys()):
        raise CheckpointError(path, f"has no {missing[0]}; give a model with RMS norms and gates")


def write(checkpoint: Checkpoint, out: Path, seed: int, type_name: str) -> None:
    """Write the equivalent model as GGUF, with the original metadata; vectors stay float32."""
    writer = gguf.GGUFWriter(out, str(checkpoint.metadata["general.architecture"]))
    copy_metadata(writer, checkpoint.metadata)
    for name, values in rotated(checkpoint, seed):
        add_tensor(writer, name, values, type_name)
    finish(writer)


@command(
    "Writes a model with rotated weights and the same outputs, to test quantizers.",
    argument("source", help="a .gguf with RMS norms before its blocks"),
    argument("out", type=Path, help="the .gguf to write"),
    argument("--type", choices=_TYPES, default="F16", help="type of the matrices (F16)"),
    argument("--seed", type=int, default=0, help="seed of the orthogonal matrix (0)"),
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if options.out.exists():
        raise SourceError(f"{options.out}: is there already; name another file, or remove it")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(open_files(options.source, {}).checkpoint, options.out, options.seed, options.type)
    return 0
