"""PEFT's `target_parameters`: LoRA of parameters that hold the matrices of all experts.

A module's parameters are wrapped one around the other, so the file has their pairs under
"experts.lora_A", "experts.base_layer.lora_A" and so on: the first parameter innermost. Of the
pair of a stack [experts, outputs, inputs], lora_A is [experts * rank, inputs], the experts
outermost, and lora_B [outputs, rank * experts], the experts innermost (peft's `ParamWrapper`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError, Tensor

_WRAPPER = ".base_layer"
_ORDER = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")  # as transformers defines them
# From this version on A has the inputs and B the outputs; before, A had the first of the two axes.
_BY_INPUTS = (0, 19)

type Pair = Mapping[str, Tensor]


def read_targets(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that `target_parameters` names, but for whole modules' ("q_proj.weight").

    Raises:
        CheckpointError: one is none of an expert stack.
    """
    given = config.get("target_parameters") or []
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise CheckpointError(path, f"target_parameters is {given!r:.200}, not a list of names")
    targets = tuple(one for one in given if one.rpartition(".")[2] != "weight")
    if other := [one for one in targets if one.rpartition(".")[2] not in _ORDER]:
        reason = f"target_parameters has {other[0]!r:.100}; of parameters only {', '.join(_ORDER)}"
        raise CheckpointError(path, f"{reason} of experts are read; merge it with PEFT")
    return targets


def has_inputs_first(config: Mapping[str, Any]) -> bool:
    """Whether a stack's A has the axis of the inputs, whatever the order of its axes is."""
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
        names = [one for one in names if any(f".{one}".endswith(f".{each}") for each in known)]
        if not names and list(found) == [0]:
            single[module] = found[0]
        elif sorted(found) == list(range(len(names))):
            stacks |= {one: found[len(names) - 1 - i] for i, one in enumerate(names)}
        else:
            reason = f"{module} has {len(found)} lora_A, and target_parameters names {len(names)}"
            raise CheckpointError(path, f"{reason} of its parameters")
    return single, stacks
