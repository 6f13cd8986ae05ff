"""Damaged llama2.c files are read or refused, never worse."""

from pathlib import Path

import pytest

from jinfer.loader.checkpoint.llama2c import open_llama2c

from .fuzzing import EXAMPLES, fuzz
from .test_llama2c import TINY, build


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_files(tmp_path: Path, examples: int) -> None:
    seeds = [build(TINY, version, shared)[0] for version in (0, 1, 2) for shared in (True, False)]
    fuzz(open_llama2c, seeds, tmp_path, examples)
