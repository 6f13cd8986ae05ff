"""llama.cpp to measure against, through `llama_cpp`'s C functions; imports nothing of jinfer.

`python -m tools.llama_peer` runs in a Python that has llama-cpp-python, which need not be jinfer's:
it reads a request in JSON from standard input and writes arrays to a file.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


class Llama:
    """A model and a context.

    Attributes:
        vocab: tokens that it knows.
    """

    def __init__(self, model: str, context: int, sequences: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        silence(llama_cpp)
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), parameters)
        if not self.model:
            raise OSError(f"{model}: llama.cpp cannot load it")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, 2048, 512
        settings.n_seq_max, settings.n_threads = sequences, os.cpu_count()
        settings.n_threads_batch, settings.kv_unified = os.cpu_count(), True
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(2048, 0, sequences)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def forget(self) -> None:
        """Empties the cache."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        """Computes (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if self.api.llama_decode(self.context, batch) != 0:
            raise OSError("llama_decode failed")

    def logits(self, row: int) -> Any:
        """Logits after token `row` of the last batch: float32 [vocab], a view."""
        import numpy as np

        pointer = self.api.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, (self.vocab,))


_callbacks: list[Any] = []  # must live as long as the library


def silence(api: Any) -> None:
    """Nothing of llama.cpp's progress on the terminal."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    _callbacks.append(kind(lambda level, text, data: None))
    api.llama_log_set(_callbacks[-1], None)
    api.llama_backend_init()


def quantize(api: Any, source: str, out: str, type_name: str) -> None:
    """Writes a GGUF file in another type, "Q3_K_M": llama.cpp's own choice for each tensor."""
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{type_name}")
    if api.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters)) != 0:
        raise OSError(f"{source}: llama.cpp cannot quantize it to {type_name}")


def _score(request: dict[str, Any]) -> None:
    """Writes the log-probabilities of windows' tokens, and all logits of some of them."""
    import numpy as np

    llama = Llama(request["model"], request["length"], 1)
    losses, logits = [], []
    for number, (ids, first) in enumerate(request["windows"]):
        llama.forget()
        llama.decode([(token, i, 0, i >= first - 1) for i, token in enumerate(ids)])
        rows = np.stack([llama.logits(i) for i in range(first - 1, len(ids) - 1)])
        if number < request["with_logits"]:
            logits.append(rows)
        top = rows.max(axis=1, keepdims=True)
        logsum = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
        losses.append(logsum - rows[np.arange(len(rows)), ids[first:]])
    size = os.path.getsize(request["model"])
    empty = np.zeros((0, llama.vocab), np.float32)
    np.savez(request["out"], losses=np.concatenate(losses), size=size,
             logits=np.concatenate(logits) if logits else empty)  # fmt: skip


def main() -> int:
    """Does what a line of JSON asks: {"quantize": ...} or {"score": ...}."""
    import llama_cpp

    request = json.loads(sys.stdin.read())
    try:
        if "quantize" in request:
            silence(llama_cpp)
            quantize(llama_cpp, *request["quantize"])
        else:
            _score(request["score"])
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
