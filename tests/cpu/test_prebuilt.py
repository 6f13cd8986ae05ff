"""Custom calls that a package brings along."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jinfer.cpu import build_library, compilers, library_cache, prebuilt
from jinfer.cpu.prebuilt import Interface
from tests.cpu.helpers import copying_compiler

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

HERE = prebuilt.interface(jax.ffi.include_dir())


@pytest.fixture
def copier(tmp_path: Path) -> str:
    return copying_compiler(tmp_path)


@pytest.fixture
def packaged(copier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library in a folder as a package has it; no compiler, and nothing in the cache."""
    monkeypatch.setattr(library_cache, "_private", [])
    monkeypatch.setattr(prebuilt, "_refused", [])
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "package")
    prebuilt.FOLDER.mkdir()
    library = prebuilt.FOLDER / library_cache.LIBRARY
    shutil.copy(build_library.library_path(), library)
    prebuilt.seal(library, build_library.own_key(), HERE)
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    return library


def loaded(folder: Path, **environment: str) -> tuple[str, str]:
    """Whether another process has custom calls and from where, and what it says meanwhile."""
    code = (
        "import sys; from pathlib import Path; "
        "from jinfer.cpu import build_library as build, prebuilt; "
        "prebuilt.FOLDER = Path(sys.argv[1]); print(build.available(), build.library_path())"
    )
    command = [sys.executable, "-c", code, str(folder)]
    everything = {**os.environ, **environment}
    done = subprocess.run(command, env=everything, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("every", ["0", "1"])
def test_prebuilt_library_needs_no_compiler(packaged: Path, every: str) -> None:
    stated, shown = loaded(packaged.parent, **{build_library.EVERY: every, build_library.LOWER: ""})
    assert stated == f"True {packaged}"
    assert shown == ""


def test_package_folder_may_be_writable_by_others(packaged: Path) -> None:
    packaged.chmod(0o666)
    packaged.parent.chmod(0o777)
    assert build_library.library_path() == packaged


def test_library_of_other_sources_is_ignored(packaged: Path) -> None:
    prebuilt.seal(packaged, "x86_64-0123456789abcdef", HERE)
    with pytest.raises(compilers.BuildError, match="no C\\+\\+ compiler no-such-compiler"):
        build_library.library_path()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 1}', "\0", '{"interface": [0]}'])
def test_library_without_its_key_is_not_loaded(packaged: Path, text: str) -> None:
    (packaged.parent / "made_from.json").write_text(text)
    assert prebuilt.find(build_library.own_key()) is None


def test_damaged_library_is_ignored(packaged: Path) -> None:
    packaged.write_bytes(packaged.read_bytes()[:-1])
    assert prebuilt.find(build_library.own_key()) is None


def test_unloadable_prebuilt_library_is_kept_and_another_compiled(
    packaged: Path, copier: str, tmp_path: Path
) -> None:
    packaged.write_bytes(b"of another system")
    prebuilt.seal(packaged, build_library.own_key(), HERE)
    stated, shown = loaded(packaged.parent, CXX=copier)
    assert stated.startswith(f"True {tmp_path / 'cache'}")
    assert "compiling custom calls" in shown
    assert packaged.read_bytes() == b"of another system"


def test_command_builds_the_library(packaged: Path, copier: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jinfer.cpu", "--into", str(tmp_path / "new")]
    environment = {**os.environ, "CXX": copier}
    made = subprocess.check_output(command, env=environment, text=True).strip()
    assert made == str(tmp_path / "new" / library_cache.LIBRARY)
    assert sorted(path.name for path in Path(made).parent.iterdir()) == sorted(
        path.name for path in packaged.parent.iterdir()
    )
    assert loaded(tmp_path / "new") == (f"True {made}", "")


def test_without_a_compiler_nothing_is_written_to_the_package() -> None:
    before = sorted(prebuilt.FOLDER.glob("*"))
    command = [sys.executable, "-m", "jinfer.cpu", "--into-package"]
    environment = {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no C++ compiler no-such-compiler")
    assert sorted(prebuilt.FOLDER.glob("*")) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--into", "{tmp}/file/new"], "Not a directory: '{tmp}/file/new'"),
        (["--into", "{tmp}/new", "--headers", "{tmp}"], "No such file or directory: '{tmp}/xla/"),
        (["--into", "{tmp}/new", "--here"], "not allowed with argument"),
        (["--headers", "{tmp}"], "--headers is for --into and --into-package"),
    ],
)
def test_command_with_invalid_options(
    options: list[str], reason: str, copier: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "jinfer.cpu", *(o.format(tmp=tmp_path) for o in options)]
    environment = {**os.environ, "CXX": copier}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "error: " in (last := done.stderr.splitlines()[-1])
    assert reason.format(tmp=tmp_path) in last


@pytest.mark.parametrize(
    ("here", "made_for", "takes"),
    [
        ((0, 4), (0, 4), True),
        ((0, 4), (0, 1), True),  # as XLA says of itself
        ((0, 4), (0, 0), False),
        ((0, 4), (0, 5), False),  # refused by jaxlib 0.11.2
        ((1, 4), (0, 4), False),
    ],
)
def test_compatible_versions_of_xla(
    here: tuple[int, int], made_for: tuple[int, int], takes: bool
) -> None:
    assert Interface(*here).accepts(Interface(*made_for)) == takes


def test_library_for_a_newer_xla_is_ignored(packaged: Path, tmp_path: Path) -> None:
    assert prebuilt.find(build_library.own_key()) == packaged
    headers = tmp_path / "xla" / "ffi" / "api"
    headers.mkdir(parents=True)
    (headers / "c_api.h").write_text(
        f"#define XLA_FFI_API_MAJOR {HERE.major}\n#define XLA_FFI_API_MINOR {HERE.minor + 1}\n"
    )
    newer = prebuilt.interface(str(tmp_path))
    assert newer == Interface(HERE.major, HERE.minor + 1)
    prebuilt.seal(packaged, build_library.own_key(), newer)
    assert prebuilt.find(build_library.own_key()) is None
