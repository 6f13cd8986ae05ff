"""LoRA adapters: PEFT's folders and llama.cpp's GGUF files, read without running anything."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jinfer.loader.adapters.peft_patterns import first_matches
from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint, CheckpointError, Tensor
from jinfer.loader.checkpoint.gguf import open_gguf
from jinfer.loader.checkpoint.mapped_file import parse_object
from jinfer.loader.checkpoint.open import open_pickle
from jinfer.loader.checkpoint.safetensors import open_safetensors
from jinfer.sandbox.safe_files import FileRefusedError, read_regular_file
from jinfer.sandbox.sandboxed_process import SandboxError

if TYPE_CHECKING:
    from jaxtyping import Float


CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
DAMAGED = "the file is damaged: copy or train it again"
_MAX_CONFIG = 1 << 20
_MAX_ALPHA = 1e6
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_([AB])(?:\.[\w-]+)?\.weight")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.[\w-]+)?")
_SAVED = re.compile(r"(.+?)(?:\.modules_to_save\.[\w-]+|\.base_layer)?\.(weight|bias)")
_OF_EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.")
# Keys of adapter_config.json that change the computation, the values that change nothing, and what
# to do about others.
_PLAIN_KEYS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "bias": (("none",), "only adapters without biases are read"),
    "lora_bias": ((False,), "only adapters without biases are read"),
    "layer_replication": ((), "the model would have other layers; merge it with PEFT"),
    "alora_invocation_tokens": ((), "an activated LoRA is not one"),
    "trainable_token_indices": ((), "merge it with PEFT"),
    "arrow_config": ((), "it is a mixture of adapters; merge it with PEFT"),
    "use_qalora": ((False,), "merge it with PEFT"),
    "megatron_config": ((), "its matrices are divided; merge it with PEFT"),
    "init_lora_weights": (
        (True, False, "gaussian", "eva", "orthogonal"),
        "its base is not the model's; save it with path_initial_model_for_weight_conversion",
    ),
}


@dataclass(frozen=True)
class LoraModule:
    """The low-rank term of a matrix, or of the matrices of all experts: scale * b @ a.

    Attributes:
        a: [rank, inputs]; for experts [experts * rank, inputs], or [experts, rank, inputs].
        b: [outputs, rank]; for experts [outputs, rank * experts], or [experts, outputs, rank].
        scale: a factor.
        magnitude: DoRA's lengths of rows [outputs]; None: a LoRA without them.
        experts: number of experts; 0: the term belongs to a single matrix.
        by_axes: whether "inputs" means the first of the two axes in the model's file, as in
            experts'
            terms of older versions of PEFT, instead of the matrices' inputs.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    experts: int = 0
    by_axes: bool = False

    @property
    def rank(self) -> int:
        """Its rank."""
        stacked = len(self.a.shape) == 3
        return self.a.shape[1] if stacked else self.a.shape[0] // max(1, self.experts)

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs] of the matrix, or of each."""
        return self.b.shape[len(self.b.shape) - 2], self.a.shape[-1]

    def read_a(self) -> Float[np.ndarray, "*experts rank inputs"]:
        """`a` in float32, of experts with an axis of their own."""
        a = self.a.read().astype(np.float32)
        return a.reshape(self.experts, -1, a.shape[-1]) if self.experts else a

    def read_b(self) -> Float[np.ndarray, "*experts outputs rank"]:
        """`b` in float32, of experts with an axis of their own."""
        b = self.b.read().astype(np.float32)
        if not self.experts or b.ndim == 3:
            return b
        return b.reshape(len(b), -1, self.experts).transpose(2, 0, 1)

    def scaled(self, b: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """`b` or a part of it times the scale; infinite where that is too large."""
        with np.errstate(over="ignore"):
            return b * np.float32(self.scale)


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter, whose matrices are read lazily.

    Attributes:
        path: its file, for errors.
        format: the names of its modules: those of a model's Hugging Face or GGUF file.
        modules: name of a module in the model's file -> its term.
        saved: name of a tensor in the model's file -> its replacement (`modules_to_save`).
        digest: hash of its contents.
    """

    path: Path
    format: Literal["peft", "gguf"]
    modules: Mapping[str, LoraModule]
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    digest: bytes = b""

    @property
    def rank(self) -> int:
        """The highest rank of its modules."""
        return max((module.rank for module in self.modules.values()), default=0)

    @property
    def has_magnitudes(self) -> bool:
        """Whether it is a DoRA."""
        return any(module.magnitude is not None for module in self.modules.values())

    @property
    def has_experts(self) -> bool:
        """Whether it changes matrices of a mixture's experts."""
        return any(
            module.experts or _OF_EXPERT.search(name) for name, module in self.modules.items()
        )


