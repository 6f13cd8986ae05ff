"""Prompt inputs: validates and normalizes prompts, messages and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from jinfer.api.image_inputs import EncodedPrompt, is_image
from jinfer.engine.requests import RequestError
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import show_value
from jinfer.sampling.param_field import unknown_parameter
from jinfer.sampling.sampling_keywords import SamplingKeywords, is_parameter, merged
from jinfer.sampling.sampling_params import PARAMETERS, SamplingParams
from jinfer.template.chat_prompt import Message

if TYPE_CHECKING:  # the HTTP client uses this module too, and should not import JAX
    import jax

type Ids = Sequence[int] | np.ndarray | jax.Array
Prompt = str | Ids | Sequence[Message] | EncodedPrompt
Params = SamplingParams | SamplingKeywords

_GIVE = "give a text, a list of token ids, or a list of messages"
_MESSAGE = "write {'role': 'user', 'content': '...'}"


type ParsedPrompt = str | list[int] | list[Message] | EncodedPrompt


def parse_prompts(given: object) -> list[ParsedPrompt]:
    """One prompt or several, normalized to a list.

    Raises:
        RequestError: the list is empty, or a member is not a prompt.
    """
    if isinstance(given, str | EncodedPrompt):
        return [given]
    listed = _listed(given)
    if not listed:
        raise RequestError(f"there is no prompt; {_GIVE}, or several of them in a list")
    if _is_number(listed[0]) or isinstance(listed[0], Mapping):
        return [_one(listed)]
    return [parse_prompt(item) for item in listed]


def parse_prompt(given: object) -> ParsedPrompt:
    """Normalizes one prompt. Raises `RequestError` for anything else."""
    if isinstance(given, str | EncodedPrompt):
        return given
    listed = _listed(given)
    if listed and isinstance(listed[0], str | list | tuple):
        raise RequestError(
            f"a list of {len(listed)} prompts is given where one belongs; generate, logits, embed "
            "and the like take several"
        )
    return _one(listed)


def parse_messages(given: object) -> list[Message]:
    """Normalizes a conversation: a string becomes a user message, and contents become strings.

    Contents with images stay lists of parts.

    Raises:
        RequestError: it is not a conversation, or a message's content is neither text nor image.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Mapping) or not isinstance(given, Sequence | np.ndarray):
        kind = type(given).__name__
        raise RequestError(f"a conversation is a list of messages, not a {kind}; {_MESSAGE}")
    if not len(given):
        raise RequestError(f"the conversation is empty; give a message: {_MESSAGE}")
    return [_message(item, number) for number, item in enumerate(given)]


def is_conversation(given: ParsedPrompt) -> TypeGuard[list[Message]]:
    """Whether a normalized prompt is a conversation."""
    return isinstance(given, list) and bool(given) and isinstance(given[0], Mapping)


def no_decoder_error(spec: ModelSpec) -> str:
    """The error for text generation with an encoder-only model: names the methods it has."""
    results = spec.stacks[0].head.results
    further = [("classify", "classes")]
    further += [("fill_mask", "logits"), ("logits", "logits"), ("pooled", "pooled")]
    uses = ["embed", "hidden", *(name for name, result in further if result in results)]
    return f"the model has no decoder; use {', '.join(uses[:-1])} or {uses[-1]}"


def no_head_error(spec: ModelSpec) -> str:
    """The error for what needs a vocabulary head: names the methods that a decoder without has."""
    reason = "the checkpoint has no vocabulary head, so the model gives no logits"
    head = spec.decoder.head.results if spec.decoder is not None else ()
    return f"{reason}; use {'classify, ' if 'classes' in head else ''}embed or hidden"


def parse_params(
    defaults: Mapping[str, Any], params: object, changes: Mapping[str, Any]
) -> SamplingParams:
    """A request's sampling parameters: `params`, with keywords taking precedence.

    Args:
        defaults: the model's, which a dictionary of `params` is merged into.
        changes: the keywords.

    Raises:
        RequestError: an unknown parameter, or a value outside its range.
    """
    if not (params is None or isinstance(params, SamplingParams | Mapping)):
        raise RequestError(
            f"params is {show_value(params)}; give SamplingParams(...), a dictionary of its "
            "fields, or keywords such as max_tokens=50"
        )
    named = params if isinstance(params, Mapping) else {}
    for name in (*named, *changes):
        if not is_parameter(name):
            raise RequestError(unknown_parameter(name, PARAMETERS))
    try:
        return merged(defaults, params, changes)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def _listed(given: object) -> list[Any]:
    """The members of a prompt that is not a string."""
    if isinstance(given, Mapping):
        raise RequestError("a prompt is a dictionary; give a list of messages: [{...}]")
    if isinstance(given, bytes | bytearray | memoryview):
        raise RequestError("a prompt is bytes; give a text: prompt.decode()")
    if isinstance(given, Sequence):
        return list(given)
    if given is None or _is_number(given) or not hasattr(given, "__array__"):
        plain = given is None or _is_number(given)
        what = show_value(given) if plain else f"a {type(given).__name__}"
        raise RequestError(f"a prompt is {what}; {_GIVE}")
    array = np.asarray(given)
    if array.ndim != 1:
        raise RequestError(
            f"an array of token ids has {array.ndim} dimensions, where a prompt has one; for "
            "several prompts give a list of them, each with its own length"
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise RequestError(f"token ids are whole numbers, not an array of {array.dtype}")
    return array.tolist()


def _one(listed: list[Any]) -> list[int] | list[Message]:
    if is_conversation(listed):
        return parse_messages(listed)
    return [_id(item) for item in listed]


def _is_number(value: object) -> bool:
    """Whether a value is a Python number or an array scalar."""
    if isinstance(value, int | float | complex):
        return True
    return not isinstance(value, str) and getattr(value, "ndim", None) == 0


def _id(value: Any) -> int:
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(plain, int) and not isinstance(plain, bool):
        return plain
    raise RequestError(
        f"{show_value(plain)} is no token id; they are whole numbers, as in [1, 15043]"
    )


def _message(given: object, number: int) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(f"message {number} is a {type(given).__name__}; {_MESSAGE}")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"message {number} has no role; {_MESSAGE}")
    if isinstance(content, list | tuple):
        if any(map(is_image, content)):
            parts = [part if is_image(part) else _text_part(part, number) for part in content]
            return {**given, "content": parts}
        return {**given, "content": "\n".join(_part(part, number) for part in content)}
    silent = content is None and not given.keys() <= {"role", "content"}  # a tool call
    if not isinstance(content, str) and not silent:
        what = "no content" if content is None else f"content that is {show_value(content)}"
        raise RequestError(f"message {number} has {what}; {_MESSAGE}")
    return given


def _text_part(part: object, number: int) -> Message:
    return {"type": "text", "text": _part(part, number)}


def _part(part: object, number: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise RequestError(
            f"message {number} has a part of type {show_value(kind)}, which is not read; "
            "give parts like {'type': 'text', 'text': '...'} or {'type': 'image', 'image': 'a.png'}"
        )
    return text
