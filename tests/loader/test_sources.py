"""Sources: paths, files of packages that are never imported, and a hub that is made up here."""

import sys
from pathlib import Path

import pytest

from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.sources import locate


def error_of(source: str, beside: Path = Path()) -> str:
    """The error of a source, checked to be one line that begins with it."""
    with pytest.raises(SourceError) as caught:
        locate(source, beside)
    text = str(caught.value)
    assert "\n" not in text
    return text


# Paths.


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    assert locate("model.gguf", tmp_path) == tmp_path / "model.gguf"
    assert locate(str(tmp_path / "model.gguf"), Path("/elsewhere")) == tmp_path / "model.gguf"
    assert locate(".", tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/model.gguf", Path("/elsewhere")) == tmp_path / "model.gguf"


def test_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    assert error_of("model", tmp_path) == f"{tmp_path / 'model'}: there is no such file or folder"


@pytest.mark.parametrize("source", ["~nobody-of-this-name/x", "x" * 5000, "a\0b"])
def test_a_path_that_cannot_be(source: str, tmp_path: Path) -> None:
    assert source[:10].replace("\0", "\\x00") in error_of(source, tmp_path)


def test_an_unknown_scheme_is_refused() -> None:
    text = error_of("ftp://somewhere/model")
    assert text.startswith("ftp://somewhere/model: unknown scheme 'ftp'; allowed: ")
    assert "package://" in text
    assert "hf://" in text


# Packages.


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, none of which can be imported."""
    folder = tmp_path / "site"
    (folder / "made_up_weights/deep").mkdir(parents=True)
    (folder / "made_up_weights/__init__.py").write_text("raise SystemExit('was imported')")
    (folder / "made_up_weights/model.gguf").touch()
    (folder / "made_up_weights/deep/model.gguf").touch()
    (folder / "made_up_single.py").write_text("raise SystemExit('was imported')")
    (folder / "made_up_namespace").mkdir()
    (folder / "made_up_namespace/model.gguf").touch()
    (folder / "secret").touch()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize(
    "file",
    [
        "made_up_weights/model.gguf",
        "made_up_weights/deep/model.gguf",
        "made_up_namespace/model.gguf",
    ],
)
def test_a_package_is_not_imported(packages: Path, file: str) -> None:
    assert locate(f"package://{file}", Path()) == (packages / file).resolve()
    assert not any(name.startswith("made_up") for name in sys.modules)


def test_a_missing_package_gives_the_line_that_installs_it() -> None:
    text = error_of("package://made_up_missing/m.gguf")
    line = f"{sys.executable} -m pip install --no-deps made-up-missing"
    assert text.endswith(f"the package made_up_missing is not installed; run: {line}")


@pytest.mark.parametrize(
    "file",
    [
        "none.gguf",
        "../secret",
        "deep/../../secret",
        "../made_up_single.py",
        "\0",
    ],
)
def test_what_is_not_in_the_package_is_refused(packages: Path, file: str) -> None:
    error_of(f"package://made_up_weights/{file}")


def test_an_absolute_path_is_not_in_the_package(packages: Path) -> None:
    assert "there is no" in error_of(f"package://made_up_weights/{packages / 'secret'}")


def test_the_error_says_where_was_looked(packages: Path) -> None:
    text = error_of("package://made_up_weights/none.gguf")
    assert f"there is no none.gguf in {(packages / 'made_up_weights').resolve()}" in text
    text = error_of("package://made_up_single/none.gguf")
    assert "there is no none.gguf in made_up_single, which is a single file" in text


@pytest.mark.parametrize("rest", ["", "module", "module/", "a.b/file", "1a/file", "/file"])
def test_a_package_source_that_is_not_one(rest: str) -> None:
    assert "write package://module/file" in error_of(f"package://{rest}")


def test_a_module_without_a_place_on_disk() -> None:
    error_of("package://__main__/model.gguf")
    assert "there is no model.gguf" in error_of("package://sys/model.gguf")


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to("gone")
    assert error_of("model.gguf", tmp_path).endswith(
        "is a link to gone, which is not there: fetch it again"
    )
