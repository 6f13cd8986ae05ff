"""Which format a model speaks: by its chat template, or as its specification says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jinfer.server.tool_parsers.call_format import Format
from jinfer.server.tool_parsers.deepseek import CALLS as DEEPSEEK_CALLS
from jinfer.server.tool_parsers.deepseek import DEEPSEEK
from jinfer.server.tool_parsers.dsml import DSML
from jinfer.server.tool_parsers.dsml import MARK as DSML_MARK
from jinfer.server.tool_parsers.harmony import CHANNEL, HARMONY
from jinfer.server.tool_parsers.hermes import HERMES
from jinfer.server.tool_parsers.hermes import OPEN as HERMES_CALL
from jinfer.server.tool_parsers.json_list import ACTION, COMMAND, GRANITE, PHI, SAID
from jinfer.server.tool_parsers.json_list import TAG as LISTED_CALL
from jinfer.server.tool_parsers.llama import LLAMA, TAG
from jinfer.server.tool_parsers.mistral import CALLS as MISTRAL_CALLS
from jinfer.server.tool_parsers.mistral import MISTRAL
from jinfer.server.tool_parsers.qwen_coder import FUNCTION, PARAMETER, QWEN_CODER
from jinfer.server.tool_parsers.reasoning import THINKINGS, Thinking
from jinfer.tokenizer import Tokenizer

FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        *(HERMES, QWEN_CODER, LLAMA, MISTRAL, DEEPSEEK),
        *(DSML, GRANITE, PHI, COMMAND, HARMONY),
    )
}

PHI_TOOLS = "<|tool|>"

# What a chat template has in it, of which the first that holds tells the format.
_TELLING: tuple[tuple[Format, Callable[[str], bool]], ...] = (
    (HARMONY, lambda text: CHANNEL in text),
    (DSML, lambda text: DSML_MARK in text),
    (DEEPSEEK, lambda text: DEEPSEEK_CALLS in text),
    (MISTRAL, lambda text: MISTRAL_CALLS in text),
    (COMMAND, lambda text: ACTION in text or (SAID in text and "tool_name" in text)),
    (PHI, lambda text: PHI_TOOLS in text),
    (GRANITE, lambda text: LISTED_CALL in text),
    (QWEN_CODER, lambda text: FUNCTION in text and PARAMETER in text),
    (HERMES, lambda text: HERMES_CALL in text),
    (LLAMA, lambda text: TAG in text or ('"name": ' in text and '"parameters": ' in text)),
)


def format_of(template: str, chosen: str = "auto") -> Format:
    """The format of calls; Hermes' where nothing tells another one.

    Args:
        template: the chat template's own text.
        chosen: `prompt.tool_calls` of the specification.
    """
    if chosen != "auto":
        return FORMATS[chosen]
    return next((one for one, tells in _TELLING if tells(template)), HERMES)


def thinking_of(template: str, tokenizer: Tokenizer, chosen: str = "auto") -> Thinking | None:
    """How thoughts are marked; None where they are not.

    Args:
        tokenizer: has tokens for the marks of a model that was trained to think.
        chosen: `prompt.reasoning` of the specification.
    """
    if chosen != "auto":
        return next((one for one in THINKINGS if one.name == chosen), None)
    for one in THINKINGS:
        if one.end in template or tokenizer.id(one.end) is not None:
            return one
    return None


def shown(marks: Iterable[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens among some marks, which are no text to who does not ask for them."""
    parts = [part for mark in marks for part in tokenizer.split_special(mark)]
    ids = (part for part in parts if isinstance(part, int) and tokenizer.is_control(part))
    return tuple(dict.fromkeys(ids))
