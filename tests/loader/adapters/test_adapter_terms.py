"""Adapters of models whose files fuse or transpose matrices, and those of GGUF."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.loader.adapters.adapter_terms import AdapterTerm, stacked
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.weights.tensor_mapping import LoadError
from tests.engine.adapters import write_adapter, write_gguf_adapter
from tests.engine.tiny import GOLDEN

GOLDENS = Path(__file__).parents[2] / "goldens"
PROMPT = [5, 9, 11, 30, 7, 8, 100, 4]


def last_logprobs(llm: LLM, adapter: str | None) -> np.ndarray:
    (answer,) = llm.generate([PROMPT], adapter=adapter, max_tokens=1, logprobs=10)
    assert answer.logprobs is not None
    best = {top.id: top.logprob for top in answer.logprobs[0].top}
    return np.array([best[id] for id in sorted(best)])


@pytest.mark.parametrize(
    ("golden", "targets"),
    [
        ("phi3_mini_4k", ("qkv_proj", "gate_up_proj", "down_proj")),
        ("gpt2", ("attn.c_attn", "mlp.c_fc")),
        ("bloom", ("query_key_value",)),
    ],
)
def test_adapter_slots_equal_merged_weights(
    golden: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    """In the fused tensor, in whose own order of rows the adapter is."""
    base = GOLDENS / golden
    turned = golden == "gpt2"
    path = write_adapter(tmp_path / "a", 4, 3, targets=targets, base=base, turned=turned)
    keys: dict[str, Any] = {"adapters.a": str(path), "dtype": "float32"}
    with LLM(base, **keys) as llm:
        beside, without = last_logprobs(llm, "a"), last_logprobs(llm, None)
    merge: dict[str, Any] = {"adapters": {"a": {"source": str(path), "merge": True}}}
    with LLM(base, **merge, dtype="float32") as llm:
        merged = last_logprobs(llm, None)
    np.testing.assert_allclose(beside, merged, atol=2e-4)
    assert not np.allclose(without, merged, atol=1e-2)


def test_of_gguf(tmp_path: Path) -> None:
    base = GOLDENS / "gguf_llama2" / "model.gguf"
    tensors = open_checkpoint(base).tensors
    names = [f"blk.{i}.{part}.weight" for i in range(2) for part in ("attn_q", "ffn_down")]
    shapes = {name: tensors[name].shape for name in names}
    path = write_gguf_adapter(tmp_path / "a.gguf", {n: (s[0], s[1]) for n, s in shapes.items()}, 4)
    keys: dict[str, Any] = {"adapters.a": str(path), "dtype": "float32"}
    with LLM(base, **keys) as llm:
        beside, without = last_logprobs(llm, "a"), last_logprobs(llm, None)
        peft = write_adapter(tmp_path / "peft", 4, 3)
        with pytest.raises(LoadError, match=r"Hugging Face's names of tensors, and the model's"):
            llm.session.adapters.load("b", peft, llm.session.engine, llm.session.thread)
    merge: dict[str, Any] = {"adapters": {"a": {"source": str(path), "merge": True}}}
    merge |= {"dtype": "float32", "quantization.weights": "plain"}
    with LLM(base, **merge) as llm:
        merged = last_logprobs(llm, None)
    np.testing.assert_allclose(beside, merged, atol=2e-4)
    assert not np.allclose(without, merged, atol=1e-2)


def test_codes_and_factors() -> None:
    """Each number within half a step; rows of zeros, and of numbers that have no step."""
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(3, 40)), rng.normal(size=(24, 3))
    a[1], b[:, 2] = 0, 1e-44
    term = AdapterTerm(a.astype(np.float32), b.astype(np.float32))
    before: dict[str, np.ndarray] = {
        "q.lora_a": np.ones((2, 4, 40), np.int8),
        "q.lora_b": np.ones((2, 4, 24), np.int8),
        "q.lora_factors": np.ones((2, 2, 4), np.float32),
    }
    found = stacked({"q": term}, 1, before, "poet")
    assert all((each[0] == 1).all() for each in found.values())
    factors = found["q.lora_factors"][1]
    for side, reference in enumerate((term.a, term.b.T)):
        codes = found[f"q.lora_{'ab'[side]}"][1]
        assert not codes[3].any()
        assert np.abs(codes[0]).max() == 127
        error = np.abs(codes[:3] * factors[side, :3, None] - reference)
        assert (error <= 0.501 * factors[side, :3, None] + 1e-43).all()


@pytest.mark.parametrize(
    ("dtype", "factor", "helps"),
    [
        ("float16", 1e6, r'poet: q has .* for float16; set .*"int8".* dtype = "float32"'),
        ("float16", np.inf, r"poet: q has .* float32, times its scale \(lora_alpha\); lower that"),
        ("float32", np.inf, r"poet: q has .* float32, times its scale \(lora_alpha\); lower that"),
        ("int8", np.inf, r"poet: q has .* float32, times its scale \(lora_alpha\); lower that"),
        ("int8", 1e6, None),
        ("float32", 1e6, None),
    ],
)
def test_terms_too_large_for_the_dtype_are_refused(
    dtype: str, factor: float, helps: str | None
) -> None:
    """Each error says what helps, which then does."""
    b = np.ones((24, 2), np.float32) * np.float32(factor)
    before = {f"q.lora_{side}": np.zeros((2, 4, n), dtype) for side, n in (("a", 40), ("b", 24))}
    if dtype == "int8":
        before["q.lora_factors"] = np.zeros((2, 2, 4), np.float32)
    expected = nullcontext() if helps is None else pytest.raises(LoadError, match=helps)
    with expected:
        stacked({"q": AdapterTerm(np.ones((2, 40), np.float32), b)}, 1, before, "poet")


@pytest.mark.parametrize("number", [np.inf, np.nan, 3e38])
def test_nonfinite_terms_are_refused(number: float, tmp_path: Path) -> None:
    """Not finite in the file: no setting helps; nor where they become so by its scale."""
    path = write_adapter(tmp_path / "poet", 2, 1, lora_alpha=64)
    file = path / "adapter_model.safetensors"
    arrays = load_file(file)
    save_file({name: np.full_like(each, number) for name, each in arrays.items()}, file)
    reason = "too large for float32, times its scale" if number == 3e38 else "the file is damaged"
    with pytest.raises(LoadError, match=f"poet.*{reason}"):
        LLM(GOLDEN, adapters={"poet": str(path)})
