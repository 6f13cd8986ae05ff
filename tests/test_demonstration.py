"""README's model and `make demo`: what it shows of them is so."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jinfer.cli.inspect.match_checkpoint import describe
from jinfer.modelspec.view.model_svg import draw_model

ROOT = Path(__file__).parents[1]


def test_the_wiring_is_the_models_and_the_drawing_is_of_it() -> None:
    """README's TOML changes nothing of the demonstration model, which docs/llama.svg shows."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(block.splitlines()) == 12
    for overrides in ({}, tomllib.loads(block)):
        spec = describe("smollm2_135m_instruct", overrides).spec
        assert spec is not None
        assert draw_model(spec) == (ROOT / "docs/llama.svg").read_text(encoding="utf-8")


def wanted_answer() -> str:
    """What README shows of `make demo`, but for the last line, of figures."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^\$ make demo .*\n((?:.*\n)*?)load .*\n", page, re.MULTILINE)
    assert found
    return " ".join(found[1].split())


def demonstrate(folder: Path, *settings: str) -> None:
    """Runs `make demo` and compares its answer."""
    # A make that runs these tests hands its level and flags down, and then says where it is.
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(
        ["make", "demo", *settings],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).endswith(wanted_answer())
    assert re.search(r"^load \d+\.\d\d s, .*/s$", done.stderr, re.MULTILINE)


def test_the_demonstration(tmp_path: Path) -> None:
    """With this environment in place of one that is made first."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pip").touch()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    (tmp_path / "installed").touch()
    demonstrate(ROOT, f"VENV={tmp_path}")


@pytest.mark.soak
def test_the_demonstration_from_a_fresh_copy(tmp_path: Path) -> None:
    """As after a clone: the environment is made, packages are fetched, kernels compiled."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    demonstrate(tmp_path)
