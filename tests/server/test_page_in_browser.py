"""The page as a browser has it: Chromium, driven against a server with the demonstration model."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from jinfer.server.schemas.parameters import GROUPS
from jinfer.server.settings import Settings, Source
from tests.server.running import GOLDENS, Running, serving

driver = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium, such as apt-get install chromium gives"
)
expect = driver.expect
expect.set_options(timeout=20_000)
ANSWERS = "**/v1/chat/completions"
TINY = {"dtype": "float32"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Ends with the module: its event loop would be in the way of others."""
    with driver.sync_playwright() as it:
        started = it.chromium.launch(executable_path=BROWSER)
        yield started
        started.close()


@contextlib.contextmanager
def opened(browser: Any, url: str, **more: Any) -> Iterator[Any]:
    """A page in a browser of its own, which asks nobody else and has nothing to complain of."""
    complaints: list[str] = []

    def answer(dialog: Any) -> None:
        if not dialog.message.startswith("Delete all "):
            complaints.append(dialog.message)
        dialog.accept()

    def log(line: Any) -> None:
        # What was refused, or could not be fetched, is noted there, too.
        if line.type == "error" and not line.text.startswith("Failed to load resource"):
            complaints.append(line.text)

    def note(request: Any) -> None:
        if not request.url.startswith(url):
            complaints.append(request.url)

    context = browser.new_context(viewport={"width": 1280, "height": 800}, **more)
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", answer)
    page.on("console", log)
    page.on("request", note)
    page.goto(url)
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def page(browser: Any, smol: Running) -> Iterator[Any]:
    with opened(browser, smol.url) as page:
        expect(page.locator("#set-temperature")).to_be_attached()
        yield page


def say(page: Any, text: str) -> None:
    """Sends a message, as a person does who has a keyboard."""
    page.locator("#input").fill(text)
    page.locator("#input").press("Enter")


def answered(page: Any) -> Any:
    """The latest answer, once it is there as a whole."""
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
    return page.locator("article.assistant").last


def set_values(page: Any, values: dict[str, str]) -> None:
    page.locator("#open-settings").click()
    for name, value in values.items():
        field = page.locator(f"#set-{name}")
        field.evaluate("field => field.closest('details').open = true")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.get_by_role("button", name="Close").click()


def stream(*deltas: dict[str, Any], end: str = "data: [DONE]\n\n") -> str:
    """Events as OpenAI's servers send them."""
    frames = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return "".join(f"data: {json.dumps(one)}\n\n" for one in frames) + end


def script(page: Any, *answers: str) -> list[Any]:
    """Has answers come from a script instead of a model, the last one again and again.

    Returns:
        The bodies of the requests, as they come.
    """
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        text = answers[min(len(bodies), len(answers) - 1)]
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(content_type="text/event-stream", body=text)

    page.route(ANSWERS, answer)
    return bodies


