"""Versions of messages, and continued answers."""

from typing import Any

from tests.server.page.driving import (
    answered,
    expect,
    kept,
    say,
    script,
    set_values,
    stream,
    turns,
    written,
)


def contents(page: Any) -> list[str]:
    return [turn["content"] for turn in turns(page)]


def test_editing_and_regenerating_keep_what_was_there(page: Any) -> None:
    bodies = script(page, *(written(f"Answer {number}.") for number in range(1, 6)))
    for text in ("First", "Second"):
        say(page, text)
        answered(page)
    first = page.locator("article.user").first
    first.get_by_role("button", name="Edit").click()
    area = page.get_by_label("Edit message")
    expect(area).to_have_value("First")
    area.press("Escape")
    expect(first.locator(".text")).to_have_text("First")
    first.get_by_role("button", name="Edit").click()
    area.fill("Other")
    area.press("Enter")
    expect(answered(page).locator(".text")).to_have_text("Answer 3.")
    expect(page.locator("article")).to_have_count(2)
    assert bodies[2]["messages"] == [{"role": "user", "content": "Other"}]
    page.get_by_role("button", name="Regenerate").click()
    expect(answered(page).locator(".text")).to_have_text("Answer 4.")
    assert bodies[3]["messages"] == bodies[2]["messages"]
    assert contents(page) == ["Other", "Answer 4."]

    def step(article: Any, name: str) -> None:
        article.get_by_role("button", name=name).focus()
        page.keyboard.press("Enter")

    answer = page.locator("article.assistant").last
    expect(answer.get_by_label("Version 2 of 2")).to_be_visible()
    expect(answer.get_by_role("button", name="Next version")).to_be_disabled()
    step(answer, "Previous version")
    expect(answer.locator(".text")).to_have_text("Answer 3.")
    expect(answer.get_by_role("button", name="Next version")).to_be_focused()
    step(page.locator("article.user").first, "Previous version")
    expect(page.locator("article .text")).to_have_text(
        ["First", "Answer 1.", "Second", "Answer 2."]
    )
    page.reload()  # the branch is kept, and so are the others
    expect(page.locator("article")).to_have_count(4)
    say(page, "Third")
    answered(page)
    assert [one["content"] for one in bodies[4]["messages"]] == [
        *("First", "Answer 1.", "Second", "Answer 2.", "Third"),
    ]
    step(page.locator("article.user").first, "Next version")
    expect(page.locator("article .text")).to_have_text(["Other", "Answer 4."])  # the latest one
    assert len(kept(page)[0]["messages"]) == 9


def test_an_answer_goes_on(page: Any) -> None:
    """The model's own: what was cut goes on as it would have been."""
    set_values(page, {"temperature": "0", "max_tokens": "24"})
    say(page, "Name three primary colours and explain what makes them primary.")
    answered(page)
    whole = turns(page)[-1]["content"]
    set_values(page, {"max_tokens": "12"})
    page.get_by_role("button", name="Regenerate").click()
    answer = answered(page)
    cut = turns(page)[-1]["content"]
    assert whole.startswith(cut)
    assert whole != cut
    with page.expect_request("**/v1/chat/completions") as sent:
        answer.get_by_role("button", name="Continue").click()
    body = sent.value.post_data_json
    assert body["continue_final_message"]
    assert body["messages"][-1] == {"role": "assistant", "content": cut}
    answered(page)
    assert turns(page)[-1]["content"] == whole
    expect(page.locator("article")).to_have_count(2)
    gauge = page.locator("#gauge")
    assert 24 < int(gauge.get_attribute("aria-valuenow")) < 100
    assert gauge.get_attribute("aria-valuemax") == "4096"


def test_an_answer_is_rewritten_and_goes_on(page: Any) -> None:
    thought = {"reasoning_content": "Hm."}
    bodies = script(page, stream(thought, {"content": "Yes."}, used=9), written(", surely."))
    say(page, "Well?")
    answer = answered(page)
    expect(answer.get_by_role("button", name="Continue")).to_be_hidden()  # it has come to its end
    answer.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("No")
    page.get_by_role("button", name="Save").click()
    answer = page.locator("article.assistant").last
    expect(answer.locator(".text")).to_have_text("No")
    answer.get_by_role("button", name="Continue").click()
    expect(answered(page).locator(".text")).to_have_text("No, surely.")
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "No", "reasoning_content": "Hm."},
    ]
