"""Which models a folder and a file offer."""

from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.server.http.server_settings import ModelSource
from jinfer.server.models.model_registry import ModelRegistry
from jinfer.server.serve_flags import model_sources_of, parse_options, server_settings_of


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_models_in_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "a.gguf", "b.toml", "b.gguf", "c/config.json", "c/model.safetensors")
    touch(tmp_path, "set-00001-of-00003.gguf", "set-00002-of-00003.gguf", "mmproj-a.gguf")
    touch(tmp_path, "seen/m-Q4.gguf", "seen/mmproj-m.gguf", "owner/one/spec.toml")
    touch(tmp_path, "owner/two/q4.gguf", "owner/two/q8.gguf", "owner/three/too/deep.gguf")
    touch(tmp_path, "README.md", ".hidden.gguf", "empty/notes.txt", "d/part-00001-of-00002.gguf")
    touch(tmp_path, "d/part-00002-of-00002.gguf", "a/model.safetensors")
    expected = {
        "a": "a",
        "a.gguf": "a.gguf",
        "b": "b.toml",
        "c": "c",
        "d": "d/part-00001-of-00002.gguf",
        "owner/one": "owner/one",
        "owner/two/q4": "owner/two/q4.gguf",
        "owner/two/q8": "owner/two/q8.gguf",
        "seen": "seen/m-Q4.gguf",
        "set": "set-00001-of-00003.gguf",
    }
    found = ModelRegistry(folder=tmp_path).sources()
    assert {item.name: str(Path(item.path).relative_to(tmp_path)) for item in found} == expected
    assert all(item.on_demand for item in found)


def test_models_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    touch(folder, "a.gguf", "b.gguf")
    file = tmp_path / "models.toml"
    file.write_text(
        '[chat]\nsource = "models/a.gguf"\naliases = ["gpt-4o", "c"]\npinned = true\n'
        '[chat.overrides]\n"engine.context" = 512\nengine.slots = 2\n'
        '[b]\nidle_unload = 60\n["far.1"]\nsource = "hf://owner/name"\nload_on_startup = true\n'
    )
    line = ModelSource("first", "x")
    flags = {"engine": {"context": 64, "queue": 3}}
    registry = ModelRegistry((line,), folder, file, flags)
    first, chat, b, far, a = registry.sources()
    assert first == line
    assert chat == ModelSource(
        "chat",
        str(folder / "a.gguf"),
        {"engine": {"context": 512, "queue": 3, "slots": 2}},
        aliases=("gpt-4o", "c"),
        pinned=True,
    )
    assert (b.path, b.idle_unload, b.on_demand) == (str(folder / "b.gguf"), 60.0, True)
    assert (far.path, far.on_demand) == ("hf://owner/name", False)
    assert (a.name, a.path, a.overrides) == ("a", str(folder / "a.gguf"), flags)
    # The command line's name wins over the folder's, and the file must not have it too.
    assert [one.path for one in ModelRegistry((ModelSource("a", "x"),), folder).sources()] == [
        "x",
        str(folder / "b.gguf"),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "x: is not a table"),
        ("[m]", "m.source: is missing"),
        ("[m]\nsource = 3", "m.source: 3 is not a text"),
        ('[m]\nsource = "a"\nalias = "b"', "m.alias: unknown key; did you mean 'aliases'"),
        ('[m]\nsource = "a"\npinned = 1', "m.pinned: 1 is not true or false"),
        ('[m]\nsource = "a"\nidle_unload = "5m"', "m.idle_unload: '5m' is not a number of seconds"),
        (
            '[m]\nsource = "a"\naliases = ["first"]',
            "m.aliases: 'first' is the name or an alias of another model",
        ),
        ('[m]\nsource = "a"\noverrides = {n_threads = 1}', "m.overrides"),
        ('[llama3.1]\nsource = "a"', r'for a name with dots, write \["llama3.1"\]'),
        ('[first]\nsource = "a"', "first: is a model of the command line, too"),
        ("[m", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(SpecError, match=told) as error:
        ModelRegistry((ModelSource("first", "x"),), file=file).sources()
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"--models-dir {tmp_path}/none: cannot be read"):
        ModelRegistry(folder=tmp_path / "none").sources()


def test_flags_of_models() -> None:
    given = ["--models-dir", "m", "--models-max", "3", "--no-models-autoload", "--idle-unload", "9"]
    found: Any = parse_options([*given, "--sleep-idle-seconds", "4", "--model-wait", "2"], {})
    settings = server_settings_of(found)
    assert model_sources_of(found) == []
    assert (settings.max_loaded, settings.autoload, settings.model_wait) == (3, False, 2.0)
    assert (settings.idle_unload, settings.idle_sleep) == (9.0, 4.0)
    with pytest.raises(SourceError, match="--alias names the first SOURCE"):
        model_sources_of(parse_options(["--models-dir", "m", "--alias", "x"], {}))
