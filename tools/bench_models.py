"""Benchmark checkpoints: `python -m tools.bench_models OUT.gguf (--source X | --shape 1.1b)`.

Real weights with all matrices in one type, or random weights of a real shape.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jinfer.cli.quantize.write_gguf import add_tensor, copy_metadata, finish, packed_rows
from jinfer.cli.run_command import check_writable, command
from jinfer.cli.terminal.argument_parser import argument, one_of
from jinfer.loader.checkpoint import CheckpointError, open_checkpoint
from jinfer.loader.open_model import open_files

# Weights of a row of random numbers, quantized once and used for all rows.
_MADE_UP_ROWS = 64
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
_SMALLEST = 32  # rows and columns of a matrix that is quantized
_ROUTER = ".ffn_gate_inp.weight"  # a mixture's, which is not quantized
_WORDS = "smollm2_135m_instruct"  # whose tokenizer a made-up model has


type Sizes = Iterator[tuple[str, tuple[int, ...]]]  # GGUF names and shapes of tensors


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama-like decoder (gated MLP, GQA), as GGUF has them.

    Attributes:
        intermediate: of a feed-forward module, or of an expert.
        context: its greatest length.
        head: the size of a head, if heads are no equal parts of the hidden vector.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int = 4096
    head: int = 0

    architecture = "llama"
    epsilon = 1e-5
    rope_base = 10000.0

    @property
    def head_size(self) -> int:
        """Numbers of a head."""
        return self.head or self.hidden // self.heads

    def tensors(self, vocab: int) -> Sizes:
        """GGUF names and shapes."""
        yield "token_embd.weight", (vocab, self.hidden)
        yield from self.outside(vocab)
        for i in range(self.layers):
            for name, shape in (*self.mixer(i), *self.feed_forward()):
                yield f"blk.{i}.{name}.weight", shape

    def outside(self, vocab: int) -> Sizes:
        """Norm and head."""
        yield "output_norm.weight", (self.hidden,)
        yield "output.weight", (vocab, self.hidden)

    def mixer(self, layer: int) -> Sizes:
        """Attention of a layer, with its norm."""
        queries, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        yield "attn_norm", (self.hidden,)
        yield "attn_q", (queries, self.hidden)
        yield "attn_k", (kv, self.hidden)
        yield "attn_v", (kv, self.hidden)
        yield "attn_output", (self.hidden, queries)

    def feed_forward(self) -> Sizes:
        """The gated MLP of a layer, with its norm."""
        yield "ffn_norm", (self.hidden,)
        yield "ffn_gate", (self.intermediate, self.hidden)
        yield "ffn_up", (self.intermediate, self.hidden)
        yield "ffn_down", (self.hidden, self.intermediate)

    def metadata(self) -> dict[str, Any]:
        """GGUF metadata of these sizes."""
        values = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.intermediate,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": self.epsilon,
            "rope.freq_base": self.rope_base,
            **self.more_metadata(),
        }
        return {f"{self.architecture}.{key}": value for key, value in values.items()}

    def more_metadata(self) -> dict[str, Any]:
        """Metadata of this architecture."""
        return {"rope.dimension_count": self.head_size}


@dataclass(frozen=True)
class Lfm2Shape(LlamaShape):
    """Sizes of an LFM2: short convolutions, attention (GQA) in some layers, gated MLPs."""

    attention: tuple[int, ...] = ()
    kernel: int = 3

    architecture = "lfm2"
    rope_base = 1e6

    def outside(self, vocab: int) -> Sizes:
        """The norm; the head is the embedding."""
        yield "token_embd_norm.weight", (self.hidden,)

    def mixer(self, layer: int) -> Sizes:
        """Attention or short convolution of a layer, with its norm."""
        if layer in self.attention:
            yield from super().mixer(layer)
            yield "attn_q_norm", (self.head_size,)
            yield "attn_k_norm", (self.head_size,)
            return
        yield "attn_norm", (self.hidden,)
        yield "shortconv.in_proj", (3 * self.hidden, self.hidden)
        yield "shortconv.conv", (self.hidden, self.kernel)
        yield "shortconv.out_proj", (self.hidden, self.hidden)

    def more_metadata(self) -> dict[str, Any]:
        """Metadata of this architecture."""
        counts = [self.kv_heads if i in self.attention else 0 for i in range(self.layers)]
        return {"attention.head_count_kv": counts, "shortconv.l_cache": self.kernel}


@dataclass(frozen=True)
class Qwen3MoeShape(LlamaShape):
    """Sizes of a Qwen3 mixture of experts: attention (GQA) with normed heads, then experts.

    Attributes:
        used: experts of a token.
    """

    experts: int = 128
    used: int = 8

    architecture = "qwen3moe"
    epsilon = 1e-6
    rope_base = 1e6

    def mixer(self, layer: int) -> Sizes:
        """Attention of a layer, with its norms."""
        yield from super().mixer(layer)
        yield "attn_q_norm", (self.head_size,)
        yield "attn_k_norm", (self.head_size,)

    def feed_forward(self) -> Sizes:
        """The experts of a layer, with the norm and the router."""
        yield "ffn_norm", (self.hidden,)
        yield "ffn_gate_inp", (self.experts, self.hidden)
        yield "ffn_gate_exps", (self.experts, self.intermediate, self.hidden)
        yield "ffn_up_exps", (self.experts, self.intermediate, self.hidden)
        yield "ffn_down_exps", (self.experts, self.hidden, self.intermediate)

    def more_metadata(self) -> dict[str, Any]:
        """Metadata of this architecture."""
        return {
            "feed_forward_length": self.used * self.intermediate,
            "expert_feed_forward_length": self.intermediate,
            "expert_count": self.experts,
            "expert_used_count": self.used,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
        }


# The sizes of TinyLlama-1.1B, of Llama-3-8B, of LFM2-1.2B and of Qwen3-30B-A3B.
SHAPES: Mapping[str, LlamaShape] = {
    "1.1b": LlamaShape(22, 2048, 32, 4, 5632),
    "8b": LlamaShape(32, 4096, 32, 8, 14336),
    "lfm2-1.2b": Lfm2Shape(16, 2048, 32, 8, 8192, attention=(2, 5, 8, 10, 12, 14)),
    "30b-a3b": Qwen3MoeShape(48, 2048, 32, 4, 768, head=128),
}


def convert(source: Path, out: Path, type_name: str) -> None:
    """Rewrite a GGUF file with all its matrices in one type."""
    checkpoint = open_checkpoint(source)
    writer = gguf.GGUFWriter(out, str(checkpoint.metadata["general.architecture"]))
    copy_metadata(writer, checkpoint.metadata)
    for name, tensor in checkpoint.tensors.items():
        add_tensor(writer, name, tensor.read().astype(np.float32), type_name)
    finish(writer)


def make_up(shape: LlamaShape, tokenizer: Path, out: Path, type_name: str) -> None:
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


@command(
    "Writes a .gguf for benchmarks, with all matrices in one type.",
    argument("out", type=Path, help="the .gguf to write"),
    one_of(
        argument("--source", help="real weights: a .gguf, or a model whose weights are one"),
        argument("--shape", choices=SHAPES, help="random weights of this size"),
        required=True,
    ),
    argument("--type", choices=TYPES, default="Q4_0", help="type of all matrices (Q4_0)"),
    argument(
        "--tokenizer",
        metavar="SOURCE",
        help=f"a .gguf with the tokenizer for random weights ({_WORDS})",
    ),
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
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
