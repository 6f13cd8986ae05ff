"""Descriptions of the fields of request bodies, by name, for all routes that have the field.

A field with a `description` of its own keeps it. OpenAPI, `/docs` and docs/reference show them.
"""

from __future__ import annotations

from collections.abc import Mapping

DESCRIPTIONS: Mapping[str, str] = {
    # conversations
    "messages": "the conversation; contents are texts or lists of text parts",
    "system": "the system message",
    "system_prompt": "the system message",
    "instructions": "the system message of this request",
    "tools": "functions that the model may call; other tools are ignored",
    "tool_choice": "auto, none, required, or the function to call",
    "parallel_tool_calls": "false: at most one call",
    "add_generation_prompt": "false: the prompt ends with the last message",
    "continue_final_message": "the answer continues the last message, the assistant's",
    "chat_template_kwargs": "variables of the chat template",
    "documents": "ranked texts; on chat routes, documents for a template that reads them",
    "reasoning": "effort, max_tokens, enabled, exclude",
    "thinking": "type and budget_tokens",
    "think": "true, false, or an effort",
    "output_config": "effort, and a format with a JSON schema",
    # models and streams
    "model": "a model's name or alias, or an adapter's; the first model if not given",
    "stream": "sends the answer as server-sent events",
    "stream_options": "include_usage, continuous_usage_stats",
    "keep_alive": "how long the model stays in memory: seconds, or a duration such as 5m",
    "options": "sampling parameters under Ollama's names",
    # prompts and answers
    "prompt": "a text or token ids; a list of either on routes that answer several",
    "text": "the prompt; on /v1/responses the format of the answer's text",
    "input": "a text or a list of texts; embeddings also take token ids",
    "input_prefix": "the text before the gap",
    "input_suffix": "the text after the gap",
    "input_extra": "other files as context: filename and text",
    "echo": "the answer begins with the prompt",
    "logprobs": "adds the log-probability of each token",
    "top_k": "number of tokens for each mask",
    "top_logprobs": "number of alternatives with their log-probabilities",
    "prompt_logprobs": "number of alternatives for each token of the prompt",
    "max_output_tokens": "limit of new tokens",
    "stop_sequences": "texts that end the answer",
    "response_format": "text, json_object, or json_schema with a schema",
    "structured_outputs": "one of json, json_object, regex, choice, grammar",
    "use_beam_search": "the answer is the best of a beam search",
    "return_token_ids": "adds prompt_token_ids and token_ids to the response",
    "return_tokens": "adds the token ids to the response",
    "timings_per_token": "adds timings to every event of a stream",
    "return_progress": "adds events with the progress of long prompts",
    "modalities": "only text",
    "safety_identifier": "is logged",
    "prompt_cache_retention": "prefixes are always cached as long as there is room",
    "add_special_tokens": "false: no special tokens are added around the text",
    # vectors
    "encoding_format": "float or base64",
    "embedding_types": "float, base64, binary, ubinary",
    "pooling": "overrides the checkpoint's pooling",
    "normalize": "scales vectors to length 1",
    "dimensions": "length of the vectors, which are truncated and normalized again",
    "truncate_prompt_tokens": "longer texts are cut to this number of tokens; -1: to the limit",
    "truncate": "false: a text that is too long is an error",
    "query": "the text that documents are compared with",
    "texts": "a list of texts",
    "top_n": "number of results",
    "return_documents": "adds the documents to the results",
    "text_1": "one text, or one for each second text",
    "text_2": "the texts that are compared with the first",
    # tokens
    "content": "a text",
    "tokens": "token ids",
    "with_pieces": "adds the text of each token",
    "return_token_strs": "adds the text of each token",
    # files, adapters, vectors by name
    "file": "the file, at most --max-file bytes",
    "purpose": "batch, or another of OpenAI's purposes",
    "expires_after": "anchor and seconds until the file is deleted",
    "input_file_id": "a file of requests, one JSON object per line",
    "endpoint": "the route of all requests of the batch",
    "output_expires_after": "anchor and seconds until result files are deleted",
    "lora_name": "the adapter's name, which requests use as their model",
    "name": "the name that requests use",
    "vectors": "vectors in place of a file",
    "metadata": "is stored and returned",
}
