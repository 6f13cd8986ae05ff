"""The llama line where no golden is: other norms, branches and heads; against passes in NumPy.

Each test writes a tiny checkpoint with the tensor names and the config.json of a published one, and
computes its logits from the reference blocks, as the family's code or paper says.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.reference.numpy_blocks import (
    attention,
    layer_norm,
    relu_squared,
    rms_norm,
    silu,
)
from tests.reference.numpy_positions import (
    Floats,
)
from tests.reference.numpy_tensors import Tensors, centre, dense, layers_of, merged

from .llama_line import (
    KV_HEADS,
    LLAMA,
    affine,
    attend,
    check,
    embedded,
    llama_shapes,
    projected,
    swiglu,
    turn,
)
from .tiny import DIM, HEADS, HIDDEN, INNER


@pytest.mark.parametrize("clip", [None, 0.4])
def test_olmo(tmp_path: Path, clip: float | None) -> None:
    """Layer norms without weights; q, k and v may be clipped."""

    def clipped(x: Floats) -> Floats:
        return x if clip is None else np.clip(x, -clip, clip)

    def forward(tensors: Tensors) -> Floats:
        x, rotate = embedded(tensors), turn()
        for t in layers_of(tensors):
            n = layer_norm(x)
            q, k, v = (clipped(y) for y in projected(n, t))
            x = x + dense(merged(attention(rotate(q), rotate(k), v)), t, "self_attn.o_proj")
            x = x + swiglu(layer_norm(x), t)
        return dense(layer_norm(x), tensors, "lm_head")

    config = LLAMA | {
        "architectures": ["OlmoForCausalLM"], "clip_qkv": clip, "attention_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip
    check(tmp_path, config, llama_shapes(norms={}, head=True), forward)


STABLELM = LLAMA | {
    "architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
    "partial_rotary_factor": 0.25, "hidden_act": "silu",
}  # fmt: skip


def test_stablelm_1_6b(tmp_path: Path) -> None:
    """Layer norms, a quarter of each head rotated, biases on q, k and v."""

    def forward(tensors: Tensors) -> Floats:
        x = embedded(tensors)
        for t in layers_of(tensors):
            x = x + attend(centre(x, t, "input_layernorm"), t, turn(dim=2))
            x = x + swiglu(centre(x, t, "post_attention_layernorm"), t)
        return dense(centre(x, tensors, "model.norm"), tensors, "lm_head")

    norms = {"input_layernorm": True, "post_attention_layernorm": True}
    shapes = llama_shapes(bias="qkv", norms=norms, head=True)
    config = STABLELM | {"use_qkv_bias": True, "use_parallel_residual": False}
    check(tmp_path, config, shapes, forward)


def per_head(x: Floats, t: Tensors, name: str) -> Floats:
    """A layer norm of each head [length, heads, dim] with weights of its own, without bias."""
    weights = [t[f"self_attn.{name}.norms.{head}.weight"] for head in range(x.shape[1])]
    return layer_norm(x, np.stack(weights))


def test_stablelm_12b(tmp_path: Path) -> None:
    """Side by side from one norm; each head of q and k is normed before it is rotated."""

    def forward(tensors: Tensors) -> Floats:
        x, rotate = embedded(tensors), turn(dim=2)
        for t in layers_of(tensors):
            n = centre(x, t, "input_layernorm")
            q, k, v = projected(n, t)
            q, k = per_head(q, t, "q_layernorm"), per_head(k, t, "k_layernorm")
            out = dense(merged(attention(rotate(q), rotate(k), v)), t, "self_attn.o_proj")
            x = x + out + swiglu(n, t)
        return dense(centre(x, tensors, "model.norm"), tensors, "lm_head")

    shapes = llama_shapes(norms={"input_layernorm": True}, head=True)
    for i in range(2):
        for name, count in (("q_layernorm", HEADS), ("k_layernorm", KV_HEADS)):
            for head in range(count):
                shapes[f"model.layers.{i}.self_attn.{name}.norms.{head}.weight"] = (DIM,)
    config = STABLELM | {"use_parallel_residual": True, "qk_layernorm": True}
    check(tmp_path, config, shapes, forward)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_command_r(tmp_path: Path, qk_norm: bool) -> None:
    """Side by side from one layer norm without bias, neighbours rotated, logits multiplied."""

    def normed(x: Floats, t: Tensors, name: str) -> Floats:
        return layer_norm(x, t[f"self_attn.{name}.weight"]) if qk_norm else x

    def forward(tensors: Tensors) -> Floats:
        x, rotate = embedded(tensors), turn(pairs="adjacent")
        for t in layers_of(tensors):
            n = layer_norm(x, t["input_layernorm.weight"])
            q, k, v = projected(n, t)
            q, k = rotate(normed(q, t, "q_norm")), rotate(normed(k, t, "k_norm"))
            x = x + dense(merged(attention(q, k, v)), t, "self_attn.o_proj") + swiglu(n, t)
        x = layer_norm(x, tensors["model.norm.weight"])
        return 0.25 * x @ tensors["model.embed_tokens.weight"].T

    shapes = llama_shapes(norms={"input_layernorm": False})
    for i in range(2) if qk_norm else ():
        shapes[f"model.layers.{i}.self_attn.q_norm.weight"] = (HEADS, DIM)
        shapes[f"model.layers.{i}.self_attn.k_norm.weight"] = (KV_HEADS, DIM)
    config = LLAMA | {
        "architectures": ["CohereForCausalLM"], "logit_scale": 0.25, "use_qk_norm": qk_norm,
        "layer_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


def test_command_r7b(tmp_path: Path) -> None:
    """Three layers with a window and rotation, then one that has neither."""

    def forward(tensors: Tensors) -> Floats:
        x = embedded(tensors)
        for i, t in enumerate(layers_of(tensors)):
            n = layer_norm(x, t["input_layernorm.weight"])
            windowed = attend(n, t, turn(pairs="adjacent"), window=6)
            x = x + (attend(n, t) if i == 3 else windowed) + swiglu(n, t)
        x = layer_norm(x, tensors["model.norm.weight"])
        return 0.25 * x @ tensors["model.embed_tokens.weight"].T

    config = LLAMA | {
        "architectures": ["Cohere2ForCausalLM"], "logit_scale": 0.25, "num_hidden_layers": 4,
        "layer_norm_eps": 1e-5, "sliding_window": 6, "sliding_window_pattern": 4,
    }  # fmt: skip
    check(tmp_path, config, llama_shapes(4, norms={"input_layernorm": False}), forward)


def test_granite(tmp_path: Path) -> None:
    """Multipliers of embeddings, scores and branches; a divisor of the logits."""

    def forward(tensors: Tensors) -> Floats:
        x = 3.0 * embedded(tensors)
        for t in layers_of(tensors):
            n = rms_norm(x, t["input_layernorm.weight"], 1e-5)
            x = x + 0.4 * attend(n, t, turn(), scale=0.2)
            x = x + 0.4 * swiglu(rms_norm(x, t["post_attention_layernorm.weight"], 1e-5), t)
        x = rms_norm(x, tensors["model.norm.weight"], 1e-5)
        return x @ tensors["model.embed_tokens.weight"].T / 1.7

    config = LLAMA | {
        "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 3.0, "rms_norm_eps": 1e-5,
        "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 1.7,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    }  # fmt: skip
    check(tmp_path, config, llama_shapes(), forward)


def test_nemotron(tmp_path: Path) -> None:
    """Norms that multiply by 1 + weight, half of each head rotated, squared relu."""

    def centred(x: Floats, t: Tensors, name: str) -> Floats:
        return layer_norm(x, 1 + t[f"{name}.weight"], t[f"{name}.bias"])

    def forward(tensors: Tensors) -> Floats:
        x = embedded(tensors)
        for t in layers_of(tensors):
            x = x + attend(centred(x, t, "input_layernorm"), t, turn(dim=DIM // 2))
            n = centred(x, t, "post_attention_layernorm")
            x = x + dense(relu_squared(dense(n, t, "mlp.up_proj")), t, "mlp.down_proj")
        return dense(centred(x, tensors, "model.norm"), tensors, "lm_head")

    norms = {"input_layernorm": True, "post_attention_layernorm": True}
    shapes = llama_shapes(norms=norms, head=True)
    shapes = {name: shape for name, shape in shapes.items() if "gate_proj" not in name}
    config = LLAMA | {
        "architectures": ["NemotronForCausalLM"], "hidden_act": "relu2", "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


def test_smollm3(tmp_path: Path) -> None:
    """Every fourth layer has no positions."""

    def forward(tensors: Tensors) -> Floats:
        x = embedded(tensors)
        for i, t in enumerate(layers_of(tensors)):
            n = rms_norm(x, t["input_layernorm.weight"], 1e-6)
            x = x + (attend(n, t) if i == 3 else attend(n, t, turn()))
            x = x + swiglu(rms_norm(x, t["post_attention_layernorm.weight"], 1e-6), t)
        x = rms_norm(x, tensors["model.norm.weight"], 1e-6)
        return x @ tensors["model.embed_tokens.weight"].T

    config = LLAMA | {
        "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
        "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4,
    }  # fmt: skip
    check(tmp_path, config, llama_shapes(4), forward)


@pytest.mark.parametrize("sandwich", [False, True])
def test_glm4(tmp_path: Path, sandwich: bool) -> None:
    """Half of each head rotated as neighbours; the 0414 models norm what a branch gives, too."""

    def after(x: Floats, t: Tensors, name: str) -> Floats:
        return rms_norm(x, t[f"{name}.weight"], 1e-5) if sandwich else x

    def forward(tensors: Tensors) -> Floats:
        x, rotate = embedded(tensors), turn(pairs="adjacent", dim=DIM // 2)
        for t in layers_of(tensors):
            n = rms_norm(x, t["input_layernorm.weight"], 1e-5)
            x = x + after(attend(n, t, rotate), t, "post_self_attn_layernorm")
            n = rms_norm(x, t["post_attention_layernorm.weight"], 1e-5)
            gate, up = np.split(dense(n, t, "mlp.gate_up_proj"), 2, axis=-1)
            x = x + after(dense(silu(gate) * up, t, "mlp.down_proj"), t, "post_mlp_layernorm")
        return dense(rms_norm(x, tensors["model.norm.weight"], 1e-5), tensors, "lm_head")

    norms = {"input_layernorm": False, "post_attention_layernorm": False}
    if sandwich:
        norms |= {"post_self_attn_layernorm": False, "post_mlp_layernorm": False}
    shapes = llama_shapes(bias="qkv", norms=norms, mlp=False, head=True)
    for i in range(2):
        shapes |= affine(f"model.layers.{i}.mlp.gate_up_proj", 2 * INNER, HIDDEN)
    config = LLAMA | {
        "architectures": ["Glm4ForCausalLM" if sandwich else "GlmForCausalLM"],
        "attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "head_dim": DIM, "tie_word_embeddings": False,
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)
