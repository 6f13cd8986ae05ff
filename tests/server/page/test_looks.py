"""Light and dark, phones, and the keyboard alone."""

from typing import Any

import pytest

from tests.server.page.driving import answered, expect, opened, say, script, stream, written
from tests.server.running import Running


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.soak
def test_dark_and_light(browser: Any, smol: Running) -> None:
    found = {}
    for scheme in ("dark", "light"):
        with opened(browser, smol.url, color_scheme=scheme) as page:
            found[scheme] = background(page)
            page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
            assert background(page) != found[scheme]  # as the system has it
            for chosen in ("dark", "light"):
                page.locator("#theme").click()
                expect(page.locator("#theme")).to_have_attribute("title", f"Theme: {chosen}")
                found[f"{scheme} {chosen}"] = background(page)
            page.reload()  # light stays
            assert background(page) == found[f"{scheme} light"]
            page.locator("#theme").click()
            expect(page.locator("#theme")).to_have_attribute("title", "Theme: auto")
    assert found["dark"] == found["dark dark"] == found["light dark"]
    assert found["light"] == found["dark light"] == found["light light"]
    assert found["dark"] != found["light"]


WIDER = """() => [...document.querySelectorAll("body *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
  .filter((one) => !one.closest(".code pre, .wide, .formula.display"))
  .map((one) => one.outerHTML.slice(0, 100))"""


NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea")]
  .filter((one) => !one.hidden && !one.ariaLabel && !one.labels?.length && !one.textContent.trim())
  .map((one) => one.outerHTML.slice(0, 100))"""


def test_a_phone(browser: Any, smol: Running) -> None:
    size = {"width": 360, "height": 740}
    with opened(browser, smol.url, reduced_motion="reduce") as page:
        page.set_viewport_size(size)
        transition = "getComputedStyle(document.querySelector('button')).transitionDuration"
        assert page.evaluate(transition) == "0s"
        page.emulate_media(reduced_motion="no-preference")
        assert page.evaluate(transition) != "0s"
        expect(page.locator("#set-temperature")).to_be_attached()
        long = "x" * 300
        text = f"{long}\n\n```\n{long}\n```\n\n|a|b|\n|-|-|\n|{long}|b|\n\n- `{long}`\n\n$${long}$$"
        call = {"index": 0, "id": "a", "function": {"name": long, "arguments": f'"{long}"'}}
        script(page, written(text), stream({"tool_calls": [call]}))
        file = {"name": f"{long}.md", "mimeType": "text/plain", "buffer": long.encode()}
        for attached in (False, True):
            if attached:
                page.locator("#files").set_input_files(file)
                assert page.evaluate(WIDER) == []
            say(page, long)
            answered(page)
        expect(page.locator("math").last).to_be_attached()
        shown = (None, "#menu", "#tab-engine", "#tab-chat", "#open-models", "#open-settings")
        for opens in shown:
            if opens:
                page.locator(opens).click()
            assert page.evaluate(NAMELESS) == []
            assert page.evaluate(WIDER) == []
            assert page.evaluate("document.documentElement.scrollWidth") == 360
            if opens == "#open-models":
                expect(page.locator("#models li")).to_have_count(1)
                assert page.evaluate(WIDER) == []
                page.keyboard.press("Escape")


def test_the_keyboard(page: Any) -> None:
    bodies = script(page, written("Yes."))
    expect(page.locator("#input")).to_be_focused()
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert bodies == []
    page.keyboard.press("Enter")
    answered(page)
    assert bodies[0]["messages"][0]["content"] == "a\nb"
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-engine")).to_be_focused()
    expect(page.locator("#tab-engine")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#engine")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()
    assert page.locator("#tab-engine").evaluate("tab => getComputedStyle(tab).outlineStyle") != (
        "none"
    )
    page.reload()
    expect(page.locator("#engine")).to_be_visible()
    page.locator("#tab-engine").press("End")
    page.locator("#tab-engine").press("ArrowRight")
    expect(page.locator("#chat")).to_be_visible()
