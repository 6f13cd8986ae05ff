"""Step keys: what a compiled step depends on, and the sizes that all steps of an engine share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jinfer.engine.runner.edit_tables import StepTaps
from jinfer.engine.runner.image_rows import ImageShapes
from jinfer.nn.abstract_model import Want
from jinfer.ops.attention.kv_cache import ADAPTER, BLOCK, OFFSET
from jinfer.quant_format import Kind
from jinfer.sampling.logits_processors import Extra

# Kinds of steps, each of which has a line in `jinfer.engine.runner.step_table`.
StepKind = Literal[
    "logits", "sample", "decode", "forward", "score", "beam", "contrastive",
    "fill_cross_attention", "encode", "copy_blocks", "set_slot", "verify", "propose",
    "gather_taps", "prefill_head", "propose_with_head", "allocate_kv_cache",
    "trace", "trace_encoder", "gather_blocks", "scatter_blocks", "encode_image",
]  # fmt: skip
_OF_SEQUENCES: tuple[StepKind, ...] = ("decode", "propose", "propose_with_head", "beam")


@dataclass(frozen=True)
class StepKey:
    """The kind and the static sizes of a compiled step.

    Attributes:
        kind: a key of `jinfer.engine.runner.step_table.STEPS`.
        tokens: tokens of a flat batch; sequences of "decode", "propose", "propose_with_head" and
            "beam"; padded tokens of a text, or
            patches of a tile.
        chosen: tokens of a flat batch after which one is sampled, at most; trees of "verify".
        rows: sequences of a flat batch without a state, texts, or tiles; of "verify", places in the
            attention's batch, 0 where each token has one place; of "gather_blocks" and
            "scatter_blocks", blocks of each group.
        want: the result of "forward" and "encode".
        stages: sampling stages of "sample", "decode", "propose", "propose_with_head" and "verify".
        masked: whether "verify" takes grammar masks.
        capture: names of the values that "trace" and "trace_encoder" return.
        blocks: length of the block tables of "trace"; 0: that of all tables.
        extras: outputs that requests of "sample", "decode" and "verify" need besides tokens.
        taps: what "logits", "decode", "verify" and "beam" edit and capture, and what "trace" edits;
            None: nothing.
        images: what images change in "logits"; None: there are none.
    """

    kind: StepKind
    tokens: int = 0
    chosen: int = 0
    rows: int = 0
    want: Want = "logits"
    stages: tuple[str, ...] = ()
    masked: bool = False
    capture: tuple[str, ...] = ()
    blocks: int = 0
    extras: tuple[Extra, ...] = ()
    taps: StepTaps | None = None
    images: ImageShapes | None = None

    @property
    def sampling(self) -> tuple[Extra | str, ...]:
        """The stages, then the extras."""
        return (*self.stages, *self.extras)

    @property
    def task(self) -> str:
        """Progress message while the step is compiled."""
        unit = "sequence" if self.kind in _OF_SEQUENCES else "token"
        many = f" for {self.tokens} {unit}{'s' * (self.tokens != 1)}" if self.tokens else ""
        return f"compiling{many}, once"


@dataclass(frozen=True)
class Sizes:
    """Sizes that all steps of an engine share.

    Attributes:
        slots: sequences that run at a time.
        context: tokens that a sequence may have.
        vocab: size of the vocabulary.
        blocks: KV-cache blocks of each attention group.
        kv_cache: number format of the KV cache.
        adapters: slots of LoRA adapters.
        offsets: whether rotary positions may differ from indices (M-RoPE).
    """

    slots: int
    context: int
    vocab: int
    blocks: Mapping[str, int]
    kv_cache: Kind
    adapters: int = 0
    offsets: bool = False

    def table_shapes(self, rows: int) -> dict[str, tuple[int, int]]:
        """Shapes of the block tables of some sequences, and of adapters and offsets if any."""
        shapes = dict.fromkeys(self.blocks, (rows, self.table))
        shapes |= {ADAPTER: (rows, 2)} if self.adapters else {}
        return shapes | ({OFFSET: (rows, 1)} if self.offsets else {})

    @property
    def table(self) -> int:
        """Length of a block table: blocks of a sequence, at most."""
        return -(-self.context // BLOCK)
