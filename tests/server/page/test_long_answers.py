"""Long answers: what has been drawn is not drawn again."""

from typing import Any

import pytest

from tests.server.page.driving import expect

# Shows a text as it grows; counts the nodes that it makes, and looks at what is there in the end.
GROWN = """async ([text, step]) => {
  const { AnswerView } = await import("/page/answer.js");
  const { blocks, render } = await import("/page/markdown.js");
  const place = document.createElement("div");
  const view = new AnswerView(place);
  let made = 0;
  const { createElement } = document;
  document.createElement = (...name) => { made += 1; return createElement.apply(document, name); };
  const begun = performance.now();
  for (let at = step; at < text.length; at += step) view.show(text.slice(0, at), true);
  view.show(text, false);
  const seconds = (performance.now() - begun) / 1000;
  delete document.createElement;
  const whole = blocks(text).map((one) => render(one).outerHTML).join("");
  return { made, seconds, same: place.innerHTML === whole };
}"""
PROSE = "Some **words** and `code` of an answer.\n\n- one\n- two\n\n1. a\n\n   b\n2. c\n\n"
CODE = "```\nfor each in all:\n    print(each, '``', end='')\n\n" + "    more()\n" * 20
TEXTS = [
    PROSE,
    "a|b\n|-|-|\n|1|2|\n\n> quoted\n> - x\n\n# Title\n***\ntext  \nmore\n\n",
    "$$\nx = 1 \\\\\n+ y\n$$\n\nand \\[ z \\] or \\(w\\)\n\n- a\n\n1",
    "- a\n\n  ```\n  b\n\n  c\n  ```\n- d\n\n~~~\n```\n~~~\n\\begin{align}\na\n\\end{align}\n\r\n",
]


def test_what_grows_is_what_it_would_be_at_once(page: Any) -> None:
    for text in TEXTS:
        assert page.evaluate(GROWN, [text * 3, 1])["same"], text
    for text in (PROSE, CODE):
        made = [page.evaluate(GROWN, [text * many, 7])["made"] for many in (20, 80)]
        assert made[1] < 5 * made[0]


@pytest.mark.soak
def test_an_answer_of_twenty_thousand_tokens(page: Any) -> None:
    """Four times the text takes about four times as long, drawn every twenty tokens."""
    lines = CODE[: CODE.index("    more")] + "    more()\n" * 9000
    for text in (PROSE * 900, lines):
        short, long = (
            min(page.evaluate(GROWN, [text[:size], 80])["seconds"] for _ in range(5))
            for size in (20_000, 80_000)
        )
        assert long < 10 * max(short, 0.02)
    expect(page.locator("#input")).to_be_visible()