def open_adapter(path: Path) -> LoraAdapter:
    """Open an adapter: PEFT's folder or a file in it, or a GGUF file.

    Raises:
        CheckpointError: it is no adapter, is damaged, or uses an unsupported feature.
    """
    if path.is_file() and path.suffix == ".gguf":
        return _with_digest(_open_gguf(path))
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        expected = f"a folder with {CONFIG}, or a .gguf file"
        raise CheckpointError(path, f"is no LoRA adapter: there is no {CONFIG}; give {expected}")
    for name in _FILES:
        if (folder / name).is_file():
            read = open_safetensors if name.endswith(".safetensors") else open_pickle
            return _with_digest(_open_peft(folder / CONFIG, read(folder / name)))
    raise CheckpointError(folder, f"is an adapter without {' or '.join(_FILES)}")


def _with_digest(adapter: LoraAdapter) -> LoraAdapter:
    hashed = hashlib.sha256()
    for name, module in adapter.modules.items():
        parts = (module.a, module.b, *([module.magnitude] if module.magnitude else ()))
        shapes = module.experts, module.by_axes, [part.shape for part in parts]
        hashed.update(repr((name, module.scale, *shapes)).encode())
        for part in parts:
            hashed.update(np.ascontiguousarray(part.raw()))
    for name, tensor in adapter.saved.items():
        hashed.update(repr((name, tensor.shape)).encode())
        hashed.update(np.ascontiguousarray(tensor.raw()))
    return LoraAdapter(
        adapter.path, adapter.format, adapter.modules, adapter.saved, hashed.digest()
    )


def _open_peft(path: Path, checkpoint: Checkpoint) -> LoraAdapter:
    try:
        config = parse_object(path, read_regular_file(path, _MAX_CONFIG))
    except FileRefusedError as error:
        raise CheckpointError(path, str(error)) from None
    _check_config(path, config)
    targets = read_targets(path, config)
    pairs, magnitudes, saved = dict[str, dict[str, Tensor]](), dict[str, Tensor](), {}
    for name, tensor in checkpoint.tensors.items():
        bare = name.removeprefix(_PREFIX)
        if match := _PAIR.fullmatch(bare):
            pairs.setdefault(match[1], {})[match[2]] = tensor
        elif match := _MAGNITUDE.fullmatch(bare):
            magnitudes[match[1].removesuffix(".weight")] = tensor
        elif "lora_" in bare:
            reason = f"{name} is a part of an adapter that is not read: its module is no matrix"
            raise CheckpointError(checkpoint.path, reason)
        elif match := _SAVED.fullmatch(bare):
            saved[f"{match[1]}.{match[2]}"] = tensor
        else:
            raise CheckpointError(checkpoint.path, f"{name} is no part of a LoRA adapter")
    modules = {}
    single, stacks = name_parameters(checkpoint.path, pairs, targets)
    names = [*single, *stacks]
    ranks = _by_pattern(path, config, "rank_pattern", names, config.get("r"))
    alphas = _by_pattern(path, config, "alpha_pattern", names, config.get("lora_alpha"))
    for name, pair in single.items():
        a, b = _checked_pair(checkpoint.path, name, pair, ("lora_A", "lora_B"))
        if (stated := ranks[name]) not in (None, a.shape[0]):
            reason = f"{name} has rank {a.shape[0]}, but its configuration says {stated!r:.100}"
            raise CheckpointError(path, f"{reason}: it belongs to other weights")
        scale = _peft_scale(path, config, alphas[name], a.shape[0])
        modules[name] = LoraModule(a, b, scale, magnitudes.pop(name, None))
    for name, pair in stacks.items():
        a, b = _checked_pair(checkpoint.path, name, pair, ("lora_A", "lora_B"))
        rank = ranks[name]
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1 or a.shape[0] % rank:
            reason = f"{name} has {a.shape[0]} rows in lora_A, which is no number of experts of"
            raise CheckpointError(checkpoint.path, f"{reason} rank {rank!r:.100}")
        scale = _peft_scale(path, config, alphas[name], rank)
        count, by_axes = a.shape[0] // rank, not has_inputs_first(config)
        modules[name] = LoraModule(a, b, scale, None, count, by_axes)
    if magnitudes:
        raise CheckpointError(checkpoint.path, f"{min(magnitudes)} has a magnitude and no lora_A")
    if config.get("use_dora") and any(module.magnitude is None for module in modules.values()):
        raise CheckpointError(checkpoint.path, "use_dora is set, and a magnitude vector is missing")
    return _not_empty(LoraAdapter(checkpoint.path, "peft", modules, saved))