def written(text: str, size: int = 7) -> str:
    """An answer that comes in pieces."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return stream(*[{"content": piece} for piece in pieces])


def test_a_chat(page: Any, smol: Running) -> None:
    set_values(page, {"temperature": "0", "max_tokens": "12"})
    question = "Name three primary colours and explain what makes them primary."
    with page.expect_request(ANSWERS) as sent:
        say(page, question)
    body = sent.value.post_data_json
    assert body["stream"]
    assert body["messages"] == [{"role": "user", "content": question}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("smol", 0, 12)
    del body["stream"], body["stream_options"]
    whole = httpx.post(f"{smol.url}/v1/chat/completions", json=body, timeout=60).json()
    text = whole["choices"][0]["message"]["content"]
    answer = answered(page)
    assert turns(page)[-1]["content"] == text
    assert answer.locator(".text").inner_text().split() == text.split()
    expect(answer.locator(".note")).to_contain_text("12 tokens")
    expect(answer.locator(".note")).to_contain_text("its limit is reached")
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("#conversations li")).to_have_count(1)
    expect(page.locator("#set-max_tokens")).to_have_value("12")
    say(page, "And now?")
    assert [one["role"] for one in turns(page)] == ["user", "assistant", "user", "assistant"]
    answered(page)
    page.locator("#new").click()
    expect(page.locator("article")).to_have_count(0)


def test_conversations(page: Any) -> None:
    script(page, written("Yes."))
    for question in ("One?", "Two?", "Three?"):
        page.locator("#new").click()
        say(page, question)
        answered(page)
    listed = page.locator("#conversations li button:first-child")
    assert listed.all_text_contents() == ["Three?", "Two?", "One?"]
    listed.nth(1).click()
    expect(page.locator("article.user .text")).to_have_text("Two?")
    page.reload()
    page.get_by_role("button", name="Delete “Three?”").click()
    assert listed.all_text_contents() == ["Two?", "One?"]
    page.locator("#clear").click()
    expect(listed).to_have_count(0)
    expect(page.locator("article")).to_have_count(0)
    assert page.evaluate("localStorage['jinfer.conversations']") == "[]"


def turns(page: Any) -> list[dict[str, str]]:
    """The latest conversation that the browser keeps."""
    kept: list[dict[str, Any]] = json.loads(page.evaluate("localStorage['jinfer.conversations']"))
    return list(kept[0]["messages"])


def test_stopping_ends_the_request(page: Any, smol: Running) -> None:
    set_values(page, {"ignore_eos": "true"})
    label = 'jinfer:request_success_total{finished_reason="abort",model_name="smol"} '
    running = smol.hosted().llm.stats

    def ended() -> float:
        text = httpx.get(f"{smol.url}/metrics").text
        return sum(
            float(line.removeprefix(label)) for line in text.split("\n") if line.startswith(label)
        )

    stops: list[Callable[[], Any]] = [
        lambda: page.locator("#stop").click(),
        lambda: page.keyboard.press("Escape"),
    ]
    for number, stop in enumerate(stops):
        before = ended()
        say(page, "Tell me a story without an end.")
        expect(page.locator("article.assistant .text").nth(number)).to_have_text(
            re.compile(r"\w \w")
        )
        assert running().running == 1
        stop()
        answer = answered(page)
        expect(answer.locator(".note")).to_have_text("stopped")
        for _ in range(100):
            if running().running == 0:
                break
            page.wait_for_timeout(20)
        assert running().running == 0
        assert ended() == before + 1
        assert turns(page)[-1]["content"]
    expect(page.locator("#send")).to_be_visible()


def test_settings_are_sent(page: Any) -> None:
    shown = page.locator("#parameters [name]")
    names = [one.get_attribute("name") for one in shown.all()]
    assert names == [name for group in GROUPS.values() for name in group]
    expect(page.locator("#set-top_k")).to_have_attribute("placeholder", "0")
    bodies = script(page, written("Yes."))
    values = {
        "strategy": ("min_p", "min_p"),
        "min_p": ("0.1", 0.1),
        "seed": ("7", 7),
        "samplers": ("min_p\ntemperature", ["min_p", "temperature"]),
        "early_stopping": ("never", "never"),
        "ignore_eos": ("true", True),
        "stop": ("END\n\\n\\n", ["END", "\n\n"]),
        "logit_bias": ('{"5": -1}', {"5": -1}),
        "stop_token_ids": ("[1, 2]", [1, 2]),
        "json_schema": ('{"type": "object"}', {"type": "object"}),
        "regex": ("[a-z]+", "[a-z]+"),
    }
    set_values(page, {name: text for name, (text, _) in values.items()})
    page.locator("#open-settings").click()
    page.locator("#system").fill("Be brief.")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#settings-count")).to_have_text(str(len(values) + 1))
    say(page, "Well?")
    answered(page)
    assert bodies[0] == {
        "model": "smol",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Well?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, (_, value) in values.items()},
    }
    page.locator("#open-settings").click()
    page.locator("#reset").click()
    page.get_by_role("button", name="Close").click()
    say(page, "And now?")
    answered(page)
    assert set(bodies[1]) == {"model", "messages", "stream", "stream_options"}
    assert [one["role"] for one in bodies[1]["messages"]] == ["user", "assistant", "user"]


def test_a_setting_that_cannot_be(page: Any) -> None:
    bodies = script(page, written("Yes."))
    for name, text in (("top_p", "3"), ("top_p", "0"), ("top_k", "1.5"), ("logit_bias", "{")):
        set_values(page, {name: text})
        say(page, "Well?")
        expect(page.locator("#settings")).to_be_visible()
        expect(page.locator(f"#set-{name}")).to_be_focused()
        page.locator(f"#set-{name}").fill("")
        page.keyboard.press("Escape")
    assert bodies == []
    expect(page.locator("#input")).to_have_value("Well?")  # nothing that was written is lost
    page.locator("#input").press("Enter")
    answered(page)
    assert set(bodies[0]) == {"model", "messages", "stream", "stream_options"}


def test_editing_and_regenerating(page: Any) -> None:
    bodies = script(page, *(written(f"Answer {number}.") for number in range(1, 5)))
    say(page, "First")
    answered(page)
    say(page, "Second")
    answered(page)
    page.locator("article.user").first.get_by_role("button", name="Edit").click()
    area = page.get_by_label("Edit message")
    expect(area).to_have_value("First")
    area.press("Escape")
    expect(page.locator("article.user .text").first).to_have_text("First")
    page.locator("article.user").first.get_by_role("button", name="Edit").click()
    area.fill("Other")
    area.press("Enter")
    expect(answered(page).locator(".text")).to_have_text("Answer 3.")
    expect(page.locator("article")).to_have_count(2)
    assert bodies[2]["messages"] == [{"role": "user", "content": "Other"}]
    page.get_by_role("button", name="Regenerate").click()
    expect(answered(page).locator(".text")).to_have_text("Answer 4.")
    assert bodies[3]["messages"] == bodies[2]["messages"]
    assert [one["content"] for one in turns(page)] == ["Other", "Answer 4."]


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

| <img src=x onerror=ran=21> | [m](javascript:ran=22) |
|---|---|
| <form action=javascript:ran=23><button> | https://e.example/"onmouseover="ran=24 |

# <script>ran=25</script>
"""


