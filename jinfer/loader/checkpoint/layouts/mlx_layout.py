"""MLX checkpoints: codes packed along inputs, with a scale and a bias for each group.

    X.weight  U32 [*stack, o, k b / 32]   a stream of bits along inputs, the lowest first
    X.scales, X.biases   [*stack, o, k / g]

Tables of embeddings and heads are stored so too. Bits and size of a group are one pair for all, or
a pair for each module, in config.json's `quantization`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, unpack_stream
from jinfer.loader.checkpoint.layouts.microscaling_layout import join_microscaled, join_mxfp8
from jinfer.loader.checkpoint.layouts.module_tensors import (
    FLOATS,
    ModuleTensors,
    TensorTable,
    as_float32,
)
from jinfer.loader.checkpoint.layouts.quant_settings import QuantSettings

_BITS = (2, 3, 4, 5, 6, 8)


def read_mlx(table: TensorTable, settings: QuantSettings) -> None:
    """Joins the tensors of each quantized module to its weight.

    Raises:
        CheckpointError: settings or tensors that cannot be read.
    """
    for module in table.modules("weight", ("U32",)):
        own = settings
        if isinstance(settings.value(module.prefix[:-1]), dict):
            own = settings.inner(module.prefix[:-1]) or settings
        mode = own.text("mode") or settings.text("mode", "affine")
        if mode == "affine":
            _join(module, own, settings)
        elif mode in ("mxfp4", "nvfp4"):
            join_microscaled(module, mode)
        elif mode == "mxfp8":
            join_mxfp8(module)
        else:
            raise own.refused(f"mode {mode[:40]!r}")


def _join(module: ModuleTensors, own: QuantSettings, general: QuantSettings) -> None:
    bits = own.number("bits", among=_BITS, default=general.number("bits", default=4))
    group = own.number("group_size", default=general.number("group_size", default=64))
    weight = module.need("weight", ("U32",))
    *rows, words = weight.shape
    inputs = words * 32 // bits
    if len(rows) < 1 or group < 1 or words * 32 % bits or inputs % group:
        reason = f"is {list(weight.shape)}, which are not whole groups of {group} with {bits} bits"
        raise module.fail("weight", reason)
    scales = module.need("scales", FLOATS, (*rows, inputs // group))
    biases = module.need("biases", FLOATS, (*rows, inputs // group))
    found = GroupedCodes(
        (*rows, inputs),
        bits,
        group,
        lambda: unpack_stream(np.asarray(weight.read()), bits),
        partial(as_float32, scales),
        biases=partial(as_float32, biases),
    )
    module.join(f"MLX {bits} bits", (weight, scales, biases), found)
