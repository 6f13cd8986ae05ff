"""FP8 checkpoints: matrices in FP8 beside scales, by whatever writer.

`X` in FP8 has its scales in `X_scale_inv` (DeepSeek, Transformers) or `X_scale` (AutoFP8, FBGEMM,
modelopt, Quark), or in `.scale` instead of `.weight`. Scales of activations and of the KV cache are
left out: both are computed in wider types.
"""

from __future__ import annotations

from jinfer.checkpoint.layouts.module_tensors import ModuleTensors, TensorTable
from jinfer.checkpoint.layouts.quant_settings import QuantSettings
from jinfer.checkpoint.layouts.scaled_layout import FP8, Block, join_fp8

# Of activations and of the KV cache.
UNUSED_SCALES: tuple[str, ...] = ("input_scale", "activation_scale", "input_scale_ub")
UNUSED_SCALES += ("output_scale",)
UNUSED_SCALES += ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale")
UNUSED_SCALES += ("k_proj.output_scale", "v_proj.output_scale", "input_global_scale")
_INVERSE = "_scale_inv"


def read_fp8(table: TensorTable, settings: QuantSettings) -> None:
    """Joins each matrix in FP8 with its scales.

    Raises:
        CheckpointError: one has none, or they do not fit.
    """
    join_all_fp8(table, block_size(settings, "weight_block_size"))


def block_size(settings: QuantSettings, key: str) -> Block | None:
    """Rows and columns of a block; None where nothing is said."""
    block = settings.value(key)
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise settings.wrong(key, "is not a list of two sizes above 0")
    return sizes[0], sizes[1]


def join_all_fp8(table: TensorTable, block: Block | None) -> None:
    """As `read_fp8`.

    Args:
        block: rows and columns that share a scale, where there is one for each.
    """
    table.drop(UNUSED_SCALES)
    for name, tensor in list(table.tensors.items()):
        if tensor.type in FP8 and not name.endswith((_INVERSE, "_scale", ".scale")):
            scale = next(
                (each for each in _scale_names(name) if table.find(each) is not None), None
            )
            if scale is None:
                wanted = (
                    f"there is no {name[:200] + _INVERSE!r} with its scales: is a file missing?"
                )
                raise table.fail(name, wanted)
            stored = table.find(scale)
            assert stored is not None
            if block is None and scale.endswith(_INVERSE) and max((*stored.shape, 1)) > 1:
                needed = "quantization_config.weight_block_size in config.json"
                reason = f"the size of its blocks is not known: add {needed}"
                raise table.fail(scale, reason)
            join_fp8(ModuleTensors(table, ""), name, scale, block)
    for name, scales in table.tensors.items():
        if name.endswith(_INVERSE):
            weight = table.find(name.removesuffix(_INVERSE))
            if weight is None:
                wanted = f"there is no {name.removesuffix(_INVERSE)[:200]!r} with its weights"
                raise table.fail(name, f"{wanted}: is a file missing?")
            reason = f"scales in {scales.type} for {weight.type}, but they are for {FP8[0]}"
            raise table.fail(name, reason)


def _scale_names(name: str) -> list[str]:
    names = [name + _INVERSE, name + "_scale"]
    return [*names, name.removesuffix("weight") + "scale"] if name.endswith(".weight") else names
