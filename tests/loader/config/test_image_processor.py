"""The settings of a checkpoint's image processor, in the files of several versions."""

import json
from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.config.config_json import with_image_processor
from jinfer.loader.config.source_errors import SourceError

FLAT = "preprocessor_config.json"
NESTED = "processor_config.json"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({FLAT: {"size": 3}}, {"size": 3}),
        ({NESTED: {"image_seq_len": 4, "image_processor": {"size": 5}}},
         {"image_seq_len": 4, "size": 5}),
        ({FLAT: {"size": 3, "resample": 1}, NESTED: {"image_processor": {"size": 5}}},
         {"size": 5, "resample": 1}),
        ({FLAT: {"size": 3}, NESTED: {"size": 7, "patch_size": 14}}, {"size": 3, "patch_size": 14}),
        ({NESTED: {"image_processor": None, "a": 1}}, {"a": 1}),
    ],
)  # fmt: skip
def test_files(files: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = with_image_processor({"hidden_size": 8}, tmp_path)
    assert config.get("image_processor") == expected
    assert config["hidden_size"] == 8


@pytest.mark.parametrize("name", [FLAT, NESTED])
@pytest.mark.parametrize("text", ["[]", "{", "\x00"])
def test_damaged_files_are_named(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match=name):
        with_image_processor({}, tmp_path)
