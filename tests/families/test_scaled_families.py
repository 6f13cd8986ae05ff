"""Families that are published in scaled low-precision blocks: the same logits as from float32.

Latent attention with experts scored by sigmoids has no golden, so it is also compared with a pass
in NumPy.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jinfer import LLM
from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.weights.tensor_mapping import LoadError
from tests.reference import numpy_moe
from tests.reference.numpy_blocks import attention, rms_norm
from tests.reference.numpy_positions import Floats, rope, yarn_frequencies
from tests.reference.numpy_tensors import Tensors, dense, heads, merged, within

from .llama_line import TOKENS, affine, check, llama_shapes
from .test_moe_families import (
    EPS,
    EXPERTS,
    GPT_OSS,
    GPT_OSS_SHAPES,
    LENGTH,
    TOP_K,
    WIDTH,
    decoder,
    one_by_one,
    swiglu,
)
from .tiny import HEADS, HIDDEN, INNER, VOCAB, Shapes, random_tensors, write

type Arrays = dict[str, np.ndarray]

Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 20, 12, 6, 4, 5
GROUPS, KEPT, SCALE, FACTOR, TRAINED = 3, 2, 2.5, 8.0, 16
PARTS = ("gate_proj", "up_proj", "down_proj")

LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "moe_intermediate_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 128,
    "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "rms_norm_eps": EPS, "rope_theta": 5000.0,
    "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_shared_experts": 2,
    "n_group": GROUPS, "topk_group": KEPT, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": SCALE, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn", "factor": FACTOR, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": TRAINED,
    },
}  # fmt: skip


def latent_shapes() -> Shapes:
    """A dense layer, and one with experts."""
    shapes = {n: s for n, s in llama_shapes(head=True).items() if ".self_attn." not in n}
    shapes = {n: s for n, s in shapes.items() if ".1.mlp." not in n}
    for i in range(2):
        layer = f"model.layers.{i}.self_attn"
        shapes |= affine(f"{layer}.q_a_proj", Q_RANK, HIDDEN)
        shapes |= {f"{layer}.q_a_layernorm.weight": (Q_RANK,)}
        shapes |= affine(f"{layer}.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK)
        shapes |= affine(f"{layer}.kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN)
        shapes |= {f"{layer}.kv_a_layernorm.weight": (KV_RANK,)}
        shapes |= affine(f"{layer}.kv_b_proj", HEADS * (NOPE + VALUE), KV_RANK)
        shapes |= affine(f"{layer}.o_proj", HIDDEN, HEADS * VALUE)
    mlp = "model.layers.1.mlp"
    shapes |= affine(f"{mlp}.gate", EXPERTS, HIDDEN)
    shapes |= {f"{mlp}.gate.e_score_correction_bias": (EXPERTS,)}
    shapes |= one_by_one(f"{mlp}.experts", WIDTH, *PARTS)
    shapes |= affine(f"{mlp}.shared_experts.gate_proj", 2 * WIDTH, HIDDEN)
    shapes |= affine(f"{mlp}.shared_experts.up_proj", 2 * WIDTH, HIDDEN)
    return shapes | affine(f"{mlp}.shared_experts.down_proj", HIDDEN, 2 * WIDTH)


def normed(x: Floats, t: Tensors, name: str) -> Floats:
    """The norms of the latents have an eps of their own."""
    return rms_norm(x, t[f"{name}.weight"], 1e-6)


def latent_attention(x: Floats, t: Tensors, layer: int) -> Floats:
    """Keys and values unfolded (arXiv 2405.04434, section 2.1); YaRN's temperature in the scale."""
    t = within(t, "self_attn.")
    frequencies = yarn_frequencies(ROPE, 5000.0, FACTOR, TRAINED)

    def turned(y: Floats) -> Floats:
        return rope(y, np.arange(LENGTH), pairs="adjacent", inv_freq=frequencies)

    q = heads(dense(normed(dense(x, t, "q_a_proj"), t, "q_a_layernorm"), t, "q_b_proj"), HEADS)
    q = np.concatenate([q[..., :NOPE], turned(q[..., NOPE:])], axis=-1)
    both = dense(x, t, "kv_a_proj_with_mqa")
    latent = normed(both[:, :KV_RANK], t, "kv_a_layernorm")
    kv = heads(dense(latent, t, "kv_b_proj"), HEADS)
    shared = np.repeat(turned(both[:, None, KV_RANK:]), HEADS, axis=1)
    k = np.concatenate([kv[..., :NOPE], shared], axis=-1)
    temperature = 0.1 * np.log(FACTOR) + 1
    scale = temperature**2 / np.sqrt(NOPE + ROPE)
    return dense(merged(attention(q, k, kv[..., NOPE:], scale=scale)), t, "o_proj")


def latent_block(x: Floats, t: Tensors) -> Floats:
    t = within(t, "mlp.")
    if "gate.weight" not in t:
        return swiglu(x, t, *PARTS)
    correction = t["gate.e_score_correction_bias"]
    chosen = [
        numpy_moe.deepseek_v3(row, correction, TOP_K, GROUPS, KEPT, SCALE)
        for row in dense(x, t, "gate")
    ]
    out = numpy_moe.mixture(
        x, chosen, lambda e, row: swiglu(row, within(t, f"experts.{e}."), *PARTS)
    )
    return out + swiglu(x, within(t, "shared_experts."), *PARTS)


