"""Codes and scales made better one at a time, all others as they are.

Error feedback rounds each weight once, when it knows nothing of the roundings to come. With H the
products of the layer's inputs and E the error of the weights, the loss is tr(E H E^T), and with all
others fixed the best value of a weight, or the best scale and base of a block, is known in closed
form: coordinate descent (arXiv 2309.01885). For 3 bits of SmolLM2-135M two rounds take 3% to 8%
off the loss on other texts than the one that H is of, six rounds 1% more.
"""

from __future__ import annotations

import numpy as np

from jinfer.quant.feedback import few_rows
from jinfer.quant.format import QuantFormat
from jinfer.quant.nearest import decoded, in_blocks

ROUNDS = 2


def descend(
    values: np.ndarray,
    hessian: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray | None,
    format: QuantFormat,
    *,
    damping: float,
    kept: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes, scales and bases of less loss.

    Args:
        values: float32 [outputs, inputs].
        hessian: X^T X of the layer's inputs, times any number: [inputs, inputs].
        codes, scale, base: uint8 [outputs, blocks, block], float16 [outputs, blocks] twice.
        damping: as for `feedback`.
        kept: float32 [outputs, inputs], the weights that are kept beside the codes, NaN elsewhere.

    Returns:
        As they are given.
    """
    inputs = values.shape[1]
    H = hessian / np.diag(hessian).mean()
    H[np.diag_indices(inputs)] += damping
    H = H.astype(np.float32)
    parts = []
    for rows in few_rows(len(values)):
        numbers = (scale[rows], None if base is None else base[rows])
        exact = None if kept is None else kept[rows]
        parts.append(_some(values[rows], H, codes[rows], *numbers, format, exact))
    codes_of, scale_of, base_of = zip(*parts, strict=True)
    bases = None if base is None else np.concatenate(base_of)
    return np.concatenate(codes_of), np.concatenate(scale_of), bases


def _some(
    values: np.ndarray,
    H: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray | None,
    format: QuantFormat,
    kept: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """`descend` for some rows, with H as it is minimized."""
    outputs, inputs = values.shape
    whole = decoded(codes, scale, base, format).reshape(outputs, -1)[:, :inputs]
    error = whole - values
    free = np.ones(values.shape, np.float32)
    if kept is not None:
        error = np.where(np.isnan(kept), error, kept - values)
        free = np.isnan(kept).astype(np.float32)
    part_codes = codes.reshape(outputs, -1)[:, :inputs].astype(np.float32)
    scale, base = scale.copy(), None if base is None else base.copy()
    slope = error @ H
    for _ in range(ROUNDS):
        for number, begin in enumerate(range(0, inputs, format.block)):
            part = slice(begin, min(begin + format.block, inputs))
            block = _Block(
                part_codes[:, part] - np.float32(format.zero if base is None else 0),
                scale[:, number],
                None if base is None else base[:, number],
                error[:, part].copy(),
                slope[:, part].copy(),
                H[part, part],
                free[:, part],
            )
            block.fit()
            block.round(format)
            scale[:, number] = block.scale
            if base is not None:
                base[:, number] = block.base
            part_codes[:, part] = block.codes + np.float32(format.zero if base is None else 0)
            slope += (block.error - error[:, part]) @ H[part]
            error[:, part] = block.error
    return in_blocks(part_codes.astype(np.uint8), format.block), scale, base


class _Block:
    """A block of each row, on its way to less loss.

    Attributes:
        codes: float32 [rows, columns], less the code of 0 in symmetric formats.
        scale, base: float16 [rows].
        error, slope: [rows, columns], of the weights, and half the loss's derivative.
    """

    def __init__(
        self,
        codes: np.ndarray,
        scale: np.ndarray,
        base: np.ndarray | None,
        error: np.ndarray,
        slope: np.ndarray,
        H: np.ndarray,
        free: np.ndarray,
    ) -> None:
        self.codes, self.scale, self.base = codes, scale, base
        self.error, self.slope, self.H, self.free = error, slope, H, free

    def fit(self) -> None:
        """The best scale and base for the codes, where they are better as they are stored."""
        q = self.codes * self.free
        Hq = q @ self.H
        qq, down = _dot(Hq, q), -_dot(self.slope, q)
        if self.base is None:
            more, lift = _ratio(down, qq, qq > 0), None
        else:
            Hf = self.free @ self.H
            qf, ff, flat = _dot(Hq, self.free), _dot(Hf, self.free), -_dot(self.slope, self.free)
            det = qq * ff - qf * qf
            some = det > 1e-6 * qq * ff
            more = _ratio(down * ff - flat * qf, det, some)
            lift = self.base + _ratio(qq * flat - qf * down, det, some)
        scale = _fp16(self.scale + more)
        base = None if lift is None else _fp16(lift)
        change = q * (scale.astype(np.float32) - self.scale.astype(np.float32))[:, None]
        if base is not None and self.base is not None:
            raised = base.astype(np.float32) - self.base.astype(np.float32)
            change += self.free * raised[:, None]
        bend = change @ self.H
        better = (2 * _dot(self.slope, change) + _dot(bend, change) < 0)[:, None]
        self.error += np.where(better, change, 0)
        self.slope += np.where(better, bend, 0)
        self.scale = np.where(better[:, 0], scale, self.scale)
        if base is not None and self.base is not None:
            self.base = np.where(better[:, 0], base, self.base)

    def round(self, format: QuantFormat) -> None:
        """Each code to the nearest of what is best for it, one column after the other."""
        step = self.scale.astype(np.float32)
        least = -format.zero if self.base is None else 0
        for j, h in enumerate(self.H):
            steps = _ratio(-self.slope[:, j], h[j] * step, step != 0)
            q = np.clip(np.rint(self.codes[:, j] + steps), least, least + format.levels - 1)
            change = (q - self.codes[:, j]) * step * self.free[:, j]
            self.codes[:, j] = q
            self.error[:, j] += change
            self.slope += change[:, None] * h


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each row with its row."""
    return np.einsum("rc,rc->r", a, b)


def _ratio(above: np.ndarray, below: np.ndarray, where: np.ndarray) -> np.ndarray:
    """0 where it is not wanted."""
    return np.divide(above, below, out=np.zeros_like(above), where=where)


def _fp16(numbers: np.ndarray) -> np.ndarray:
    limit = float(np.finfo(np.float16).max)
    return np.clip(numbers, -limit, limit).astype(np.float16)
