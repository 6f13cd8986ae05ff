"""`--list`: what is known of every model specification, with and without its checkpoint."""

from pathlib import Path

import pytest

from jinfer.catalogue import entries, table
from jinfer.generate import main
from jinfer.spec.errors import SpecError
from jinfer.spec.files import families, specs_folder

SIZES = """
[dims]
vocab = 100
hidden = 64
layers = 2
heads = 4
kv_heads = 2
intermediate = 128
"""


def test_every_specification_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        path.stem for path in sorted(specs_folder().glob("*.toml"))
    ]
    (demo,) = (line.split() for line in lines if line.startswith("smollm2_135m_instruct "))
    assert demo[1:4] == ["llama", "decoder-only", "135M"]
    # 134515008 parameters, of which 35136 in norms: 16 bits each, or 5 with the norms at 16.
    assert demo[4:6] == ["256.57", "MiB"]
    assert demo[8:10] == ["80.22", "MiB"]


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
    assert a.memory[0] == 2 * a.parameters
    assert a.memory[2] == matrices * 5 // 8 + 5 * 64 * 2
    assert b.parameters == 6_740_000_000
    assert b.memory == (13_480_000_000, 7_582_500_000, 4_212_500_000)
    assert (c.parameters, c.memory) == (None, ())
    assert table(tmp_path).splitlines()[3].split()[3:7] == ["-"] * 4


@pytest.mark.parametrize("count", ["7", "7b", "7 B", "-7B", "", "12345B", 7])
def test_a_count_that_is_none(tmp_path: Path, count: object) -> None:
    written = f'"{count}"' if isinstance(count, str) else count
    text = f'family = "llama"\nweights = "hf://a/b"\nparameters = {written}\n'
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(SpecError, match="parameters: "):
        list(entries(tmp_path))


def test_without_a_source_nothing_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "required: source" in capsys.readouterr().err
