"""House figures: the sizes of the project stay below their bounds."""

from pathlib import Path

import pytest

from tests.house_figures import BOUNDS, figures, folder_sizes, words_by_hand


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    return figures()


@pytest.mark.parametrize("name", BOUNDS)
def test_figure_is_below_its_bound(name: str, measured: dict[str, int]) -> None:
    assert measured[name] <= BOUNDS[name]


def test_every_figure_has_a_bound(measured: dict[str, int]) -> None:
    assert measured.keys() == BOUNDS.keys()


def test_figures_of_a_small_tree(tmp_path: Path) -> None:
    files = {
        "jinfer/a.py": "class A: ...\nclass _B: ...\n",
        "jinfer/nn/b.py": "from jinfer import a\n",
        "docs/page.md": "# Two words\nIt stands beside.\n",
        "docs/reference/made.md": "not counted\n",
        "pyproject.toml": '[project]\ndependencies = ["jax"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    made = figures(tmp_path)
    assert (made["modules"], made["lines"], made["public classes"]) == (2, 3, 1)
    assert (made["floors"], made["dependencies"], words_by_hand(tmp_path)) == (2, 1, 6)
    assert made["avoided words in documentation"] == 2
    assert folder_sizes(tmp_path) == {"jinfer": 1, "jinfer/nn": 1}