def _not_empty(adapter: LoraAdapter) -> LoraAdapter:
    if not adapter.modules and not adapter.saved:
        raise CheckpointError(adapter.path, "has no lora_A and lora_B: it is no LoRA adapter")
    return adapter


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(path, f"peft_type is {kind!r:.100}; only LORA is read")
    for key, (plain, advice) in _PLAIN_KEYS.items():
        value = config.get(key)
        # True and 1 are equal, and only the first is a switch.
        same = any(value is usual or (isinstance(usual, str) and value == usual) for usual in plain)
        if not (value is None or value in ([], {}, ()) or same):
            raise CheckpointError(path, f"{key} = {value!r}: {advice}"[:300])


def _peft_scale(path: Path, config: Mapping[str, Any], alpha: Any, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) of rsLoRA (arXiv 2312.03732)."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < _MAX_ALPHA:
        raise CheckpointError(path, f"lora_alpha is {alpha!r:.100}, which is no factor")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(
    path: Path, config: Mapping[str, Any], key: str, modules: Sequence[str], usual: Any
) -> dict[str, Any]:
    """Each module's value of `rank_pattern` or `alpha_pattern`."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise CheckpointError(path, f"{key} is {patterns!r}"[:200] + ", not a table of modules")
    try:
        found = first_matches([*patterns], modules) if patterns else [None] * len(modules)
    except SandboxError as error:
        reason = f"{key} has patterns that cannot be matched with modules: {error}"
        raise CheckpointError(path, reason) from None
    values = [*patterns.values()]
    numbers = zip(modules, found, strict=True)
    return {module: usual if n is None else values[n] for module, n in numbers}


def _open_gguf(path: Path) -> LoraAdapter:
    checkpoint = open_gguf(path)
    metadata = checkpoint.metadata
    if (metadata.get("general.type"), metadata.get("adapter.type")) != ("adapter", "lora"):
        reason = "is no LoRA adapter: general.type and adapter.type are not adapter and lora"
        raise CheckpointError(path, reason)
    if "adapter.alora.invocation_tokens" in metadata:
        raise CheckpointError(path, "is an activated LoRA, which is not read")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not abs(alpha) < _MAX_ALPHA:
        raise CheckpointError(path, f"adapter.lora.alpha is {alpha!r:.100}, which is no factor")
    pairs = dict[str, dict[str, Tensor]]()
    for name, tensor in checkpoint.tensors.items():
        module, _, part = name.rpartition(".lora_")
        if part not in ("a", "b") or not module.endswith(".weight"):
            raise CheckpointError(path, f"{name} is no part of a LoRA adapter of matrices")
        pairs.setdefault(module.removesuffix(".weight"), {})[part.upper()] = tensor
    modules = {}
    for name, pair in pairs.items():
        if all(len(part.shape) == 3 for part in pair.values()) and len(pair) == 2:
            a, b, experts = *_checked_stacks(path, name, pair), pair["A"].shape[0]
        else:
            a, b, experts = *_checked_pair(path, name, pair, ("lora_a", "lora_b")), 0
        scale = alpha / a.shape[-2] if alpha else 1.0
        modules[name] = LoraModule(a, b, scale, experts=experts)
    return _not_empty(LoraAdapter(path, "gguf", modules))


def _checked_stacks(path: Path, module: str, pair: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    a, b = pair["A"], pair["B"]
    if a.shape[0] != b.shape[0] or a.shape[1] != b.shape[2] or 0 in a.shape:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        expected = "[experts, rank, in] and [experts, out, rank]"
        raise CheckpointError(path, f"{module}: lora_a and lora_b are {shapes}, not {expected}")
    return a, b


def _checked_pair(
    path: Path, module: str, pair: Mapping[str, Tensor], names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    for part, name in zip("AB", names, strict=True):
        if part not in pair:
            raise CheckpointError(path, f"{module} has no {name}")
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise CheckpointError(
            path, f"{module}: {' and '.join(names)} are {shapes}, not [rank, in] and [out, rank]"
        )
    return a, b


_WRAPPER = ".base_layer"
_ORDER = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")  # the definitions of transformers
# From this version on A has the inputs and B the outputs; before, A had the first of the two axes.
_BY_INPUTS = (0, 19)

type Pair = Mapping[str, Tensor]


def read_targets(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters in `target_parameters`, except whole modules ("q_proj.weight").

    These are stacks of the matrices of all experts. A module's parameters wrap each other, so the
    file has their pairs under "experts.lora_A", "experts.base_layer.lora_A" and so on, the first
    parameter innermost. For a stack [experts, outputs, inputs], lora_A is [experts * rank, inputs],
    experts outermost, and lora_B [outputs, rank * experts], experts innermost (peft's
    `ParamWrapper`).

    Raises:
        CheckpointError: a parameter belongs to no expert stack.
    """
    given = config.get("target_parameters") or []
    if not isinstance(given, list) or not all(isinstance(target, str) for target in given):
        raise CheckpointError(path, f"target_parameters is {given!r:.200}, not a list of names")
    targets = tuple(target for target in given if target.rpartition(".")[2] != "weight")
    if other := [target for target in targets if target.rpartition(".")[2] not in _ORDER]:
        reason = f"target_parameters has {other[0]!r:.100}; of parameters only {', '.join(_ORDER)}"
        raise CheckpointError(path, f"{reason} of experts are read; merge it with PEFT")
    return targets


