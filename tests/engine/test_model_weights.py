"""Weights by name, read and replaced."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfer import LLM
from jinfer.engine.requests import RequestError
from tests.engine.tiny import GOLDEN, PROMPTS

FILE = load_file(Path(GOLDEN) / "model.safetensors")
TENSOR = "model.layers.1.self_attn.q_proj.weight"
NAME = "decoder.1.attn.q"


def opened(**keys: Any) -> LLM:
    return LLM(GOLDEN, **{"dtype": "float32", "quantization.weights": "plain", **keys})


def test_float16_is_replaced_as_it_is() -> None:
    """A checkpoint in float16 keeps its 16 bits on a CPU; others of float16 go in exactly."""
    golden = Path(GOLDEN).parent / "llama2"
    with LLM(golden) as llm:
        values = np.float16(llm.weights[NAME].values) / 2
        llm.update_weights({NAME: values})
        np.testing.assert_allclose(llm.weights[NAME].values, np.float32(values), rtol=0, atol=1e-5)
        apply, params = llm.function()
        np.testing.assert_allclose(
            apply(params, PROMPTS[1]), llm.logits([PROMPTS[1]])[0], rtol=0, atol=0.02
        )


def test_read_and_replaced() -> None:
    with opened() as llm:
        weight = llm.weights[NAME]
        np.testing.assert_array_equal(weight.values, FILE[TENSOR].astype(np.float32))
        assert (weight.name, weight.format) == (f"{NAME}.weight", "float32")
        assert (weight.nbytes, weight.tensors) == (4 * 64 * 64, (TENSOR,))
        assert len(llm.weights) == len(list(llm.weights)) == len(FILE)
        assert NAME in llm.weights
        assert "decoder.9.attn.q" not in llm.weights
        prompt = PROMPTS[6]
        before = [llm.generate([prompt], max_tokens=8)[0].token_ids for _ in range(2)]
        compiled, logits = llm.compilations, llm.logits([prompt])[0]
        llm.update_weights(
            {NAME: -weight.values, "decoder.0.ffn.up": llm.weights["decoder.0.ffn.up"]}
        )
        after = llm.generate([prompt], max_tokens=8)[0]
        assert after.usage.cached_tokens == 0
        assert not np.allclose(llm.logits([prompt])[0], logits, atol=1e-2)
        llm.update_weights({f"{NAME}.weight": weight})
        np.testing.assert_array_equal(llm.logits([prompt])[0], logits)
        assert llm.generate([prompt], max_tokens=8)[0].token_ids == before[0]
        assert llm.compilations == compiled + 1  # that of `logits`
        for values, said in (
            ({"decoder.9.attn.q": weight}, "there is no weight 'decoder.9.attn.q'; did you mean"),
            ({NAME: weight.values[:3]}, "decoder.1.attn.q.weight is [64, 64], and the values are"),
            ({NAME: "x"}, "the values are no array of numbers"),
        ):
            with pytest.raises(RequestError) as caught:
                llm.update_weights(values)
            assert said in str(caught.value)


def test_quantized() -> None:
    with opened(**{"quantization.weights": "q8", "quantization.threshold": 0}) as llm:
        weight = llm.weights[NAME]
        assert weight.format.startswith("q8")
        assert weight.nbytes < 2 * 64 * 64
        np.testing.assert_allclose(weight.values, FILE[TENSOR].astype(np.float32), atol=3e-3)
        llm.update_weights({NAME: 2 * weight.values})
        np.testing.assert_allclose(llm.weights[NAME].values, 2 * weight.values, atol=6e-3)
        assert llm.generate([PROMPTS[0]], max_tokens=3)[0].token_ids
