"""A hub that is made up here, and the cache of the hub's own library, without a network."""

import importlib
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.hub import repository, snapshot
from jinfer.loader.sources import locate

SHA, OTHER = "0" * 39 + "1", "0" * 39 + "2"


def error_of(source: str) -> str:
    """The error of a source, checked to be one line that begins with it."""
    with pytest.raises(SourceError) as caught:
        locate(source, Path())
    text = str(caught.value)
    assert "\n" not in text
    return text


class Hub:
    """Stands for huggingface_hub: says what it was asked, and what the repository has."""

    def __init__(self, files: list[str], folder: Path) -> None:
        self.files, self.folder = files, folder
        self.asked: list[tuple[str, str | None]] = []
        self.patterns: list[str] = []

    def model_info(self, name: str, *, revision: str | None, timeout: float) -> Any:
        self.asked.append((name, revision))
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(
        self,
        name: str,
        *,
        revision: str | None,
        allow_patterns: Sequence[str] = (),
        local_files_only: bool = False,
    ) -> str:
        self.asked.append((name, revision))
        self.patterns = list(allow_patterns)
        if local_files_only:
            raise FileNotFoundError("there is nothing")
        return str(self.folder)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes functions importable as `huggingface_hub`, where every host has an address."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])

    def install(hub: Any) -> None:
        module: Any = ModuleType("huggingface_hub")
        module.model_info = hub.model_info
        module.snapshot_download = hub.snapshot_download
        module.constants = SimpleNamespace(HF_HUB_OFFLINE=False, ENDPOINT="https://hub.test")
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
        (OSError("no room\nanywhere"), "no room"),
        (RuntimeError("\n 404 Client Error: not found.\n\nPlease"), "404 Client Error: not found."),
        (KeyError(), "KeyError"),
        (
            ConnectionError("refused"),
            "hub.test cannot be reached (refused), and the hub's cache has no copy of it; "
            "a folder or a .gguf needs no network",
        ),
    ],
    ids=["lines", "blank lines", "no text", "connection"],
)
def test_an_error_of_the_hub_becomes_one_line(
    install: Callable[[Any], None], tmp_path: Path, error: Exception, reason: str
) -> None:
    class Broken(Hub):
        def model_info(self, name: str, *, revision: str | None, timeout: float) -> Any:
            raise error

    install(Broken([], tmp_path))
    assert error_of("hf://owner/name") == f"hf://owner/name: {reason}"


def test_without_the_hub_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    text = error_of("hf://owner/name")
    assert f"{sys.executable} -m pip install 'jinfer[hub]'" in text


# The cache, as huggingface_hub lays it out, and that library itself.


def put(cache: Path, *shas: str, main: str = SHA) -> Path:
    """The folder of me/tiny in a cache, with these snapshots of a model."""
    folder = cache / "models--me--tiny"
    (folder / "refs").mkdir(parents=True)
    if main:
        (folder / "refs" / "main").write_text(main)
    for sha in shas:
        (folder / "snapshots" / sha).mkdir(parents=True)
        for name in ("config.json", "model.gguf"):
            (folder / "snapshots" / sha / name).write_text("x")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, in a world without a network."""
    hub = pytest.importorskip("huggingface_hub")
    constants = importlib.import_module("huggingface_hub.constants")

    def lost(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("somebody asked the network")

    monkeypatch.setattr(socket, "getaddrinfo", lost)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(hub, "model_info", asked)
    return tmp_path


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    ("rest", "file"),
    [("", ""), (f"@{SHA}", ""), ("@main", ""), ("/model.gguf", "model.gguf")],
)
def test_the_cache_needs_no_network(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    offline: bool,
    rest: str,
    file: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    found = put(cache, SHA, OTHER) / "snapshots" / SHA
    with caplog.at_level(logging.WARNING, "jinfer"):
        assert locate(f"hf://me/tiny{rest}", Path()) == found / file
    lines = [record.getMessage() for record in caplog.records]
    told = f"hf://me/tiny{rest}: huggingface.co cannot be reached (Name or service not known); "
    assert [line.startswith(told) for line in lines] == [True] * (not offline)


def test_what_the_cache_lacks(cache: Path) -> None:
    text = error_of("hf://me/tiny")
    assert "huggingface.co cannot be reached (Name or service not known)" in text
    assert text.endswith("a folder or a .gguf needs no network")
    put(cache, SHA)
    assert "has no other.gguf" in error_of("hf://me/tiny/other.gguf")
    assert "no copy of it" in error_of(f"hf://me/tiny@{OTHER}")


@pytest.mark.parametrize("inner", ["", "snapshots"])
def test_a_folder_of_the_cache_is_its_snapshot(tmp_path: Path, inner: str) -> None:
    folder = put(tmp_path, SHA, OTHER, main=OTHER)
    assert locate(str(folder / inner), Path()) == folder / "snapshots" / OTHER
    (folder / "refs" / "main").unlink()
    with pytest.raises(SourceError, match=f"several snapshots \\({SHA}, {OTHER}\\): name one"):
        snapshot(folder / inner)


def test_the_only_snapshot_and_none(tmp_path: Path) -> None:
    folder = put(tmp_path, SHA, main="")
    found = snapshot(folder)
    assert found == folder / "snapshots" / SHA
    assert repository(found) == "me/tiny"
    assert repository(tmp_path / "me") == ""
    for each in found.iterdir():
        each.unlink()
    found.rmdir()
    with pytest.raises(SourceError, match="holds no snapshot"):
        snapshot(folder)
    assert snapshot(tmp_path) == tmp_path
