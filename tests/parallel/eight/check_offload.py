"""Blocks of a model on several devices come back to each of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import SamplingParams
from jinfer.modelspec.spec_errors import SpecError
from tests.parallel.eight.models import opened

PROMPT = np.random.default_rng(1).integers(3, 250, 100).tolist()


def test_a_restart_with_a_disk(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"engine.cache_disk": str(tmp_path)}
    answers = []
    for _ in range(2):
        with opened("llama2", devices="0&1;2&3", **disk) as llm:
            answers += llm.generate([PROMPT], SamplingParams(max_tokens=4))
    assert answers[0].token_ids == answers[1].token_ids
    assert [one.usage.cached_tokens for one in answers] == [0, 64]


def test_blocks_in_host_memory_are_not_offloaded() -> None:
    with pytest.raises(SpecError, match=r"engine.cache_ram: cannot be had with partition\.host_kv"):
        opened("llama2", devices="0", host_kv_cache=0.5, **{"engine.cache_ram": 1})
