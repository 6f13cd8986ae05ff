"""Families with sparse attention against NumPy, and as GGUF files have them."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from tests.reference.numpy_blocks import attention, chosen_keys, layer_norm, rms_norm
from tests.reference.numpy_positions import Floats, rope, yarn_frequencies
from tests.reference.numpy_tensors import Tensors, dense, heads, merged, within

from .gguf_files import write_gguf
from .llama_line import TOKENS, affine, check
from .test_latent_gguf import KEYS, NAMES, WHOLE
from .test_moe_families import LENGTH, decoder
from .test_moe_gguf import converted, gguf_keys
from .test_scaled_families import (
    FACTOR,
    KV_RANK,
    LATENT,
    NOPE,
    Q_RANK,
    ROPE,
    TRAINED,
    latent_block,
    latent_shapes,
)
from .tiny import HEADS, HIDDEN, Shapes, random_tensors, write

TOP_K, INDEX_HEADS, INDEX_DIM = 7, 3, 12
CONFIG = LATENT | {
    "architectures": ["GlmMoeDsaForCausalLM"], "index_topk": TOP_K, "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM, "indexer_rope_interleave": True, "index_topk_freq": 1,
    "indexer_types": ["full", "full"],
}  # fmt: skip
GGUF: dict[str, Any] = {
    "attention.indexer.top_k": TOP_K, "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX_DIM,
}  # fmt: skip
INDEX_NAMES = {
    f"self_attn.indexer.{name}": f"indexer.{other}"
    for name, other in (
        *(("wq_b", "attn_q_b"), ("wk", "attn_k"), ("k_norm", "k_norm")),
        *(("weights_proj", "proj"),),
    )
}


def shapes() -> Shapes:
    shapes = latent_shapes()
    for i in range(2):
        prefix = f"model.layers.{i}.self_attn.indexer."
        shapes |= affine(f"{prefix}wq_b", INDEX_HEADS * INDEX_DIM, Q_RANK)
        shapes |= affine(f"{prefix}wk", INDEX_DIM, HIDDEN)
        shapes |= affine(f"{prefix}weights_proj", INDEX_HEADS, HIDDEN)
        shapes |= {f"{prefix}k_norm.{leaf}": (INDEX_DIM,) for leaf in ("weight", "bias")}
    return shapes


def sparse_attention(x: Floats, t: Tensors, layer: int, chosen: list[Any] | None = None) -> Floats:
    """Args:
    chosen: the keys of each token in the layer before, which become those of this one.
    """
    chosen = [] if chosen is None else chosen
    t, at = within(t, "self_attn."), np.arange(LENGTH)
    frequencies = yarn_frequencies(ROPE, 5000.0, FACTOR, TRAINED)

    def turned(y: Floats) -> Floats:
        return rope(y, at, 5000.0, "adjacent", ROPE, frequencies)

    latent = rms_norm(dense(x, t, "q_a_proj"), t["q_a_layernorm.weight"], 1e-6)
    q = heads(dense(latent, t, "q_b_proj"), HEADS)
    q = np.concatenate([q[..., :NOPE], turned(q[..., NOPE:])], axis=-1)
    both = dense(x, t, "kv_a_proj_with_mqa")
    small = rms_norm(both[:, :KV_RANK], t["kv_a_layernorm.weight"], 1e-6)
    kv = heads(dense(small, t, "kv_b_proj"), HEADS)
    shared = np.repeat(turned(both[:, None, KV_RANK:]), HEADS, axis=1)
    k, v = np.concatenate([kv[..., :NOPE], shared], axis=-1), kv[..., NOPE:]
    scale = (0.1 * np.log(FACTOR) + 1) ** 2 / np.sqrt(NOPE + ROPE)
    found = index(x, latent, t, turned) if "indexer.wk.weight" in t else chosen
    chosen[:] = found
    out = [attention(q[i : i + 1], k[own], v[own], scale=scale) for i, own in enumerate(found)]
    return dense(merged(np.concatenate(out)), t, "o_proj")


def index(x: Floats, latent: Floats, t: Tensors, turned: Callable[[Floats], Floats]) -> list[Any]:
    """The keys chosen for each token."""
    index_q = turned(heads(dense(latent, t, "indexer.wq_b"), INDEX_HEADS))
    weight, bias = (t[f"indexer.k_norm.{leaf}"] for leaf in ("weight", "bias"))
    index_k = turned(layer_norm(dense(x, t, "indexer.wk")[:, None], weight, bias, 1e-6))[:, 0]
    weights = dense(x, t, "indexer.weights_proj")
    return [chosen_keys(index_q[i], weights[i], index_k[: i + 1], TOP_K) for i in range(LENGTH)]


def sparse_decoder(tensors: Tensors) -> Floats:
    return decoder(tensors, latent_block, partial(sparse_attention, chosen=[]))


def test_glm_moe_dsa(tmp_path: Path) -> None:
    check(tmp_path, CONFIG, shapes(), sparse_decoder)


@pytest.mark.parametrize("arch", ["glm-dsa", "deepseek32"])
def test_gguf(tmp_path: Path, arch: str) -> None:
    tensors = random_tensors(shapes(), seed=11)
    name = "GlmMoeDsaForCausalLM" if arch == "glm-dsa" else "DeepseekV32ForCausalLM"
    config = CONFIG | {"architectures": [name]}
    write(tmp_path, config if arch == "glm-dsa" else without_glm(config), tensors)
    correction = "model.layers.1.mlp.gate.e_score_correction_bias"
    whole = {n: v for n, v in tensors.items() if n != correction}
    file = converted(whole, NAMES | INDEX_NAMES)
    file["blk.1.exp_probs_b.bias"] = tensors[correction]
    # The layer that drafts is counted.
    file |= {re.sub(r"blk\.1\.", "blk.2.", n): v for n, v in file.items() if n.startswith("blk.1.")}
    keys = gguf_keys(KEYS | WHOLE | GGUF | {"block_count": 3, "nextn_predict_layers": 1})
    write_gguf(tmp_path / "model.gguf", arch, keys, file)
    wanted = LLM(tmp_path / "model.safetensors", dtype="float32").logits([TOKENS.tolist()])[0]
    got = LLM(tmp_path / "model.gguf", dtype="float32").logits([TOKENS.tolist()])[0]
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)


def without_glm(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that DeepSeek-V3.2 has, too."""
    return {n: v for n, v in config.items() if not n.startswith(("indexer_", "index_topk_"))}


@pytest.mark.parametrize(
    "keys",
    [
        {"indexer_types": ["full", "shared"]},
        {"indexer_types": None, "index_topk_pattern": "FS"},
        {"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 1},
    ],
)
def test_keys_chosen_in_another_layer(tmp_path: Path, keys: dict[str, Any]) -> None:
    """GLM-5.2: a layer uses what the one before it has chosen, and has no indexer of its own."""
    own = "model.layers.1.self_attn.indexer."
    some = {name: shape for name, shape in shapes().items() if not name.startswith(own)}
    check(tmp_path, CONFIG | keys, some, sparse_decoder)
