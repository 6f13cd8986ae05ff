"""Models by name: those of the catalogue and of a hub, wherever a source is taken."""

import re
from pathlib import Path

import pytest

from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.open_model import open_files
from jinfer.loader.sources import full_source, locate
from jinfer.modelspec.spec_files import model_specs, specs_folder

DEMO = "smollm2_135m_instruct"


def test_names_of_the_catalogue(tmp_path: Path) -> None:
    for name, path in model_specs().items():
        assert full_source(name, tmp_path) == str(path)
        assert locate(str(path), tmp_path) == path


@pytest.mark.parametrize("name", ["owner/name", "Qwen/Qwen3-0.6B", "a/b@v1.0", "a-b_c/d.e-f"])
def test_names_of_the_hub(name: str, tmp_path: Path) -> None:
    assert full_source(name, tmp_path) == f"hf://{name}"


@pytest.mark.parametrize(
    "source",
    [
        *("hf://a/b", "package://a/b.gguf", "ftp://a/b", "a/b/c", "/a/b", "./a/b", "../a", "~/a"),
        *("models/x.gguf", "specs/x.toml", "a/b.BIN", "model.gguf"),
    ],
)
def test_other_sources_stay_as_they_are(source: str, tmp_path: Path) -> None:
    assert full_source(source, tmp_path) == source


def test_what_exists_comes_first(tmp_path: Path) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / DEMO).mkdir()
    for source in (DEMO, "owner/name"):
        assert full_source(source, tmp_path) == source
    # Rather a slip than a model of somebody who is called like a folder here.
    assert full_source("owner/nmae", tmp_path) == "owner/nmae"


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("SmolLM2-135M-Instruct", f"did you mean '{DEMO}'"),
        ("smollm2_135m_instrukt", f"did you mean '{DEMO}'"),
        ("smollm2_135m_instruct.toml", f"did you mean '{DEMO}'"),
        ("smolm2_135m", f"did you mean '{DEMO}'"),
        ("smollm2-1.7", "did you mean 'smollm2_1.7b_instruct'"),
        ("llama3.1_8b", "did you mean 'llama3.1_8b_instruct'"),
        ("qwen3-0.6b", "did you mean 'qwen3_0.6b'"),
        ("nosuch", "'jinfer list' shows models by name"),
    ],
)
def test_a_near_miss(source: str, hint: str, tmp_path: Path) -> None:
    words = f"{source}: there is no such file, folder or model; {hint}"
    with pytest.raises(SourceError, match=re.escape(words)):
        full_source(source, tmp_path)


def test_a_name_is_a_source_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened = open_files(DEMO, {})
    assert opened.path == specs_folder() / f"{DEMO}.toml"
    assert opened.weights.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_what_comes_from_a_hub_by_its_name_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = Path(__file__).parents[1] / "goldens" / "llama2"
    monkeypatch.setattr("jinfer.loader.sources._on_hub", lambda rest, source: golden)
    monkeypatch.chdir(tmp_path)
    assert open_files("someone/something", {}).trust is False
    assert open_files(golden, {}).trust is None


def test_a_near_miss_of_what_is_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "my_finetune").mkdir()
    (tmp_path / "my_finetune" / "model-q4.gguf").touch()
    with pytest.raises(SourceError, match="did you mean 'my_finetune'"):
        full_source("my_finetun", tmp_path)
    for source in ("my_finetune/model_q4.gguf", "./my_finetune/modelq4.gguf"):
        with pytest.raises(
            SourceError, match=r"no such file or folder; did you mean .*model-q4\.gguf'"
        ):
            locate(source, tmp_path)
