"""A process that runs out of memory maps is told so before XLA crashes."""

from pathlib import Path

import pytest

from jinfer import LLM
from jinfer.engine.requests import EngineError
from jinfer.engine.runner import compiled_programs
from jinfer.engine.runner.mmap_limit import check_maps

LLAMA2 = Path(__file__).parents[1] / "goldens" / "llama2"


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


def test_what_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear line, and the next request is answered once there is room."""
    refusal = "this process has too many maps"

    def full() -> None:
        raise EngineError(refusal)

    with LLM(LLAMA2) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(compiled_programs, "check_maps", full)
            with pytest.raises(EngineError, match=f"^{refusal}$"):
                llm.generate([1, 5, 9], max_tokens=2)
        assert len(llm.generate([1, 5, 9], max_tokens=2, ignore_eos=True)[0].token_ids) == 2
