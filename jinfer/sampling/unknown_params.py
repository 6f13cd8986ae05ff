"""Unknown sampling parameters: the error that names the nearest, or what jinfer has instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jinfer.modelspec.spec_errors import nearest_hint, show_value

_STRUCTURE = "json_schema, regex, choice or grammar says what the answer has to be"
LORA = (
    'LoRA adapters are loaded by adapters={"name": source} of LLM or by load_adapter, and '
    'generate(..., adapter="name") computes with one'
)
LOGITS = (
    "logits_processors=[function] are functions of yours, in JAX; logit_bias, banned_token_ids, "
    f"allowed_token_ids, bad_words and the samplers change logits too, and {_STRUCTURE}"
)
_STOPS = "stop and stop_token_ids end an answer, and leaving the loop over stream(...) does"
_PIECES = "stream(...) gives the pieces of an answer"

# Other engines' parameters that jinfer has not: what it has instead.
ABSENT: Mapping[str, str] = {
    "logits_processor": LOGITS,
    "logits_warper": LOGITS,
    "stopping_criteria": _STOPS,
    "stop_function": _STOPS,
    "callback": _PIECES,
    "callbacks": _PIECES,
    "stream": _PIECES,
    "streamer": _PIECES,
    "lora": LORA,
    "lora_request": LORA,
    "do_sample": "temperature=0 is greedy, any other temperature draws",
    "use_beam_search": 'strategy="beam" searches with beams',
    "num_return_sequences": "n is the number of answers",
    "response_format": _STRUCTURE,
    "guided_json": _STRUCTURE,
    "guided_regex": _STRUCTURE,
    "guided_choice": _STRUCTURE,
    "guided_grammar": _STRUCTURE,
    "structured_outputs": _STRUCTURE,
    "output_scores": "logprobs gives log-probabilities, and logits(...) the logits of a prompt",
    "output_logits": "logprobs gives log-probabilities, and logits(...) the logits of a prompt",
    "prompt_logprobs": "score(...) gives the log-probabilities of a prompt",
    "echo": "score(...) gives the log-probabilities of a prompt",
}


def no_parameter(name: object, known: Iterable[str], aliases: Mapping[str, str]) -> str:
    """A sentence about a name that no parameter has.

    Args:
        known: the parameters' names.
        aliases: another engine's name -> the parameter.
    """
    unknown = str(name)
    if unknown in ABSENT:
        return f"there is no parameter {show_value(name)}: {ABSENT[unknown]}"
    if unknown in aliases:
        own = aliases[unknown]
        return (
            f"there is no parameter {show_value(name)}; here it is {own}: SamplingParams({own}=...)"
        )
    return f"there is no parameter {show_value(name)}; {nearest_hint(name, known)}"
