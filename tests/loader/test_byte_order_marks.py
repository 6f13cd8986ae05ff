"""Files that an editor began with a byte order mark, wherever a user's text is read."""

import codecs
import json
import shutil
from pathlib import Path

import pytest

from jinfer.cli.terminal.generate_flags import _text_or_file
from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.mapped_file import parse_object
from jinfer.loader.open_model import open_model
from jinfer.modelspec.spec_files import read_toml
from jinfer.server.serve_flags import model_sources_of, parse_options, read_api_keys
from tests.test_goldens import GOLDENS

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def marked(path: Path, text: str) -> Path:
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    return path


def test_keys(tmp_path: Path) -> None:
    path = marked(tmp_path / "keys.txt", "secret\r\nsecond\r\n  # none\r\n")
    assert read_api_keys(path) == ("secret", "second")


def test_specifications(tmp_path: Path) -> None:
    assert read_toml(marked(tmp_path / "a.toml", 'family = "llama"\r\n')) == {"family": "llama"}


def test_texts_of_flags(tmp_path: Path) -> None:
    path = marked(tmp_path / "text", TEMPLATE)
    assert _text_or_file(str(path)) == TEMPLATE
    (source,) = model_sources_of(parse_options(["m", "--chat-template", str(path)], {}))
    assert source.overrides["prompt"]["chat_template"] == TEMPLATE


def test_parts_of_a_file_have_none(tmp_path: Path) -> None:
    data = codecs.BOM_UTF8 + b'{"a": 1}'
    assert parse_object(tmp_path, data) == {"a": 1}
    with pytest.raises(CheckpointError):
        parse_object(tmp_path, data, 8)


@pytest.mark.parametrize("name", ["tok_gpt2", "tok_gpt2_slow", "tok_wordpiece"])
def test_a_whole_checkpoint(tmp_path: Path, name: str) -> None:
    """Weights in shards, a tokenizer, a chat template: every text of it begins with a mark."""
    shutil.copytree(GOLDENS / "llama31", tmp_path, dirs_exist_ok=True)
    for file in (GOLDENS / name).iterdir():
        if file.name != "expected.json":
            shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    plain = open_model(tmp_path, {})
    for file in tmp_path.iterdir():
        if file.suffix in (".json", ".txt", ".jinja"):
            marked(file, file.read_text())
    found = open_model(tmp_path, {})
    assert found.spec.dims == plain.spec.dims
    assert found.checkpoint.tensors.keys() == plain.checkpoint.tensors.keys()
    assert found.conversation.jinja == plain.conversation.jinja == TEMPLATE
    assert found.tokenizer is not None
    assert plain.tokenizer is not None
    text = json.loads((GOLDENS / name / "expected.json").read_text())
    for words in ("Hello world", str(text)[:200]):
        assert found.tokenizer.encode(words) == plain.tokenizer.encode(words)
