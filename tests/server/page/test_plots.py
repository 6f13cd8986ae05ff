"""Live plots of what the engine does."""

import re
from typing import Any

import pytest

from tests.server.page.driving import (
    answered,
    expect,
    plot,
    say,
    set_values,
)
from tests.server.running import Running


@pytest.mark.soak
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
    assert int(found[1]) + int(found[2]) == smol.model().llm.stats().blocks
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
