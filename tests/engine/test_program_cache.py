"""The folder of compiled programs: nobody else's, and without what is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jinfer.engine.runner.program_cache import private_folder

PROGRAM = """
import warnings
warnings.simplefilter("error")
from jinfer.engine.runner.program_cache import use_persistent_cache
use_persistent_cache()
import jax
print(jax.jit(lambda x: x * 3 + 1)(2))
"""


def run(cache: Path, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "JINFER_CACHE": str(cache), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )


def entries(cache: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in cache.rglob("*-cache")}


def test_an_entry_cut_short_is_replaced(tmp_path: Path) -> None:
    """JAX alone leaves it, warns, and compiles at each start."""
    assert run(tmp_path).stdout == "7\n"
    good = entries(tmp_path)
    assert good
    for path in good:  # as if the process had been killed while it wrote
        path.write_bytes(path.read_bytes()[:-10])
        path.with_name(path.name.removesuffix("-cache") + "-atime").unlink()
    assert run(tmp_path).stdout == "7\n"
    mended = entries(tmp_path)
    assert mended.keys() == good.keys()
    assert all(len(mended[path]) == len(good[path]) for path in good)
    assert run(tmp_path).stdout == "7\n"
    assert entries(tmp_path) == mended


def test_programs_compiled_apart_are_not_in_jax_s_cache(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "print(jax.jit(lambda x: x * 3 + 1)(2))",
        "from jinfer.engine.runner.program_cache import compiled_apart\n"
        "print(compiled_apart(jax.jit(lambda x: x * 3 + 1).lower(2))(2))",
    )
    assert run(tmp_path, program).stdout == "7\n"
    assert not entries(tmp_path)


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    for path in (tmp_path / "a" / "new", tmp_path / "readable"):
        path.parent.mkdir(exist_ok=True)
    (tmp_path / "readable").mkdir(mode=0o755)
    (tmp_path / "readable" / "entry").write_text("kept")
    for name in ("a/new", "readable"):
        folder = private_folder(tmp_path / name)
        assert folder is not None
        assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "readable" / "entry").exists()


def test_what_others_could_write_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "entry-cache").write_text("planted")
    (folder / "link").symlink_to(tmp_path / "nowhere")
    assert private_folder(folder) == folder
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(folder)
    assert private_folder(tmp_path / "link") is None
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert private_folder(folder) is None
    assert capsys.readouterr().err.count("is not a folder of yours") == 2


def test_a_folder_that_cannot_be_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(3):
        assert private_folder(tmp_path / "file" / "programs") is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "JINFER_CACHE" in said
