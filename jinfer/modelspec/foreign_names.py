"""Foreign names: the names of other engines, and what each is here.

One table for keywords of Python, keys of specifications, sampling parameters, command-line flags,
fields of HTTP requests and commands. A keyword such as `n_ctx` is a flag (`--n-ctx`) as well; a
name with hyphens in front is only a flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ForeignName:
    """A row of the table: names with one meaning.

    Attributes:
        names: separated by spaces.
        key: the key of a specification with the same meaning.
        parameter: the sampling parameter with the same meaning.
        option: the field of a flag with the same meaning.
        python: what to do instead, in Python.
        flag: what to do instead, on a command line.
        serve: the same for `jinfer serve`, where it differs.
    """

    names: str
    key: str = ""
    parameter: str = ""
    option: str = ""
    python: str = ""
    flag: str = ""
    serve: str = ""


@dataclass(frozen=True)
class ForeignField:
    """Fields of HTTP requests that have no effect here.

    Attributes:
        names: separated by spaces.
        reason: why there is no effect.
        type: the type of the values that are ignored and reported; None: they are refused.
        neutral: values that request what happens anyway.
    """

    names: str
    reason: str
    type: Any = None
    neutral: tuple[Any, ...] = ()


_STRUCTURE = "json_schema, regex, choice or grammar constrains the answer"
_LOGITS = (
    "logits_processors=[function] are functions of yours, in JAX; logit_bias, banned_token_ids, "
    f"allowed_token_ids, bad_words and the samplers change logits too, and {_STRUCTURE}"
)
_LORA = (
    'LoRA adapters are loaded by adapters={"name": source} of LLM or by load_adapter, and '
    'generate(..., adapter="name") computes with one'
)
_STOPS = "stop and stop_token_ids end an answer, and so does leaving the loop over stream(...)"
_PIECES = "stream(...) gives the pieces of an answer"
_SCORES = "score(...) gives the log-probabilities of a prompt"
_OUTPUT = "logprobs gives log-probabilities, and logits(...) the logits of a prompt"
_DEVICE = (
    "the environment variable JAX_PLATFORMS chooses (cpu, cuda), and partition.devices says which "
    "devices hold which part of the model"
)
_DEVICES = "--set partition.devices=... says which device computes what (jinfer docs partition)"
_MAPPED = "weights are always mapped from their file"
_LEAVE_MAPPED = "leave it out: files are mapped, and read pages are released"
_ONE_WAY = "leave it out: there is one way to compute"
_ALWAYS = "leave it out: it is always on"
_OWN = "it is chosen for the device by itself"
_SOURCE = "the model is the first argument: LLM(source)"
_VECTORS = "embed(...) gives vectors of any model"
_SERVE_VECTORS = (
    "leave it out: /v1/embeddings gives vectors of any model, pooled as its files say, /rerank and "
    "/classify what its head says"
)

_LLAMA_CPP = (
    ForeignName("n_ctx ctx_size -c", key="engine.context"),
    ForeignName(
        "n_parallel parallel n_seq_max -np",
        key="engine.slots",
        flag="--set engine.slots=N is the number of sequences that run at a time",
    ),
    ForeignName(
        "n_batch n_ubatch -b --batch-size -ub --ubatch-size",
        key="engine.prefill_chunk",
        flag="--set engine.prefill_chunk=N is the number of prompt tokens that a step computes",
    ),
    ForeignName("cache_type_k cache_type_v type_k type_v -ctk -ctv", key="quantization.kv_cache"),
    ForeignName(
        "n_gpu_layers gpu_layers ngl -ngl",
        key="partition.cpu_layers",
        flag="a GPU that JAX finds computes all layers; --set partition.cpu_layers=N leaves N to "
        "the CPU",
    ),
    ForeignName("split_mode tensor_split -sm -ts", key="partition.devices", flag=_DEVICES),
    ForeignName("main_gpu -mg", python=_DEVICE, flag=_DEVICES),
    ForeignName(
        "draft_model -md --model-draft",
        key="speculation.draft",
        flag="--set speculation.draft=... drafts tokens (jinfer docs speculation)",
    ),
    ForeignName("chat_format", key="prompt.chat_template"),
    ForeignName("system_prompt -sys", key="prompt.system", option="system"),
    ForeignName("model_path", python=_SOURCE, flag="the source is the first argument"),
    ForeignName("-m", option="model"),
    ForeignName("-a", option="alias"),
    ForeignName("-p", option="prompt"),
    ForeignName("-f --file", option="prompt_file"),
    ForeignName("-cnv --conversation -i --interactive", option="chat"),
    ForeignName("-no-cnv --no-conversation", option="raw"),
    ForeignName("--models-max", option="max_loaded"),
    ForeignName("--sleep-idle-seconds", option="idle_sleep"),
    ForeignName("--ssl-cert-file", option="ssl_certfile"),
    ForeignName("--ssl-key-file", option="ssl_keyfile"),
    ForeignName("n_predict", parameter="max_tokens"),
    ForeignName("repeat_penalty", parameter="repetition_penalty"),
    ForeignName("repeat_last_n", parameter="penalty_last_n"),
    ForeignName("typ_p typical", parameter="typical_p"),
    ForeignName("tfs", parameter="tfs_z"),
    ForeignName("mirostat_ent", parameter="mirostat_tau"),
    ForeignName("mirostat_lr", parameter="mirostat_eta"),
    ForeignName("dynatemp_exp", parameter="dynatemp_exponent"),
    ForeignName("n_probs", parameter="logprobs"),
    ForeignName(
        "thinking_budget_tokens reasoning_budget_tokens --reasoning-budget",
        parameter="thinking_token_budget",
    ),
    ForeignName("reasoning_budget_message", parameter="thinking_budget_message"),
    ForeignName("--temp", parameter="temperature"),
    ForeignName("-s", parameter="seed"),
    ForeignName("-j", parameter="json_schema"),
    ForeignName(
        "n_threads -t -tb --threads --threads-batch",
        python="threads=... is the number of cores",
        option="threads",
        serve="it computes on all cores that it may use: taskset, or CPUAffinity= of systemd, says "
        "which",
    ),
    ForeignName(
        "lora lora_path --lora-scaled",
        python=_LORA,
        serve="--adapter NAME=SOURCE loads an adapter, and --max-adapters makes room for others",
    ),
    ForeignName("use_mmap use_mlock", python=_MAPPED),
    ForeignName("--mlock --no-mmap", flag=_LEAVE_MAPPED),
    ForeignName("flash_attn -fa", python=_OWN, flag=_ONE_WAY),
    ForeignName("logits_all", python="logits(...) gives those of every token"),
    ForeignName("embedding", python=_VECTORS, serve=_SERVE_VECTORS),
    ForeignName("--embeddings --rerank --reranking --pooling", serve=_SERVE_VECTORS),
    ForeignName(
        "verbose",
        python="the logger 'jinfer' says what there is to say, and progress=True shows a bar",
        serve="--log-level debug",
    ),
    ForeignName("-v -lv --log-verbosity", serve="--log-level debug"),
    ForeignName("--log-disable", serve="--log-level warning"),
    ForeignName("mmproj -mm", python="there are no images", flag="models read text alone"),
    ForeignName(
        "--control-vector --control-vector-scaled --control-vector-layer-range",
        flag="of Python: generate(..., steer=read_control_vector(FILE)) (jinfer docs activations)",
        serve="--allow-inspection lets requests steer, and POST /v1/steering keeps a control "
        "vector",
    ),
    ForeignName("-hf -hfr --hf-repo", flag="give owner/name as the source"),
    ForeignName("-dev", flag="JAX_PLATFORMS=cpu or cuda in the environment chooses"),
    ForeignName(
        "--jinja -cb --cont-batching --metrics --slots --props",
        serve=_ALWAYS,
    ),
    ForeignName("--no-webui", serve="--no-page"),
    ForeignName(
        "-s --seed --temp --temperature --top-k --top-p --min-p -n --predict --n-predict "
        "--max-tokens --repeat-penalty --presence-penalty --frequency-penalty",
        serve="each request has its own; the default: --set generation.temperature=... and so on",
    ),
    ForeignName("--host --port", flag="it is for jinfer serve"),
    ForeignName("stop_function", python=_STOPS),
    ForeignName("logits_processor", python=_LOGITS),
)
_VLLM = (
    ForeignName("max_model_len", key="engine.context"),
    ForeignName(
        "max_num_seqs",
        key="engine.slots",
        flag="--set engine.slots=N is the number of sequences that run at a time",
    ),
    ForeignName(
        "max_num_batched_tokens",
        key="engine.prefill_chunk",
        flag="--set engine.prefill_chunk=N is the number of prompt tokens that a step computes",
    ),
    ForeignName(
        "gpu_memory_utilization num_gpu_blocks_override --kv-cache-memory-bytes",
        key="engine.kv_tokens",
        flag="--set engine.kv_tokens=N is the number of tokens that the cache has room for",
    ),
    ForeignName("kv_cache_dtype", key="quantization.kv_cache"),
    ForeignName(
        "tensor_parallel_size -tp",
        key="partition.mesh",
        flag='--set "partition.devices=0&1" divides each layer among devices',
    ),
    ForeignName(
        "pipeline_parallel_size -pp",
        key="partition.mesh",
        flag='--set "partition.devices=0;1" gives each device some of the layers',
    ),
    ForeignName("cpu_offload_gb", key="partition.streamed_layers"),
    ForeignName(
        "speculative_model speculative_config",
        key="speculation.draft",
        flag="--set speculation.draft=... drafts tokens (jinfer docs speculation)",
    ),
    ForeignName("-q --quantization", flag="--set quantization.weights=q4 quantizes the weights"),
    ForeignName("--served-model-name", option="alias"),
    ForeignName("--default-chat-template-kwargs", option="chat_template_kwargs"),
    ForeignName("--lora-modules", option="adapter"),
    ForeignName("--max-loras", option="max_adapters"),
    ForeignName("--max-lora-rank", option="max_adapter_rank"),
    ForeignName("max_completion_tokens", parameter="max_tokens"),
    ForeignName(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs response_format",
        python=_STRUCTURE,
    ),
    ForeignName("use_beam_search", python='strategy="beam" searches with beams'),
    ForeignName("prompt_logprobs echo", python=_SCORES),
    ForeignName("lora_request", python=_LORA),
    ForeignName(
        "enable_lora",
        python=_LORA,
        serve="--adapter NAME=SOURCE loads an adapter, and --max-adapters makes room for others",
    ),
    ForeignName(
        "enable_prefix_caching",
        serve=_ALWAYS,
        python="what prompts begin with alike is always computed once",
    ),
    ForeignName("--enable-chunked-prefill --enable-auto-tool-choice", serve=_ALWAYS),
    ForeignName("enforce_eager", python="programs are always compiled", flag=_ONE_WAY),
    ForeignName("task runner convert", python=_VECTORS, serve=_SERVE_VECTORS),
    ForeignName(
        "load_format",
        python=_MAPPED,
        flag="leave it out: the content of a file says its format",
    ),
    ForeignName("attention_backend", python=_OWN),
    ForeignName("limit_mm_per_prompt", python="there are no images"),
    ForeignName("--disable-log-requests --disable-log-stats", serve="--log-level warning"),
    ForeignName("--tokenizer", flag="--set tokenizer=PATH"),
    ForeignName(
        "--download-dir", flag="HF_HOME in the environment is the folder of the hub's files"
    ),
    ForeignName(
        "stream --no-stream",
        python=_PIECES,
        flag="leave it out: an answer is written as it comes",
    ),
)
_TRANSFORMERS = (
    ForeignName("max_seq_len max_seq_length model_max_length", key="engine.context"),
    ForeignName("load_in_4bit load_in_8bit quantization_config", key="quantization.weights"),
    ForeignName("torch_dtype", key="dtype"),
    ForeignName("max_new_tokens", parameter="max_tokens"),
    ForeignName("min_new_tokens", parameter="min_tokens"),
    ForeignName("num_beams", parameter="beams"),
    ForeignName("bad_words_token_ids", parameter="bad_words_ids"),
    ForeignName("stop_strings", parameter="stop"),
    ForeignName("do_sample", python="temperature=0 is greedy, any other temperature draws"),
    ForeignName("num_return_sequences", python="n is the number of answers"),
    ForeignName("output_scores output_logits", python=_OUTPUT),
    ForeignName("stopping_criteria", python=_STOPS),
    ForeignName("streamer callback callbacks", python=_PIECES),
    ForeignName("logits_warper", python=_LOGITS),
    ForeignName(
        "device device_map gpu cuda",
        python=_DEVICE,
        flag="JAX_PLATFORMS=cpu or cuda in the environment chooses",
    ),
    ForeignName("lora_adapters adapter", python=_LORA),
    ForeignName("low_cpu_mem_usage", python=_MAPPED),
    ForeignName("attn_implementation", python=_OWN),
    ForeignName(
        "trust_remote_code",
        python="no code of a checkpoint is run",
        flag="leave it out: no code of a checkpoint is ever run",
    ),
    ForeignName(
        "revision",
        python="write it into the source: hf://owner/name@revision",
        flag="write owner/name@revision as the source",
    ),
    ForeignName(
        "cache_dir",
        python="HF_HOME is the folder of the hub's files, JINFER_CACHE that of compiled programs",
    ),
    ForeignName("local_files_only", python="HF_HUB_OFFLINE=1 opens what the hub's cache has"),
    ForeignName("model", python=_SOURCE),
)
_OLLAMA = (
    ForeignName("num_ctx context_length", key="engine.context"),
    ForeignName("num_threads num_thread", python="threads=... is the number of cores"),
)
_INFERFLOW = (
    ForeignName("decoding_alg decoding_strategy", parameter="strategy"),
    ForeignName("random_seed", parameter="seed"),
    ForeignName("max_output_len", parameter="max_tokens"),
    ForeignName("max_k", parameter="top_k"),
    ForeignName("pool_size", parameter="fsd_pool"),
    ForeignName("tau", parameter="mirostat_tau"),
    ForeignName("eta", parameter="mirostat_eta"),
)
ROWS = (*_LLAMA_CPP, *_VLLM, *_TRANSFORMERS, *_OLLAMA, *_INFERFLOW)

_FOUND = "equal beginnings of prompts are found without it"
_TEXT = "models read text alone"
_GRAMMAR = "a grammar holds from the answer's beginning, or from the end of its thought"
_ADAPTIVE = "there is no such sampler; mirostat follows the surprise, too"
_SHIFT = "a context is never shifted"
_TRANSFER = "prompts are computed where they come"
FIELDS = (
    # llama.cpp
    ForeignField("n_cache_reuse", _FOUND, int, (0,)),
    ForeignField("backend_sampling", "tokens are always chosen on the device", bool, (True,)),
    ForeignField("sse_ping_interval", "--ping sets it for all streams", int),
    ForeignField("n_keep", _SHIFT, neutral=(0, -1)),
    ForeignField("n_discard", _SHIFT, neutral=(0,)),
    ForeignField("n_indent", "a grammar says how lines begin", neutral=(0,)),
    ForeignField("min_keep", "each filter keeps at least one token", neutral=(0,)),
    ForeignField("adaptive_target", _ADAPTIVE, neutral=(-1,)),
    ForeignField("adaptive_decay", _ADAPTIVE, float),
    ForeignField("grammar_lazy grammar_triggers", _GRAMMAR, neutral=(False, [])),
    ForeignField(
        "preserved_tokens", "parsers see the special tokens that they need", list[str], ([],)
    ),
    # vLLM
    ForeignField("request_id", "the header X-Request-Id names a request", str),
    ForeignField("session_id", _FOUND, str),
    ForeignField("stream_interval", "pieces are sent as soon as they are there", int, (1,)),
    ForeignField(
        "spaces_between_special_tokens", "special tokens are spelled as they are", bool, (True,)
    ),
    ForeignField("mm_processor_kwargs media_io_kwargs", _TEXT, dict[str, Any]),
    ForeignField("return_mm_kwargs", _TEXT, bool, (True, False)),
    ForeignField(
        "return_token_offsets",
        "/apply-template and /tokenize say how a prompt is read",
        bool,
        (False,),
    ),
    ForeignField(
        "routed_experts_prompt_start", "answers do not say which experts computed them", int, (0,)
    ),
    ForeignField("cache_salt", "cache_prompt: false keeps a prompt out of the shared cache"),
    ForeignField("watermarking", "answers have no watermark", neutral=(False,)),
    ForeignField("repetition_detection", "penalties and DRY keep answers from repetitions"),
    ForeignField("kv_transfer_params ec_transfer_params", _TRANSFER),
    ForeignField("vllm_xargs", "nothing here reads them"),
)

# Commands of Ollama, llama.cpp, vLLM and shells.
COMMANDS: Mapping[str, str] = {
    "run": "chat MODEL",
    "start": "serve MODEL",
    "server": "serve MODEL",
    "cli": "chat MODEL",
    "complete": "generate MODEL",
    "completion": "generate MODEL",
    "ask": "generate MODEL QUESTION",
    "ls": "list",
    "models": "list",
    "search": "list TEXT",
    "ps": "list, which shows what is on this machine; what a server has, its /v1/models",
    "show": "inspect SOURCE",
    "info": "inspect SOURCE",
    "download": "pull NAME",
    "convert": "quantize SOURCE OUT; without that any checkpoint is read as it is",
    "create": "generate spec.toml; a model is a TOML file",
    "rerank": "serve SOURCE, which has /rerank; in Python LLM(SOURCE).classify",
    "classify": "serve SOURCE, which has /classify; in Python LLM(SOURCE).classify",
    "embed": "serve SOURCE, which has /v1/embeddings; in Python LLM(SOURCE).embed",
    "rm": "list --memory, which shows where weights come from; the hub's own command removes them",
    "-v": "--version",
}


def parameter_aliases() -> dict[str, str]:
    """Names of sampling parameters in Python and in JSON -> jinfer's."""
    rows = ((name, row.parameter) for row in ROWS if row.parameter for name in row.names.split())
    return {name: parameter for name, parameter in rows if not name.startswith("-")}


def keyword(name: str) -> ForeignName | None:
    """What a keyword in Python is here; None if it is unknown, or a sampling parameter."""
    found = (row for row in ROWS if name in row.names.split() and (row.key or row.python))
    return next(found, None)


def flag_aliases(name: str, key: str = "") -> Iterator[str]:
    """Other engines' flags for a sampling parameter or an option, or for a specification's key."""
    for row in ROWS:
        if name in (row.parameter, row.option) or (key and row.key == key):
            yield from map(_flag, row.names.split())


def flag_hint(flag: str, serve: bool = False) -> str:
    """What to do instead of a flag that does not exist, or ""."""
    rows = [row for row in ROWS if flag in map(_flag, row.names.split())]
    texts = [row.serve for row in rows] if serve else []
    texts += [row.flag for row in rows]
    texts += [f"--set {row.key}=... is that key" if row.key else row.python for row in rows]
    return next(filter(None, texts), "")


def _flag(name: str) -> str:
    return name if name.startswith("-") else f"--{name.replace('_', '-')}"
