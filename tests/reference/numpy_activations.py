"""Forward passes whose inner values have names, to be recorded or changed on the way."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .numpy_blocks import Floats, gelu_tanh, mask, rms_norm, silu, softmax
from .numpy_moe import best, grouped, mixture
from .numpy_positions import rope
from .numpy_tensors import Tensors, centre, dense, heads, layers_of, merged, within

# Sees a value by its name, and gives what to go on with.
type Tap = Callable[[str, Floats], Floats]
type Config = dict[str, Any]


def attended(
    q: Floats,
    k: Floats,
    v: Floats,
    tap: Tap,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Floats:
    """[queries, heads, dim]: causal attention; scores and pattern are [heads, queries, keys]."""
    count, repeats = len(q), q.shape[1] // k.shape[1]
    k, v = (np.repeat(each, repeats, axis=1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = tap("scores", np.where(mask(count, count, window=window), scores, -np.inf))
    return np.einsum("hqk,khd->qhd", tap("pattern", softmax(scores)), v)


def gpt2(tensors: Tensors, tokens: ArrayLike, config: Config, tap: Tap) -> Floats:
    """GPT-2: logits."""
    tensors = {
        name: array.T if name.startswith("h.") and array.ndim == 2 else array
        for name, array in within(tensors, "transformer.").items()
    }
    ids = np.asarray(tokens)
    x = tap("embed", tensors["wte.weight"][ids] + tensors["wpe.weight"][: len(ids)])
    for i, t in enumerate(layers_of(tensors, "h.")):
        at = _named(tap, f"decoder.{i}.")
        normed = at("attn_norm", centre(at("attn_norm.input", x), t, "ln_1"))
        fused = heads(dense(normed, t, "attn.c_attn"), 3 * config["n_head"])
        q, k, v = (at(f"attn.{n}", y) for n, y in zip("qkv", np.split(fused, 3, 1), strict=True))
        out = at("attn.heads", attended(q, k, v, _named(at, "attn.")))
        x = at("x@1", x + at("attn", dense(merged(out), t, "attn.c_proj")))
        up = at("ffn.up", dense(at("ffn_norm", centre(x, t, "ln_2")), t, "mlp.c_fc"))
        inner = at("ffn.hidden", gelu_tanh(up))
        x = at("x", x + at("ffn", dense(inner, t, "mlp.c_proj")))
    return tap("logits", tap("hidden", centre(x, tensors, "ln_f")) @ tensors["wte.weight"].T)


def llama(tensors: Tensors, tokens: ArrayLike, config: Config, tap: Tap) -> Floats:
    """Llama, Mixtral, Gemma 2 and DeepSeek-V2: logits."""
    gemma, eps = config["model_type"] == "gemma2", config["rms_norm_eps"]
    tensors = {
        name: array + 1 if gemma and name.endswith("norm.weight") else array
        for name, array in tensors.items()
    }
    x = tensors["model.embed_tokens.weight"][np.asarray(tokens)]
    x = tap("embed", x * config["hidden_size"] ** 0.5 if gemma else x)
    after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    for i, t in enumerate(layers_of(tensors)):
        at = _named(tap, f"decoder.{i}.")
        normed = at("attn_norm", rms_norm(x, t["input_layernorm.weight"], eps))
        attention = _latent_attention if "kv_lora_rank" in config else _attention
        y = at("attn", attention(normed, t, config, i, _named(at, "attn.")))
        y = at("attn_post", rms_norm(y, t[f"{after}.weight"], eps)) if gemma else y
        x = at("x@1", x + y)
        normed = at("ffn_norm", rms_norm(x, t[f"{before if gemma else after}.weight"], eps))
        y = _feed_forward(normed, t, config, at)
        if gemma:
            y = at("ffn_post", rms_norm(y, t["post_feedforward_layernorm.weight"], eps))
        x = at("x", x + y)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    logits = tap("hidden", rms_norm(x, tensors["model.norm.weight"], eps)) @ head.T
    cap = config.get("final_logit_softcapping")
    return tap("logits", cap * np.tanh(logits / cap) if cap else logits)


def _named(tap: Tap, prefix: str) -> Tap:
    return lambda name, value: tap(prefix + name, value)


def _attention(x: Floats, t: Tensors, config: Config, layer: int, tap: Tap) -> Floats:
    counts = [config["num_attention_heads"], *[config["num_key_value_heads"]] * 2]
    q, k, v = (
        heads(dense(x, t, f"self_attn.{n}_proj"), c) for n, c in zip("qkv", counts, strict=True)
    )
    at, theta = np.arange(len(x)), config.get("rope_theta", 10000.0)
    q, k = tap("q", rope(q, at, theta)), tap("k", rope(k, at, theta))
    window = config.get("sliding_window") if layer % 2 == 0 else None
    scalar = config.get("query_pre_attn_scalar")
    given = None if scalar is None else scalar**-0.5, window, config.get("attn_logit_softcapping")
    out = tap("heads", attended(q, k, tap("v", v), tap, *given))
    return dense(merged(out), t, "self_attn.o_proj")


def _latent_attention(x: Floats, t: Tensors, config: Config, layer: int, tap: Tap) -> Floats:
    """MLA with nothing absorbed (arXiv 2405.04434, section 2.1)."""
    count, nope, eps = config["num_attention_heads"], config["qk_nope_head_dim"], 1e-6
    rank, at = config["kv_lora_rank"], np.arange(len(x))
    latent = rms_norm(dense(x, t, "self_attn.q_a_proj"), t["self_attn.q_a_layernorm.weight"], eps)
    q = heads(dense(latent, t, "self_attn.q_b_proj"), count)
    turned = rope(q[..., nope:], at, pairs="adjacent")
    q = tap("q", np.concatenate([q[..., :nope], turned], axis=-1))
    both = dense(x, t, "self_attn.kv_a_proj_with_mqa")
    shared = rms_norm(both[:, :rank], t["self_attn.kv_a_layernorm.weight"], eps)
    shared = tap("latent", shared)
    each = heads(dense(shared, t, "self_attn.kv_b_proj"), count)
    turned = np.repeat(rope(both[:, None, rank:], at, pairs="adjacent"), count, axis=1)
    k = tap("k", np.concatenate([each[..., :nope], turned], axis=-1))
    out = tap("heads", attended(q, k, tap("v", each[..., nope:]), tap))
    return dense(merged(out), t, "self_attn.o_proj")


def _feed_forward(x: Floats, t: Tensors, config: Config, tap: Tap) -> Floats:
    if "mlp.down_proj.weight" in t:
        return tap("ffn", _gated(x, t, "mlp", config, _named(tap, "ffn.")))
    mixtral = "block_sparse_moe.gate.weight" in t
    name = "block_sparse_moe" if mixtral else "mlp"
    logits = tap("ffn.router", dense(x, t, f"{name}.gate"))
    kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    if mixtral:
        t = {**t, **{_renamed(n, kind): w for n, w in t.items() if ".experts." in n}}

    def expert(number: int, row: Floats) -> Floats:
        return _gated(row, t, f"{name}.experts.{number}", config)

    y = tap("ffn", mixture(x, [_routed(row, config) for row in logits], expert))
    if mixtral:
        return y
    shared = _gated(x, t, "mlp.shared_experts", config, _named(tap, "shared_expert."))
    return y + tap("shared_expert", shared)


def _renamed(name: str, kinds: dict[str, str]) -> str:
    *first, kind, last = name.split(".")
    return ".".join([*first, kinds[kind], last])


def _routed(logits: Floats, config: Config) -> dict[int, float]:
    shares = softmax(logits)
    if "n_group" in config:
        ranked = grouped(shares, config["n_group"], config["topk_group"], np.max)
        chosen = best(ranked, config["num_experts_per_tok"])
        return {e: shares[e] * config["routed_scaling_factor"] for e in chosen}
    chosen = best(shares, config["num_experts_per_tok"])
    return {e: shares[e] / sum(shares[c] for c in chosen) for e in chosen}


def _gated(
    x: Floats, t: Tensors, name: str, config: Config, tap: Tap = lambda _, value: value
) -> Floats:
    act = gelu_tanh if "gelu" in config["hidden_act"] else silu
    gate = tap("gate", dense(x, t, f"{name}.gate_proj"))
    up = tap("up", dense(x, t, f"{name}.up_proj"))
    return dense(tap("hidden", act(gate) * up), t, f"{name}.down_proj")
