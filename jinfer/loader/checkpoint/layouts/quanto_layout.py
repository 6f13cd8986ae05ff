"""optimum-quanto checkpoints: `X.weight._data` in I8 or FP8 beside `X.weight._scale` of its rows.

Matrices of 4 and 2 bits (`X.weight._data._data`) lie in rows of a group each, and the file does not
say how many of them are a row of the matrix: they are refused.
"""

from __future__ import annotations

from dataclasses import replace

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.layouts.fp8_layout import join_all_fp8
from jinfer.loader.checkpoint.layouts.module_tensors import TensorTable
from jinfer.loader.checkpoint.layouts.quant_settings import INSTEAD
from jinfer.loader.checkpoint.layouts.scaled_layout import join_int8

CODES = ".weight._data"
PACKED = ".weight._data._data"
_SCALE = ".weight._scale"


def is_quanto(name: str) -> bool:
    """Whether a tensor is one of quanto's, which writes no settings into config.json."""
    return name.endswith((CODES, PACKED))


def read_quanto(table: TensorTable) -> None:
    """Joins each matrix with its scales.

    Raises:
        CheckpointError: one has none, they do not fit, or it has fewer than 8 bits.
    """
    table.drop(("input_scale", "output_scale"))
    for name, tensor in list(table.tensors.items()):
        if name.endswith(PACKED):
            reason = f"tensor {name[:200]!r}: quanto's 4 and 2 bits do not say their matrix's shape"
            raise CheckpointError(table.path, f"{reason}, and are not read: {INSTEAD}")
        for ending, usual in ((CODES, ".weight"), (_SCALE, ".weight_scale")):
            if name.endswith(ending):
                own = name.removesuffix(ending) + usual
                if table.find(own) is not None:
                    raise table.fail(own, f"is there beside {name[:200]!r}: which is meant?")
                table.take(name)
                table.put(replace(tensor, name=own))
    for module in table.modules("weight", ("I8",)):
        join_int8(module, "weight_scale")
    join_all_fp8(table, None)
