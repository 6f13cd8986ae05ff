"""A process that runs out of memory maps is told so before XLA crashes."""

from pathlib import Path

import pytest

from jinfer.engine.maps import check_maps
from jinfer.engine.requests import EngineError


def test_few_maps_are_enough() -> None:
    check_maps()


def test_no_such_files(tmp_path: Path) -> None:
    check_maps(tmp_path / "maps", tmp_path / "limit")


def test_maps_run_out(tmp_path: Path) -> None:
    (maps := tmp_path / "maps").write_text("a map\n" * 5000)
    (limit := tmp_path / "limit").write_text("6000\n")
    with pytest.raises(EngineError, match=r"5,000 of the 6,000 memory maps.*vm\.max_map_count"):
        check_maps(maps, limit)
    limit.write_text("7000\n")
    check_maps(maps, limit)
