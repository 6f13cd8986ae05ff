"""Parts of messages besides text: files, calls of tools, formulas, code in colours."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.driving import (
    answered,
    expect,
    opened,
    say,
    script,
    set_values,
    stream,
    turns,
    written,
)
from tests.server.running import Running


def test_files_are_attached(page: Any, tmp_path: Path) -> None:
    bodies = script(page, written("Yes."))
    text = tmp_path / "notes <b>.md"
    text.write_bytes(b"a\r\n```\nb\n```\nc")
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\xff\xfe")
    chooser = page.locator("#files")
    chooser.set_input_files([text, picture])
    expect(page.locator("#status")).to_have_text("a.png is no text in UTF-8")
    expect(page.locator("#attached li")).to_have_count(1)
    page.get_by_role("button", name="Remove notes <b>.md").click()
    expect(page.locator("#attached")).to_be_hidden()
    chooser.set_input_files(text)
    say(page, "What is in it?")
    answered(page)
    expect(page.locator("#attached")).to_be_hidden()
    assert bodies[0]["messages"][0]["content"] == (
        "notes <b>.md:\n````\na\n```\nb\n```\nc\n````\n\nWhat is in it?"
    )
    card = page.locator("article.user .card")
    expect(card.locator("summary")).to_contain_text("notes <b>.md")
    expect(card.locator("pre")).to_be_hidden()
    expect(page.locator("article.user .text")).to_have_text("What is in it?")
    page.reload()
    card.locator("summary").click()
    expect(card.locator("pre")).to_have_text("a\n```\nb\n```\nc")


CALL = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": '}}
REST = {"index": 0, "function": {"arguments": '"Paris <b>"}'}}
OTHER = {"index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}}


def test_tools_are_cards(page: Any) -> None:
    called = stream({"tool_calls": [CALL]}, {"tool_calls": [REST, OTHER]}, reason="tool_calls")
    bodies = script(page, stream({"reasoning_content": "Hm."}), called, written("20 degrees."))
    page.locator("#open-settings").click()
    page.locator("#tools").fill("[{")
    page.get_by_role("button", name="Close").click()
    say(page, "Hello")  # is not sent
    expect(page.locator("#tools")).to_be_focused()
    function = {"name": "weather", "parameters": {"type": "object"}}
    page.locator("#tools").fill(json.dumps([function]))
    page.keyboard.press("Escape")
    page.locator("#input").press("Enter")
    answered(page)
    assert bodies[0]["tools"] == [{"type": "function", "function": function}]
    say(page, "The weather?")
    cards = answered(page).locator(".card.tool")
    expect(cards).to_have_count(2)
    expect(cards.first.locator("summary")).to_contain_text("weather")
    expect(cards.first.locator("code")).to_have_text('{\n  "city": "Paris <b>"\n}')
    page.get_by_label("Result of weather").fill('{"degrees": 20}')
    page.get_by_role("button", name="Send results").click()
    expect(answered(page).locator(".text")).to_have_text("20 degrees.")
    calls = [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris <b>"}'},
        },
        {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert bodies[2]["messages"][-3:] == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": '{"degrees": 20}'},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
    ]
    expect(page.locator("article.tool summary")).to_have_text(["weatherresult", "timeresult"])
    page.reload()
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)
    assert [turn["role"] for turn in turns(page)[-4:]] == ["user", "assistant", "tool", "assistant"]


RICH = r"""Prices of $5 and $6, then $e^{i\pi} + 1 = 0$ and \(\frac{a}{b}\).

$$
x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \\
- y
$$

\begin{align}
a &= b \\
c &= d
\end{align}

```python
def f(x):
    return "<b>" + str(x)  # done
```

