"""An engine put together as a specification sizes it, and the programs that it will need."""

from __future__ import annotations

import jax

from jinfer.engine.blocks import BlockManager, BlockPool
from jinfer.engine.device import flat_sizes
from jinfer.engine.engine import Engine
from jinfer.engine.memory import cache_blocks
from jinfer.engine.programs import Programs, Shape, Sizes
from jinfer.engine.scheduler import Scheduler
from jinfer.guard.shelf import Shelf
from jinfer.model import AbstractModel
from jinfer.opening.settings import Opened
from jinfer.ops.cache import ENCODER
from jinfer.sampling.names import STAGES
from jinfer.sampling.order import PLAIN


def assemble(model: AbstractModel, opened: Opened, shelf: Shelf | None = None) -> Engine:
    """An engine whose weights are yet to be loaded.

    Args:
        shelf: where its programs are kept.
    """
    spec, context = opened.spec.engine, opened.context
    shapes = model.caches
    used = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.parameters))
    blocks = cache_blocks(
        shapes,
        opened.kv_cache,
        slots=spec.slots,
        context=context,
        chunk=spec.prefill_chunk,
        tokens=spec.kv_tokens,
        used=used,
    )
    windows = {shape.group: shape.window for shape in shapes.values()}
    pools = {g: BlockPool(n, windows[g]) for g, n in blocks.items() if g != ENCODER}
    encoder = BlockPool(blocks[ENCODER]) if ENCODER in blocks else None
    sizes = Sizes(spec.slots, context, opened.spec.dims.get("vocab", 0), blocks, opened.kv_cache)
    mixed = max(spec.mixed_chunk, spec.slots + 1)
    scheduler = Scheduler(
        BlockManager(pools, encoder),
        spec.slots,
        spec.prefill_chunk,
        mixed,
        flat_sizes(spec.prefill_chunk, mixed, spec.slots),
        spec.queue,
    )
    return Engine(programs=Programs(model, sizes, shelf), scheduler=scheduler)


def first_shapes(engine: Engine, prompt: int) -> list[Shape]:
    """The programs that a request needs if it comes alone, and asks for nothing unusual."""
    scheduler, shapes = engine.scheduler, [Shape("admit")]
    while prompt > 1:
        count = scheduler.filling(min(scheduler.chunk, prompt))
        shapes.append(Shape("logits", engine.size_of(count), 1))
        prompt -= count
    chosen = Shape("choose", chosen=1, stages=PLAIN)
    return [*dict.fromkeys(shapes), chosen, Shape("decode", 1, stages=PLAIN)]


def all_shapes(engine: Engine) -> list[Shape]:
    """The programs that requests of every kind but beam and contrastive search may need."""
    if not engine.model.caches:
        return []
    slots = engine.programs.sizes.slots
    counts = sorted({engine.row_count(n) for n in range(1, slots + 1)})
    flat = [
        Shape("logits", size, chosen)
        for size in engine.scheduler.sizes
        for chosen in sorted({1, engine.chosen_count(size, 2)})
    ]
    shapes = [Shape("admit"), Shape("copy"), *flat]
    choices = sorted({shape.chosen for shape in flat})
    for stages in (PLAIN, STAGES):
        shapes += [Shape("choose", chosen=count, stages=stages) for count in choices]
        shapes += [Shape("decode", count, stages=stages) for count in counts]
    return shapes
