"""`jinfer docs`: pages by name."""

import pytest

from jinfer.cli import main
from jinfer.cli.show_docs import docs_folder


def test_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    folder = docs_folder()
    expected = [
        sorted(path.stem for path in folder.glob(item)) for item in ("*.md", "reference/*.md")
    ]
    assert named == [*expected[0], *expected[1]]
    assert len(set(named)) == len(named)
    for name in ("sampling", "docs/sampling.md"):
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out == (docs_folder() / "sampling.md").read_text()
    assert main(["docs", "samplng"]) == 2
    assert "did you mean 'sampling'?" in capsys.readouterr().err
