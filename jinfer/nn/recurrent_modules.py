"""Recurrent modules: short convolution, state spaces, delta rule, RG-LRU, linear attention, WKV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec.recurrent_blocks import (
    BonusSpec,
    ConvSpec,
    DeltaSpec,
    LinearAttentionSpec,
    RGLRUSpec,
    SelectiveScanSpec,
    ShiftSpec,
    SSMSpec,
    WKV7Spec,
    WKVSpec,
)
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.parameter import parameter
from jinfer.ops.activation import activate
from jinfer.ops.attention.kv_cache import StateCache
from jinfer.ops.norm import normalize_l2
from jinfer.ops.recurrence.diagonal_state import rg_lru, selective_scan
from jinfer.ops.recurrence.matrix_state import gated_delta, linear_attention, rwkv7, ssd, step_size
from jinfer.ops.recurrence.rwkv4 import wkv
from jinfer.ops.recurrence.short_conv import short_conv
from jinfer.ops.reductions import mean_of_row

if TYPE_CHECKING:
    from jaxtyping import Float

_L2_EPS = 1e-6


class ShortConv(nnx.Module):
    """Short causal convolution, depthwise."""

    def __init__(self, block: ConvSpec, dtype: DTypeLike) -> None:
        self.block = block
        self.weight = parameter((block.size, block.kernel), ("channels", "taps"), jnp.float32)
        if block.bias:
            self.bias = parameter((block.size,), ("channels",), jnp.float32)

    def __call__(
        self, x: Float[Array, "1 tokens channels"], batch: ForwardBatch, cache: StateCache
    ) -> tuple[Float[Array, "1 tokens channels"], StateCache]:
        """Computes the convolved inputs, after the activation."""
        bias = self.bias[...] if self.block.bias else None
        y, table = short_conv(
            _rows(x), self.weight[...].T, bias, cache["inputs"], batch.sequence_runs()
        )
        if self.block.activation is not None:
            y = activate(self.block.activation, y)
        return y[None].astype(x.dtype), {"inputs": table}


class SSM(nnx.Module):
    """State space of Mamba-2 (SSD)."""

    def __init__(self, block: SSMSpec, dtype: DTypeLike) -> None:
        self.block = block
        heads = (block.heads,), ("ssm_heads",), jnp.float32
        self.a_log, self.d, self.dt_bias = (parameter(*heads) for _ in range(3))

    def __call__(
        self,
        x: Float[Array, "1 tokens width"],
        b: Float[Array, "1 tokens inputs"],
        c: Float[Array, "1 tokens inputs"],
        dt: Float[Array, "1 tokens heads"],
        batch: ForwardBatch,
        cache: StateCache,
    ) -> tuple[Float[Array, "1 tokens width"], StateCache]:
        """Computes the heads' concatenated outputs."""
        block = self.block
        y, table = ssd(
            _heads(x, block.heads),
            step_size(dt[0], self.dt_bias[...], (block.least, math.inf)),
            _decay_rate(self.a_log[...], block.stored),
            _heads(b, block.groups),
            _heads(c, block.groups),
            self.d[...],
            cache["state"],
            batch.sequence_runs(),
        )
        return y.reshape(x.shape).astype(x.dtype), {"state": table}


class SelectiveScan(nnx.Module):
    """State space of Mamba-1."""

    def __init__(self, block: SelectiveScanSpec, dtype: DTypeLike) -> None:
        self.block = block
        channels = (block.width,), ("channels",), jnp.float32
        self.a_log = parameter((block.width, block.states), ("channels", "states"), jnp.float32)
        self.d, self.dt_bias = parameter(*channels), parameter(*channels)

    def __call__(
        self,
        x: Float[Array, "1 tokens width"],
        b: Float[Array, "1 tokens states"],
        c: Float[Array, "1 tokens states"],
        dt: Float[Array, "1 tokens width"],
        batch: ForwardBatch,
        cache: StateCache,
    ) -> tuple[Float[Array, "1 tokens width"], StateCache]:
        """Computes the channels' outputs."""
        y, table = selective_scan(
            _rows(x),
            step_size(dt[0], self.dt_bias[...]),
            _decay_rate(self.a_log[...], self.block.stored).T,
            _rows(b),
            _rows(c),
            self.d[...],
            cache["state"],
            batch.sequence_runs(),
        )
        return y[None].astype(x.dtype), {"state": table}


