"""What is cached of a slot is saved, restored and erased, as llama.cpp has it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import Running

FRANCE = "The capital of France is Paris. What is the capital of France?" * 4
GERMANY = FRANCE + " And of Germany?"


@pytest.fixture
def http(smol: Running, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of the shared server as if it had been started with --slot-save-path."""
    settings = smol.service.settings
    object.__setattr__(settings, "slot_save_path", str(tmp_path / "slots"))
    with smol.client() as client:
        yield client
    object.__setattr__(settings, "slot_save_path", None)


def cached(http: httpx.Client, prompt: str) -> tuple[int, str]:
    asked = {"prompt": prompt, "id_slot": 1, "n_predict": 4, "temperature": 0}
    answer = http.post("/completion", json=asked).json()
    assert answer["id_slot"] == 1
    return answer["tokens_cached"], answer["content"]


def act(http: httpx.Client, action: str, slot: int = 1, **body: Any) -> dict[str, Any]:
    answer = http.post(f"/slots/{slot}?action={action}", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_a_slot_is_saved_restored_and_erased(http: httpx.Client, tmp_path: Path) -> None:
    act(http, "erase")
    _, content = cached(http, FRANCE)
    saved = act(http, "save", filename="one.bin")
    assert saved["n_written"] == (tmp_path / "slots" / "one.bin").stat().st_size
    assert saved["timings"]["save_ms"] > 0
    assert act(http, "erase") == {"id_slot": 1, "n_erased": saved["n_saved"]}
    assert cached(http, FRANCE) == (0, content)
    act(http, "erase")
    restored = act(http, "restore", slot=2, filename="one.bin")
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    assert cached(http, FRANCE)[0] > 50
    assert cached(http, GERMANY)[0] > 50
    assert act(http, "erase", slot=2)["n_erased"] == saved["n_saved"]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/slots/9?action=save", {"filename": "a"}, "id", "slots are 0 to 7"),
        ("/slots/x?action=save", {"filename": "a"}, "id", "there is no slot 'x'"),
        (
            "/slots/0?action=copy",
            {"filename": "a"},
            "action",
            "it must be one of save, restore, erase",
        ),
        ("/slots/0?action=save", {}, "filename", "there is no filename"),
        ("/slots/0?action=save", {"filename": "../a"}, "filename", "use a plain file name"),
        ("/slots/0?action=restore", {"filename": ".."}, "filename", "use a plain file name"),
        ("/slots/0?action=restore", {"filename": "none"}, "filename", "cannot be read"),
        ("/completion", {"prompt": "a", "id_slot": 8}, "id_slot", "slots are 0 to 7"),
    ],
)
def test_invalid_slot_actions(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


def test_slots_are_not_saved_by_default(smol: Running) -> None:
    with smol.client() as client:
        answer = client.post("/slots/0?action=erase", json={})
    assert answer.status_code == 501
    assert "--slot-save-path" in answer.json()["error"]["message"]
