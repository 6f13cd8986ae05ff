"""Well-known model shapes, from published configurations, as work for the cost model."""

from __future__ import annotations

from dataclasses import dataclass

from jinfer.parallel.cost_model import ModelCost


@dataclass(frozen=True)
class KnownShape:
    """A Llama-like decoder, or a mixture of experts with its attention.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, inner, vocab: its sizes.
        experts, chosen: 1 for a dense model.
        matrices: of a feed-forward: 3 if gated.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    experts: int = 1
    chosen: int = 1
    matrices: int = 3

    def work(self, bits: float) -> ModelCost:
        """Its cost with weights of so many bits, and 16 for everything else."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        expert = self.matrices * self.hidden * self.inner
        rest = 2 * self.vocab * self.hidden
        whole = self.layers * (attention + self.experts * expert) + rest
        active = self.layers * (attention + self.chosen * expert) + rest / 2
        return ModelCost(
            weights=whole * bits / 8,
            active=active * bits / 8,
            parameters=active,
            layers=self.layers,
            hidden=2 * self.hidden,
            vocab=4 * self.vocab,
            cache=4 * self.layers * self.kv_heads * self.head_dim,
            kv_heads=self.kv_heads,
            tables=rest / 2 * bits / 8,
        )


SHAPES = {
    "Llama-2-7B": KnownShape(32, 4096, 32, 32, 128, 11008, 32000),
    "Llama-2-13B": KnownShape(40, 5120, 40, 40, 128, 13824, 32000),
    "Yi-34B": KnownShape(60, 7168, 56, 8, 128, 20480, 64000),
    "Falcon-40B": KnownShape(60, 8192, 128, 8, 64, 32768, 65024, matrices=2),
    "Mixtral-8x7B": KnownShape(32, 4096, 32, 8, 128, 14336, 32000, experts=8, chosen=2),
    "Llama-2-70B": KnownShape(80, 8192, 64, 8, 128, 28672, 32000),
}