class GatedDelta(nnx.Module):
    """Gated delta rule: gated delta net, Kimi Delta Attention (KDA)."""

    def __init__(self, block: DeltaSpec, dtype: DTypeLike) -> None:
        self.block = block
        width = block.heads * block.key_dim if block.channels else block.heads
        self.a_log = parameter((block.heads,), ("delta_heads",), jnp.float32)
        self.dt_bias = parameter((width,), ("delta_heads",), jnp.float32)

    def __call__(
        self,
        q: Float[Array, "1 tokens keys"],
        k: Float[Array, "1 tokens keys"],
        v: Float[Array, "1 tokens values"],
        decay: Float[Array, "1 tokens decays"],
        beta: Float[Array, "1 tokens heads"],
        batch: ForwardBatch,
        cache: StateCache,
    ) -> tuple[Float[Array, "1 tokens values"], StateCache]:
        """Computes the heads' concatenated outputs."""
        block = self.block
        times = block.heads // block.key_heads if block.repeat == "tile" else 1
        y, table = gated_delta(
            _tiled(unit_length(_heads(q, block.key_heads)), times) / math.sqrt(block.key_dim),
            _tiled(unit_length(_heads(k, block.key_heads)), times),
            _heads(v, block.heads),
            self._log_decay(_rows(decay) + self.dt_bias[...][None]),
            block.beta_scale * activate("sigmoid", _rows(beta)),
            cache["state"],
            batch.sequence_runs(),
        )
        return y.reshape(v.shape).astype(v.dtype), {"state": table}

    def _log_decay(self, decay: Float[Array, "tokens decays"]) -> Array:
        rate = _decay_rate(self.a_log[...], self.block.stored)[None]
        if self.block.channels:
            decay, rate = decay.reshape(-1, self.block.heads, self.block.key_dim), rate[..., None]
        if self.block.lower is None:
            return rate * activate("softplus", decay)
        return self.block.lower * activate("sigmoid", -rate * decay)


class RGLRU(nnx.Module):
    """RG-LRU: real-gated linear recurrent unit (arXiv 2402.19427)."""

    def __init__(self, block: RGLRUSpec, dtype: DTypeLike) -> None:
        self.decay = parameter((block.width,), ("channels",), jnp.float32)

    def __call__(
        self,
        x: Float[Array, "1 tokens width"],
        input_gate: Float[Array, "1 tokens width"],
        recurrence_gate: Float[Array, "1 tokens width"],
        batch: ForwardBatch,
        cache: StateCache,
    ) -> tuple[Float[Array, "1 tokens width"], StateCache]:
        """Computes the channels' states."""
        rows = _rows(x), _rows(input_gate), _rows(recurrence_gate)
        y, table = rg_lru(*rows, self.decay[...], cache["state"], batch.sequence_runs())
        return y[None].astype(x.dtype), {"state": table}


class LinearAttention(nnx.Module):
    """Linear attention with a fixed decay a head."""

    def __init__(self, block: LinearAttentionSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self,
        q: Float[Array, "1 tokens width"],
        k: Float[Array, "1 tokens width"],
        v: Float[Array, "1 tokens width"],
        batch: ForwardBatch,
        cache: StateCache,
    ) -> tuple[Float[Array, "1 tokens width"], StateCache]:
        """Computes the heads' concatenated outputs."""
        heads = self.block.heads
        slopes = [self.block.slope * 2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]
        y, table = linear_attention(
            _heads(q, heads),
            _heads(k, heads),
            _heads(v, heads),
            jnp.asarray(slopes, jnp.float32),
            cache["state"],
            batch.sequence_runs(),
        )
        return y.reshape(v.shape).astype(v.dtype), {"state": table}


