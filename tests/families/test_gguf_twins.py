"""Goldens written as GGUF, with the names and the layout of llama.cpp's converters.

Of these families there is no converted golden. Each must give what its checkpoint gives.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from jinfer.loader.checkpoint import open_checkpoint

from .gguf_files import write_gguf
from .llama_line import KV_HEADS, LLAMA, affine, llama_shapes
from .tiny import DIM, HEADS, HIDDEN, INNER, VOCAB, random_tensors, write

GOLDENS = Path(__file__).parents[1] / "goldens"
TOKENS = [int(token) for token in np.random.default_rng(9).integers(0, 320, 30)]

type Arrays = dict[str, np.ndarray]

COMMON = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
}  # fmt: skip
# Names of each family: of the whole model, then of a layer.
NAMES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "phi3": (
        "model.layers.",
        {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
        COMMON | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
    ),
    "starcoder2": (
        "model.layers.",
        {"token_embd": "model.embed_tokens", "output_norm": "model.norm"},
        COMMON | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "starcoder": (
        "transformer.h.",
        {
            "token_embd": "transformer.wte", "output_norm": "transformer.ln_f",
            "position_embd": "transformer.wpe",
        },
        {
            "attn_norm": "ln_1", "ffn_norm": "ln_2", "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
        },
    ),
    "gptneox": (
        "gpt_neox.layers.",
        {
            "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        {
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
    "falcon": (
        "transformer.h.",
        {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"},
        {
            "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn",
            "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
}  # fmt: skip


def renamed(folder: Path, architecture: str) -> Arrays:
    """The golden's tensors under GGUF's names."""
    prefix, whole, layer = NAMES[architecture]
    found: Arrays = {}
    for name, tensor in open_checkpoint(folder).tensors.items():
        module, _, leaf = name.rpartition(".")
        if module.startswith(prefix):
            number, _, module = module.removeprefix(prefix).partition(".")
            (new,) = (word for word, old in layer.items() if old == module)
            new = f"blk.{number}.{new}"
        else:
            (new,) = (word for word, old in whole.items() if old == module)
        found[f"{new}.{leaf}"] = tensor.read().astype(np.float32)
    return found


def keys(
    heads: int, kv_heads: int, layers: int = 3, hidden: int = 64, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": 320, "embedding_length": hidden, "block_count": layers,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads,
    } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip


def check(file: Path, folder: Path, overrides: dict[str, Any] | None = None) -> None:
    wanted = LLM(folder, dtype="float32", **overrides or {}).logits([TOKENS])[0]
    got = LLM(file, dtype="float32").logits([TOKENS])[0]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)


def regrouped(arrays: Arrays, groups: int, parts: tuple[int, ...]) -> Arrays:
    """Fused tensors of groups of heads, their parts put one after the other."""
    changed = dict(arrays)
    for name in (name for name in arrays if "attn_qkv" in name):
        rows = arrays[name].reshape(groups, sum(parts), -1, *arrays[name].shape[1:])
        split = np.split(rows, np.cumsum(parts)[:-1], axis=1)
        changed[name] = np.concatenate([part.reshape(-1, *rows.shape[3:]) for part in split])
    return changed


@pytest.mark.parametrize("scaled", [False, True])
def test_phi3(tmp_path: Path, scaled: bool) -> None:
    """The window, the fused projections, and the factors that are tensors in the file."""
    arrays = renamed(GOLDENS / "phi3_mini_4k", "phi3")
    known = keys(
        4, 4, feed_forward_length=128, attention__layer_norm_rms_epsilon=1e-5, context_length=512,
        attention__sliding_window=20, rope__dimension_count=16, rope__freq_base=10000.0,
        rope__scaling__original_context_length=256,
    )  # fmt: skip
    overrides: dict[str, Any] = {}
    if scaled:
        factors = np.linspace(1, 5, 8)
        arrays |= {f"rope_factors_{n}.weight": factors.astype(np.float32) for n in ("short",)}
        arrays["rope_factors_long.weight"] = np.full(8, 9, np.float32)
        known["rope.scaling.attn_factor"] = 1.25
        overrides["decoder.modules.attn.position.scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors.tolist(),
            "attention_factor": 1.25,
        }
    write_gguf(tmp_path / "m.gguf", "phi3", known, arrays)
    check(tmp_path / "m.gguf", GOLDENS / "phi3_mini_4k", overrides)


def test_starcoder2(tmp_path: Path) -> None:
    """The converter leaves the window out."""
    known = keys(
        4, 2, feed_forward_length=160, attention__layer_norm_epsilon=1e-5, context_length=512,
        rope__freq_base=999999.4420358813,
    )  # fmt: skip
    write_gguf(
        tmp_path / "m.gguf", "starcoder2", known, renamed(GOLDENS / "starcoder2", "starcoder2")
    )
    check(tmp_path / "m.gguf", GOLDENS / "starcoder2", {"decoder.modules.attn.window": "none"})


def test_gpt_bigcode(tmp_path: Path) -> None:
    known = keys(
        4, 1, feed_forward_length=256, attention__layer_norm_epsilon=1e-5, context_length=160
    )
    write_gguf(
        tmp_path / "m.gguf", "starcoder", known, renamed(GOLDENS / "gpt_bigcode", "starcoder")
    )
    check(tmp_path / "m.gguf", GOLDENS / "gpt_bigcode")


def test_gpt_neox(tmp_path: Path) -> None:
    known = keys(
        4, 4, feed_forward_length=160, attention__layer_norm_epsilon=1e-5, context_length=160,
        rope__dimension_count=4,
    )  # fmt: skip
    arrays = regrouped(renamed(GOLDENS / "gpt_neox", "gptneox"), 4, (1, 1, 1))
    write_gguf(tmp_path / "m.gguf", "gptneox", known, arrays)
    check(tmp_path / "m.gguf", GOLDENS / "gpt_neox")


def test_falcon_40b(tmp_path: Path) -> None:
    """The two norms change their names: attn_norm is the one of the feed-forward."""
    known = keys(
        8, 2, layers=2, hidden=128, feed_forward_length=512, attention__layer_norm_epsilon=1e-5,
        context_length=2048,
    )  # fmt: skip
    arrays = regrouped(renamed(GOLDENS / "falcon40b", "falcon"), 2, (4, 1, 1))
    write_gguf(tmp_path / "m.gguf", "falcon", known, arrays)
    check(tmp_path / "m.gguf", GOLDENS / "falcon40b")


def test_glm4(tmp_path: Path) -> None:
    """Neighbours are rotated on half of each head; a norm on both sides of each branch."""
    norms = ("input", "post_attention", "post_self_attn", "post_mlp")
    shapes = llama_shapes(
        bias="qkv", norms={f"{n}_layernorm": False for n in norms}, mlp=False, head=True
    )
    for i in range(2):
        shapes |= affine(f"model.layers.{i}.mlp.gate_up_proj", 2 * INNER, HIDDEN)
    config = LLAMA | {
        "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5, "head_dim": DIM, "tie_word_embeddings": False,
    }  # fmt: skip
    tensors = random_tensors(shapes)
    write(tmp_path, config, tensors)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm", "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    file: Arrays = {}
    for name, values in tensors.items():
        module, _, leaf = name.rpartition(".")
        number, _, inner = module.removeprefix("model.layers.").partition(".")
        new = whole[module] if module in whole else f"blk.{number}.{names[inner]}"
        file[f"{new}.{leaf}"] = values
    known = keys(
        HEADS, KV_HEADS, layers=2, hidden=HIDDEN, feed_forward_length=INNER, vocab_size=VOCAB,
        attention__layer_norm_rms_epsilon=1e-5, attention__key_length=DIM, context_length=128,
        rope__freq_base=5000.0, rope__dimension_count=DIM // 2,
    )  # fmt: skip
    write_gguf(tmp_path / "m.gguf", "glm4", known, file)
    tokens = [token % VOCAB for token in TOKENS]
    wanted = LLM(tmp_path / "model.safetensors", dtype="float32").logits([tokens])[0]
    got = LLM(tmp_path / "m.gguf", dtype="float32").logits([tokens])[0]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)
