"""Pooling: how the vectors of a text's tokens become the embedding of the text.

Checkpoints describe it in the files of sentence-transformers (modules.json and the files that it
names, old and new), or in GGUF's `pooling_type`, whose numbers are llama.cpp's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from jinfer.loader.checkpoint import Checkpoint, open_checkpoint
from jinfer.loader.config.config_json import read_json, read_json_value
from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import nearest_hint, show_value
from jinfer.sandbox.safe_files import path_exists

if TYPE_CHECKING:
    from jaxtyping import Float


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # arXiv 1706.02515

_erf = np.vectorize(math.erf, otypes=[float])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


# By the names of torch.nn's classes, with the default arguments of these.
DENSE_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "LeakyReLU": lambda x: np.where(x > 0, x, 0.01 * x),
    "ELU": _elu,
    "SELU": lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * _elu(x)),
    "GELU": lambda x: (0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype),
    "SiLU": lambda x: x * _sigmoid(x),
    "Mish": lambda x: x * np.tanh(_softplus(x)),
    "Sigmoid": _sigmoid,
    "Softplus": _softplus,
    "Softsign": lambda x: x / (1 + np.abs(x)),
}


Pooling = Literal["mean", "first", "last", "max", "mean_sqrt_len", "weighted_mean"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

type Vectors = Float[np.ndarray, "texts hidden"]

# `pooling_mode` of 1_Pooling/config.json, and the keys that older files have in its place, in the
# order in which several are put together.
_MODES: dict[str, tuple[str, Pooling]] = {
    "cls": ("pooling_mode_cls_token", "first"),
    "max": ("pooling_mode_max_tokens", "max"),
    "mean": ("pooling_mode_mean_tokens", "mean"),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
    "weightedmean": ("pooling_mode_weightedmean_tokens", "weighted_mean"),
    "lasttoken": ("pooling_mode_lasttoken", "last"),
}
_GGUF_TYPES: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}
_GGUF_REFUSED = {
    0: "which gives no vector of a whole text",
    4: "a score by a ranking head, which classify gives",
}
# Files of the module Transformer; older files are named after the model.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_DENSE = re.compile(r"dense_(\d{1,3})\.weight")
_MAX_TOKENS = 10**9  # tokenizers without a limit say a number of thirty digits


@dataclass(frozen=True)
class Projection:
    """A dense layer after the pooling, in float32.

    Attributes:
        weight: [outputs, inputs].
        bias: [outputs], or None.
        function: what is applied to the sum.
    """

    weight: Float[np.ndarray, "outputs inputs"]
    bias: Float[np.ndarray, " outputs"] | None
    function: Callable[[np.ndarray], np.ndarray]

    def __call__(self, x: Float[np.ndarray, "texts inputs"]) -> Float[np.ndarray, "texts outputs"]:
        """The layer's output."""
        y = x @ self.weight.T
        return self.function(y if self.bias is None else y + self.bias)


