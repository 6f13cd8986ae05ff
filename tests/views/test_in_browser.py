"""Views in a browser: nothing leaves its place, text is legible light and dark, keys move."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api as driver

from tests.server.page.conftest import BROWSER
from tests.views.made_up import views

LONG = 30  # tokens

# What sticks out of the page, unless it can be scrolled to; and what lies on something else.
OUTSIDE = """() => {
  const wrong = [], wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) wrong.push('the page is wider than its window');
  for (const each of document.querySelectorAll('.jv *')) {
    if (each.closest('.scroll') || each.closest('input,style,script')) continue;
    const box = each.getBoundingClientRect();
    if (box.right > wide + 1 || box.left < -1) wrong.push(`${each.tagName} ${each.className}`);
  }
  for (const part of document.querySelectorAll('td,th,.card,.fork,.small label,.down span')) {
    const box = part.getBoundingClientRect(), next = part.nextElementSibling;
    if (!next || getComputedStyle(part).position === 'sticky') continue;
    const other = next.getBoundingClientRect();
    const across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
    const down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
    if (across > 1 && down > 1) wrong.push(`${part.className} on the next`);
  }
  return wrong;
}"""
# The least contrast of a text with what is behind it (WCAG's ratio).
CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const over = colours => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => {
      const share = v / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    }).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  };
  let least = 21, of = '';
  const known = {};
  for (const each of document.querySelectorAll('.jv td,.jv th,.jv p,.jv .token,.jv dt,.jv dd')) {
    const behind = [];
    const style = getComputedStyle;
    for (let at = each; at; at = at.parentElement) behind.unshift(style(at).backgroundColor);
    const colours = [...behind, style(each).color], key = colours.join();
    if (key in known) continue;
    known[key] = true;
    const [a, b] = [over(behind), over(colours)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least) [least, of] = [ratio, each.outerHTML.slice(0, 200)];
  }
  return [least, of];
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each view, with odd tokens and many."""
    folder = tmp_path_factory.mktemp("views")
    made = views(LONG, layers=6, heads=6)
    return {name: view.save(folder / f"{name}.html") for name, view in made.items()}


@pytest.fixture(scope="module")
def tab(pages: dict[str, Path]) -> Iterator[Any]:
    if BROWSER is None or not shutil.which(BROWSER):
        pytest.skip("needs Chromium, such as apt-get install chromium gives")
    with driver.sync_playwright() as it:
        browser = it.chromium.launch(executable_path=BROWSER)
        tab = browser.new_page(viewport={"width": 900, "height": 700})
        yield tab
        browser.close()


def test_nothing_leaves_its_place_and_all_is_legible(tab: Any, pages: dict[str, Path]) -> None:
    complaints = list[str]()
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    tab.on("request", lambda one: complaints.append(one.url) if "http" in one.url[:4] else None)
    colour = "getComputedStyle(document.querySelector('.jv')).color"
    for name, path in pages.items():
        tab.goto(path.as_uri())
        assert tab.title() != "run", name
        for width in (420, 900):
            tab.set_viewport_size({"width": width, "height": 700})
            assert tab.evaluate(OUTSIDE) == [], f"{name} at {width}"
        colours = set()
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            least, of = tab.evaluate(CONTRAST)
            assert least >= 4.5, f"{name}, {scheme}: {of}"
            colours.add(tab.evaluate(colour))
        # A notebook's own theme counts more than the system's.
        tab.evaluate("document.body.dataset.jpThemeLight = 'true'")
        assert len({*colours, tab.evaluate(colour)}) == 2, name
    assert complaints == []


def test_keys_move_and_say_where(tab: Any, pages: dict[str, Path]) -> None:
    stated = "document.querySelector('output').textContent"
    tab.goto(pages["lens"].as_uri())
    tab.keyboard.press("Tab")  # Chromium lets one scroll with keys, and stops there first
    if "scroll" in tab.evaluate("document.activeElement.className"):
        tab.keyboard.press("Tab")
    assert tab.evaluate(stated).startswith("after embed, at 0 ")
    moves = {"ArrowRight": "embed, at 1 ", "ArrowDown": "0, at 1 ", "End": f"0, at {LONG - 1} "}
    for key, place in {**moves, "Home": "0, at 0 "}.items():
        tab.keyboard.press(key)
        assert tab.evaluate(stated).startswith(f"after {place}"), key
    tab.goto(pages["patterns"].as_uri())
    tab.focus("[type=radio]:checked")
    tab.keyboard.press("ArrowRight")  # the next head
    assert tab.evaluate("document.querySelector(':checked').ariaLabel") == "1"
    tab.focus("[data-heat]")
    tab.keyboard.press("ArrowDown")
    tab.wait_for_function(f"{stated} !== ''")
    first, second, value = tab.evaluate(stated).split("\n")
    assert (first[:2], second[:2]) == ("1 ", "0 ")
    table = views(LONG, layers=6, heads=6)["patterns"].table()
    exact = table["attention"][LONG * LONG + LONG]
    assert float(value.removesuffix(" attention")) == pytest.approx(exact, abs=0.01)
