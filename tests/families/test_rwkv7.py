"""RWKV-7 against a pass in NumPy, by the equations of its paper (arXiv 2503.14456, section 4)."""

from pathlib import Path

import numpy as np

from jinfer import LLM
from tests.reference.numpy_blocks import layer_norm, relu_squared, sigmoid
from tests.reference.numpy_recurrences import wkv7
from tests.reference.numpy_tensors import Floats, Tensors, centre, dense, heads, layers_of, merged

from .gguf_files import write_gguf
from .gguf_headers import headers
from .tiny import DIM, HEADS, HIDDEN, INNER, TEXTS, VOCAB, Shapes, close, linear, norm, served

RANKS = {"w": 6, "a": 5, "v": 3, "g": 7}
LAYERS = 3
GGUF_NAMES = {
    "model.embeddings": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "model.layers.0.pre_norm": "token_embd_norm", "model.layers": "blk", "ffn_norm": "attn_norm_2",
    "attn.g_norm": "time_mix_ln", "attn.k_k": "time_mix_k_k", "attn.k_a": "time_mix_k_a",
    "attn.r_k": "time_mix_r_k", "attn.r_proj": "time_mix_receptance", "ffn.key": "channel_mix_key",
    "attn.k_proj": "time_mix_key", "attn.v_proj": "time_mix_value", "ffn.x_k": "channel_mix_lerp_k",
    "attn.o_proj": "time_mix_output", "ffn.value": "channel_mix_value",
}  # fmt: skip
CONFIG = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "head_dim": DIM,
    "num_heads": None,
    "decay_low_rank_dim": RANKS["w"],
    "a_low_rank_dim": RANKS["a"],
    "v_low_rank_dim": RANKS["v"],
    "gate_low_rank_dim": RANKS["g"],
    "hidden_act": "sqrelu",
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shapes() -> Shapes:
    found: Shapes = {
        "model.embeddings.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        **norm("model.norm"),
        **norm("model.layers.0.pre_norm"),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        found |= norm(f"{layer}.attn_norm") | norm(f"{layer}.ffn_norm")
        found |= norm(f"{layer}.attn.g_norm")
        found |= {f"{layer}.attn.x_{x}": (1, 1, HIDDEN) for x in "rwkvag"}
        found |= {f"{layer}.attn.{x}": (HIDDEN,) for x in ("k_k", "k_a")}
        found[f"{layer}.attn.r_k"] = (HEADS, DIM)
        for x in "rkvo":
            found |= linear(f"{layer}.attn.{x}_proj", HIDDEN, HIDDEN, bias=False)
        for x, rank in RANKS.items():
            if (x, i) != ("v", 0):
                found |= linear(f"{layer}.attn.{x}_lora.lora.0", rank, HIDDEN, bias=False)
                found |= linear(f"{layer}.attn.{x}_lora.lora.2", HIDDEN, rank, bias=x != "g")
        found[f"{layer}.ffn.x_k"] = (HIDDEN,)
        found |= linear(f"{layer}.ffn.key", INNER, HIDDEN, bias=False)
        found |= linear(f"{layer}.ffn.value", HIDDEN, INNER, bias=False)
    return found


def before(x: Floats) -> Floats:
    """The row before each."""
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def low_rank(x: Floats, t: Tensors, name: str) -> Floats:
    y = dense(x, t, f"attn.{name}_lora.lora.0")
    y = np.tanh(y) if name == "w" else sigmoid(y) if name == "g" else y
    return dense(y, t, f"attn.{name}_lora.lora.2")


def time_mixing(x: Floats, t: Tensors, first: Floats | None) -> tuple[Floats, Floats]:
    mixed = {c: x + (before(x) - x) * t[f"attn.x_{c}"].reshape(-1) for c in "rwkvag"}
    r, k, v = (dense(mixed[c], t, f"attn.{c}_proj") for c in "rkv")
    if first is None:
        first = v
    else:
        v = v + (first - v) * sigmoid(low_rank(mixed["v"], t, "v"))
    decay = np.exp(-np.exp(-0.5) * sigmoid(low_rank(mixed["w"], t, "w")))
    rate = sigmoid(low_rank(mixed["a"], t, "a"))
    kappa = heads(k * t["attn.k_k"], HEADS)
    kappa = kappa / np.linalg.norm(kappa, axis=-1, keepdims=True)
    k = k * (1 + (rate - 1) * t["attn.k_a"])
    rh, kh, vh, wh, ah = (heads(each, HEADS) for each in (r, k, v, decay, rate))
    y = layer_norm(wkv7(rh, wh, kh, vh, kappa, ah), eps=DIM * 1e-5)
    y = merged(y) * t["attn.g_norm.weight"] + t["attn.g_norm.bias"]
    y = y + merged(np.sum(rh * kh * t["attn.r_k"], axis=-1, keepdims=True) * vh)
    return dense(y * low_rank(mixed["g"], t, "g"), t, "attn.o_proj"), first


def logits(text: list[int], t: Tensors) -> Floats:
    x = centre(t["model.embeddings.weight"][text], t, "model.layers.0.pre_norm")
    first = None
    for layer in layers_of(t):
        y, first = time_mixing(centre(x, layer, "attn_norm"), layer, first)
        x = x + y
        n = centre(x, layer, "ffn_norm")
        mixed = n + (before(n) - n) * layer["ffn.x_k"]
        x = x + dense(relu_squared(dense(mixed, layer, "ffn.key")), layer, "ffn.value")
    return dense(centre(x, t, "model.norm"), t, "lm_head")


def test_rwkv7(tmp_path: Path) -> None:
    llm, tensors = served(tmp_path, CONFIG, shapes())
    for got, text in zip(llm.logits(TEXTS), TEXTS, strict=True):
        close(got, logits(text, tensors))


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    for c in RANKS:
        for part, place in (("0.weight", 1), ("2.weight", 2), ("2.bias", 0)):
            name = name.replace(f"attn.{c}_lora.lora.{part}", f"time_mix_{c}{place}.weight")
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name if name.endswith((".weight", ".bias")) else f"{name}.weight"


def test_rwkv7_of_llama_cpp(tmp_path: Path) -> None:
    _, tensors = served(tmp_path, CONFIG, shapes())
    file = {gguf_name(name): t for name, t in tensors.items() if ".attn.x_" not in name}
    for i in range(LAYERS):
        mixed = [tensors[f"model.layers.{i}.attn.x_{c}"].reshape(1, 1, -1) for c in "rwkvag"]
        file[f"blk.{i}.time_mix_lerp_fused.weight"] = np.stack(mixed)
        file[f"blk.{i}.time_mix_r_k.weight"] = file[f"blk.{i}.time_mix_r_k.weight"].reshape(-1)
    keys = next(header.keys for header in headers() if header.name == "rwkv7")
    path = tmp_path / "m.gguf"
    write_gguf(path, "rwkv7", keys, {n: t.astype(np.float32) for n, t in file.items()})
    got = LLM(path, dtype="float32").logits(TEXTS[:1])[0]
    close(got, logits(TEXTS[0], tensors))
