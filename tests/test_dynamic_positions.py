"""Rotary positions whose theta grows with the length of the sequence, against a pass in NumPy."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.loader.checkpoint import open_checkpoint
from tests.reference.numpy_blocks import attention, rms_norm, silu
from tests.reference.numpy_positions import Floats, dynamic_ntk_theta, rope
from tests.reference.numpy_tensors import Tensors, dense, heads, merged, within

GOLDEN = Path(__file__).parent / "goldens" / "llama2"
LAYERS, HEADS, DIM, EPS, THETA = 3, 4, 16, 1e-5, 10000.0
TRAINED, FACTOR = 32, 4.0
SCALING = {
    "rope_type": "dynamic",
    "factor": FACTOR,
    "original_max_position_embeddings": TRAINED,
}
TOKENS = np.random.default_rng(8).integers(3, 320, 100).tolist()


def served(**overrides: Any) -> LLM:
    scaling = {"decoder.modules.attn.position.scaling": SCALING}
    return LLM(GOLDEN, dtype="float32", **{**scaling, **overrides})


@cache
def tensors() -> Tensors:
    file = open_checkpoint(GOLDEN).tensors
    return {name: tensor.read().astype(np.float64) for name, tensor in file.items()}


def theta(total: int) -> float:
    return THETA if total <= TRAINED else dynamic_ntk_theta(THETA, DIM, FACTOR, total, TRAINED)


def forward(tokens: list[int], prompt: int) -> Floats:
    """Logits where the first `prompt` tokens were computed at once, the others one by one."""

    def rotated(x: Floats) -> Floats:
        rows = [
            rope(x[p : p + 1], np.array([p]), theta=theta(max(prompt, p + 1)))
            for p in range(len(x))
        ]
        return np.concatenate(rows)

    t = tensors()
    x = t["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        layer = within(t, f"model.layers.{i}.")
        n = rms_norm(x, layer["input_layernorm.weight"], EPS)
        q, k, v = (heads(dense(n, layer, f"self_attn.{name}_proj"), HEADS) for name in "qkv")
        out = merged(attention(rotated(q), rotated(k), v))
        x = x + dense(out, layer, "self_attn.o_proj")
        n = rms_norm(x, layer["post_attention_layernorm.weight"], EPS)
        gate, up = (dense(n, layer, f"mlp.{name}_proj") for name in ("gate", "up"))
        x = x + dense(silu(gate) * up, layer, "mlp.down_proj")
    return dense(rms_norm(x, t["model.norm.weight"], EPS), t, "lm_head")


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(forward(tokens, len(prompt))[-1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("length", "chunk"),
    [
        *((TRAINED, 512), (TRAINED + 1, 512), (100, 16)),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in ((20, 16), (20, 512), (TRAINED, 16), (TRAINED + 1, 16), (100, 512))
        ),
    ],
)
def test_one_pass(length: int, chunk: int) -> None:
    """The whole text's length counts for every token, also where it is computed in pieces."""
    got = served(**{"engine.prefill_chunk": chunk}).logits([TOKENS[:length]])[0]
    wanted = forward(TOKENS[:length], length)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)
    one_by_one = forward(TOKENS[:length], 1)
    assert (np.abs(wanted - one_by_one).max() > 1e-3) == (length > TRAINED)


PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
# Shorter than trained all the time, growing beyond it, longer from the beginning.
PROMPTS = [TOKENS[:12], TOKENS[4:31], TOKENS[2:70]]


def test_generation() -> None:
    """A token generated has the theta of the text up to it; keys before stay as they are."""
    together = served().generate(PROMPTS, PARAMS)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert list(answer.token_ids) == continued(prompt, 12)


def test_what_is_in_the_cache_is_used_only_where_it_is_right() -> None:
    llm = served(**{"engine.slots": 1})
    conversation: list[int] = []
    for turn in (TOKENS[:18], TOKENS[20:30], TOKENS[30:50], TOKENS[50:60]):
        conversation += turn
        answer = llm.generate([conversation], PARAMS)[0].token_ids
        assert list(answer) == continued(conversation, 12)
        conversation += answer
    again = conversation[:20]  # short again: its keys are not those of the long text
    assert list(llm.generate([again], PARAMS)[0].token_ids) == continued(again, 12)


def test_short_prompts_are_still_not_computed_again() -> None:
    llm = served(**{"engine.slots": 1})
    seen = [
        llm.generate([TOKENS[:length]], SamplingParams(max_tokens=20, ignore_eos=True))[
            0
        ].usage.cached_tokens
        for length in (20, 25, 30, 40, 45, 45, 20)
    ]
    # The keys of a stretched prompt are those of its own length alone.
    assert seen == [0, 20, 25, 0, 0, 44, 19]


def test_beams() -> None:
    prompt = TOKENS[:40]
    params = SamplingParams(max_tokens=3, beams=2, length_penalty=0.0, ignore_eos=True)
    answer = list(served().generate([prompt], params)[0].token_ids)

    def score(tokens: list[int]) -> float:
        logits = forward(prompt + tokens, len(prompt))[len(prompt) - 1 : -1]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return float(sum(row[token] for row, token in zip(logs, tokens, strict=True)))

    assert score(answer) >= score(continued(prompt, 3)) - 1e-4
