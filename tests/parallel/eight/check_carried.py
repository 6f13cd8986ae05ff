"""Values that outlive a layer travel between stages. Run by tests/parallel/test_eight.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM, SamplingParams
from jinfer.modelspec.spec_errors import SpecError
from tests.reference.numpy_carried import SPEC, carried_params, numpy_carried

PROMPT = np.random.default_rng(3).integers(0, 64, 40).tolist()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("carried")
    save_file(carried_params(seed=5), folder / "model.safetensors")
    (folder / "carried.toml").write_text(SPEC)
    return folder / "carried.toml"


def opened(spec: Path, **plan: Any) -> LLM:
    return LLM(spec, dtype="float32", **{f"partition.{key}": value for key, value in plan.items()})


def test_two_stages_give_numpys_tokens(spec: Path) -> None:
    params = carried_params(seed=5)
    with opened(spec, devices="0;1", layers=[2, 4]) as llm:
        got = llm.logits([PROMPT])[0]
        answer = llm.generate([PROMPT], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    np.testing.assert_allclose(got, numpy_carried(params, PROMPT), rtol=0, atol=5e-5)
    tokens = list(PROMPT)
    for token in answer.token_ids:
        assert token == int(np.argmax(numpy_carried(params, tokens)[-1]))
        tokens.append(token)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"devices": "0;1"}, "layer 4 takes the keys of layer 2 for its attn; keep these in one"),
        ({"devices": "0&1"}, "its sparsity depends on all of its width"),
    ],
)
def test_refused(spec: Path, plan: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as caught:
        opened(spec, **plan)
    assert "\n" not in str(caught.value)
