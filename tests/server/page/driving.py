"""What a person does with the page, and answers that come from a script."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from playwright import sync_api as driver

expect: Any = driver.expect
expect.set_options(timeout=20_000)
ANSWERS = "**/v1/chat/completions"


# Of what a page keeps.
FORGET = """() => new Promise((resolve) => {
  localStorage.clear();
  sessionStorage.clear();
  const opening = indexedDB.open("jinfer");
  opening.onsuccess = () => {
    const { result } = opening;
    const clearing = result.transaction("conversations", "readwrite");
    clearing.objectStore("conversations").clear();
    clearing.oncomplete = () => resolve(result.close());
  };
})"""


@contextlib.contextmanager
def opened(browser: Any, url: str, **more: Any) -> Iterator[Any]:
    """A page in its own browser, without requests to other hosts and without console errors."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **more)
    context.set_default_timeout(20_000)
    page = context.new_page()
    complaints = watched(page, url)
    page.goto(url)
    yield page
    context.close()
    assert complaints == []


def watched(page: Any, url: str) -> list[str]:
    """Record a page's console errors and its requests to other hosts."""
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
        if not request.url.removeprefix("blob:").startswith(url):
            complaints.append(request.url)

    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", answer)
    page.on("console", log)
    page.on("request", note)
    return complaints


def say(page: Any, text: str) -> None:
    """Sends a message, as a person does who has a keyboard."""
    page.locator("#input").fill(text)
    page.locator("#input").press("Enter")


def answered(page: Any) -> Any:
    """The latest answer, once it is there as a whole."""
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
    return page.locator("article.assistant").last


KEPT = """() => new Promise((resolve) => {
  const opening = indexedDB.open("jinfer");
  opening.onsuccess = () => {
    const reading = opening.result.transaction("conversations")
      .objectStore("conversations").getAll();
    reading.onsuccess = () => {
      opening.result.close();
      resolve(reading.result.sort((one, other) => other.updated - one.updated));
    };
  };
})"""


def kept(page: Any) -> list[dict[str, Any]]:
    """The conversations that the browser keeps, the latest first."""
    conversations: list[dict[str, Any]] = page.evaluate(KEPT)
    return conversations


def turns(page: Any) -> list[dict[str, Any]]:
    """The branch that the latest of them shows."""
    latest = kept(page)[0]
    messages = {item["id"]: item for item in latest["messages"]}
    found = []
    at = latest["leaf"]
    while at is not None:
        found.append(messages[at])
        at = messages[at]["parent"]
    return found[::-1]


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


def stream(
    *deltas: dict[str, Any], end: str = "data: [DONE]\n\n", reason: str | None = None, used: int = 0
) -> str:
    """Events as OpenAI's servers send them."""
    frames: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if reason:
        frames.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if used:
        usage = {"prompt_tokens": used - 1, "completion_tokens": 1, "total_tokens": used}
        frames.append({"choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + end


def script(page: Any, *answers: str) -> list[Any]:
    """Take answers from a script instead of a model; the last answer repeats.

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


def written(text: str, **more: Any) -> str:
    """An answer that comes in pieces."""
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    return stream(*[{"content": piece} for piece in pieces], **more)


def plot(page: Any, title: str) -> Any:
    return page.locator(".plot").filter(has=page.get_by_role("heading", name=title))
