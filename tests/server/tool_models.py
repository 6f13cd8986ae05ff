"""Models with templates for tools and thoughts, and their requests."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai

from jinfer.loader.open_model import open_files
from jinfer.server.http.server_settings import ModelSource
from tests.server.running import SMOL, Running, serving
from tools.bench_models import LlamaShape, make_up

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
# Name, chat template (None: the model's own), and further keys of `prompt`.
type TemplateOf = tuple[str, str | None, dict[str, Any]]
# The demonstration model, where it has to know something; others are of random weights.
KNOWS = "hermes"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather like in Rome?"}]


@contextlib.contextmanager
def serving_templates(folder: Path, templates: Sequence[TemplateOf]) -> Iterator[Running]:
    """A server of models with these templates, which all have ended when it does."""
    tiny = str(folder / "model.gguf")
    words = open_files("smollm2_135m_instruct", {}).weights  # and its chat template
    make_up(LlamaShape(2, 64, 4, 2, 96, context=4096), words, folder / "model.gguf", "Q8_0")
    sources = []
    for name, template, own in templates:
        prompt: dict[str, Any] = own if template is None else {"chat_template": template, **own}
        path = SMOL.path if name == KNOWS else tiny
        given = {**SMOL.overrides, "prompt": prompt, "engine": {"slots": 4}}
        sources.append(ModelSource(name, path, given))
    with serving(sources) as running:
        yield running
        for model in running.service.models.models:
            assert running.holds_nothing(model.name)


def create(client: openai.OpenAI, **changes: Any) -> Any:
    """A chat completion of these tools."""
    given = {"model": "hermes", "messages": ASKED, "tools": [WEATHER, NOW], "temperature": 0}
    return client.chat.completions.create(**{**given, "max_tokens": 200, **changes})


def arguments_of(call: Any) -> Any:
    """What a call's arguments say, which have to fit its tool."""
    said = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(said) == {"city"}
        assert said["city"] in ("Paris", "Rome")
    else:
        assert (call.function.name, said) == ("now", {})
    return said