def test_what_a_model_says_does_not_run(page: Any) -> None:
    everywhere = [{"reasoning_content": HOSTILE}, *[{"content": one} for one in HOSTILE]]
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
        for number in range(1, 26):
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
    for by_hand in (False, True):  # a page that is not from this machine has no clipboard
        with opened(browser, smol.url, permissions=rights) as page:
            if by_hand:
                page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
            expect(page.locator("#set-temperature")).to_be_attached()
            script(page, written(f"So:\n\n```python\n{code}\n```\n"))
            say(page, "Write a function.")
            answered(page).get_by_role("button", name="Copy code").click()
            expect(page.locator("#status")).to_have_text("Copied")
            page.locator("#input").fill("")
            page.locator("#input").press("Control+v")
            expect(page.locator("#input")).to_have_value(code)


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


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
  .filter((one) => !one.closest(".code pre, .wide"))
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
        script(
            page, written(f"{long}\n\n```\n{long}\n```\n\n|a|b|\n|-|-|\n|{long}|b|\n\n- `{long}`")
        )
        say(page, long)
        answered(page)
        for shown in (None, "#menu", "#tab-engine", "#tab-chat", "#open-settings"):
            if shown:
                page.locator(shown).click()
            assert page.evaluate(WIDER) == []
            assert page.evaluate("document.documentElement.scrollWidth") == 360


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


def plot(page: Any, title: str) -> Any:
    return page.locator(".plot").filter(has=page.get_by_role("heading", name=title))


def test_plots_of_the_engine(page: Any, smol: Running) -> None:
    set_values(page, {"ignore_eos": "true"})
    say(page, "Tell me a story without an end.")
    page.locator("#tab-engine").click()
    for title in ("Tokens a second", "Streams", "Cache blocks"):
        line = plot(page, title).locator("svg path.series-0")
        expect(line).to_have_attribute("d", re.compile(r"^M[\d. ]+L[\d. ]+"))
    expect(plot(page, "Streams").locator("b").first).to_have_text("1")
    expect(plot(page, "Tokens a second").locator("b")).to_have_text(re.compile(r"[1-9]"))
    held = plot(page, "Cache blocks").get_by_role("img")
    label = held.get_attribute("aria-label")
    found = re.fullmatch(r"Cache blocks: held (\d+), free (\d+)", label)
    assert found
    assert int(found[1]) > 0
    assert int(found[1]) + int(found[2]) == smol.hosted().llm.stats().blocks
    expect(plot(page, "Speculation")).to_be_hidden()
    expect(page.locator(".absent")).to_contain_text("no figures of drafts")
    page.locator("#tab-chat").click()
    page.locator("#stop").click()
    answered(page)
    set_values(page, {"ignore_eos": "", "max_tokens": "1"})
    page.locator("#tab-engine").click()
    expect(plot(page, "Streams").locator("b").first).to_have_text("0")
    page.locator("#tab-chat").click()
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#tab-engine").click()
    answered(page)


