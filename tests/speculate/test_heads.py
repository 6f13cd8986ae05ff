"""Heads of checkpoints that have them: as published, whole, and never in the way of a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from jinfer.loader.open_model import open_model
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.forward_context import ForwardBatch
from jinfer.ops.attention.kv_cache import BLOCK, zero_cache
from jinfer.speculate.eagle_drafter import EagleDrafter
from jinfer.speculate.speculative_decoding import SpeculativeDecoder
from tests.arrays import on_device
from tests.families.llama_line import (
    TOKENS,
    llama_shapes,
)
from tests.families.tiny import VOCAB, close, written
from tests.reference.numpy_tensors import Floats
from tests.speculate.drafts import alone, ids, same
from tests.speculate.heads import AHEAD, CASES, LAYERS, TARGET, right_head, write_eagle

KEYS: dict[str, Any] = {"engine.slots": 2, "engine.context": 128, "dtype": "float32"}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=0)
DRAWN = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=0.8, seed=3)


def head_of(llm: LLM) -> EagleDrafter:
    speculation = llm.session.engine.speculator
    assert isinstance(speculation, SpeculativeDecoder)
    (head,) = speculation.drafters
    assert isinstance(head, EagleDrafter)
    return head


def given_by(head: EagleDrafter, vectors: Floats) -> Floats:
    """A head's logits in places 0, 1, ... of TOKENS from the second one on."""
    count = len(vectors)
    assert count <= 2 * BLOCK

    @jax.jit  # one program, where each operation would be one
    def computed(parameters: Any, tokens: jax.Array, vectors: jax.Array) -> jax.Array:
        every, zeros = jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, jnp.int32)
        groups = head.runner.programs.sizes.blocks
        tables = {group: jnp.arange(2, dtype=jnp.int32)[None] for group in groups}
        at = ForwardBatch.flat(zeros, every, zeros[:1] + count, tables, zeros[:1])
        module = head.runner.model.module(parameters)
        # In float32, which a head's own cache is not: it only drafts.
        cache = zero_cache(head.runner.model.caches, 2, jnp.float32)
        out, _ = module.decode_all(tokens, at, cache, None, module.project_hidden(vectors))
        return out["logits"]

    tokens = on_device(AHEAD[:count], jnp.int32)
    given = on_device(vectors, jnp.float32)
    return np.asarray(computed(head.runner.parameters, tokens, given), np.float64)


def kept_by(llm: LLM, head: EagleDrafter) -> Floats:
    """What the target's layers gave of TOKENS, as the head is given it while it drafts."""
    seen: list[Floats] = []
    plain = head._vectors

    def watched(rows: Any, positions: Any) -> Any:
        vectors = plain(rows, positions)
        seen.extend(
            np.asarray(vector)
            for vector, row, place in zip(vectors, rows, positions, strict=True)
            if row >= 0 and place == len(seen)
        )
        return vectors

    head._vectors = watched  # type: ignore[method-assign]
    llm.generate([TOKENS.tolist()], GREEDY)
    head._vectors = plain  # type: ignore[method-assign]
    return np.stack(seen[: len(TOKENS)])


def finite(logits: Floats) -> Floats:
    return np.where(np.isfinite(logits), logits, -1e3)


