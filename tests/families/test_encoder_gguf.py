"""Encoders as GGUF files have them, against the same model in safetensors.

The files are written here with the names and the layout of llama.cpp's converter.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jinfer import LLM

from .gguf_files import write_gguf
from .tiny import DIM, HEADS, HIDDEN, INNER, TEXTS, VOCAB, Shapes, close, linear, norm, served

type Arrays = dict[str, np.ndarray]


def renamed(tensors: Mapping[str, np.ndarray], names: dict[str, str]) -> Arrays:
    """Tensors under GGUF's names; those that it has no name for are left out."""
    found: Arrays = {}
    for name, values in tensors.items():
        module, _, leaf = name.rpartition(".")
        layer = re.search(r"layers\.(\d+)\.", module)
        block = f"blk.{layer[1]}." if layer else ""
        if new := names.get(module[layer.end() :] if layer else module):
            found[f"{block}{new}.{leaf}"] = values.astype(np.float32)
    return found


def keys(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "embedding_length": HIDDEN, "block_count": layers,
        "feed_forward_length": INNER, "attention.head_count": HEADS, "context_length": 64,
    } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip


def test_modern_bert(tmp_path: Path) -> None:
    shapes: Shapes = {"embeddings.tok_embeddings.weight": (VOCAB, HIDDEN)}
    shapes |= norm("embeddings.norm", bias=False) | norm("final_norm", bias=False)
    for i in range(4):
        block = f"layers.{i}."
        shapes |= norm(block + "attn_norm", bias=False) if i else {}
        shapes |= linear(block + "attn.Wqkv", 3 * HIDDEN, HIDDEN, False)
        shapes |= linear(block + "attn.Wo", HIDDEN, HIDDEN, False)
        shapes |= norm(block + "mlp_norm", bias=False)
        shapes |= linear(block + "mlp.Wi", 2 * INNER, HIDDEN, False)
        shapes |= linear(block + "mlp.Wo", HIDDEN, INNER, False)
    config = {
        "architectures": ["ModernBertModel"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": 4, "num_attention_heads": HEADS,
        "max_position_embeddings": 64, "norm_eps": 1e-5, "local_attention": 8,
    }  # fmt: skip
    llm, tensors = served(tmp_path, config, shapes)
    names = {
        "embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm",
        "final_norm": "output_norm", "attn_norm": "attn_norm", "attn.Wqkv": "attn_qkv",
        "attn.Wo": "attn_output", "mlp_norm": "ffn_norm", "mlp.Wi": "ffn_up",
        "mlp.Wo": "ffn_down",
    }  # fmt: skip
    known = keys(
        4, attention__layer_norm_epsilon=1e-5, attention__sliding_window=8,
        rope__freq_base=160000.0, rope__freq_base_swa=10000.0, pooling_type=2,
    )  # fmt: skip
    file = tmp_path / "m.gguf"
    write_gguf(file, "modern-bert", known, renamed(tensors, names))
    got = LLM(file, dtype="float32")
    for ours, hidden, first in zip(
        got.hidden(TEXTS), llm.hidden(TEXTS), got.embed(TEXTS), strict=True
    ):
        close(ours, hidden)
        close(first, hidden[0] / np.linalg.norm(hidden[0]))


def test_embedding_gemma(tmp_path: Path) -> None:
    """Converters add one to norms, and may bring along the dense layers that follow the mean."""
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes: Shapes = {"embed_tokens.weight": (VOCAB, HIDDEN)} | norm("norm", bias=False)
    for i in range(6):
        block = f"layers.{i}."
        for part, count in (("q", HEADS), ("k", 1), ("v", 1)):
            shapes |= linear(f"{block}self_attn.{part}_proj", count * DIM, HIDDEN, False)
        shapes |= linear(block + "self_attn.o_proj", HIDDEN, HEADS * DIM, False)
        for part in "qk":
            shapes |= norm(f"{block}self_attn.{part}_norm", DIM, False)
        for name in norms:
            shapes |= norm(f"{block}{name}_layernorm", bias=False)
        shapes |= linear(block + "mlp.gate_proj", INNER, HIDDEN, False)
        shapes |= linear(block + "mlp.up_proj", INNER, HIDDEN, False)
        shapes |= linear(block + "mlp.down_proj", HIDDEN, INNER, False)
    config = {
        "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True,
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 6,
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": DIM,
        "intermediate_size": INNER, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": DIM, "sliding_window": 8,
    }  # fmt: skip
    llm, tensors = served(tmp_path, config, shapes)
    names = {
        "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm", "self_attn.o_proj": "attn_output",
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
        **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    }  # fmt: skip
    file = {
        name: values + 1 if "norm" in name else values
        for name, values in renamed(tensors, names).items()
    }
    rng = np.random.default_rng(2)
    dense = [rng.normal(0, 0.2, shape).astype(np.float32) for shape in ((20, HIDDEN), (6, 20))]
    file |= {f"dense_{number}.weight": each for number, each in enumerate(dense, 2)}
    known = keys(
        6, attention__head_count_kv=1, attention__key_length=DIM, attention__sliding_window=8,
        attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e6, pooling_type=1,
    )  # fmt: skip
    write_gguf(tmp_path / "m.gguf", "gemma-embedding", known, file)
    got = LLM(tmp_path / "m.gguf", dtype="float32")
    for ours, hidden, vector in zip(
        got.hidden(TEXTS), llm.hidden(TEXTS), got.embed(TEXTS), strict=True
    ):
        close(ours, hidden)
        wanted = dense[1] @ (dense[0] @ hidden.mean(axis=0))
        close(vector, wanted / np.linalg.norm(wanted))
