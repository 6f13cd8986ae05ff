"""How the page shows answers of a model, which may be hostile."""

import json
import re
from typing import Any

from tests.server.page.driving import answered, expect, opened, say, script, stream, written
from tests.server.running import Running

HOSTILE = r"""
<script>window.ran = 1</script> <img src=x onerror="window.ran = 2"> <svg onload="ran=3">
<iframe srcdoc="<script>parent.ran=4</script>"></iframe> <a href="javascript:ran=5">a</a>

[b](javascript:window.ran=6) [c](JaVaScRiPt:ran=7) [d](data:text/html,<script>ran=8</script>)
[e](&#106;avascript:ran=9) [f]( javascript:ran=10 ) <javascript:ran=11> [h](vbscript:ran=12)
![i](javascript:ran=13) ![j](x" onerror="ran=14) [k](https://e.example" onclick="ran=15)
[l](java
script:ran=16) **<img src=x onerror=ran=17>** `<script>ran=18</script>`
<style>body{display:none}</style> <meta http-equiv=refresh content=0;url=//e.example>

```"><script>ran=19</script>
</code></pre><script>ran=20</script>
```

$x <img src=x onerror=ran=26>$ \(\text{<svg onload=ran=27>}\) ~~~html <script>ran=28</script>

```html
<script>ran=29</script></span></code><img src=x onerror=ran=30>
```

| <img src=x onerror=ran=21> | [m](javascript:ran=22) |
|---|---|
| <form action=javascript:ran=23><button> | https://e.example/"onmouseover="ran=24 |

# <script>ran=25</script>
"""


def test_what_a_model_says_does_not_run(page: Any) -> None:
    everywhere = [{"reasoning_content": HOSTILE}, *[{"content": item} for item in HOSTILE]]
    broken = {"error": {"message": HOSTILE, "type": "server_error"}}
    end = f"data: {json.dumps(broken)}\n\n"
    script(page, stream(*everywhere), stream(*everywhere, end=end))
    say(page, HOSTILE)
    answered(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".assistant .error")).to_contain_text("ran=25")
    for again in (False, True):  # as it comes, and as it is kept
        if again:
            page.reload()
        answer = page.locator("article.assistant").last
        expect(answer.locator(".text")).to_contain_text("window.ran = 1")
        answer.locator("summary").click()
        for number in range(1, 31):
            if number != 8:  # of which the sign before is the end of a link
                expect(answer).to_contain_text(re.compile(rf"ran ?= ?{number}\b"))
        for link in answer.locator("a").all():
            assert link.get_attribute("href").startswith("https://e.example")
            assert link.get_attribute("rel") == "noopener noreferrer nofollow"
            link.evaluate("link => link.dispatchEvent(new MouseEvent('mouseover'))")
        inner = page.locator("#log :is(script, img, svg:not(.icon), iframe, style, meta, form)")
        assert inner.count() == 0
        named = page.evaluate(
            "[...document.querySelectorAll('#log *')].flatMap(e => e.getAttributeNames())"
        )
        assert not [name for name in named if name.startswith("on")]
        expect(page.locator("body")).to_be_visible()
        assert page.evaluate("window.ran") is None


def test_thoughts_are_folded(page: Any) -> None:
    script(page, stream({"reasoning_content": "It is "}, {"reasoning_content": "two."}))
    say(page, "1 + 1?")
    thoughts = answered(page).locator(".thoughts")
    expect(thoughts).to_be_hidden()
    page.locator(".assistant summary").click()
    expect(thoughts).to_have_text("It is two.")


MARKDOWN = [
    ("a *b* **c** `d`", "<p>a <em>b</em> <strong>c</strong> <code>d</code></p>"),
    ("***x***", "<p><strong><em>x</em></strong></p>"),
    ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
    ("a\nb", "<p>a<br>b</p>"),
    ("\\*a\\*", "<p>*a*</p>"),
    ("``a`b``", "<p><code>a`b</code></p>"),
    ("## T ##", "<h4>T</h4>"),
    ("#no", "<p>#no</p>"),
    ("---", "<hr>"),
    ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("- a\n\n1. b\n2. c", '<ul><li>a</li></ul><ol start="1"><li>b</li><li>c</li></ol>'),
    ("3) a\n\n   b", '<ol start="3"><li><p>a</p><p>b</p></li></ol>'),
    ("~~a~~ <b>", "<p><del>a</del> &lt;b&gt;</p>"),
    (
        "|a|b|\n|:-:|--:|\n|1|`x`|",
        '<div class="wide"><table><thead><tr><th class="center">a</th><th class="right">b</th>'
        '</tr></thead><tbody><tr><td class="center">1</td><td class="right"><code>x</code></td>'
        "</tr></tbody></table></div>",
    ),
    (
        "see https://e.example/a_b_c.",
        '<p>see <a href="https://e.example/a_b_c" target="_blank" '
        'rel="noopener noreferrer nofollow">https://e.example/a_b_c</a>.</p>',
    ),
    (
        "[a](mailto:x@e.example)",
        '<p><a href="mailto:x@e.example" target="_blank" '
        'rel="noopener noreferrer nofollow">a</a></p>',
    ),
    ("[a](//e.example)", "<p>[a](//e.example)</p>"),
]
# Over and over, these would take long where a pattern tries many ways.
NASTY = (
    *("**a ", "*a ", "*_", "_a __", "a~~", "[a", "[](", "![", "https://", "<http://a"),
    *("`", "```a`", "``` a", "~", "# ", "> ", "- ", "|-", "a|\n|-|", "  ", "\n- "),
)
RENDERED = """async (text) => {
  const { blocks, render } = await import("/page/markdown.js");
  return blocks(text).map((block) => render(block).outerHTML).join("");
}"""


def test_markdown(page: Any) -> None:
    for text, html in MARKDOWN:
        assert page.evaluate(RENDERED, text) == html, text
    code = page.evaluate(RENDERED, "```py\na\n\n  b\n```\nc")
    assert "<pre" in code
    assert "<code>a\n\n  b</code>" in code
    assert code.endswith("<p>c</p>")
    assert "<code>a</code>" in page.evaluate(RENDERED, "~~~~\na")
    for nasty in NASTY:
        before = page.evaluate("performance.now()")
        for end in ("", "`", "x"):
            page.evaluate(RENDERED, nasty * (20_000 // len(nasty)) + end)
        assert page.evaluate("performance.now()") - before < 3000, nasty


def test_copying(browser: Any, smol: Running) -> None:
    code = "def f(x):\n    return x + 1"
    rights = ["clipboard-read", "clipboard-write"]
    with opened(browser, smol.url, permissions=rights) as page:
        expect(page.locator("#set-temperature")).to_be_attached()
        script(page, written(f"So:\n\n```python\n{code}\n```\n"))
        say(page, "Write a function.")
        copy = answered(page).get_by_role("button", name="Copy code")
        for by_hand in (False, True):  # a page that is not from this machine has no clipboard
            if by_hand:
                page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
                page.locator("#status").evaluate("one => one.textContent = ''")
            copy.click()
            expect(page.locator("#status")).to_have_text("Copied")
            page.locator("#input").fill("")
            page.locator("#input").press("Control+v")
            expect(page.locator("#input")).to_have_value(code)
