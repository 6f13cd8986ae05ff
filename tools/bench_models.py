"""Benchmark checkpoints: `python -m tools.bench_models OUT.gguf (--source X | --shape 1.1b)`.

Real weights with all matrices in one type, or random weights of a real shape.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np

from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.quantize.write_gguf import add_tensor, copy_metadata, finish, packed_rows
from jinfer.cli.run_command import check_writable, run
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.open_model import open_files

# Weights of a row of random numbers, quantized once and used for all rows.
_MADE_UP_ROWS = 64
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
_SMALLEST = 32  # rows and columns of a matrix that is quantized
_ROUTER = ".ffn_gate_inp.weight"  # a mixture's, which is not quantized
_WORDS = "smollm2_135m_instruct"  # whose tokenizer a made-up model has


class Shape(Protocol):
    """Sizes of a model, as GGUF has them."""

    architecture: str

    def tensors(self, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """GGUF names and shapes."""

    def metadata(self) -> dict[str, Any]:
        """GGUF metadata of these sizes."""


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama-like decoder (gated MLP, GQA)."""

    architecture = "llama"

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int = 4096

    def tensors(self, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """GGUF names and shapes."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "token_embd.weight", (vocab, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        yield "output.weight", (vocab, self.hidden)
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm.weight", (self.hidden,)
            yield f"blk.{i}.attn_q.weight", (self.hidden, self.hidden)
            yield f"blk.{i}.attn_k.weight", (kv, self.hidden)
            yield f"blk.{i}.attn_v.weight", (kv, self.hidden)
            yield f"blk.{i}.attn_output.weight", (self.hidden, self.hidden)
            yield f"blk.{i}.ffn_norm.weight", (self.hidden,)
            yield f"blk.{i}.ffn_gate.weight", (self.intermediate, self.hidden)
            yield f"blk.{i}.ffn_up.weight", (self.intermediate, self.hidden)
            yield f"blk.{i}.ffn_down.weight", (self.hidden, self.intermediate)

    def metadata(self) -> dict[str, Any]:
        """GGUF metadata of these sizes."""
        return {
            "llama.block_count": self.layers,
            "llama.context_length": self.context,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": self.intermediate,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.rope.dimension_count": self.hidden // self.heads,
            "llama.rope.freq_base": 10000.0,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }


@dataclass(frozen=True)
class Lfm2Shape:
    """Sizes of an LFM2: short convolutions, attention (GQA) in some layers, gated MLPs."""

    architecture = "lfm2"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    attention: tuple[int, ...]
    kernel: int = 3
    context: int = 4096

    def tensors(self, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """GGUF names and shapes."""
        head = self.hidden // self.heads
        kv = head * self.kv_heads
        yield "token_embd.weight", (vocab, self.hidden)
        yield "token_embd_norm.weight", (self.hidden,)
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm.weight", (self.hidden,)
            if i in self.attention:
                yield f"blk.{i}.attn_q.weight", (self.hidden, self.hidden)
                yield f"blk.{i}.attn_k.weight", (kv, self.hidden)
                yield f"blk.{i}.attn_v.weight", (kv, self.hidden)
                yield f"blk.{i}.attn_output.weight", (self.hidden, self.hidden)
                yield f"blk.{i}.attn_q_norm.weight", (head,)
                yield f"blk.{i}.attn_k_norm.weight", (head,)
            else:
                yield f"blk.{i}.shortconv.in_proj.weight", (3 * self.hidden, self.hidden)
                yield f"blk.{i}.shortconv.conv.weight", (self.hidden, self.kernel)
                yield f"blk.{i}.shortconv.out_proj.weight", (self.hidden, self.hidden)
            yield f"blk.{i}.ffn_norm.weight", (self.hidden,)
            yield f"blk.{i}.ffn_gate.weight", (self.intermediate, self.hidden)
            yield f"blk.{i}.ffn_up.weight", (self.intermediate, self.hidden)
            yield f"blk.{i}.ffn_down.weight", (self.hidden, self.intermediate)

    def metadata(self) -> dict[str, Any]:
        """GGUF metadata of these sizes."""
        counts = [self.kv_heads if i in self.attention else 0 for i in range(self.layers)]
        return {
            "lfm2.block_count": self.layers,
            "lfm2.context_length": self.context,
            "lfm2.embedding_length": self.hidden,
            "lfm2.feed_forward_length": self.intermediate,
            "lfm2.attention.head_count": self.heads,
            "lfm2.attention.head_count_kv": counts,
            "lfm2.attention.layer_norm_rms_epsilon": 1e-5,
            "lfm2.rope.freq_base": 1e6,
            "lfm2.shortconv.l_cache": self.kernel,
        }


@dataclass(frozen=True)
class Qwen3MoeShape:
    """Sizes of a Qwen3 mixture of experts: attention (GQA) with normed heads, then experts.

    Attributes:
        used: experts of a token.
        intermediate: of an expert.
    """

    architecture = "qwen3moe"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    used: int
    intermediate: int
    context: int = 4096

    def tensors(self, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """GGUF names and shapes."""
        queries, kv = self.heads * self.head, self.kv_heads * self.head
        yield "token_embd.weight", (vocab, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        yield "output.weight", (vocab, self.hidden)
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm.weight", (self.hidden,)
            yield f"blk.{i}.attn_q.weight", (queries, self.hidden)
            yield f"blk.{i}.attn_k.weight", (kv, self.hidden)
            yield f"blk.{i}.attn_v.weight", (kv, self.hidden)
            yield f"blk.{i}.attn_output.weight", (self.hidden, queries)
            yield f"blk.{i}.attn_q_norm.weight", (self.head,)
            yield f"blk.{i}.attn_k_norm.weight", (self.head,)
            yield f"blk.{i}.ffn_norm.weight", (self.hidden,)
            yield f"blk.{i}{_ROUTER}", (self.experts, self.hidden)
            yield f"blk.{i}.ffn_gate_exps.weight", (self.experts, self.intermediate, self.hidden)
            yield f"blk.{i}.ffn_up_exps.weight", (self.experts, self.intermediate, self.hidden)
            yield f"blk.{i}.ffn_down_exps.weight", (self.experts, self.hidden, self.intermediate)

    def metadata(self) -> dict[str, Any]:
        """GGUF metadata of these sizes."""
        return {
            "qwen3moe.block_count": self.layers,
            "qwen3moe.context_length": self.context,
            "qwen3moe.embedding_length": self.hidden,
            "qwen3moe.feed_forward_length": self.used * self.intermediate,
            "qwen3moe.expert_feed_forward_length": self.intermediate,
            "qwen3moe.expert_count": self.experts,
            "qwen3moe.expert_used_count": self.used,
            "qwen3moe.attention.head_count": self.heads,
            "qwen3moe.attention.head_count_kv": self.kv_heads,
            "qwen3moe.attention.key_length": self.head,
            "qwen3moe.attention.value_length": self.head,
            "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
            "qwen3moe.rope.freq_base": 1e6,
        }


# The sizes of TinyLlama-1.1B, of Llama-3-8B, of LFM2-1.2B and of Qwen3-30B-A3B.
SHAPES: Mapping[str, Shape] = {
    "1.1b": LlamaShape(22, 2048, 32, 4, 5632),
    "8b": LlamaShape(32, 4096, 32, 8, 14336),
    "lfm2-1.2b": Lfm2Shape(16, 2048, 32, 8, 8192, attention=(2, 5, 8, 10, 12, 14)),
    "30b-a3b": Qwen3MoeShape(48, 2048, 32, 4, 128, experts=128, used=8, intermediate=768),
}


def convert(source: Path, out: Path, type_name: str) -> None:
    """Rewrite a GGUF file with all its matrices in one type."""
    checkpoint = open_checkpoint(source)
    writer = gguf.GGUFWriter(out, str(checkpoint.metadata["general.architecture"]))
    copy_metadata(writer, checkpoint.metadata)
    for name, tensor in checkpoint.tensors.items():
        add_tensor(writer, name, tensor.read().astype(np.float32), type_name)
    finish(writer)


def make_up(shape: Shape, tokenizer: Path, out: Path, type_name: str) -> None:
    """Write a model of random weights, with the tokenizer of another GGUF file."""
    metadata = open_checkpoint(tokenizer).metadata
    writer = gguf.GGUFWriter(out, shape.architecture)
    words = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    copy_metadata(writer, {**words, **shape.metadata()})
    rng = np.random.default_rng(0)
    experts = dict[tuple[int, ...], np.ndarray]()  # one array for all layers: they take GB
    for name, size in shape.tensors(len(metadata["tokenizer.ggml.tokens"])):
        deviation = 1 / np.sqrt(size[-1])
        if name.endswith(_ROUTER):
            writer.add_tensor(name, rng.standard_normal(size, np.float32) * np.float32(deviation))
            continue
        # A vector, or the taps of a convolution.
        if len(size) == 1 or min(size[-2:]) < _SMALLEST:
            writer.add_tensor(name, np.ones(size, np.float32))
            continue
        rows = rng.standard_normal((_MADE_UP_ROWS, size[-1]), np.float32) * np.float32(deviation)
        kind = gguf.GGMLQuantizationType[type_name]
        packed = packed_rows(name, rows, type_name)
        values = experts.get(size)
        if values is None:
            values = np.resize(packed, (*size[:-1], packed.shape[1]))
        if len(size) > 2:
            experts[size] = values
        writer.add_tensor(name, values, raw_dtype=kind)
    finish(writer)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Errors are one line, never a traceback."""
    parser = CliParser(
        prog=prog_of_module(__spec__.name),
        description="Writes a .gguf for benchmarks, with all matrices in one type.",
    )
    add = parser.add_argument
    add("out", type=Path, help="the .gguf to write")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--source", help="real weights: a .gguf, or a model whose weights are one")
    which.add_argument("--shape", choices=SHAPES, help="random weights of this size")
    add("--type", choices=TYPES, default="Q4_0", help="type of all matrices (Q4_0)")
    add(
        "--tokenizer",
        metavar="SOURCE",
        help=f"a .gguf with the tokenizer for random weights ({_WORDS})",
    )
    return run(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    if options.source is not None and options.tokenizer is not None:
        raise CheckpointError(options.tokenizer, "--tokenizer goes with --shape alone")
    check_writable(options.out)
    path = open_files(options.source or options.tokenizer or _WORDS, {}).weights
    if open_checkpoint(path).format != "gguf":
        raise CheckpointError(path, "is no GGUF file, and only these are written again")
    if options.source is not None:
        convert(path, options.out, options.type)
    else:
        make_up(SHAPES[options.shape], path, options.out, options.type)
    return 0


if __name__ == "__main__":
    sys.exit(main())