```nothing-that-is-known
a < b
```
"""


def test_formulas_and_colours(browser: Any, smol: Running) -> None:
    asked = []
    with opened(browser, smol.url) as page:
        page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        expect(page.locator("#set-temperature")).to_be_attached()
        libraries = {"temml.min.js", "highlight.min.js", "stix-two-math.woff2"}
        script(page, written("No *code*, no formulas, $5."), written(RICH))
        say(page, "First")
        answered(page)
        assert not libraries & set(asked)  # nothing is loaded that nobody needs
        say(page, "Second")
        answer = answered(page)
        expect(answer.locator("math")).to_have_count(4)
        expect(answer.locator("math mfrac")).to_have_count(2)
        expect(answer.locator("math[display=block]")).to_have_count(2)
        expect(answer.locator("p").first).to_contain_text("Prices of $5 and $6, then")
        expect(answer.locator(".hljs-keyword")).to_have_text(["def", "return"])
        expect(answer.locator(".hljs-string")).to_have_text('"<b>"')
        assert answer.locator("code").last.inner_text() == "a < b"
        page.wait_for_function("document.fonts.check('16px \"Page Math\"', 'x')")
        assert libraries <= set(asked)
        # Numbers and words are told apart by colour, and bars of fractions are drawn.
        colours = answer.locator(".hljs-keyword, .hljs-string, .hljs-comment").evaluate_all(
            "all => new Set(all.map(one => getComputedStyle(one).color)).size"
        )
        assert colours == 3


HOSTILE_TEX = [
    r"\href{javascript:ran=1}{x}",
    r"\url{javascript:ran=1}",
    r"\includegraphics{https://e.example/x.png}",
    r"\style{background:url(https://e.example)}{x}",
    r"\htmlData{onclick=ran=1}{x}",
    r"\text{<img src=x onerror=ran=1>}",
    r"\rule{9999em}{9999em}",
    r"\kern-5000em\rule{100em}{100em}",
    r"\def\a{\a\a}\a",
    "{" * 900 + "x" + "}" * 900,
    r"\color{red;background:url(https://e.example)}x",
    r"\class{note}{x} \id{input}{x}",
]
SHOWN = """async (all) => {
  const { formula } = await import("/page/formula.js");
  const place = document.getElementById("log");
  place.replaceChildren(...all.map((tex) => formula(tex, tex, false)));
  for (const code of ["<img src=x onerror=ran=2>", "&lt;script&gt;", "</span><b>"]) {
    const { codeBlock } = await import("/page/code.js");
    place.append(codeBlock(code, "html"));
  }
}"""
MATHML = "http://www.w3.org/1998/Math/MathML"


def test_formulas_and_colours_cannot_do_harm(page: Any) -> None:
    """Nothing that they name runs, is loaded or linked, or covers the page."""
    page.evaluate(SHOWN, HOSTILE_TEX)
    expect(page.locator("#log .hljs-tag").first).to_be_attached()
    expect(page.locator("#log math").first).to_be_attached()
    attributes = page.evaluate(
        """() => [...document.querySelectorAll("#log math *")].flatMap((one) =>
          [one.namespaceURI, ...one.getAttributeNames().map((name) => name)])"""
    )
    assert not {"href", "src", "id", "xlink:href", "onclick"} & set(attributes)
    assert {name for name in attributes if "/" in name} == {MATHML}
    assert not page.locator("#log :is(img, a, script, b)").count()
    codes = page.locator("#log code").all_text_contents()
    assert codes == ["<img src=x onerror=ran=2>", "&lt;script&gt;", "</span><b>"]
    covers = page.evaluate(
        """() => [[5, 5], [innerWidth - 5, 5], [5, innerHeight - 5], [640, innerHeight - 30]]
          .filter(([x, y]) => document.elementFromPoint(x, y).closest("#log")).length"""
    )
    assert covers == 0
    assert page.evaluate("window.ran") is None
    set_values(page, {"max_tokens": "1"})  # the page still does what it should


@pytest.mark.soak
def test_code_that_takes_long_to_colour_holds_up_nothing(page: Any) -> None:
    """A pattern that needs minutes ends with its worker; the next code has its colours."""
    slow = "def " * 25_000
    page.evaluate(
        """async (slow) => {
          const { codeBlock } = await import("/page/code.js");
          const blocks = [codeBlock(slow, "csharp"), codeBlock("def f(): pass", "python")];
          document.getElementById("log").replaceChildren(...blocks);
        }""",
        slow,
    )
    before = page.evaluate("performance.now()")
    expect(page.locator(".hljs-keyword")).to_have_text(["def", "pass"])
    assert 2500 < page.evaluate("performance.now()") - before < 15_000
    assert page.locator("#log code").first.text_content() == slow