@pytest.mark.parametrize(
    "name",
    [
        # One of each family, of which GLM's comes in GGUF; the others are variants of these.
        pytest.param(n, marks=[pytest.mark.soak] if n in ("glm", "named", "mimo") else [])
        for n in CASES
    ],
)
def test_eagle_head_equals_the_published_definition(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    settings = KEYS | {"speculation.draft": case.draft, "speculation.nodes": 4}
    with LLM(case.source, **settings) as llm:
        head = head_of(llm)
        assert llm.spec.speculation.head == case.family
        close(finite(given_by(head, case.vectors)), finite(case.logits))
        close(kept_by(llm, head), case.vectors)


@pytest.mark.parametrize(
    "name",
    [
        "eagle",
        *(pytest.param(n, marks=pytest.mark.soak) for n in CASES if n != "eagle"),
    ],
)
def test_tokens_are_those_without_it(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    prompts = ids(VOCAB, 9, 66)
    with LLM(case.source, **KEYS) as llm:
        plain = {params: alone(llm, prompts, params) for params in (GREEDY, DRAWN)}
    settings = KEYS | {"speculation.draft": case.draft, "speculation.nodes": 6}
    with LLM(case.source, **settings) as llm:
        for params, answers in plain.items():
            same(alone(llm, prompts, params), answers)
            same(llm.generate(prompts, params), answers)
        stats = llm.stats()
        assert stats.draft_tokens
        assert stats.blocks_held == 0


def test_perfect_head_is_always_accepted(tmp_path: Path) -> None:
    """Each token follows from the one before alone, and the head knows from which which."""
    source = right_head(tmp_path)
    prompts = ids(VOCAB, 9, 33)
    with LLM(source, **KEYS) as llm:
        plain = alone(llm, prompts, GREEDY)
        drawn = alone(llm, prompts, DRAWN)
    settings = KEYS | {"speculation.draft": "head", "speculation.nodes": 4}
    with LLM(source, **settings) as llm:
        same(alone(llm, prompts, GREEDY), plain)
        same(alone(llm, prompts, DRAWN), drawn)
        speculation = llm.session.engine.speculator
        assert isinstance(speculation, SpeculativeDecoder)
        tried = speculation.draft_length.tried()
    for depth in (1, 2):
        right, of = tried["head", depth, 0]
        assert of > 10
        assert right / of > 0.95


@pytest.mark.soak
@pytest.mark.parametrize(("cache", "least"), [("q8", 0.999), ("q3.5", 0.9), ("bf16", 0.999)])
def test_kept_vectors_may_be_rounded(cache: str, least: float, tmp_path: Path) -> None:
    case = CASES["eagle"](tmp_path)
    prompts = ids(VOCAB, 9, 66)
    keys = KEYS | {"quantization.kv_cache": cache}
    drafts = keys | {"speculation.draft": case.draft, "speculation.nodes": 4}
    with LLM(case.source, **keys) as llm:
        plain = alone(llm, prompts, DRAWN)
    with LLM(case.source, **drafts) as llm:
        same(alone(llm, prompts, DRAWN), plain)
        kept = kept_by(llm, head_of(llm))
    assert np.corrcoef(kept.ravel(), case.vectors.ravel())[0, 1] > least


def test_head_equals_reference_values(tmp_path: Path) -> None:
    """Of tokens that were in the cache before a request came."""
    case = CASES["mimo"](tmp_path)
    settings = KEYS | {"speculation.draft": "head", "speculation.nodes": 4}
    with LLM(case.source, **settings) as llm:
        llm.generate([TOKENS.tolist()], GREEDY)
        close(kept_by(llm, head_of(llm)), case.vectors)
        assert llm.generate([TOKENS.tolist()], GREEDY)[0].usage.cached_tokens > 30


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("head", {}, {}, "knows of no head in its checkpoints"),
    ("HEAD", {"vocab_size": 80, "draft_vocab_size": 60}, {}, "is for 80 tokens, and the model has"),
    ("HEAD", {"target_hidden_size": 64}, {}, "is given 192 numbers of a token, but 3 layers of"),
    (
        "HEAD",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}},
        {},
        "follows layers 1, 2, 30, but the model has 8",
    ),
    ("HEAD", {}, {"speculation.expansion": [1, 2]}, "a head drafts a chain"),
]


@pytest.mark.parametrize(("draft", "config", "keys", "message"), REFUSED, ids=lambda one: str(one))
def test_unfit_head_is_a_one_line_error(
    draft: str, config: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written(tmp_path / "target", TARGET, llama_shapes(LAYERS, head=True))
    write_eagle(tmp_path / "head", **config)
    named = str(tmp_path / "head") if draft == "HEAD" else draft
    with pytest.raises(SpecError) as error:
        LLM(tmp_path / "target", **(KEYS | keys | {"speculation.draft": named}))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layers", "[1, 2.5]", "is no list of layers"),
        ("layers", [], "is no list of layers"),
        ("layer", [1], "unknown key; did you mean 'layers'?"),
        ("width", 0, "decoder.follows.width: 0 is not a whole number"),
        ("hidden", "fuse(tokens)", "unknown name 'tokens'"),
    ],
    ids=str,
)
def test_token_order_of_a_head_is_checked(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    write_eagle(tmp_path)
    with pytest.raises(SpecError) as error:
        open_model(tmp_path, {f"decoder.follows.{key}": value}, alone=False)
    assert message in str(error.value)


def test_a_head_is_no_model(tmp_path: Path) -> None:
    write_eagle(tmp_path)
    with pytest.raises(SpecError, match="it drafts for another model"):
        LLM(tmp_path, **KEYS)
