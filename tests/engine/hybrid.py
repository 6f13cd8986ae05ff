"""A hybrid that nobody ships: delta rule, state space, RG-LRU and attention, made up here."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jinfer import LLM, SamplingParams
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.nn.abstract_model import build_abstract_model
from tests.speculate.drafts import RandomTrees, alone, known, speculating

SPEC = '''
weights = "model.safetensors"

[dims]
vocab           = 128
hidden          = 64
layers          = 4
heads           = 4
kv_heads        = 2
head_dim        = 16
intermediate    = 128
context         = 512
ssm_width       = 64
ssm_heads       = 4
ssm_groups      = 2
ssm_states      = 16
delta_heads     = 4
delta_key_heads = 2
delta_key_dim   = 16
delta_value_dim = 16
lru_width       = 64

[modules]
embed  = { kind = "embedding" }
logits = { kind = "head" }

[decoder]
stem    = "embed(tokens)"
pattern = ["delta", "space", "unit", "attention"]
layer   = """
x = x + attn(mix_norm(x))
x = x + ffn(ffn_norm(x))
"""
head    = "logits(norm(x))"

[decoder.modules]
mix_norm = { kind = "rms" }
ffn_norm = { kind = "rms" }
norm     = { kind = "rms" }
ffn      = { kind = "gated", activation = "silu" }
attn     = { kind = "attention", position = { kind = "rope" } }

[decoder.variants.attention]

[decoder.variants.delta]
layer = """
n = mix_norm(x)
y = delta(conv_q(q(n)), conv_k(k(n)), conv_v(v(n)), decay(n), beta(n))
x = x + out(out_norm(y) * act(gate(n)))
x = x + ffn(ffn_norm(x))
"""

[decoder.variants.delta.modules]
q        = { kind = "linear", outputs = 32 }
k        = { kind = "linear", outputs = 32 }
v        = { kind = "linear", outputs = 64 }
gate     = { kind = "linear", outputs = 64 }
conv_q   = { kind = "conv", size = 32, activation = "silu" }
conv_k   = { kind = "conv", size = 32, activation = "silu" }
conv_v   = { kind = "conv", size = 64, activation = "silu" }
decay    = { kind = "linear", outputs = 4 }
beta     = { kind = "linear", outputs = 4 }
delta    = { kind = "delta" }
out_norm = { kind = "rms", size = 64, groups = 4, shared = true }
act      = { kind = "activation", function = "silu" }
out      = { kind = "linear", inputs = 64 }

[decoder.variants.space]
layer = """
n = mix_norm(x)
y = ssm(conv_x(in_x(n)), conv_b(in_b(n)), conv_c(in_c(n)), in_dt(n))
x = x + out(out_norm(y * act(gate(n))))
x = x + ffn(ffn_norm(x))
"""

[decoder.variants.space.modules]
in_x     = { kind = "linear", outputs = 64 }
in_b     = { kind = "linear", outputs = 32 }
in_c     = { kind = "linear", outputs = 32 }
in_dt    = { kind = "linear", outputs = 4 }
gate     = { kind = "linear", outputs = 64 }
conv_x   = { kind = "conv", size = 64, bias = true, activation = "silu" }
conv_b   = { kind = "conv", size = 32, bias = true, activation = "silu" }
conv_c   = { kind = "conv", size = 32, bias = true, activation = "silu" }
ssm      = { kind = "ssm" }
out_norm = { kind = "rms", size = 64, groups = 2 }
act      = { kind = "activation", function = "silu" }
out      = { kind = "linear", inputs = 64 }

[decoder.variants.unit]
layer = """
n = mix_norm(x)
h = conv(in_x(n))
y = lru(h, sigmoid(input_gate(h)), sigmoid(recurrence_gate(h)))
x = x + out(y * act(gate(n)))
x = x + ffn(ffn_norm(x))
"""

[decoder.variants.unit.modules]
in_x            = { kind = "linear", outputs = 64, bias = true }
gate            = { kind = "linear", outputs = 64 }
conv            = { kind = "conv", size = 64, kernel = 3 }
input_gate      = { kind = "block_linear", inputs = 64, outputs = 64, blocks = 4, bias = true }
recurrence_gate = { kind = "block_linear", inputs = 64, outputs = 64, blocks = 4, bias = true }
sigmoid         = { kind = "activation", function = "sigmoid" }
lru             = { kind = "rglru" }
act             = { kind = "activation", function = "gelu_tanh" }
out             = { kind = "linear", inputs = 64 }

[tensors]
'''


def write_hybrid(folder: Path) -> Path:
    """Writes the specification and a checkpoint of random numbers; returns the former's path."""
    rows = ["embed", "logits", "decoder.norm"]
    shared = ("mix_norm", "ffn_norm", *(f"ffn.{part}" for part in ("gate", "up", "down")))
    table = tomllib.loads(SPEC)["decoder"]
    own = {name for variant in table["variants"].values() for name in variant.get("modules", {})}
    attention = [f"attn.{part}" for part in "qkvo"]
    rows += [f"decoder.{{i}}.{name}" for name in (*shared, *sorted(own), *attention)]
    text = SPEC + "".join(f'"{name}" = "{name}"\n' for name in rows)
    spec = resolve([tomllib.loads(text)], "hybrid", CheckpointFacts("safetensors"), {})
    model, rng = build_abstract_model(spec, np.float32), np.random.default_rng(9)
    tensors = {}
    for name, parameter in zip(model.names, model.parameters, strict=True):
        one = "norm" in name or name == "decoder.1.ssm.d"
        wide = 1.3 / np.sqrt(parameter.shape[-1]) if len(parameter.shape) > 1 else 0.3
        tensors[name] = rng.normal(float(one), wide, parameter.shape).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "hybrid.toml").write_text(text)
    return folder / "hybrid.toml"


def check_company(one: LLM, many: LLM) -> None:
    """Eight streams that begin alike, with drafts and too few blocks: their tokens alone.

    Args:
        one: where each is alone.
        many: eight slots, and blocks for two whole answers.
    """
    rng = np.random.default_rng(3)
    common = rng.integers(3, 128, 112).tolist()
    prompts = [common + rng.integers(3, 128, 5 + i).tolist() for i in range(8)]
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.7, seed=5)
    plain = alone(one, prompts, params)
    wanted = [answer.token_ids for answer in plain]
    trees = RandomTrees(known(prompts, plain), 128, 7)
    with speculating(many, trees, nodes=16) as drafted:
        assert [answer.token_ids for answer in many.generate(prompts, params)] == wanted
    stats = many.stats()
    assert drafted.accepted > 20
    assert drafted.drafted - drafted.accepted > 20
    assert stats.preemptions
    assert stats.cached_tokens >= 7 * 112
    assert stats.blocks_held == 0


MANY: dict[str, Any] = {"engine.slots": 8, "engine.kv_tokens": 512}
