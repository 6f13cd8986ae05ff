"""Families of which there is no golden, against forward passes in NumPy.

Each test writes a tiny checkpoint with the tensor names and the config.json of a published one, and
computes its logits from the reference blocks, as the family's code or paper says.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM
from tests.reference.numpy_blocks import (
    attention,
    gelu_erf,
    gelu_tanh,
    layer_norm,
    linear,
    relu_squared,
    rms_norm,
    silu,
)
from tests.reference.numpy_positions import (
    Floats,
    Pairs,
    alibi_slopes_ceil,
    alibi_slopes_floor,
    dynamic_ntk_theta,
    llama3_frequencies,
    longrope_attention_factor,
    rope,
    rope_frequencies,
)
from tests.reference.numpy_tensors import Tensors, centre, dense, heads, merged, within

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 96, 32, 48, 4, 2, 8
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 40)
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128,
    "rope_theta": 5000.0,
}  # fmt: skip

FUSED = ("q_proj", "k_proj", "v_proj")

type Shapes = dict[str, tuple[int, ...]]
type Rotate = Callable[[Floats], Floats]


def random_tensors(shapes: Shapes, seed: int) -> dict[str, np.ndarray]:
    """Weights large enough that a mistake in the wiring shows; norms around 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) > 1 and "norm" not in name:
            values = rng.normal(0, 1.2 / np.sqrt(shape[-1]), shape)
        else:
            values = rng.normal(float("norm" in name and name.endswith("weight")), 0.3, shape)
        tensors[name] = values.astype(np.float32)
    return tensors


def check(
    folder: Path,
    config: dict[str, Any],
    shapes: Shapes,
    forward: Callable[[Tensors], Floats],
    overrides: dict[str, Any] | None = None,
) -> None:
    """Serves random tensors of these shapes, and compares the logits."""
    tensors = random_tensors(shapes, seed=11)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    got = LLM(folder, dtype="float32", **overrides or {}).logits([TOKENS.tolist()])[0]
    wanted = forward({name: values.astype(np.float64) for name, values in tensors.items()})
    assert wanted.std() > 0.1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)


def affine(name: str, outputs: int, inputs: int, bias: bool = False) -> Shapes:
    """A projection's shapes."""
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    return shapes | ({f"{name}.bias": (outputs,)} if bias else {})


def norm(name: str, bias: bool = False) -> Shapes:
    """A norm's shapes."""
    return {f"{name}.{leaf}": (HIDDEN,) for leaf in ("weight", "bias")[: 1 + bias]}


def llama_shapes(
    layers: int = 2,
    bias: str = "",
    norms: dict[str, bool] | None = None,
    mlp: bool = True,
    head: bool = False,
) -> Shapes:
    """The names of the llama line.

    Args:
        bias: which of q, k, v and o have one.
        norms: those of a layer and whether they have a bias; the final one has the first's.
        mlp: the feed-forward is gated, and its two projections are not fused.
        head: the vocabulary head is stored.
    """
    if norms is None:
        norms = {"input_layernorm": False, "post_attention_layernorm": False}
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        widths = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "o": HIDDEN}
        for part, width in widths.items():
            inputs = HEADS * DIM if part == "o" else HIDDEN
            shapes |= affine(f"{layer}self_attn.{part}_proj", width, inputs, part in bias)
        for name, biased in norms.items():
            shapes |= norm(layer + name, biased)
        for name in ("gate_proj", "up_proj") if mlp else ():
            shapes |= affine(f"{layer}mlp.{name}", INNER, HIDDEN)
        shapes |= affine(f"{layer}mlp.down_proj", HIDDEN, INNER)
    if norms:
        shapes |= norm("model.norm", next(iter(norms.values())))
    return shapes | ({"lm_head.weight": (VOCAB, HIDDEN)} if head else {})


def layers_of(tensors: Tensors, prefix: str = "model.layers.") -> Iterator[Tensors]:
    count = 1 + max(int(name.split(".")[0]) for name in within(tensors, prefix))
    return (within(tensors, f"{prefix}{i}.") for i in range(count))


def turn(theta: float = 5000.0, pairs: Pairs = "halves", dim: int = DIM) -> Rotate:
    return lambda x: rope(x, np.arange(len(x)), theta, pairs, dim)


