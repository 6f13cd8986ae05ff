"""LoRA adapters of a model that is split by layers and by tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from tests.engine.adapters import write_adapter
from tests.engine.tiny import GOLDEN, PROMPTS

KEYS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 1}


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    found = []
    for name in ("a", None, "b"):
        (one,) = llm.generate([PROMPTS[3]], adapter=name, **KEYS)
        assert one.logprobs is not None
        found.append((one.token_ids, [each.logprob for each in one.logprobs]))
    return found


@pytest.mark.parametrize(
    ("mesh", "type"), [({"pipe": 3}, "auto"), ({"pipe": 2, "tensor": 2}, "int8")], ids=str
)
def test_as_on_one_device(mesh: dict[str, int], type: str, tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / f"{rank}", rank, rank) for rank in (4, 16)]
    keys: dict[str, Any] = {"dtype": "float32", "engine.slots": 2, "adapters.a": str(paths[0])}
    keys |= {"engine.max_adapters": 2, "engine.adapter_dtype": type}
    with LLM(GOLDEN, **keys) as whole:
        whole.load_adapter("b", paths[1])
        wanted = answers(whole)
    assert wanted[0][0] != wanted[1][0] != wanted[2][0]
    with LLM(GOLDEN, **(keys | {"partition.mesh": mesh})) as split:
        split.load_adapter("b", paths[1])
        for (tokens, logprobs), (ids, numbers) in zip(answers(split), wanted, strict=True):
            assert tokens == ids
            np.testing.assert_allclose(logprobs, numbers, atol=1e-4)
