"""Flags of llama.cpp and vLLM: aliases, and hints for those without an equivalent."""

from __future__ import annotations

from collections.abc import Mapping

_DEVICES = "--set partition.devices=... says which device computes what (jinfer docs partition)"
_MAPPED = "leave it out: files are mapped, and what is read of them let go"

_CONTROL_VECTORS = ("--control-vector", "--control-vector-scaled", "--control-vector-layer-range")

# Hints for flags that are not accepted.
FLAG_HINTS: Mapping[tuple[str, ...], str] = {
    ("-ngl", "--n-gpu-layers", "--gpu-layers"): (
        "a GPU that JAX finds computes all layers; --set partition.cpu_layers=N leaves N to the CPU"
    ),
    ("-tp", "--tensor-parallel-size"): (
        '--set "partition.devices=0&1" divides each layer among devices'
    ),
    ("-pp", "--pipeline-parallel-size"): (
        '--set "partition.devices=0;1" gives each device some of the layers'
    ),
    ("-ts", "--tensor-split", "-sm", "--split-mode", "-mg", "--main-gpu"): _DEVICES,
    ("-dev", "--device"): "JAX_PLATFORMS=cpu or cuda in the environment chooses",
    ("--gpu-memory-utilization", "--kv-cache-memory-bytes"): (
        "--set engine.kv_tokens=N says how many tokens the cache has room for"
    ),
    ("-b", "--batch-size", "-ub", "--ubatch-size", "--max-num-batched-tokens"): (
        "--set engine.prefill_chunk=N says how many tokens of prompts a step computes"
    ),
    ("-np", "--parallel", "--max-num-seqs"): (
        "--set engine.slots=N says how many sequences run at a time"
    ),
    ("-q", "--quantization"): "--set quantization.weights=q4 quantizes the weights",
    ("-md", "--model-draft", "--speculative-config"): (
        "--set speculation.draft=... drafts tokens (jinfer docs speculation)"
    ),
    _CONTROL_VECTORS: (
        "of Python: generate(..., steer=read_control_vector(FILE)) (jinfer docs activations)"
    ),
    ("-hf", "-hfr", "--hf-repo"): "give owner/name as the source",
    ("--tokenizer",): "--set tokenizer=PATH",
    ("--revision",): "write owner/name@revision as the source",
    ("--download-dir",): "HF_HOME in the environment says where the hub's files are kept",
    ("--load-format",): "leave it out: a file's format is told by its content",
    ("--trust-remote-code",): "leave it out: no code of a checkpoint is ever run",
    ("--mlock", "--no-mmap"): _MAPPED,
    ("-fa", "--flash-attn", "--enforce-eager"): "leave it out: there is one way to compute",
    ("-mm", "--mmproj"): "models read text alone",
    ("--host", "--port"): "it is for jinfer serve",
    ("--stream", "--no-stream"): "leave it out: an answer is written as it comes",
}

_ALWAYS = "leave it out: it is always so"
_ASKED = (
    "each request says it; what holds where it does not: --set generation.temperature=... and so on"
)

# Hints for server flags, which come before those above.
SERVER_FLAG_HINTS: Mapping[tuple[str, ...], str] = {
    _CONTROL_VECTORS: (
        "--allow-inspection lets requests steer, and POST /v1/steering keeps a control vector"
    ),
    ("-t", "--threads", "-tb", "--threads-batch"): (
        "it computes on all cores that it may use: taskset, or CPUAffinity= of systemd, says which"
    ),
    (
        *("--jinja", "--enable-auto-tool-choice", "-cb", "--cont-batching", "--metrics"),
        *("--slots", "--props", "--enable-chunked-prefill", "--enable-prefix-caching"),
    ): _ALWAYS,
    (
        *("--embedding", "--embeddings", "--task", "--runner", "--convert", "--rerank"),
        *("--reranking", "--pooling"),
    ): (
        "leave it out: /v1/embeddings gives vectors of any model, pooled as its files say, "
        "/rerank and /classify what its head says"
    ),
    ("--lora", "--lora-scaled", "--enable-lora"): (
        "--adapter NAME=SOURCE loads an adapter, and --max-adapters makes room for others"
    ),
    ("-v", "--verbose", "-lv", "--log-verbosity"): "--log-level debug",
    ("--log-disable", "--disable-log-requests", "--disable-log-stats"): "--log-level warning",
    ("--no-webui",): "--no-page",
    (
        *("-s", "--seed", "--temp", "--temperature", "--top-k", "--top-p", "--min-p"),
        *("-n", "--predict", "--n-predict", "--max-tokens", "--repeat-penalty"),
        *("--presence-penalty", "--frequency-penalty"),
    ): _ASKED,
    **FLAG_HINTS,
}

# Flags with another name and the same meaning: jinfer's -> others'.
FLAG_ALIASES: Mapping[str, tuple[str, ...]] = {
    "--prompt": ("-p",),
    "--prompt-file": ("-f", "--file"),
    "--system": ("-sys", "--system-prompt"),
    "--threads": ("-t",),
    "--chat": ("-cnv", "--conversation", "-i", "--interactive"),
    "--raw": ("-no-cnv", "--no-conversation"),
    "--temperature": ("--temp",),
    "--seed": ("-s",),
    "--json-schema": ("-j",),
    "--thinking-token-budget": ("--reasoning-budget",),
}
