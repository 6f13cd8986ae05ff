"""Usage, timings and log-probabilities in the formats of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinfer.engine.output.completion import TokenLogprob, Usage
from jinfer.server.core.prompt_requests import PromptRequests
from jinfer.tokenizer import Tokenizer


def usage(jobs: Sequence[PromptRequests], usages: Mapping[int, Usage]) -> dict[str, Any]:
    """Return the usage of a request; a prompt with several answers counts once."""
    prompt = sum(len(job.ids) for job in jobs)
    cached, number = 0, 0
    for job in jobs:
        first = usages.get(number)
        cached += first.cached_tokens if first is not None else 0
        number += len(job.engine_requests)
    new = sum(usage.completion_tokens for usage in usages.values())
    result: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if drafted := sum(usage.drafted_tokens for usage in usages.values()):
        accepted = sum(usage.accepted_tokens for usage in usages.values())
        result["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return result


def llamacpp_timings(usage: Usage) -> dict[str, Any]:
    """llama.cpp's timings of an answer."""
    computed = usage.prompt_tokens - usage.cached_tokens
    prefill = max(0.0, usage.prefill_seconds - usage.queue_seconds)
    return {
        "cache_n": usage.cached_tokens,
        **_rates("prompt", computed, prefill),
        # The decode time starts at the first token, which belongs to the prompt's time.
        **_rates("predicted", usage.completion_tokens, usage.decode_seconds, first=1),
    }


def _rates(name: str, count: int, seconds: float, first: int = 0) -> dict[str, Any]:
    timed = max(0, count - first)
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / max(1, timed),
        f"{name}_per_second": timed / seconds if seconds > 0 else 0.0,
    }


def token_text(tokenizer: Tokenizer | None, id: int, as_id: bool = False) -> str:
    """Return a token's own text, with a leading space that `decode` may omit.

    Args:
        as_id: return vLLM's "token_id:N" instead, which differs for tokens with equal texts.
    """
    if as_id:
        return f"token_id:{id}"
    return "" if tokenizer is None else tokenizer.spelled(id).decode("utf-8", "replace")


def token_key(tokenizer: Tokenizer | None, id: int, as_id: bool = False) -> str:
    """Return a token's text, or its bytes if it is part of a character, as a unique key."""
    if as_id:
        return token_text(tokenizer, id, as_id)
    if tokenizer is None:
        return str(id)
    data = tokenizer.spelled(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _entry(tokenizer: Tokenizer | None, entry: TokenLogprob, as_ids: bool) -> dict[str, Any]:
    data = b"" if tokenizer is None else tokenizer.spelled(entry.id)
    return {
        "token": token_text(tokenizer, entry.id, as_ids),
        "logprob": finite_logprob(entry.logprob),
        "bytes": list(data),
        "token_id": entry.id,
    }


def finite_logprob(logprob: float) -> float:
    """Replace -inf, which JSON lacks, by OpenAI's -9999."""
    return max(logprob, -9999.0)


def chat_logprobs(
    tokenizer: Tokenizer | None, entries: Iterable[TokenLogprob], as_ids: bool | None = False
) -> list[dict[str, Any]]:
    """Convert log-probabilities to the format of chat completions."""
    named = bool(as_ids)
    return [
        {
            **_entry(tokenizer, entry, named),
            "top_logprobs": [_entry(tokenizer, other, named) for other in entry.top],
        }
        for entry in entries
    ]


def ranked_logprobs(entry: TokenLogprob) -> dict[str, dict[str, Any]]:
    """Convert log-probabilities to vLLM's format: by id, with ranks."""
    found = {
        str(other.id): {"logprob": finite_logprob(other.logprob), "rank": rank}
        for rank, other in enumerate(entry.top, 1)
    }
    return {str(entry.id): {"logprob": finite_logprob(entry.logprob)}, **found}