def attend(x: Floats, t: Tensors, rotate: Rotate = lambda x: x, **how: Any) -> Floats:
    """Attention with the names q_proj, k_proj, v_proj, o_proj."""
    q, k, v = (
        heads(dense(x, t, f"self_attn.{n}_proj"), c)
        for n, c in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    return dense(merged(attention(rotate(q), rotate(k), v, **how)), t, "self_attn.o_proj")


def swiglu(x: Floats, t: Tensors) -> Floats:
    inner = silu(dense(x, t, "mlp.gate_proj")) * dense(x, t, "mlp.up_proj")
    return dense(inner, t, "mlp.down_proj")


def embedded(tensors: Tensors, name: str = "model.embed_tokens.weight") -> Floats:
    return tensors[name][TOKENS]


@pytest.mark.parametrize("clip", [None, 0.4])
def test_olmo(tmp_path: Path, clip: float | None) -> None:
    """Layer norms without weights; q, k and v may be clipped."""

    def clipped(x: Floats) -> Floats:
        return x if clip is None else np.clip(x, -clip, clip)

    def forward(tensors: Tensors) -> Floats:
        x, rotate = embedded(tensors), turn()
        for t in layers_of(tensors):
            n = layer_norm(x)
            q, k, v = (
                heads(clipped(dense(n, t, f"self_attn.{p}_proj")), c)
                for p, c in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
            )
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
            q, k, v = (
                heads(dense(n, t, f"self_attn.{p}_proj"), c)
                for p, c in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
            )
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
            q, k, v = (
                heads(dense(n, t, f"self_attn.{p}_proj"), c)
                for p, c in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
            )
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


@pytest.mark.parametrize(("trained", "served"), [(128, None), (32, 64)])
def test_internlm2(tmp_path: Path, trained: int, served: int | None) -> None:
    """q, k and v of each group of heads in one tensor, and theta that grows with the context."""
    group = HEADS // KV_HEADS
    theta = 5000.0 if served is None else dynamic_ntk_theta(5000.0, DIM, 2.0, served, trained)

    def forward(tensors: Tensors) -> Floats:
        x, rotate = tensors["model.tok_embeddings.weight"][TOKENS], turn(theta)
        for t in layers_of(tensors):
            n = rms_norm(x, t["attention_norm.weight"], 1e-5)
            fused = dense(n, t, "attention.wqkv").reshape(len(x), KV_HEADS, group + 2, DIM)
            q, k, v = (
                fused[:, :, :group].reshape(len(x), HEADS, DIM),
                fused[:, :, -2],
                fused[:, :, -1],
            )
            x = x + dense(merged(attention(rotate(q), rotate(k), v)), t, "attention.wo")
            n = rms_norm(x, t["ffn_norm.weight"], 1e-5)
            inner = silu(dense(n, t, "feed_forward.w1")) * dense(n, t, "feed_forward.w3")
            x = x + dense(inner, t, "feed_forward.w2")
        return dense(rms_norm(x, tensors["model.norm.weight"], 1e-5), tensors, "output")

    shapes: Shapes = {
        "model.tok_embeddings.weight": (VOCAB, HIDDEN),
        "output.weight": (VOCAB, HIDDEN),
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= norm(layer + "attention_norm") | norm(layer + "ffn_norm")
        shapes |= affine(layer + "attention.wqkv", KV_HEADS * (group + 2) * DIM, HIDDEN)
        shapes |= affine(layer + "attention.wo", HIDDEN, HEADS * DIM)
        shapes |= affine(layer + "feed_forward.w1", INNER, HIDDEN)
        shapes |= affine(layer + "feed_forward.w3", INNER, HIDDEN)
        shapes |= affine(layer + "feed_forward.w2", HIDDEN, INNER)
    config = LLAMA | {
        "architectures": ["InternLM2ForCausalLM"], "bias": False, "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "dynamic", "factor": 2.0}, "tie_word_embeddings": False,
        "max_position_embeddings": trained,
    }  # fmt: skip
    asked = {} if served is None else {"engine.context": served}
    check(tmp_path, config, shapes | norm("model.norm"), forward, asked)


@pytest.mark.parametrize(("served", "list_name"), [(64, "short_factor"), (65, "long_factor")])
def test_phi4_mini(tmp_path: Path, served: int, list_name: str) -> None:
    """LongRoPE on three quarters of each head: another list for contexts longer than trained."""
    lists = {"short_factor": [1.0, 1.2, 1.9], "long_factor": [1.5, 4.0, 9.0]}
    frequencies = rope_frequencies(6, 5000.0) / lists[list_name]
    factor = longrope_attention_factor(128 / 64, 64)

    def rotate(x: Floats) -> Floats:
        at = np.arange(len(x))
        return rope(x, at, rotary_dim=6, inv_freq=frequencies, attention_factor=factor)

    def forward(tensors: Tensors) -> Floats:
        x = embedded(tensors)
        for t in layers_of(tensors):
            n = dense(rms_norm(x, t["input_layernorm.weight"], 1e-5), t, "self_attn.qkv_proj")
            q, k, v = np.split(heads(n, HEADS + 2 * KV_HEADS), [HEADS, HEADS + KV_HEADS], axis=1)
            attended = attention(rotate(q), rotate(k), v, window=20)
            x = x + dense(merged(attended), t, "self_attn.o_proj")
            n = rms_norm(x, t["post_attention_layernorm.weight"], 1e-5)
            gate, up = np.split(dense(n, t, "mlp.gate_up_proj"), 2, axis=-1)
            x = x + dense(silu(gate) * up, t, "mlp.down_proj")
        x = rms_norm(x, tensors["model.norm.weight"], 1e-5)
        return x @ tensors["model.embed_tokens.weight"].T

    shapes = llama_shapes(mlp=False)
    shapes = {name: s for name, s in shapes.items() if name.split(".")[-2] not in FUSED}
    for i in range(2):
        qkv = (HEADS + 2 * KV_HEADS) * DIM
        shapes |= affine(f"model.layers.{i}.self_attn.qkv_proj", qkv, HIDDEN)
        shapes |= affine(f"model.layers.{i}.mlp.gate_up_proj", 2 * INNER, HIDDEN)
    config = LLAMA | {
        "architectures": ["Phi3ForCausalLM"], "rms_norm_eps": 1e-5, "sliding_window": 20,
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", **lists}, "tie_word_embeddings": True,
    }  # fmt: skip
    check(tmp_path, config, shapes, forward, {"engine.context": served})


def test_exaone(tmp_path: Path) -> None:
    """Llama's layer under other names, with Llama 3.1's scaling."""
    frequencies = llama3_frequencies(rope_frequencies(DIM, 5000.0), 8.0, 1.0, 4.0, 16)

    def rotate(x: Floats) -> Floats:
        return rope(x, np.arange(len(x)), inv_freq=frequencies)

    def forward(tensors: Tensors) -> Floats:
        x = tensors["transformer.wte.weight"][TOKENS]
        for t in layers_of(tensors, "transformer.h."):
            n = rms_norm(x, t["ln_1.weight"], 1e-5)
            q, k, v = (
                heads(dense(n, t, f"attn.attention.{p}_proj"), c)
                for p, c in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
            )
            out = merged(attention(rotate(q), rotate(k), v))
            x = x + dense(out, t, "attn.attention.out_proj")
            n = rms_norm(x, t["ln_2.weight"], 1e-5)
            inner = silu(dense(n, t, "mlp.c_fc_0")) * dense(n, t, "mlp.c_fc_1")
            x = x + dense(inner, t, "mlp.c_proj")
        return dense(rms_norm(x, tensors["transformer.ln_f.weight"], 1e-5), tensors, "lm_head")

    shapes: Shapes = {"transformer.wte.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= norm("transformer.ln_f")
    for i in range(2):
        layer = f"transformer.h.{i}."
        shapes |= norm(layer + "ln_1") | norm(layer + "ln_2")
        for part, width in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes |= affine(f"{layer}attn.attention.{part}_proj", width * DIM, HIDDEN)
        shapes |= affine(layer + "attn.attention.out_proj", HIDDEN, HEADS * DIM)
        shapes |= affine(layer + "mlp.c_fc_0", INNER, HIDDEN)
        shapes |= affine(layer + "mlp.c_fc_1", INNER, HIDDEN)
        shapes |= affine(layer + "mlp.c_proj", HIDDEN, INNER)
    config = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"} | {
        "architectures": ["ExaoneForCausalLM"], "num_layers": 2, "layer_norm_epsilon": 1e-5,
        "activation_function": "silu", "head_dim": DIM, "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16, "rope_type": "llama3",
        },
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


GPT = {"vocab_size": VOCAB, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}


def test_gptj(tmp_path: Path) -> None:
    """Side by side from one norm; some dimensions rotated as neighbours; a bias at the head."""

    def forward(tensors: Tensors) -> Floats:
        x, rotate = tensors["transformer.wte.weight"][TOKENS], turn(1e4, "adjacent", 4)
        for t in layers_of(tensors, "transformer.h."):
            n = centre(x, t, "ln_1")
            q, k, v = (heads(dense(n, t, f"attn.{p}_proj"), HEADS) for p in "qkv")
            out = dense(merged(attention(rotate(q), rotate(k), v)), t, "attn.out_proj")
            x = x + out + dense(gelu_tanh(dense(n, t, "mlp.fc_in")), t, "mlp.fc_out")
        return dense(centre(x, tensors, "transformer.ln_f"), tensors, "lm_head")

    shapes: Shapes = {"transformer.wte.weight": (VOCAB, HIDDEN)}
    shapes |= affine("lm_head", VOCAB, HIDDEN, True) | norm("transformer.ln_f", True)
    for i in range(2):
        layer = f"transformer.h.{i}."
        shapes |= norm(layer + "ln_1", True) | {layer + "attn.bias": (1, 1, 64, 64)}
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= affine(f"{layer}attn.{part}", HIDDEN, HIDDEN)
        shapes |= affine(layer + "mlp.fc_in", 4 * HIDDEN, HIDDEN, True)
        shapes |= affine(layer + "mlp.fc_out", HIDDEN, 4 * HIDDEN, True)
    config = GPT | {
        "architectures": ["GPTJForCausalLM"], "n_embd": HIDDEN, "n_head": HEADS, "n_layer": 2,
        "n_positions": 64, "n_inner": None, "rotary_dim": 4, "tie_word_embeddings": False,
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


def test_gpt_neo(tmp_path: Path) -> None:
    """Scores without a scale; every other layer has a window."""

    def forward(tensors: Tensors) -> Floats:
        tensors = within(tensors, "transformer.")
        x = tensors["wte.weight"][TOKENS] + tensors["wpe.weight"][: len(TOKENS)]
        for i, t in enumerate(layers_of(tensors, "h.")):
            n = centre(x, t, "ln_1")
            q, k, v = (heads(dense(n, t, f"attn.attention.{p}_proj"), HEADS) for p in "qkv")
            out = attention(q, k, v, scale=1.0, window=5 if i else None)
            x = x + dense(merged(out), t, "attn.attention.out_proj")
            x = x + dense(gelu_tanh(dense(centre(x, t, "ln_2"), t, "mlp.c_fc")), t, "mlp.c_proj")
        return centre(x, tensors, "ln_f") @ tensors["wte.weight"].T

    shapes: Shapes = {
        "transformer.wte.weight": (VOCAB, HIDDEN),
        "transformer.wpe.weight": (64, HIDDEN),
    }
    shapes |= norm("transformer.ln_f", True)
    for i in range(2):
        layer = f"transformer.h.{i}."
        shapes |= norm(layer + "ln_1", True) | norm(layer + "ln_2", True)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            bias = part == "out_proj"
            shapes |= affine(f"{layer}attn.attention.{part}", HIDDEN, HIDDEN, bias)
        shapes |= affine(layer + "mlp.c_fc", 4 * HIDDEN, HIDDEN, True)
        shapes |= affine(layer + "mlp.c_proj", HIDDEN, 4 * HIDDEN, True)
    config = GPT | {
        "architectures": ["GPTNeoForCausalLM"], "hidden_size": HIDDEN, "num_heads": HEADS,
        "num_layers": 2, "max_position_embeddings": 64, "intermediate_size": None,
        "attention_layers": ["global", "local"], "window_size": 5,
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


def test_mpt(tmp_path: Path) -> None:
    """No biases, ALiBi for a number of heads that is no power of two, clipped q, k and v."""
    head_count, width = 6, 24

    def forward(tensors: Tensors) -> Floats:
        tensors = within(tensors, "transformer.")
        x = tensors["wte.weight"][TOKENS]
        for t in layers_of(tensors, "blocks."):
            fused = np.clip(dense(layer_norm(x, t["norm_1.weight"]), t, "attn.Wqkv"), -0.9, 0.9)
            q, k, v = np.split(heads(fused, 3 * head_count), 3, axis=1)
            out = attention(q, k, v, slopes=alibi_slopes_ceil(head_count, 6.0))
            x = x + dense(merged(out), t, "attn.out_proj")
            inner = gelu_erf(dense(layer_norm(x, t["norm_2.weight"]), t, "ffn.up_proj"))
            x = x + dense(inner, t, "ffn.down_proj")
        return layer_norm(x, tensors["norm_f.weight"]) @ tensors["wte.weight"].T

    shapes: Shapes = {
        "transformer.wte.weight": (VOCAB, width),
        "transformer.norm_f.weight": (width,),
    }
    for i in range(2):
        layer = f"transformer.blocks.{i}."
        shapes |= {f"{layer}norm_1.weight": (width,), f"{layer}norm_2.weight": (width,)}
        shapes |= affine(layer + "attn.Wqkv", 3 * width, width)
        shapes |= affine(layer + "attn.out_proj", width, width)
        shapes |= affine(layer + "ffn.up_proj", 4 * width, width)
        shapes |= affine(layer + "ffn.down_proj", width, 4 * width)
    config = {
        "architectures": ["MPTForCausalLM"], "d_model": width, "n_heads": head_count, "n_layers": 2,
        "expansion_ratio": 4, "max_seq_len": 64, "vocab_size": VOCAB, "no_bias": True,
        "learned_pos_emb": True,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 6, "clip_qkv": 0.9, "qk_ln": False,
            "softmax_scale": None,
        },
    }  # fmt: skip
    check(tmp_path, config, shapes, forward)


FALCON = {
    "architectures": ["FalconForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "num_attention_heads": HEADS, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def falcon_shapes(fused: int, norms: tuple[str, ...], bias: bool) -> Shapes:
    shapes: Shapes = {"transformer.word_embeddings.weight": (VOCAB, HIDDEN)}
    shapes |= norm("transformer.ln_f", True)
    for i in range(2):
        layer = f"transformer.h.{i}."
        for name in norms:
            shapes |= norm(layer + name, True)
        shapes |= affine(layer + "self_attention.query_key_value", fused * DIM, HIDDEN, bias)
        shapes |= affine(layer + "self_attention.dense", HIDDEN, HIDDEN, bias)
        shapes |= affine(layer + "mlp.dense_h_to_4h", 4 * HIDDEN, HIDDEN, bias)
        shapes |= affine(layer + "mlp.dense_4h_to_h", HIDDEN, 4 * HIDDEN, bias)
    return shapes


def falcon_ffn(x: Floats, t: Tensors) -> Floats:
    return dense(gelu_erf(dense(x, t, "mlp.dense_h_to_4h")), t, "mlp.dense_4h_to_h")


def test_falcon_rw(tmp_path: Path) -> None:
    """One after the other; ALiBi's biases are added before the scores are scaled."""
    slopes = alibi_slopes_floor(HEADS) / np.sqrt(DIM)

    def forward(tensors: Tensors) -> Floats:
        tensors = within(tensors, "transformer.")
        x = tensors["word_embeddings.weight"][TOKENS]
        for t in layers_of(tensors, "h."):
            fused = dense(centre(x, t, "input_layernorm"), t, "self_attention.query_key_value")
            q, k, v = np.moveaxis(fused.reshape(len(x), HEADS, 3, DIM), 2, 0)
            x = x + dense(merged(attention(q, k, v, slopes=slopes)), t, "self_attention.dense")
            x = x + falcon_ffn(centre(x, t, "post_attention_layernorm"), t)
        return centre(x, tensors, "ln_f") @ tensors["word_embeddings.weight"].T

    norms = ("input_layernorm", "post_attention_layernorm")
    config = FALCON | {
        "alibi": True, "bias": True, "multi_query": False, "new_decoder_architecture": False,
        "parallel_attn": False,
    }  # fmt: skip
    check(tmp_path, config, falcon_shapes(3 * HEADS, norms, True), forward)


def test_falcon2_11b(tmp_path: Path) -> None:
    """Grouped heads, side by side from one norm, an untied head."""
    group = HEADS // KV_HEADS

    def forward(tensors: Tensors) -> Floats:
        head = tensors["lm_head.weight"]
        tensors = within(tensors, "transformer.")
        x, rotate = tensors["word_embeddings.weight"][TOKENS], turn(5e5)
        for t in layers_of(tensors, "h."):
            n = centre(x, t, "input_layernorm")
            fused = dense(n, t, "self_attention.query_key_value")
            fused = fused.reshape(len(x), KV_HEADS, group + 2, DIM)
            q, k, v = (
                fused[:, :, :group].reshape(len(x), HEADS, DIM),
                fused[:, :, -2],
                fused[:, :, -1],
            )
            out = merged(attention(rotate(q), rotate(k), v))
            x = x + dense(out, t, "self_attention.dense") + falcon_ffn(n, t)
        return linear(centre(x, tensors, "ln_f"), head)

    shapes = falcon_shapes(KV_HEADS * (group + 2), ("input_layernorm",), False)
    config = FALCON | {
        "alibi": False, "bias": False, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS,
        "num_ln_in_parallel_attn": 1, "rope_theta": 5e5, "parallel_attn": True,
        "tie_word_embeddings": False,
    }  # fmt: skip
    check(tmp_path, config, shapes | {"lm_head.weight": (VOCAB, HIDDEN)}, forward)
