"""Routes and their tests: every route of the server is in the table, and every test exists."""

import re

from jinfer.server.routes import ENDPOINTS
from tests.server.running import ROOT

# Paths -> functions, or files, that test them.
TESTS: dict[str, str] = {
    "/health /v1/health /ping": "test_health test_while_it_loads",
    "/version /load": "test_version",
    "/metrics": "test_metrics",
    "/openapi.json /docs": "test_an_answer_is_as_described test_a_page_without_another_host",
    "/v1/models /models /v1/models/{model}": "test_models test_models_are_listed_and_loaded",
    "/models/{model}": "test_models test_models_are_listed_and_loaded",
    "/models/load /models/unload": "test_models_are_loaded_and_unloaded_by_name",
    "/sleep /wake_up /is_sleeping": "test_a_model_sleeps_and_wakes",
    "/v1/chat/completions /chat/completions": "tests/server/test_chat.py",
    "/v1/chat/completions/batch": "test_several_conversations",
    "/v1/chat/completions/input_tokens /chat/completions/input_tokens": "test_tokens_of_a_chat",
    "/v1/completions /completions": "tests/server/test_completions.py",
    "/v1/responses /responses": "tests/server/test_responses.py",
    "/v1/responses/input_tokens": "test_a_conversation_goes_on",
    "/v1/responses/{response_id}/input_items": "test_a_conversation_goes_on",
    "/v1/responses/{response_id}": "test_a_conversation_goes_on test_a_stream_that_goes_on",
    "/v1/responses/{response_id}/cancel": "test_cancelling",
    "/v1/stream /v1/streams/lookup": "tests/server/test_resumable_streams.py",
    "/v1/files /v1/files/{file_id} /v1/files/{file_id}/content": "test_a_batch",
    "/v1/batches /v1/batches/{batch_id}": "test_a_batch",
    "/v1/batches/{batch_id}/cancel": "test_a_batch_that_is_cancelled",
    "/v1/messages": "tests/server/test_messages.py",
    "/v1/messages/count_tokens": "test_an_answer test_a_coding_agent",
    "/v1/embeddings /embeddings": "test_embeddings",
    "/v2/embed": "test_embeddings_of_cohere",
    "/invocations": "test_invocations",
    "/v1/rerank /rerank /v2/rerank": "test_rerank test_rerank_by_a_head",
    "/score /v1/score": "test_score test_score_by_a_head",
    "/classify /v1/classify": "test_classify",
    "/pooling": "test_pooling",
    "/fill-mask /v1/fill-mask": "test_fill_mask",
    "/tokenize": "test_tokens_as_llama_cpp_asks test_tokens_as_vllm_asks",
    "/detokenize": "test_tokens_as_llama_cpp_asks",
    "/tokenizer_info": "test_a_tokenizer_described",
    "/apply-template": "test_a_template",
    "/completion": "test_completion_as_llama_cpp_has_it test_a_stream_as_llama_cpp_has_it",
    "/infill": "tests/server/test_infill.py",
    "/lora-adapters /v1/load_lora_adapter /v1/unload_lora_adapter": "tests/server/test_adapters.py",
    "/v1/steering /v1/steering/{name}": "tests/server/test_activations.py",
    "/props /slots": "test_props_and_slots",
    "/slots/{id}": "tests/server/test_slot_actions.py",
    "/api/chat /api/generate": "tests/server/test_ollama.py",
    "/api/embed /api/embeddings": "test_vectors",
    "/api/tags /api/ps /api/version /api/show": "test_the_models_of_ollama",
    "/api/pull /api/push /api/create /api/copy /api/delete": "test_errors_of_ollama",
    "/": "test_inferflow test_the_page test_its_files",
    "/page/{file}": "test_the_page test_its_files",
}


def test_every_route_has_a_test() -> None:
    listed = {path for paths in TESTS for path in paths.split()}
    assert listed == {
        path.replace(":path", "") for endpoint in ENDPOINTS for path in endpoint.paths
    }


def test_every_named_test_exists() -> None:
    folder = ROOT / "tests" / "server"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("**/test_*.py"))
    for name in " ".join(TESTS.values()).split():
        if "/" in name:
            assert (ROOT / name).is_file(), name
        else:
            assert re.search(rf"def {name}\(", source), name
