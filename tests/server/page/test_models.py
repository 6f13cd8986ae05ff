"""Models that are loaded and unloaded from the page."""

import json
from typing import Any

from tests.server.page.driving import answered, expect, opened, say, script, written
from tests.server.running import Running


def test_models_are_loaded_and_unloaded(browser: Any, smol: Running) -> None:
    """A server with several models, of which a load is refused."""
    states = {"first": "loaded", "other": "unloaded", "broken": "unloaded", "vectors": "loaded"}
    acts: list[tuple[str, str]] = []

    def card(name: str) -> dict[str, Any]:
        status: dict[str, Any] = {"value": states[name]}
        if name == "broken":
            status |= {"failed": True, "error": "<b>no</b> such file"}
        chats = ["embeddings" if name == "vectors" else "chat"]
        known = {"max_model_len": 4096, "capabilities": chats}
        return {"id": name, "status": status, **(known if states[name] == "loaded" else {})}

    def act(route: Any) -> None:
        name = json.loads(route.request.post_data)["model"]
        action = route.request.url.rpartition("/")[2]
        acts.append((action, name))
        if name == "broken":
            route.fulfill(status=400, json={"error": {"message": "it does not <i>open</i>"}})
            return
        states[name] = "loaded" if action == "load" else "unloaded"
        route.fulfill(json={"success": True})

    with opened(browser, smol.url) as page:
        adapter = {"id": "adapter", "parent": "first", "status": {"value": "loaded"}}
        page.route(
            "**/v1/models",
            lambda route: route.fulfill(json={"data": [*map(card, states), adapter]}),
        )
        page.route("**/props*", lambda route: route.fulfill(status=404, json={}))
        page.route("**/models/*load", act)
        page.reload()
        expect(page.locator("#set-temperature")).to_be_attached()
        page.locator("#open-models").focus()
        page.keyboard.press("Enter")
        dialog = page.locator("#models")
        expect(dialog.locator("li b")).to_have_text(list(states))
        expect(dialog.locator(".wrong")).to_have_text("<b>no</b> such file")
        load = dialog.get_by_role("button", name="Load other")
        load.focus()
        page.keyboard.press("Enter")
        expect(dialog.locator(".state")).to_have_text(["loaded", "loaded", "unloaded", "loaded"])
        expect(dialog.get_by_role("button", name="Unload other")).to_be_focused()
        dialog.get_by_role("button", name="Unload first").click()
        expect(dialog.locator(".state").first).to_have_text("unloaded")
        dialog.get_by_role("button", name="Load broken").click()
        expect(dialog.locator(".wrong")).to_have_text("it does not <i>open</i>")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        assert acts == [("load", "other"), ("unload", "first"), ("load", "broken")]
        expect(page.locator("#open-models")).to_be_focused()
        options = page.locator("#model option")
        assert options.all_text_contents() == [
            *("first", "other", "broken", "vectors (no chat)", "adapter"),
        ]
        expect(options.nth(3)).to_be_disabled()
        bodies = script(page, written("Yes."))
        page.locator("#model").select_option("other")
        say(page, "Well?")
        answered(page)
        assert bodies[0]["model"] == "other"
        page.reload()
        expect(page.locator("#model")).to_have_value("other")
