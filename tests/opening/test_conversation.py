"""Which prompt format counts: the specification's, the checkpoint's, or the fallback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jinfer.opening.conversation import Conversation
from jinfer.spec.errors import SpecError
from jinfer.spec.files import with_families
from jinfer.spec.resolve import Facts, resolve
from jinfer.template import TemplateError
from jinfer.tokenizer import Tokenizer, load_tokenizer

DIMS = {"vocab": 100, "hidden": 64, "layers": 1, "heads": 4, "kv_heads": 4, "intermediate": 64}
USER = [{"role": "user", "content": "Hi"}]
GGUF = {"general.architecture": "llama", "tokenizer.chat_template": "own"}


def tokenizer() -> Tokenizer:
    found = load_tokenizer(Path(__file__).parents[1] / "goldens" / "tok_gpt2")
    assert found is not None
    return found


def written(
    prompt: dict[str, str], source: Path, config: dict[str, Any] | None = None
) -> tuple[bool, str]:
    """Whether there is a template, and the prompt it gives."""
    tables = with_families({"family": "llama", "dims": DIMS, "prompt": prompt}, source)
    conversation = Conversation.of(
        resolve(tables, "here", Facts(), {}), source, config if config is not None else {}
    )
    if not conversation.has_template:
        return False, ""
    return True, tokenizer().decode(conversation.encode(tokenizer(), USER))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({}, "own"),
        ({"fallback": "fallback"}, "own"),
        ({"fallback": "fallback", "chat_template": "spec"}, "spec"),
        ({"fallback": "fallback", "template": "{query}!"}, "Hi!"),
    ],
)
def test_the_checkpoints_own_template_is_before_the_fallback(
    prompt: dict[str, str], text: str, tmp_path: Path
) -> None:
    assert written(prompt, tmp_path, GGUF) == (True, text)
    config = {"chat_template": "own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert written(prompt, tmp_path) == (True, text)


@pytest.mark.parametrize("template", ["[INST] [/INST]", "{bos}{{query}}", "{query}{turn}{answer}"])
def test_a_template_without_a_place_for_the_user_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"here: prompt.template: has no \{query\}: what the user"):
        written({"template": template}, tmp_path)
    assert written({"template": f"{template.partition('{turn}')[0]}{{_question}}"}, tmp_path)[0]


def test_without_its_own_the_fallback_counts(tmp_path: Path) -> None:
    assert written({}, tmp_path) == (False, "")
    assert written({"fallback": "fallback"}, tmp_path) == (True, "fallback")
    assert written({"fallback": "{{ messages[0].content }}?", "system": "S"}, tmp_path)[1] == "S?"


def test_without_any_there_is_no_chat(tmp_path: Path) -> None:
    tables = with_families({"family": "llama", "dims": DIMS}, tmp_path)
    conversation = Conversation.of(resolve(tables, "here", Facts(), {}), tmp_path, {})
    with pytest.raises(TemplateError, match="the model has no chat template; set prompt"):
        conversation.encode(tokenizer(), USER)
