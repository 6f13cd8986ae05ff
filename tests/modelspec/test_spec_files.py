"""Specification files, families of families, finding a family, overrides."""

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest

from jinfer.modelspec import spec_files
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.resolve_spec import CheckpointFacts, matches
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import (
    _may_match,
    families,
    find_family,
    format_table,
    parse_override,
    read_toml,
    with_families,
)
from jinfer.modelspec.toml_tables import nested

from .helpers import PATH, facts, one_line


def test_toml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[dims]\nhidden = 3")
    assert read_toml(path) == {"dims": {"hidden": 3}}
    path.write_bytes(b"[dims]\r\nhidden = 4")  # edited while the process runs
    assert read_toml(path) == {"dims": {"hidden": 4}}


def test_every_family_is_found_by_what_its_match_says() -> None:
    """Only the text of this table is looked into, before a family is parsed."""
    known = families()
    for name, path in known.items():
        table = read_toml(path).get("match", {})
        words = {word for key in ("architectures", "gguf") for word in table.get(key, [])}
        words |= {"llama2c"} if table.get("llama2c") else set()
        assert all(_may_match(path, [word]) for word in words), name
        assert not table or not _may_match(path, ["vocab", "\ud800", "family"]), name
    assert not any(_may_match(path, []) for path in known.values())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"a = ", "is not TOML: Invalid value"),
        (b"a = 1\na = 2", "is not TOML: Cannot overwrite a value"),
        (b"\xff", "is not TOML: 'utf-8' codec can't decode"),
        (b"a = " + b"9" * 5000, "is not TOML: Exceeds the limit"),
        (b"a = " + b"[" * 5000, "is not TOML: "),
        (b"a = " + b"[" * 50 + b"]" * 50, "has tables and lists in each other more than 16 deep"),
        (b"a" + b".a" * 1500 + b" = 1", "has tables and lists in each other more than 16 deep"),
    ],
)
def test_file_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_toml(path)
    assert one_line(caught.value, path).startswith(reason)


def test_folder_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not a regular file"):
        read_toml(tmp_path)


def test_families_of_families(tmp_path: Path) -> None:
    tables = with_families({"family": "mistral", "dtype": "float32"}, Path(PATH))
    assert tables == [
        read_toml(families()["llama"]), read_toml(families()["mistral"]),
        {"family": "mistral", "dtype": "float32"},
    ]  # fmt: skip
    (tmp_path / "own.toml").write_text('family = "llama"')
    tables = with_families({"family": "own.toml"}, tmp_path / "model.toml")
    assert tables == [read_toml(families()["llama"]), {"family": "llama"}, {"family": "own.toml"}]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lama", "family: unknown family 'lama'; did you mean 'llama'? allowed: "),
        (3, "family: unknown family 3; allowed: "),
        (["llama"], "family: unknown family ['llama']"),
        ({}, "family: unknown family {}"),
        ("\0.toml", "family: '\\x00.toml' is no file: "),
    ],
)  # fmt: skip
def test_family_refused(family: Any, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        with_families({"family": family}, Path(PATH))
    assert one_line(caught.value).startswith(reason)


def test_family_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="none\\.toml: cannot be read: No such file"):
        with_families({"family": "none.toml"}, tmp_path / "model.toml")