class Shift(nnx.Module):
    """Token shift."""

    def __init__(self, block: ShiftSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, x: Float[Array, "1 tokens width"], batch: ForwardBatch, cache: StateCache
    ) -> tuple[Float[Array, "1 tokens width"], StateCache]:
        """Returns the vectors of the previous tokens."""
        taps = jnp.zeros((2, self.block.size), jnp.float32).at[0].set(1.0)
        y, table = short_conv(_rows(x), taps, None, cache["inputs"], batch.sequence_runs())
        return y[None].astype(x.dtype), {"inputs": table}


class WKV(nnx.Module):
    """Time mixing of RWKV-4."""

    def __init__(self, block: WKVSpec, dtype: DTypeLike) -> None:
        channels = (block.width,), ("channels",), jnp.float32
        self.decay, self.bonus = parameter(*channels), parameter(*channels)

    def __call__(
        self,
        k: Float[Array, "1 tokens width"],
        v: Float[Array, "1 tokens width"],
        batch: ForwardBatch,
        cache: StateCache,
    ) -> tuple[Float[Array, "1 tokens width"], StateCache]:
        """Computes weighted means of the values."""
        rows = _rows(k), _rows(v), self.decay[...], self.bonus[...]
        y, table = wkv(*rows, cache["state"], batch.sequence_runs())
        return y[None].astype(v.dtype), {"state": table}


class WKV7(nnx.Module):
    """Time mixing of RWKV-7."""

    def __init__(self, block: WKV7Spec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self,
        r: Float[Array, "1 tokens keys"],
        decay: Float[Array, "1 tokens keys"],
        k: Float[Array, "1 tokens keys"],
        v: Float[Array, "1 tokens values"],
        removal: Float[Array, "1 tokens keys"],
        rate: Float[Array, "1 tokens keys"],
        batch: ForwardBatch,
        cache: StateCache,
    ) -> tuple[Float[Array, "1 tokens values"], StateCache]:
        """Computes the heads' concatenated outputs."""
        heads = self.block.heads
        y, table = rwkv7(
            _heads(r, heads),
            -math.exp(-0.5) * activate("sigmoid", _heads(decay, heads)),
            _heads(k, heads),
            _heads(v, heads),
            unit_length(_heads(removal, heads), eps=1e-24),
            _heads(rate, heads),
            cache["state"],
            batch.sequence_runs(),
        )
        return y.reshape(v.shape).astype(v.dtype), {"state": table}


class Bonus(nnx.Module):
    """The bonus of a token's own value in RWKV-7."""

    def __init__(self, block: BonusSpec, dtype: DTypeLike) -> None:
        shape = block.heads, block.key_dim
        self.weight = parameter(shape, ("channels", "head_dim"), jnp.float32)

    def __call__(
        self,
        r: Float[Array, "1 tokens keys"],
        k: Float[Array, "1 tokens keys"],
        v: Float[Array, "1 tokens values"],
    ) -> Float[Array, "1 tokens values"]:
        """Computes each head's value times the sum of r k weight."""
        heads = self.weight.shape[0]
        products = _heads(r, heads) * _heads(k, heads) * self.weight[...][None]
        factors = mean_of_row(products) * products.shape[-1]
        return (factors * _heads(v, heads)).reshape(v.shape).astype(v.dtype)


def _rows(x: Float[Array, "1 tokens width"]) -> Float[Array, "tokens width"]:
    return x[0].astype(jnp.float32)


def _heads(x: Float[Array, "1 tokens width"], heads: int) -> Float[Array, "tokens heads dim"]:
    return _rows(x).reshape(x.shape[1], heads, -1)


def _tiled(x: Float[Array, "tokens heads dim"], times: int) -> Float[Array, "tokens more dim"]:
    """Repeats all heads, as a whole, `times` times."""
    return x if times == 1 else jnp.tile(x, (1, times, 1))


def unit_length(x: Float[Array, "*rows dim"], eps: float = _L2_EPS) -> Float[Array, "*rows dim"]:
    """x / sqrt(sum(x^2) + eps)."""
    return normalize_l2(x, None, eps=eps)


def _decay_rate(a_log: Array, stored: str) -> Array:
    """Returns a, which is negative."""
    return -jnp.exp(a_log) if stored == "log" else a_log