def has_inputs_first(config: Mapping[str, Any]) -> bool:
    """Whether a stack's A has the axis of the inputs, in any order of its axes."""
    numbers = str(config.get("peft_version") or "0").split(".")[:2]
    return tuple(int(n) if n.isdecimal() else 0 for n in numbers) >= _BY_INPUTS


def name_parameters(
    path: Path, pairs: Mapping[str, Pair], targets: Iterable[str]
) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """The pairs of single matrices by module, and those of stacks by parameter.

    Args:
        path: of the adapter, for errors.
        pairs: by module, as the file has them.
        targets: of `read_targets`.

    Raises:
        CheckpointError: a module has more pairs than parameters, or fewer.
    """
    wrapped = dict[str, dict[int, Pair]]()
    for name, pair in pairs.items():
        module, depth = name, 0
        while module.endswith(_WRAPPER):
            module, depth = module.removesuffix(_WRAPPER), depth + 1
        wrapped.setdefault(module, {})[depth] = pair
    single, stacks, known = dict[str, Pair](), dict[str, Pair](), set(targets)
    for module, found in wrapped.items():
        names = [f"{module}.{leaf}" for leaf in _ORDER]
        names = [
            name for name in names if any(f".{name}".endswith(f".{target}") for target in known)
        ]
        if not names and list(found) == [0]:
            single[module] = found[0]
        elif sorted(found) == list(range(len(names))):
            stacks |= {name: found[len(names) - 1 - i] for i, name in enumerate(names)}
        else:
            reason = f"{module} has {len(found)} lora_A, and target_parameters names {len(names)}"
            raise CheckpointError(path, f"{reason} of its parameters")
    return single, stacks