def test_circle_of_families(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a"), ("self", "self")):
        (tmp_path / f"{one}.toml").write_text(f'family = "{other}.toml"')
    for name in ("a", "self"):
        with pytest.raises(SpecError, match="family: the families name each other in a circle"):
            with_families(read_toml(tmp_path / f"{name}.toml"), tmp_path / f"{name}.toml")


def test_formats() -> None:
    assert set(format_table("gguf")) == {"dims", "modules", "tensors"}
    assert format_table("safetensors") == {}


def found(config: dict[str, Any], *architectures: str) -> str:
    return find_family(facts(config), architectures, Path("folder")).stem


def test_family_is_found() -> None:
    assert found({}, "MistralForCausalLM") == "mistral"
    assert found({}, "Other", "LlamaForCausalLM") == "llama"
    assert found({"multi_query": True}, "FalconForCausalLM") == "falcon"
    assert find_family(CheckpointFacts("gguf"), ["qwen2"], Path("file.gguf")).stem == "qwen2"
    assert find_family(CheckpointFacts("llama2c"), [], Path("file.bin")).stem == "llama"


def test_a_condition_decides_between_families_of_one_name() -> None:
    """GGUF's "llama" is a mixture of experts if the file says how many there are."""
    for metadata, family in (({"expert_count": 8}, "mixtral"), ({"expert_count": 0}, "llama")):
        known = CheckpointFacts("gguf", lookup_in(metadata))
        assert find_family(known, ["llama"], Path("file.gguf")).stem == family


def test_a_condition_may_ask_for_rows() -> None:
    table = {"architectures": ["A"], "when": "rows('head') == 9 or rows('none')"}

    def fits(head: int) -> bool:
        known = facts({}, {"head": (head, 4)})
        return matches(
            table,
            "",
            format=known.format,
            architectures={"A"},
            lookup=known.lookup,
            has=known.has,
            rows=known.row_count,
        )

    assert fits(9)
    assert not fits(8)


@pytest.mark.parametrize(
    ("config", "architectures", "reason"),
    [
        ({}, ["NewForCausalLM"], "no family is known for NewForCausalLM; write a specification"),
        ({}, [], "no family is known for a safetensors file without an architecture"),
        ({}, ["GPT2LMHeadModel", "LlamaForCausalLM"], "several families match GPT2LMHeadModel, "
         "LlamaForCausalLM: gpt2, llama; name one in a spec"),
    ],
)  # fmt: skip
def test_no_family_is_found(config: dict[str, Any], architectures: list[str], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        find_family(facts(config), architectures, Path("folder"))
    assert one_line(caught.value, "folder").startswith(reason)


@pytest.mark.parametrize(("both_ways", "family"), [(False, "gemma3"), (True, "gemma_embedding")])
def test_a_condition_chooses_the_family(both_ways: bool, family: str) -> None:
    config = {"use_bidirectional_attention": both_ways}
    found = find_family(facts(config), ["Gemma3TextModel"], Path("folder"))
    assert found.stem == family


def test_a_family_with_a_wrong_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "wrong.toml"
    monkeypatch.setattr(spec_files, "families", lambda: {"wrong": path})
    path.write_text('match = { architecture = ["New"] }')
    with pytest.raises(SpecError, match=r"match\.architecture: unknown key; did you mean 'arch"):
        found({}, "New")
    path.write_text('match = { architectures = "New", when = "$a +" }')
    with pytest.raises(SpecError, match=r"match\.when: cannot be read as an expression: '\$a \+'"):
        found({}, "New")


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("dtype=float32", {"dtype": "float32"}),
        ("engine.slots=4", {"engine": {"slots": 4}}),
        (" engine.slots = 4 ", {"engine": {"slots": 4}}),
        ("dims.eps=1e-5", {"dims": {"eps": 1e-5}}),
        ("a.b.c=true", {"a": {"b": {"c": True}}}),
        ('prompt.system="Be brief."', {"prompt": {"system": "Be brief."}}),
        ("prompt.system=Be brief.", {"prompt": {"system": "Be brief."}}),
        ("prompt.system=", {"prompt": {"system": ""}}),
        ("prompt.template=a=b", {"prompt": {"template": "a=b"}}),
        ("dims.heads=$n_head | 4", {"dims": {"heads": "$n_head | 4"}}),
        ("pattern=['a', 'b']", {"pattern": ["a", "b"]}),
        ("attn={kind = 'rope'}", {"attn": {"kind": "rope"}}),
        ("x=2024-01-01", {"x": datetime.date(2024, 1, 1)}),
        ("x=" + "[" * 3000, {"x": "[" * 3000}),
        ("x=" + "9" * 5000, {"x": "9" * 5000}),
    ],
)
def test_override(text: str, table: dict[str, Any]) -> None:
    assert parse_override(text) == table


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dtype", "dtype: is not key=value, such as engine.context=4096"),
        ("", "is not key=value"),
        ("=3", "=3: is not key=value"),
        ("a..b=3", "a..b: is not a key, such as engine.context"),
        (".a=3", ".a: is not a key"),
        ("a .b=3", "a .b: is not a key"),
        (".".join("a" * 50) + "=3", "is not a key"),
    ],
)
def test_override_refused(text: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_override(text)
    assert reason in one_line(caught.value, "--set")


def test_nested() -> None:
    assert nested("a.b", {"c": 1}) == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 20_000) + " = 1",
        ".".join(['"a b"'] * 20_000) + " = 1",
        "[" + ".".join("1" * 20_000) + "]",
        "a = {" + ".".join("a" * 20_000) + " = 1}",
        "\n".join(f"a{number}." + ".".join("b" * 500) + " = 1" for number in range(500)),
    ],
)
def test_dotted_keys_without_end(tmp_path: Path, text: str) -> None:
    """The parser took 6.9 s and 1.7 GB for the first."""
    path = tmp_path / "long.toml"
    path.write_text(text)
    begun = time.thread_time()
    with pytest.raises(SpecError, match="has a line with too many dots"):
        read_toml(path)
    assert time.thread_time() - begun < 1


def test_many_fractions_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "factors.toml"
    path.write_text(f"a = [{', '.join(f'{n}.25' for n in range(500))}]\n")
    assert len(read_toml(path)["a"]) == 500


def test_only_regular_files_of_some_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "long.toml").write_bytes(b"#" * (1 << 21))
    for name, reason in (
        ("pipe.toml", "is not a regular file"),
        ("zero.toml", "is not a regular file"),
        ("long.toml", "is larger than 1048576 bytes"),
    ):
        with pytest.raises(SpecError, match=reason):
            read_toml(tmp_path / name)
