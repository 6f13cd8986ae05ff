"""Conversations that the browser keeps: found, renamed, exported, imported."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.driving import answered, expect, kept, say, script, written


def titles(page: Any) -> list[str]:
    found: list[str] = page.locator("#conversations li > button").evaluate_all(
        "all => all.map(one => one.title)"
    )
    return found


def imported(page: Any, folder: Path, content: object) -> None:
    """Has a file with this imported."""
    path = folder / "some.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    page.locator("#import-file").set_input_files(path)


def test_conversations_are_found_renamed_and_exchanged(page: Any, tmp_path: Path) -> None:
    script(page, written("Red, or <b>blue</b>."), written("Water is wet."))
    for question in ("Which colour?", "What is water?"):
        page.locator("#new").click()
        say(page, question)
        answered(page)
    sought = page.locator("#sought")
    sought.fill("BLUE red")
    expect(page.locator("#conversations mark")).to_have_text("blue")
    assert titles(page) == ["Which colour?"]
    sought.fill("green")
    expect(page.locator("#conversations")).to_have_text("Nothing found")
    sought.press("Escape")
    page.locator("#conversations li > button").last.focus()  # all by keyboard
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_label("Title").fill("Colours <i>")
    page.keyboard.press("Enter")
    assert titles(page) == ["What is water?", "Colours <i>"]
    with page.expect_download() as item:
        page.locator("#conversations li > button").last.hover()
        page.get_by_role("button", name="Export “Colours <i>”").click()
    assert item.value.suggested_filename == "Colours-i.json"
    with page.expect_download() as all_of_them:
        page.get_by_role("button", name="Export all").click()
    exported = tmp_path / "all.json"
    all_of_them.value.save_as(exported)
    before = kept(page)
    page.locator("#clear").click()
    expect(page.locator("#conversations li")).to_have_count(0)
    for again in (False, True):  # what is there already is not added twice
        page.locator("#import-file").set_input_files(exported)
        expect(page.locator("#status")).to_have_text(f"Imported {0 if again else 2} of 2")
    assert kept(page) == before
    expect(page.locator("article.assistant .text")).to_have_text("Water is wet.")
    good: dict[str, Any] = {"role": "user", "content": "<img src=x onerror=ran=1>"}
    whole: dict[str, Any] = {"format": "jinfer-conversations", "version": 1}
    for wrong, why in (
        ("{", "it is not JSON"),
        ({"conversations": []}, "it has no conversations of this page"),
        (whole | {"conversations": [{"messages": [good | {"role": "root"}]}]}, "none of the roles"),
        (
            whole | {"conversations": [{"messages": [good | {"content": 1}]}]},
            "content of a message",
        ),
        (whole | {"conversations": [{"messages": [good | {"parent": "x"}]}]}, "follows none"),
        (whole | {"conversations": [{"messages": [good | {"id": "a"}] * 2}]}, "the same id"),
        (whole | {"version": 2, "conversations": []}, "another version"),
    ):
        imported(page, tmp_path, wrong)
        expect(page.locator("#status")).to_contain_text(why)
    assert kept(page) == before
    hostile = {"title": "</button><script>ran=2</script>", "id": "__proto__", "messages": [good]}
    imported(page, tmp_path, whole | {"conversations": [hostile]})
    expect(page.locator("article.user .text")).to_have_text(good["content"])
    assert titles(page)[0] == hostile["title"]
    assert page.evaluate("window.ran") is None


def test_conversations_of_earlier_versions_are_taken_over(page: Any) -> None:
    messages = [{"role": "user", "content": "Old?"}, {"role": "assistant", "content": "Yes."}]
    old = json.dumps([{"id": "1-a", "messages": messages}, {"messages": 1}])
    page.evaluate("old => localStorage.setItem('jinfer.conversations', old)", old)
    page.reload()
    expect(page.locator("article .text")).to_have_text(["Old?", "Yes."])
    assert page.evaluate("localStorage.getItem('jinfer.conversations')") is None
    page.reload()
    assert titles(page) == ["Old?"]


@pytest.mark.soak
def test_many_long_conversations(page: Any, tmp_path: Path) -> None:
    """Conversations beyond the size of localStorage are found while typing."""
    message = {"role": "user", "content": "some words " * 10_000}
    many = [
        {"id": str(n), "messages": [message], "updated": n, "title": f"t{n}"} for n in range(200)
    ]
    whole = {"format": "jinfer-conversations", "version": 1, "conversations": many}
    imported(page, tmp_path, whole)
    expect(page.locator("#status")).to_have_text("Imported 200 of 200")
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(200)
    before = page.evaluate("performance.now()")
    page.locator("#sought").fill("t17 words")
    expect(page.locator("#conversations li")).to_have_count(11)
    assert page.evaluate("performance.now()") - before < 2000
