"""A model that nobody ships is served by a specification alone, and gives NumPy's logits."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM, SamplingParams
from tests.reference.numpy_unseen import numpy_forward, random_params

SPEC = """
weights = "model.safetensors"

[dims]
vocab        = 96
hidden       = 32
layers       = 4
heads        = 4
kv_heads     = 2
head_dim     = 8
intermediate = 48
context      = 128

[modules]
embed  = { kind = "embedding" }
logits = { kind = "head", bias = true }

[decoder]
stem    = "embed_norm(embed(tokens) * sqrt(hidden))"
head    = "logits(norm(x)) / 1.7"
pattern = "even if i % 2 == 0 else odd"

[decoder.modules]
embed_norm = { kind = "layer", eps = 1e-3 }
ffn_norm   = { kind = "layer", eps = 1e-3 }
norm       = { kind = "rms", eps = 1e-3 }

[decoder.variants.even]
layer = "x = x + attn(attn_norm(x)) + 0.3 * sqrt(2 / layers) * ffn(ffn_norm(x))"

[decoder.variants.even.modules]
attn_norm = { kind = "rms", eps = 1e-3 }
attn = { kind = "attention", position = { kind = "rope", theta = 5000, dim = "head_dim / 2" } }
ffn  = { kind = "gated", activation = "gelu_tanh" }

[decoder.variants.odd]
layer = \"\"\"
branch = 0.3 * sqrt(2 / layers) * ffn(ffn_norm(x))
x = x + attn_post(attn(x)) + branch
\"\"\"

[decoder.variants.odd.modules]
attn_post = { kind = "rms", eps = 1e-3 }
attn = { kind = "attention", window = 7, position = { kind = "alibi" } }
ffn  = { kind = "mlp", activation = "relu2", bias = true }

[tensors]
"embed"                    = "embed"
"logits"                   = "logits"
"decoder.embed_norm"       = "decoder.embed_norm"
"decoder.norm"             = "decoder.norm"
"decoder.{i}.attn_norm"    = "decoder.{i}.attn_norm"
"decoder.{i}.attn_post"    = "decoder.{i}.attn_post"
"decoder.{i}.ffn_norm"     = "decoder.{i}.ffn_norm"
"decoder.{i}.attn.q"       = "decoder.{i}.attn.q"
"decoder.{i}.attn.k"       = "decoder.{i}.attn.k"
"decoder.{i}.attn.v"       = "decoder.{i}.attn.v"
"decoder.{i}.attn.o"       = "decoder.{i}.attn.o"
"decoder.{i}.ffn.gate"     = "decoder.{i}.ffn.gate"
"decoder.{i}.ffn.up"       = "decoder.{i}.ffn.up"
"decoder.{i}.ffn.down"     = "decoder.{i}.ffn.down"
"""


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    return random_params(seed=11)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, params: dict[str, np.ndarray]) -> LLM:
    folder: Path = tmp_path_factory.mktemp("unseen")
    save_file(params, folder / "model.safetensors")
    (folder / "unseen.toml").write_text(SPEC)
    return LLM(folder / "unseen.toml", dtype="float32")


def test_logits(llm: LLM, params: dict[str, np.ndarray]) -> None:
    tokens = np.random.default_rng(3).integers(0, 96, 40)
    got = llm.logits([tokens.tolist()])[0]
    np.testing.assert_allclose(got, numpy_forward(params, tokens), rtol=0, atol=5e-5)


def test_decoding_token_by_token(llm: LLM, params: dict[str, np.ndarray]) -> None:
    tokens = [5, 17, 60]
    answer = llm.generate([tokens], SamplingParams(max_tokens=12))[0]
    for token in answer.token_ids:
        assert token == int(np.argmax(numpy_forward(params, np.array(tokens))[-1]))
        tokens.append(token)
