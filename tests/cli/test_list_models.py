"""`jinfer list`: the catalogue's table, as `--list` shows it."""

import subprocess
import sys
from pathlib import Path

import pytest

from jinfer.cli import main
from jinfer.generate import main as generate


def test_it_is_the_table_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(["--list", "qwen3*"]) == 0
    expected = capsys.readouterr().out
    assert main(["list", "qwen3*"]) == 0
    assert capsys.readouterr().out == expected


def test_a_text_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "falcon_7b_instrukt"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.endswith("did you mean 'falcon_7b_instruct'?\n")


@pytest.mark.parametrize("words", [["list"], ["pull", "nowhere"], ["list", "qwen3"]])
def test_it_needs_no_jax(words: list[str]) -> None:
    script = (
        "import sys; from jinfer.cli import main; main(sys.argv[1:]); "
        "sys.exit('jax' in sys.modules)"
    )
    command = [sys.executable, "-c", script, *words]
    folder = Path(__file__).parents[2]
    assert subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0