def test_sigmoid_experts_and_latent_attention(tmp_path: Path) -> None:
    """Groups by their two best, weights without the correction, made to sum to the scale."""
    check(tmp_path, LATENT, latent_shapes(), lambda t: decoder(t, latent_block, latent_attention))


def logits(folder: Path, config: dict[str, Any], tensors: Arrays) -> np.ndarray:
    write(folder, config, tensors)
    return LLM(folder, dtype="float32").logits([TOKENS.tolist()])[0]


type Block = tuple[int, int]
BLOCK = (8, 16)  # of which neither divides all sizes; too small to be kept
WIDER = (8, 32)
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}


def fp8_config(block: Block) -> dict[str, Any]:
    return LATENT | {"quantization_config": FP8 | {"weight_block_size": list(block)}}


def in_fp8(block: Block = BLOCK) -> tuple[Arrays, Arrays]:
    """All projections of the layers in FP8 blocks, and the same values in float32."""
    small, whole = {}, random_tensors(latent_shapes(), seed=3)
    for name, values in list(whole.items()):
        small[name] = values
        if "_proj" not in name:
            continue
        scales = np.empty([-(-n // b) for n, b in zip(values.shape, block, strict=True)], "f4")
        codes, same = np.empty(values.shape, ml_dtypes.float8_e4m3fn), np.empty_like(values)
        for i, j in np.ndindex(*scales.shape):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(values[at]).max() / 448
            codes[at] = (values[at] / scales[i, j]).astype(codes.dtype)
            same[at] = codes[at].astype(np.float32) * scales[i, j]
        small[name], small[f"{name}_scale_inv"], whole[name] = codes, scales, same
    return small, whole


@pytest.mark.parametrize("block", [BLOCK, WIDER])
def test_fp8(tmp_path: Path, block: Block) -> None:
    """Latent attention and experts, decoded and kept: the same bits."""
    small, whole = in_fp8(block)
    wanted = logits(tmp_path / "whole", LATENT, whole)
    np.testing.assert_array_equal(logits(tmp_path / "small", fp8_config(block), small), wanted)
    plain = random_tensors(latent_shapes(), seed=3)
    assert np.abs(logits(tmp_path / "plain", LATENT, plain) - wanted).max() > 0.01


# As many inputs as outputs in one of the projections: a shape cannot tell which way it lies.
SQUARE = GPT_OSS | {"intermediate_size": HIDDEN}
MXFP4 = SQUARE | {"quantization_config": {"quant_method": "mxfp4"}}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def in_mxfp4() -> tuple[Arrays, Arrays]:
    """The experts as blocks [experts, outputs, inputs / 32, 16], and as [experts, in, out]."""
    resized = {"gate_up_proj": 2 * HIDDEN, "down_proj": HIDDEN}
    shapes = {
        name: (*shape[:-1], next((n for part, n in resized.items() if part in name), shape[-1]))
        for name, shape in GPT_OSS_SHAPES.items()
    }
    shapes |= {name: (EXPERTS, HIDDEN, HIDDEN) for name in shapes if name.endswith("down_proj")}
    whole, rng = random_tensors(shapes, seed=4), np.random.default_rng(4)
    small = dict(whole)
    for name in [name for name in whole if name.endswith(("gate_up_proj", "down_proj"))]:
        outputs = shapes[name][2]
        codes = rng.integers(0, 16, (EXPERTS, outputs, HIDDEN))
        scales = rng.integers(122, 126, (EXPERTS, outputs, HIDDEN // 32)).astype(np.uint8)
        pairs = codes.reshape(EXPERTS, outputs, HIDDEN // 32, 16, 2)
        del small[name]
        small[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
        small[f"{name}_scales"] = scales
        values = E2M1[codes] * np.exp2(scales.astype(np.float32) - 127).repeat(32, axis=2)
        whole[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    return small, whole


def test_mxfp4(tmp_path: Path) -> None:
    small, whole = in_mxfp4()
    wanted = logits(tmp_path / "whole", SQUARE, whole)
    assert wanted.std() > 0.1
    found = logits(tmp_path / "small", MXFP4, small)  # stays in 4 bits, without loss
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def test_a_method_that_is_not_known(tmp_path: Path) -> None:
    small, _ = in_fp8()
    config = LATENT | {"quantization_config": {"quant_method": "spqr", "bits": 4}}
    with pytest.raises(CheckpointError, match=r"config.json: .* quantized by spqr, which jinfer"):
        logits(tmp_path / "small", config, small)


def test_a_block_size_that_does_not_fit(tmp_path: Path) -> None:
    small, _ = in_fp8()
    with pytest.raises(CheckpointError, match=r"_scale_inv': is \[.* in blocks of 16 x 16; look"):
        logits(tmp_path / "small", fp8_config((16, 16)), small)


def test_blocks_of_another_shape_than_the_model(tmp_path: Path) -> None:
    small, _ = in_mxfp4()
    with pytest.raises(LoadError, match=r"experts\.\w+_proj_blocks is \[6, "):
        logits(tmp_path / "small", MXFP4 | {"intermediate_size": 48}, small)
