"""Flags of the command, and of other servers; variables of the environment."""

from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.spec_errors import SpecError
from jinfer.server.models.served_model import ServedModel
from jinfer.server.serve_flags import (
    FLAGS,
    default_model_name,
    model_sources_of,
    parse_options,
    server_settings_of,
)
from tests.server.running import ROOT


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "99999"], "argument --port: 99999 is not a whole number from 0 to 65535"),
        (["--queue", "-1"], "argument --queue: -1 is not a whole number from 0 to 2^31 - 1"),
        (["--port", "x"], "argument --port: 'x' is not a whole number"),
        (["--max-body", "0"], "argument --max-body: 0 is not a whole number from 1 to"),
        (["--timeout", "-1"], "argument --timeout: -1.0 is not a number of seconds from 0 on"),
        (["--timeout", "nan"], "argument --timeout: nan is not a number of seconds"),
        (["--timeout", "inf"], "argument --timeout: inf is not a number of seconds"),
    ],
)
def test_invalid_numbers(flags: list[str], told: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse_options(["m", *flags], {})
    assert told in capsys.readouterr().err


def test_the_command_line_wins_over_the_environment() -> None:
    environment = {
        "JINFER_PORT": "1",
        "JINFER_MAX_BODY": "100",
        "JINFER_LOG_PROMPTS": "true",
        "JINFER_SOURCE": "a=one.gguf,two.gguf",
        "JINFER_CORS": "https://a, https://b",
        "JINFER_TIMEOUT": "0",
    }
    found = parse_options(["--port", "2"], environment)
    assert found["port"] == 2
    settings = server_settings_of(found)
    assert settings.max_body == 100
    assert settings.log_prompts
    assert settings.cors == ("https://a", "https://b")
    assert settings.timeout is None
    assert [(item.name, item.path) for item in model_sources_of(found)] == [
        ("a", "one.gguf"),
        ("two", "two.gguf"),
    ]
    assert model_sources_of(parse_options(["b=three"], environment))[0].name == "b"


def test_flags_of_other_servers() -> None:
    llama = ["-m", "m.gguf", "-c", "512", "-np", "3", "-ctk", "q8", "--alias", "x", "--host", "::1"]
    found = parse_options(llama, {})
    (source,) = model_sources_of(found)
    assert source.name == "x"
    assert source.overrides["engine"] == {"queue": 256, "context": 512, "slots": 3}
    assert source.overrides["quantization"] == {"kv_cache": "q8"}
    vllm = ["m", "--served-model-name", "y", "--max-model-len", "64", "--max-num-seqs", "2"]
    (source,) = model_sources_of(parse_options(vllm, {}))
    assert (source.name, source.overrides["engine"]["slots"]) == ("y", 2)
    several = parse_options(["m.gguf", "other=b", "--alias", "x, gpt-4o"], {})
    assert [(item.name, item.aliases) for item in model_sources_of(several)] == [
        ("x", ("gpt-4o",)), ("other", ()),
    ]  # fmt: skip
    assert {"x", "gpt-4o", "gpt-4o:latest"} <= {*ServedModel(model_sources_of(several)[0]).names}
    with pytest.raises(SourceError, match="two models are called other"):
        model_sources_of(parse_options(["m", "other=b", "--alias", "x,other"], {}))


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        ([], {}, "there is no SOURCE"),
        (["a/m.gguf", "b/m.gguf"], {}, "two models are called m"),
        (["m", "--set", "nothing"], {}, "is not key=value"),
        (["m"], {"JINFER_PORT": "x"}, "JINFER_PORT='x' is not a whole number from 0 to 65535"),
        (
            ["m"],
            {"JINFER_WARM_UP": "x"},
            "JINFER_WARM_UP='x' is not one of .*; allowed: background",
        ),
        (["m"], {"JINFER_LOG_PROMPTS": "x"}, "JINFER_LOG_PROMPTS='x' is not true or false"),
        (["m", "--api-key-file", "/nowhere/keys"], {}, "write a key per line"),
        (["m", "--chat-template", "/nowhere/t"], {}, "--chat-template /nowhere/t"),
    ],
)
def test_invalid_flags(arguments: list[str], environment: dict[str, str], told: str) -> None:

    def read() -> None:
        found = parse_options(arguments, environment)
        server_settings_of(found)
        model_sources_of(found)

    with pytest.raises((SourceError, SpecError), match=told):
        read()


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n two \n")
    found = parse_options(["m", "--api-key", "three", "--api-key-file", str(path)], {})
    assert server_settings_of(found).keys == ("three", "one", "two")
    path.write_text("# none\n")
    with pytest.raises(SourceError, match="has no key"):
        server_settings_of(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("specs/smollm2_135m_instruct.toml", "smollm2_135m_instruct"),
        ("a/b/model.Q4_0.gguf", "model.Q4_0"),
        ("package://weights/m.gguf", "m"),
        ("hf://owner/name", "owner/name"),
        ("folder/", "folder"),
    ],
)
def test_names(source: str, name: str) -> None:
    assert default_model_name(source) == name


def test_every_flag_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for flag in FLAGS:
        assert f"`{flag.flag}`" in page