@dataclass(frozen=True)
class PoolingSpec:
    """The pooling of a checkpoint.

    Attributes:
        take: the pooling methods; the vectors of several are concatenated; empty if there is none.
        normalize: divide vectors by their length.
        max_tokens: longer texts are cut to this length; None: to the model's context.
        layers: layers between pooling and normalization.
        prompts: name -> prefix of texts.
        default_prompt: the name of the prefix that is used by default.
        include_prompt: whether the tokens of the prefix are pooled.
        lower_case: whether texts are converted to lower case.
        similarity: how two vectors are compared.
        declared: whether the checkpoint is declared as an embedding model.
        late: each token has a vector, projected by `layers`, and texts are compared by MaxSim (late
            interaction, ColBERT, arXiv 2004.12832).
        skipped: tokens of documents that are not compared, by name.
        refusal: the reason why the user has to choose a pooling; "" if it has a default.
    """

    take: tuple[Pooling, ...]
    normalize: bool = True
    max_tokens: int | None = None
    layers: tuple[Callable[[Vectors], Vectors], ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    lower_case: bool = False
    similarity: Similarity = "cosine"
    declared: bool = False
    late: bool = False
    skipped: tuple[str, ...] = ()
    refusal: str = ""

    def prompt(self, name: str | None) -> str:
        """Return the text of a prefix; None: of the default. Raises `ValueError`."""
        if name is not None and name not in self.prompts:
            known = nearest_hint(name, self.prompts) if self.prompts else "the model has no prompts"
            raise ValueError(f"there is no prompt {show_value(name)}; {known}")
        chosen = self.default_prompt if name is None else name
        return "" if chosen is None else self.prompts[chosen]

    def text(self, text: str, prompt: str) -> str:
        """Return the input of the tokenizer for a text with a prefix."""
        whole = prompt + text
        return whole.lower() if self.lower_case else whole


def find_pooling(spec: ModelSpec, checkpoint: Checkpoint, config: Mapping[str, Any]) -> PoolingSpec:
    """Read the pooling of a GGUF file, or of the modules.json of a checkpoint.

    Raises:
        SourceError: a file has an unknown value.
        CheckpointError: the weights of a dense layer are broken.
    """
    path, hidden = checkpoint.path, spec.dims.get("hidden")
    folder = path if path.is_dir() else path.parent
    own = _of_gguf(checkpoint, config, hidden)
    own = own or PoolingSpec(("mean" if spec.decoder is None else "last",))
    if not path_exists(folder / "modules.json"):
        return own
    return _of_modules(folder, own, hidden)


def _of_gguf(
    checkpoint: Checkpoint, config: Mapping[str, Any], hidden: int | None
) -> PoolingSpec | None:
    """Read `pooling_type`; None if there is none."""
    if checkpoint.format != "gguf":
        return None
    key = f"{config.get('general.architecture', '')}.pooling_type"
    number = config.get(key)
    if number is None:
        return None
    known = type(number) is int
    if known and number in _GGUF_TYPES:
        layers = _of_dense_tensors(checkpoint, hidden)
        return PoolingSpec((_GGUF_TYPES[number],), layers=layers, declared=True)
    reason = _GGUF_REFUSED.get(number if known else -1, "which is not known")
    return PoolingSpec(
        (), refusal=f"{checkpoint.path.name}: {key} is {show_value(number)}, {reason}"
    )


def _of_dense_tensors(checkpoint: Checkpoint, hidden: int | None) -> tuple[Projection, ...]:
    """The dense layers that a GGUF file has of sentence-transformers' modules, in their order."""
    tensors = checkpoint.tensors
    numbers = sorted(int(n[1]) for name in tensors if (n := _DENSE.fullmatch(name)))
    weights = [tensors[f"dense_{n}.weight"].read().astype(np.float32) for n in numbers]
    layers = tuple(Projection(weight, None, DENSE_ACTIVATIONS["Identity"]) for weight in weights)
    _check_widths(checkpoint.path, layers, hidden, "dense_*.weight")
    return layers


def _of_modules(folder: Path, own: PoolingSpec, hidden: Any) -> PoolingSpec:
    """Read modules.json and the files of its modules.

    Args:
        own: the pooling in a GGUF file, which takes precedence.
    """
    take, include_prompt, pooled = own.take, True, False
    layers: list[Callable[[Vectors], Vectors]] = [*own.layers]
    for module in _modules(folder / "modules.json"):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooled = True
            file = _inside(folder, module) / "config.json"
            config = read_json(file)
            take, include_prompt = _modes(config, file), config.get("include_prompt") is not False
        elif kind == "Dense" and not own.layers:
            layers.append(_projection(_inside(folder, module)))
        elif kind == "Normalize":
            layers.append(to_length_1)
        elif kind not in ("Transformer", "Dense", "Dropout"):
            raise SourceError(f"{folder / 'modules.json'}: a module of kind {kind!r} is not known")
    if own.declared or own.refusal:
        take = own.take
    _check_widths(folder, layers, hidden and hidden * max(1, len(take) if pooled else 1))
    normalize = layers[-1:] == [to_length_1]
    longest, lower_case = _transformer(folder)
    settings_file = folder / "config_sentence_transformers.json"
    prompts, default, similarity = _prompts(settings_file)
    late = not pooled and any(isinstance(layer, Projection) for layer in layers)
    if late:
        reason = "gives a vector of each token and none of a text: it has no pooling"
        return PoolingSpec(
            take=(),
            max_tokens=longest,
            layers=tuple(layer for layer in layers if isinstance(layer, Projection)),
            prompts=_prefixes(settings_file) | prompts,
            lower_case=lower_case,
            declared=True,
            late=True,
            skipped=_skipped(settings_file),
            refusal=f"{folder / 'modules.json'}: {reason}",
        )
    return PoolingSpec(
        take=take,
        normalize=normalize,
        max_tokens=longest,
        layers=tuple(layers[:-1] if normalize else layers),
        prompts=prompts,
        default_prompt=default,
        include_prompt=include_prompt,
        lower_case=lower_case,
        similarity=similarity,
        declared=not own.refusal,
        refusal=own.refusal,
    )


def _transformer(folder: Path) -> tuple[int | None, bool]:
    """Return the maximum number of tokens of a text, and whether it is converted to lower case.

    Newer files leave the former to the tokenizer's own.
    """
    there = (folder / name for name in _TRANSFORMER_FILES if path_exists(folder / name))
    settings = read_json(file) if (file := next(there, None)) else {}
    tokenizer = folder / "tokenizer_config.json"
    known = read_json(tokenizer).get("model_max_length") if path_exists(tokenizer) else None
    limits = (settings.get("max_seq_length"), known)
    valid = (n for n in limits if type(n) is int and 1 < n < _MAX_TOKENS)
    return next(valid, None), settings.get("do_lower_case") is True


def _prompts(path: Path) -> tuple[dict[str, str], str | None, Similarity]:
    """Return the prefixes by name, the name of the default, and the similarity of vectors."""
    config = read_json(path) if path_exists(path) else {}
    given = config.get("prompts") or {}
    if not isinstance(given, Mapping) or not all(
        isinstance(text, str | None) for text in given.values()
    ):
        raise SourceError(f"{path}: prompts is {show_value(given)}; it has to be texts by name")
    prompts = {str(name): text or "" for name, text in given.items()}
    default: Any = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise SourceError(
            f"{path}: default_prompt_name is {show_value(default)}, which no prompt has"
        )
    similarity: Any = config.get("similarity_fn_name") or "cosine"
    if similarity not in get_args(Similarity):
        known = nearest_hint(str(similarity), get_args(Similarity))
        raise SourceError(f"{path}: similarity_fn_name is {show_value(similarity)}; {known}")
    return prompts, default, similarity


def _prefixes(path: Path) -> dict[str, str]:
    """PyLate's prefixes of queries and documents, as prompts."""
    config = read_json(path) if path_exists(path) else {}
    keys = {"query": "query_prefix", "document": "document_prefix"}
    return {n: config[key] for n, key in keys.items() if isinstance(config.get(key), str)}


def _skipped(path: Path) -> tuple[str, ...]:
    """PyLate's tokens of documents that are not compared."""
    config = read_json(path) if path_exists(path) else {}
    words = config.get("skiplist_words")
    return tuple(map(str, words)) if isinstance(words, list) else ()


def _inside(folder: Path, module: Mapping[str, Any]) -> Path:
    """The folder of a module: in that of the model, wherever links lead from there."""
    path = str(module.get("path", ""))
    if path.startswith("/") or ".." in PurePath(path).parts or "\0" in path:
        raise SourceError(f"{folder / 'modules.json'}: {path[:100]!r} leads out of the folder")
    return folder / path


def _check_widths(
    path: Path, layers: Sequence[Any], hidden: Any, name: str = "linear.weight"
) -> None:
    """Raise unless the inputs of each layer are the outputs of the layer before."""
    for each in layers:
        if not isinstance(each, Projection):
            continue
        shape = each.weight.shape
        if len(shape) != 2 or shape[1] != (hidden or shape[1]) or not shape[0]:
            raise SourceError(f"{path}: {name} {list(shape)} does not take {hidden} numbers")
        if each.bias is not None and each.bias.shape != shape[:1]:
            raise SourceError(f"{path}: linear.bias {list(each.bias.shape)} is not [{shape[0]}]")
        hidden = shape[0]


def _projection(folder: Path) -> Projection:
    """A dense layer of sentence-transformers."""
    config = read_json(folder / "config.json")
    name = str(config.get("activation_function", "Tanh") or "Identity")
    function = DENSE_ACTIVATIONS.get(name.rpartition(".")[2])
    if function is None:
        known = nearest_hint(name.rpartition(".")[2], DENSE_ACTIVATIONS)
        file = folder / "config.json"
        raise SourceError(f"{file}: the activation_function {name} is not known; {known}")
    usual = {"module_input_name": "sentence_embedding", "use_residual": False}
    for key, value in usual.items():
        if config.get(key, value) not in (value, None):
            reason = f"{key} = {show_value(config[key])} is not followed"
            raise SourceError(f"{folder / 'config.json'}: {reason}")
    tensors = open_checkpoint(folder).tensors
    if "linear.weight" not in tensors:
        raise SourceError(f"{folder}: has no tensor linear.weight")
    bias = tensors["linear.bias"].read() if "linear.bias" in tensors else None
    weight = tensors["linear.weight"].read().astype(np.float32)
    return Projection(weight, None if bias is None else bias.astype(np.float32), function)


def _modules(path: Path) -> Sequence[Mapping[str, Any]]:
    modules = read_json_value(path)
    if not isinstance(modules, list) or not all(isinstance(m, Mapping) for m in modules):
        raise SourceError(f"{path}: is not a list of modules")
    return modules


def _modes(config: Mapping[str, Any], file: Path) -> tuple[Pooling, ...]:
    """Return the pooling methods in `pooling_mode`, or in keys of older files."""
    known = {key: name for name, (key, _) in _MODES.items()}
    named = config.get("pooling_mode")
    if named is None:
        keys = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
        strange = next((key for key in keys if key not in known), None)
        chosen = [name for name, (key, _) in _MODES.items() if key in keys] or ["mean"]
    else:
        chosen = [named] if isinstance(named, str) else named
        is_list = isinstance(chosen, list) and chosen
        names = chosen if is_list else [named]
        strange = next((n for n in names if not isinstance(n, str) or n not in _MODES), None)
    if strange is not None:
        raise SourceError(
            f"{file}: the pooling {show_value(strange)} is not known; "
            f"{nearest_hint(str(strange), _MODES)}"
        )
    return tuple(_MODES[name][1] for name in chosen)


def to_length_1(vectors: Vectors) -> Vectors:
    """Divide vectors by their lengths."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def cut(ids: list[int], limit: int) -> list[int]:
    """Cut tokens to `limit`, but keep the last token, which ends the text."""
    return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


def pool(
    hidden: Sequence[Float[np.ndarray, "tokens hidden"]],
    take: Sequence[Pooling],
    skipped: Sequence[int] | None = None,
) -> Vectors:
    """Return a vector for each text.

    Args:
        skipped: for each text, the number of tokens at its beginning that are left out.
    """
    begins = skipped or [0] * len(hidden)
    pairs = zip(hidden, begins, strict=True)
    return np.stack(
        [np.concatenate([_TAKES[method](x, begin) for method in take]) for x, begin in pairs]
    )


def _weighted(x: np.ndarray, begin: int) -> np.ndarray:
    """Weigh later tokens more (arXiv 2202.08904)."""
    weights = np.arange(begin + 1, len(x) + 1, dtype=np.float32)[:, None]
    return (x[begin:] * weights).sum(axis=0) / weights.sum()


_TAKES: dict[Pooling, Callable[[np.ndarray, int], np.ndarray]] = {
    "mean": lambda x, begin: x[begin:].mean(axis=0),
    "first": lambda x, begin: x[begin],
    "last": lambda x, begin: x[-1],
    "max": lambda x, begin: x[begin:].max(axis=0),
    "mean_sqrt_len": lambda x, begin: x[begin:].sum(axis=0) / np.sqrt(len(x) - begin),
    "weighted_mean": _weighted,
}
