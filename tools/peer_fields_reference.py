"""Fields of other services: the table of docs/reference/peer_fields.md.

The lists of fields are those of the services' own descriptions, in November 2026; the treatment of
each field follows from the schemas of the server.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from jinfer.server.http.schema_base import Ignored
from jinfer.server.routes import ENDPOINTS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, NATIVE = "/v1/responses", "/v1/messages", "/completion"

_LLAMA_CPP = """
    stream cache_prompt return_progress sse_ping_interval n_predict max_tokens n_cmpl n
    n_cache_reuse t_max_predict_ms top_k top_p min_p top_n_sigma xtc_probability xtc_threshold
    typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty
    frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length
    dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target
    adaptive_decay seed min_keep n_keep n_discard n_indent backend_sampling lora json_schema
    grammar grammar_lazy grammar_triggers preserved_tokens logit_bias ignore_eos stop samplers
    id_slot timings_per_token verbose reasoning_budget_tokens reasoning_budget_message
"""
_VLLM = """
    model frequency_penalty logit_bias max_tokens n presence_penalty response_format seed stop
    stream stream_options stream_options.include_usage stream_options.continuous_usage_stats
    temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words add_special_tokens
    structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs
    cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval echo logprobs
"""
# Service -> route -> its fields.
FIELDS: dict[str, dict[str, str]] = {
    "llama.cpp": {
        NATIVE: f"{_LLAMA_CPP} prompt n_probs return_tokens response_fields post_sampling_probs",
        CHAT: f"""{_LLAMA_CPP} messages tools tool_choice parallel_tool_calls response_format
            logprobs top_logprobs max_completion_tokens chat_template_kwargs add_generation_prompt
            continue_final_message reasoning_format thinking_budget_tokens parse_tool_calls
            stream_options""",
    },
    "vLLM": {
        CHAT: f"""{_VLLM} messages top_logprobs max_completion_tokens tools tool_choice
            reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt
            continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
            mm_processor_kwargs return_prompt_text""",
        TEXT: f"{_VLLM} prompt suffix prompt_embeds",
    },
    "OpenAI": {
        CHAT: """messages model audio frequency_penalty function_call functions logit_bias logprobs
            max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls
            prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention
            reasoning_effort response_format safety_identifier seed service_tier stop store stream
            stream_options stream_options.include_usage stream_options.include_obfuscation
            temperature tool_choice tools top_logprobs top_p user verbosity web_search_options""",
        TEXT: """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n
            presence_penalty seed stop stream stream_options suffix temperature top_p user""",
        RESPONSES: """input model background conversation include instructions max_output_tokens
            max_tool_calls metadata parallel_tool_calls previous_response_id prompt prompt_cache_key
            prompt_cache_retention reasoning reasoning.effort reasoning.summary safety_identifier
            service_tier store stream stream_options temperature text text.format text.verbosity
            tool_choice tools top_logprobs top_p truncation user""",
        "/v1/embeddings": "input model dimensions encoding_format user",
    },
    "OpenRouter": {
        CHAT: "reasoning.effort reasoning.max_tokens reasoning.enabled reasoning.exclude",
    },
    "Anthropic": {
        MESSAGES: """messages model max_tokens cache_control container context_management
            inference_geo mcp_servers metadata output_config output_config.effort
            output_config.format output_format service_tier speed stop_sequences stream system
            temperature thinking thinking.type thinking.budget_tokens thinking.display tool_choice
            tools top_k top_p""",
    },
    "Ollama": {
        "/api/chat": "model messages tools format options stream think keep_alive logprobs"
        " top_logprobs",
        "/api/generate": "model prompt suffix images format system template stream raw keep_alive"
        " options context think logprobs top_logprobs",
        "/api/embed": "model input truncate dimensions options keep_alive",
    },
}

# Fields whose treatment is written in a handler or a type, not in a mark of the schema.
_ONLY = "rejected unless it changes nothing"
HANDLED = {
    "parse_tool_calls": f"{_ONLY}: tool calls are always parsed",
    "/api/generate images": "rejected: models read text only",
    "/api/generate template": "rejected: set --chat-template for all requests",
    "/api/generate suffix": "rejected: use /v1/completions",
}


def schema(route: str) -> type[BaseModel]:
    """The schema of a route's body."""
    return next(endpoint.request_model for endpoint in ENDPOINTS if route in endpoint.paths)


def field_of(model: Any, path: str) -> FieldInfo | None:
    """A field of a schema, or of a nested schema; None if it does not exist."""
    first, _, rest = path.partition(".")
    names = {name: name for name in model.model_fields}
    names |= {field.alias: name for name, field in model.model_fields.items() if field.alias}
    if first not in names:
        return None
    found: FieldInfo = model.model_fields[names[first]]
    if not rest:
        return found
    kinds = [found.annotation, *get_args(found.annotation)]
    inner = next((kind for kind in kinds if _is_model(kind)), None)
    return None if inner is None else field_of(inner, rest)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def treatment(route: str, path: str) -> str:
    """What the server does with a field: followed, ignored or rejected, with the reason."""
    found = field_of(schema(route), path)
    if (handled := HANDLED.get(path) or HANDLED.get(f"{route} {path}")) is not None:
        return handled
    if found is None:
        return "rejected: not known"
    return mark_of(found) or "followed"


def mark_of(field: FieldInfo) -> str:
    """The treatment that a field's mark declares; empty without a mark."""
    for mark in field.metadata:
        if isinstance(mark, Ignored):
            return f"ignored: {mark.reason}"
        if isinstance(mark, BeforeValidator) and "rejected_field" in mark.func.__qualname__:
            cells = (cell.cell_contents for cell in mark.func.__closure__ or ())
            return f"{_ONLY}: {next(cell for cell in cells if isinstance(cell, str))}"
    return ""


def names() -> set[str]:
    """Every field that the page lists."""
    return {name for routes in FIELDS.values() for text in routes.values() for name in text.split()}


def rows() -> Iterator[tuple[str, str, str]]:
    """Fields, the services and routes that have them, and the treatment."""
    outcomes: dict[tuple[str, str], dict[str, list[str]]] = {}
    for service, routes in FIELDS.items():
        for route, names in routes.items():
            for name in names.split():
                routes_of_field = outcomes.setdefault((name, treatment(route, name)), {})
                routes_of_field.setdefault(route, []).append(service)
    groups: dict[tuple[str, str], list[str]] = {}
    for (name, what), senders in outcomes.items():
        who = "; ".join(f"`{route}`: {', '.join(by)}" for route, by in senders.items())
        groups.setdefault((what, who), []).append(name)
    for (what, who), together in sorted(
        groups.items(), key=lambda item: (item[0], sorted(item[1]))
    ):
        yield ", ".join(f"`{name}`" for name in sorted(together)), who, what


def page() -> str:
    """The whole page."""
    lines = [
        "# Fields of other services",
        "",
        "What the server does with each request field of other services (November 2026). A",
        "*followed* field has its effect. An *ignored* field is accepted without effect; the",
        "response names it in the header `x-jinfer-ignored`, and `--strict` rejects it. A",
        "*rejected* field is an error that names it.",
        "",
        "| field | services, by route | treatment |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows()),
    ]
    return "\n".join(lines) + "\n"
