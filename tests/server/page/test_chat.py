"""A chat in the page: conversations, settings, stopping, editing, models, keys."""

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from jinfer.server.core.sampling_fields import GROUPS
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from tests.server.page.driving import (
    ANSWERS,
    answered,
    expect,
    kept,
    opened,
    plot,
    say,
    script,
    set_values,
    turns,
    written,
)
from tests.server.running import GOLDENS, Running, serving

TINY = {"dtype": "float32"}


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
    assert [turn["role"] for turn in turns(page)] == ["user", "assistant", "user", "assistant"]
    answered(page)
    page.locator("#new").click()
    expect(page.locator("article")).to_have_count(0)


def test_conversations(page: Any) -> None:
    script(page, written("Yes."))
    for question in ("One?", "Two?", "Three?"):
        page.locator("#new").click()
        say(page, question)
        answered(page)
    listed = page.locator("#conversations li > button")
    assert listed.all_text_contents() == ["Three?", "Two?", "One?"]
    listed.nth(1).click()
    expect(page.locator("article.user .text")).to_have_text("Two?")
    page.reload()
    listed.first.hover()
    page.get_by_role("button", name="Delete “Three?”").click()
    assert listed.all_text_contents() == ["Two?", "One?"]
    page.locator("#clear").click()
    expect(listed).to_have_count(0)
    expect(page.locator("article")).to_have_count(0)
    assert kept(page) == []


def test_stopping_ends_the_request(page: Any, smol: Running) -> None:
    set_values(page, {"ignore_eos": "true"})
    label = 'jinfer:request_success_total{finished_reason="abort",model_name="smol"} '
    running = smol.model().llm.stats

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
        for _ in range(1000):
            if running().running == 0:
                break
            page.wait_for_timeout(20)
        assert running().running == 0
        assert ended() == before + 1
        assert turns(page)[-1]["content"]
    expect(page.locator("#send")).to_be_visible()


def test_settings_are_sent(page: Any) -> None:
    shown = page.locator("#parameters [name]")
    names = [item.get_attribute("name") for item in shown.all()]
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
    assert [body["role"] for body in bodies[1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.soak
def test_an_invalid_setting(page: Any) -> None:
    bodies = script(page, written("Yes."))
    for name, text in (("top_p", "3"), ("top_p", "-1"), ("top_k", "1.5"), ("logit_bias", "{")):
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


def test_an_api_key_is_requested(browser: Any) -> None:
    model = ModelSource("llama", str(GOLDENS / "llama2"), TINY)
    settings = ServerSettings(keys=("secret",), warm_up=False)
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
