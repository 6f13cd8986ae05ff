"""Notebooks of docs/notebooks: they run, keep their outputs, and need nothing but themselves."""

import json
import re
from pathlib import Path

import jax
import pytest

from tests.notebooks import FOLDER, code_cells, empty_folder, notebooks, run

from .structure import UNWANTED_TEXT

pytestmark = pytest.mark.usefixtures("shared_programs")

OUTSIDE = re.compile(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|url\(|@import""")


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    """Each cell has outputs of the kinds that are kept."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    as_users = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with empty_folder(), as_users[0], as_users[1]:
        for cell, outputs in zip(code_cells(notebook), run(notebook), strict=True):
            assert [list(one.get("data", [])) for one in outputs] == [
                list(one.get("data", [])) for one in cell["outputs"]
            ]


def test_files_are_as_jupyter_writes_them() -> None:
    assert len(notebooks()) == 7
    for path in notebooks():
        text = path.read_text(encoding="utf-8")
        notebook = json.loads(text)
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        names = [cell["id"] for cell in notebook["cells"]]
        assert len(set(names)) == len(names)
        assert len(text.encode()) < 300_000, path.name
        assert len(code_cells(notebook)) <= 12, path.name


def test_outputs_are_kept_and_stand_alone() -> None:
    for path in notebooks():
        cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
        assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
        assert sum(bool(cell["outputs"]) for cell in cells) > len(cells) // 2, path.name
        outputs = json.dumps([cell["outputs"] for cell in cells])
        assert not OUTSIDE.search(outputs.replace('\\"', '"')), path.name
        assert not UNWANTED_TEXT.search(outputs), path.name
        assert "/tmp/" not in outputs, path.name


def test_readers_find_all_of_them() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\w+\.ipynb)\)", index) == [path.name for path in notebooks()]