def test_plots_of_drafts(page: Any) -> None:
    """With the figures of a server that has some."""
    drafted = [0]

    def figures(route: Any) -> None:
        drafted[0] += 10
        label = '{model_name="smol"}'
        values = {
            "num_requests_running": 3,
            "spec_decode_num_draft_tokens_total": drafted[0],
            "spec_decode_num_accepted_tokens_total": drafted[0] * 0.6,
            "prefix_cache_queries_total": drafted[0],
            "prefix_cache_hits_total": drafted[0] * 0.25,
        }
        lines = [f"jinfer:{name}{label} {value}" for name, value in values.items()]
        route.fulfill(content_type="text/plain", body="# HELP a b\n" + "\n".join(lines))

    page.route("**/metrics", figures)
    page.locator("#tab-engine").click()
    expect(plot(page, "Speculation").locator("b")).to_have_text("60 %")
    expect(plot(page, "Prefix hits").locator("b")).to_have_text("25 %")
    expect(plot(page, "Streams").locator("b").first).to_have_text("3")
    expect(page.locator(".absent")).to_be_hidden()


def test_several_models(browser: Any, smol: Running) -> None:
    names = ["smol", "other", "vectors"]
    listed = [{"id": name, "status": {"value": "absent"}} for name in names]
    listed[2]["capabilities"] = ["embeddings"]
    with opened(browser, smol.url) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": listed}))
        page.reload()
        expect(page.locator("#set-temperature")).to_be_attached()
        assert page.locator("#model option").all_text_contents() == [
            *names[:2],
            "vectors (no chat)",
        ]
        expect(page.locator("#model option").nth(2)).to_be_disabled()
        bodies = script(page, written("Yes."))
        page.locator("#model").select_option("other")
        say(page, "Well?")
        answered(page)
        assert bodies[0]["model"] == "other"
        page.reload()
        expect(page.locator("#model")).to_have_value("other")


def test_errors_are_shown(page: Any) -> None:
    set_values(page, {"strategy": "fsd", "mirostat": "2"})
    say(page, "Well?")
    expect(page.locator(".assistant .error")).to_contain_text("mirostat")
    set_values(page, {"strategy": "", "mirostat": "", "max_tokens": "2"})
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".assistant .error")).to_be_hidden()
    expect(answered(page).locator(".text")).not_to_be_empty()
    page.route(ANSWERS, lambda route: route.abort())
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".assistant .error")).to_have_text("The server does not answer.")


def test_a_key_is_asked_for(browser: Any) -> None:
    model = Source("llama", str(GOLDENS / "llama2"), TINY)
    settings = Settings(keys=("secret",), warm_up=False)
    with serving([model], settings) as running, opened(browser, running.url) as page:
        dialog = page.locator("#key")
        expect(dialog).to_contain_text("a valid API key is needed")
        dialog.get_by_role("button", name="Cancel").click()
        expect(page.locator("#notice")).to_contain_text("a valid API key is needed")
        page.locator("#tab-engine").click()  # which asks once more, not every second
        expect(dialog).to_be_visible()
        for key in ("wrong", "secret"):
            page.locator("#key-input").fill(key)
            page.locator("#key-input").press("Enter")
            if key == "wrong":
                expect(page.locator("#key-input")).to_have_value("wrong")
                expect(dialog).to_be_visible()
        expect(page.locator("#set-temperature")).to_be_attached()
        expect(dialog).to_be_hidden()
        assert page.evaluate("sessionStorage['jinfer.key']") == '"secret"'
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        expect(page.locator("#notice")).to_be_hidden()
        expect(plot(page, "Streams").locator("b").first).to_have_text("0")
