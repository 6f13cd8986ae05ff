"""Encoders that rotate queries and keys, against forward passes in NumPy.

Tensor names and config files are those of published checkpoints; each test computes the results
of two texts, as the family's code or paper says.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from tests.reference.numpy_blocks import (
    attention,
    gelu_erf,
    gelu_tanh,
    layer_norm,
    rms_norm,
    silu,
)
from tests.reference.numpy_positions import Floats, rope
from tests.reference.numpy_tensors import Tensors, centre, dense, heads, layers_of, merged

from . import llama_line
from .bert_line import BERT, EPS, NAMES
from .gguf_files import write_gguf
from .tiny import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    TEXTS,
    TYPES,
    VOCAB,
    Shapes,
    close,
    linear,
    norm,
    served,
)


def test_modernbert(tmp_path: Path) -> None:
    """Layers 0 and 3 see the whole text, the others 4 tokens to either side; no first norm."""
    shapes: Shapes = {"model.embeddings.tok_embeddings.weight": (VOCAB, HIDDEN)}
    shapes |= norm("model.embeddings.norm", bias=False) | norm("model.final_norm", bias=False)
    for i in range(4):
        block = f"model.layers.{i}."
        shapes |= norm(block + "attn_norm", bias=False) if i else {}
        shapes |= linear(block + "attn.Wqkv", 3 * HIDDEN, HIDDEN, False)
        shapes |= linear(block + "attn.Wo", HIDDEN, HIDDEN, False)
        shapes |= norm(block + "mlp_norm", bias=False)
        shapes |= linear(block + "mlp.Wi", 2 * INNER, HIDDEN, False)
        shapes |= linear(block + "mlp.Wo", HIDDEN, INNER, False)
    shapes |= linear("head.dense", HIDDEN, HIDDEN, False) | norm("head.norm", bias=False)
    shapes |= {"decoder.bias": (VOCAB,)}
    config = {
        "architectures": ["ModernBertForMaskedLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": 4, "num_attention_heads": HEADS,
        "max_position_embeddings": 64, "hidden_activation": "gelu", "norm_eps": 1e-5,
        "norm_bias": False, "attention_bias": False, "mlp_bias": False, "decoder_bias": True,
        "classifier_activation": "gelu", "classifier_bias": False, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "local_attention": 8,
        "tie_word_embeddings": True,
    }  # fmt: skip
    llm, t = served(tmp_path, config, shapes)
    for hidden, logits, text in zip(llm.hidden(TEXTS), llm.logits(TEXTS), TEXTS, strict=True):
        at = np.arange(len(text))
        x = t["model.embeddings.tok_embeddings.weight"][text]
        x = layer_norm(x, t["model.embeddings.norm.weight"])
        for i, layer in enumerate(layers_of(t, "model.layers.")):
            n = layer_norm(x, layer["attn_norm.weight"]) if i else x
            q, k, v = np.split(heads(dense(n, layer, "attn.Wqkv"), 3 * HEADS), 3, axis=1)
            theta, window = (1e4, 5) if i % 3 else (1.6e5, None)
            q, k = rope(q, at, theta), rope(k, at, theta)
            out = attention(q, k, v, causal=False, window=window)
            x = x + dense(merged(out), layer, "attn.Wo")
            n = dense(layer_norm(x, layer["mlp_norm.weight"]), layer, "mlp.Wi")
            active, gate = np.split(n, 2, axis=-1)
            x = x + dense(gelu_erf(active) * gate, layer, "mlp.Wo")
        x = layer_norm(x, t["model.final_norm.weight"])
        close(hidden, x)
        out = layer_norm(gelu_erf(dense(x, t, "head.dense")), t["head.norm.weight"])
        words = t["model.embeddings.tok_embeddings.weight"]
        close(logits, out @ words.T + t["decoder.bias"])


@pytest.mark.parametrize("dialect", ["gpt2", "bert"])
def test_nomic_bert(tmp_path: Path, dialect: str) -> None:
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    shapes |= norm("emb_ln")
    for i in range(2):
        block = f"encoder.layers.{i}."
        shapes |= linear(block + "attn.Wqkv", 3 * HIDDEN, HIDDEN, False)
        shapes |= linear(block + "attn.out_proj", HIDDEN, HIDDEN, False)
        shapes |= linear(block + "mlp.fc11", INNER, HIDDEN, False)
        shapes |= linear(block + "mlp.fc12", INNER, HIDDEN, False)
        shapes |= linear(block + "mlp.fc2", HIDDEN, INNER, False)
        shapes |= norm(block + "norm1") | norm(block + "norm2")
    own: dict[str, Any] = {
        "n_embd": HIDDEN, "n_head": HEADS, "n_layer": 2, "n_inner": INNER, "n_positions": 64,
        "layer_norm_epsilon": EPS, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
        "activation_function": "swiglu",
    }  # fmt: skip
    config = {"vocab_size": VOCAB, "type_vocab_size": 2} | own if dialect == "gpt2" else BERT
    config = config | {"architectures": ["NomicBertModel"]}
    config = config if dialect == "gpt2" else config | {"hidden_act": "silu"}
    llm, t = served(tmp_path, config, shapes)
    got = llm.hidden(TEXTS, token_type_ids=TYPES)
    for hidden, text, types in zip(got, TEXTS, TYPES, strict=True):
        at = np.arange(len(text))
        x = t["embeddings.word_embeddings.weight"][text]
        x = centre(x + t["embeddings.token_type_embeddings.weight"][types], t, "emb_ln", EPS)
        for layer in layers_of(t, "encoder.layers."):
            q, k, v = np.split(heads(dense(x, layer, "attn.Wqkv"), 3 * HEADS), 3, axis=1)
            out = attention(rope(q, at, 1000.0), rope(k, at, 1000.0), v, causal=False)
            x = centre(x + dense(merged(out), layer, "attn.out_proj"), layer, "norm1", EPS)
            inner = dense(x, layer, "mlp.fc11") * silu(dense(x, layer, "mlp.fc12"))
            x = centre(x + dense(inner, layer, "mlp.fc2"), layer, "norm2", EPS)
        close(hidden, x)


@pytest.mark.parametrize("scaled", [False, True])
def test_gte(tmp_path: Path, scaled: bool) -> None:
    """Up, then gate in one tensor; with "ntk", theta and all frequencies change by the factor."""
    shapes: Shapes = {"embeddings.word_embeddings.weight": (VOCAB, HIDDEN)} | norm(
        "embeddings.LayerNorm"
    )
    shapes |= {} if scaled else {"embeddings.token_type_embeddings.weight": (2, HIDDEN)}
    for i in range(2):
        block = f"encoder.layer.{i}."
        shapes |= linear(block + "attention.qkv_proj", 3 * HIDDEN, HIDDEN)
        shapes |= linear(block + "attention.o_proj", HIDDEN, HIDDEN)
        shapes |= linear(block + "mlp.up_gate_proj", 2 * INNER, HIDDEN, False)
        shapes |= linear(block + "mlp.down_proj", HIDDEN, INNER)
        shapes |= norm(block + "attn_ln") | norm(block + "mlp_ln")
    factor = 4.0 if scaled else 1.0
    config = BERT | {
        "architectures": ["NewModel"], "position_embedding_type": "rope", "rope_theta": 2000.0,
        "type_vocab_size": 0 if scaled else 2,
        "rope_scaling": {"type": "ntk", "factor": factor} if scaled else None,
    }  # fmt: skip
    llm, t = served(tmp_path, config, shapes)
    frequencies = (2000.0 * factor) ** -(np.arange(0, DIM, 2) / DIM) / factor ** (2 / DIM)
    for hidden, text in zip(llm.hidden(TEXTS), TEXTS, strict=True):
        at = np.arange(len(text))
        x = t["embeddings.word_embeddings.weight"][text]
        x = x if scaled else x + t["embeddings.token_type_embeddings.weight"][0]
        x = centre(x, t, "embeddings.LayerNorm", EPS)
        for layer in layers_of(t, "encoder.layer."):
            fused = heads(dense(x, layer, "attention.qkv_proj"), 3 * HEADS)
            q, k, v = np.split(fused, 3, axis=1)
            q, k = (rope(part, at, inv_freq=frequencies) for part in (q, k))
            out = dense(merged(attention(q, k, v, causal=False)), layer, "attention.o_proj")
            x = centre(x + out, layer, "attn_ln", EPS)
            up, gate = np.split(dense(x, layer, "mlp.up_gate_proj"), 2, axis=-1)
            x = centre(x + dense(gelu_erf(gate) * up, layer, "mlp.down_proj"), layer, "mlp_ln", EPS)
        close(hidden, x)


def test_jina_bert(tmp_path: Path) -> None:
    """Scores are lower by the distance, whether a token stands before or after; also as GGUF."""
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (VOCAB, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    } | norm("embeddings.LayerNorm")
    for i in range(2):
        block = f"encoder.layer.{i}."
        for name in NAMES:
            shapes |= linear(block + name, HIDDEN, HIDDEN)
        shapes |= linear(block + "mlp.gated_layers", 2 * INNER, HIDDEN, False)
        shapes |= linear(block + "mlp.wo", HIDDEN, INNER)
        shapes |= norm(block + "attention.output.LayerNorm") | norm(block + "mlp.layernorm")
    config = BERT | {
        "architectures": ["JinaBertModel"], "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
    }  # fmt: skip
    llm, t = served(tmp_path, config, shapes)
    file: dict[str, np.ndarray] = {
        f"{new}.{leaf}": t[f"embeddings.{old}.{leaf}"].astype(np.float32)
        for new, old, leaves in (
            ("token_embd", "word_embeddings", ("weight",)),
            ("token_types", "token_type_embeddings", ("weight",)),
            ("token_embd_norm", "LayerNorm", ("weight", "bias")),
        )
        for leaf in leaves
    }
    named = dict(zip(NAMES, ("attn_q", "attn_k", "attn_v", "attn_output"), strict=True)) | {
        "attention.output.LayerNorm": "attn_output_norm", "mlp.layernorm": "layer_output_norm",
        "mlp.wo": "ffn_down",
    }  # fmt: skip
    for i, layer in enumerate(layers_of(t, "encoder.layer.")):
        for name, values in layer.items():
            module, _, leaf = name.rpartition(".")
            if module in named:
                file[f"blk.{i}.{named[module]}.{leaf}"] = values.astype(np.float32)
        halves = np.split(layer["mlp.gated_layers.weight"].astype(np.float32), 2)
        file |= {f"blk.{i}.ffn_gate.weight": halves[0], f"blk.{i}.ffn_up.weight": halves[1]}
    known = {
        "vocab_size": VOCAB, "embedding_length": HIDDEN, "block_count": 2, "context_length": 64,
        "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.layer_norm_epsilon": EPS,
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", "jina-bert-v2", known, file)
    got = LLM(tmp_path / "m.gguf", dtype="float32").hidden(TEXTS, token_type_ids=TYPES)
    slopes = 2.0 ** (-8 / HEADS * np.arange(1, HEADS + 1))
    for hidden, ours, text, types in zip(
        llm.hidden(TEXTS, token_type_ids=TYPES), got, TEXTS, TYPES, strict=True
    ):
        far = abs(np.arange(len(text))[:, None] - np.arange(len(text)))
        x = t["embeddings.word_embeddings.weight"][text]
        x = centre(
            x + t["embeddings.token_type_embeddings.weight"][types], t, "embeddings.LayerNorm", EPS
        )
        for layer in layers_of(t, "encoder.layer."):
            q, k, v = (heads(dense(x, layer, name), HEADS) for name in NAMES[:3])
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM) - slopes[:, None, None] * far
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out = dense(merged(np.einsum("hqk,khd->qhd", weights, v)), layer, NAMES[3])
            x = centre(x + out, layer, "attention.output.LayerNorm", EPS)
            gate, up = np.split(dense(x, layer, "mlp.gated_layers"), 2, axis=-1)
            x = centre(x + dense(gelu_erf(gate) * up, layer, "mlp.wo"), layer, "mlp.layernorm", EPS)
        close(hidden, x)
        close(ours, x)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_qwen_2_with_code_of_its_own_looks_both_ways(tmp_path: Path, prefix: str) -> None:
    shapes = {
        prefix + name.removeprefix("model."): shape
        for name, shape in llama_line.llama_shapes(bias="qkv").items()
    }
    config = llama_line.LLAMA | {
        "architectures": ["Qwen2Model"], "is_causal": False, "rms_norm_eps": 1e-6,
        "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"},
    }  # fmt: skip
    llm, t = served(tmp_path, config, shapes)
    x = t[f"{prefix}embed_tokens.weight"][llama_line.TOKENS]
    for layer in layers_of(t, f"{prefix}layers."):
        n = rms_norm(x, layer["input_layernorm.weight"], 1e-6)
        x = x + llama_line.attend(n, layer, llama_line.turn(), causal=False)
        x = x + llama_line.swiglu(
            rms_norm(x, layer["post_attention_layernorm.weight"], 1e-6), layer
        )
    x = rms_norm(x, t[f"{prefix}norm.weight"], 1e-6)
    close(llm.hidden([llama_line.TOKENS.tolist()])[0], x)


def test_embedding_gemma(tmp_path: Path) -> None:
    """A window of 8 tells a token of those at most 4 away; every third layer has none."""
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes: Shapes = {"embed_tokens.weight": (VOCAB, HIDDEN)} | norm("norm", bias=False)
    for i in range(3):
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
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 3,
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": DIM,
        "intermediate_size": INNER, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 5,
        "sliding_window": 8, "_sliding_window_pattern": 3,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    llm, t = served(tmp_path, config, shapes)

    def plus_one(x: Floats, tensors: Tensors, name: str) -> Floats:
        return rms_norm(x, 1 + tensors[f"{name}.weight"], 1e-6)

    for vector, text in zip(llm.embed(TEXTS), TEXTS, strict=True):
        at = np.arange(len(text))
        x = t["embed_tokens.weight"][text] * np.sqrt(HIDDEN)
        for i, layer in enumerate(layers_of(t, "layers.")):
            n = plus_one(x, layer, "input_layernorm")
            q, k, v = (
                heads(dense(n, layer, f"self_attn.{part}_proj"), count)
                for part, count in (("q", HEADS), ("k", 1), ("v", 1))
            )
            theta, window = (1e6, None) if i == 2 else (1e4, 5)
            q = rope(plus_one(q, layer, "self_attn.q_norm"), at, theta)
            k = rope(plus_one(k, layer, "self_attn.k_norm"), at, theta)
            out = attention(q, k, v, scale=5**-0.5, causal=False, window=window)
            out = dense(merged(out), layer, "self_attn.o_proj")
            x = x + plus_one(out, layer, "post_attention_layernorm")
            n = plus_one(x, layer, "pre_feedforward_layernorm")
            inner = gelu_tanh(dense(n, layer, "mlp.gate_proj")) * dense(n, layer, "mlp.up_proj")
            out = dense(inner, layer, "mlp.down_proj")
            x = x + plus_one(out, layer, "post_feedforward_layernorm")
        mean = plus_one(x, t, "norm").mean(axis=0)
        close(vector, mean / np.linalg.norm(mean))
