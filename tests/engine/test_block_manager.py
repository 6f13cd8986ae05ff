"""Blocks: held, shared, copied, given back, found again; against a plain list of what is held."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.engine.scheduling.block_manager import RELEASED, BlockManager, BlockTables
from jinfer.engine.scheduling.block_pool import BlockPool
from jinfer.engine.scheduling.cache_size import cache_blocks
from jinfer.modelspec.model_spec import EngineSpec
from jinfer.ops.attention.kv_cache import BLOCK, CacheShape

RNG = np.random.default_rng(1)
TEXT = RNG.integers(0, 1000, 1000).tolist()


def manager(blocks: int = 40, **windows: int) -> BlockManager:
    pools = {"all": BlockPool(blocks)}
    pools |= {f"window {w}": BlockPool(blocks, w) for w in windows.values()}
    return BlockManager(pools)


def computed(
    blocks: BlockManager, tokens: list[int], reuse: bool = True
) -> tuple[BlockTables, int, list]:
    """A sequence all of whose tokens are in the cache."""
    held, cached, copies = blocks.share_prefix(tokens, reuse=reuse)
    assert blocks.reserve(held, len(tokens))
    blocks.register(held, tokens, len(tokens))
    return held, cached, copies


def test_nothing_is_cached_at_first() -> None:
    blocks = manager()
    held, cached, copies = computed(blocks, TEXT[:200])
    assert (cached, copies) == (0, [])
    assert [len(table) for table in held.by_group.values()] == [4]
    assert blocks.used == 4
    blocks.free(held)
    assert blocks.used == 0


@pytest.mark.parametrize(
    ("length", "same", "expected"),
    [
        (220, 220, 219),  # all but the last token, whose logits are wanted
        (300, 220, 220),
        (300, 140, 140),
        (300, 128, 128),
        (300, 136, 136),
        (300, 135, 128),
        (192, 192, 191),
        (300, 70, 64),  # 6 more are not worth a copy
        (300, 60, 60),
        (300, 5, 0),
        (300, 0, 0),
    ],
)
@pytest.mark.parametrize("ended", [False, True])
def test_a_common_beginning_is_found(length: int, same: int, expected: int, ended: bool) -> None:
    blocks = manager()
    first, _, _ = computed(blocks, TEXT[:220])
    if ended:
        blocks.free(first)
    other = TEXT[:same] + [-1 - t for t in TEXT[same:length]]
    held, cached, copies = blocks.share_prefix(other[:length])
    assert cached == expected
    assert len(copies) == (expected % BLOCK > 0)
    full = expected // BLOCK
    if not ended:
        assert held.by_group["all"][:full] == first.by_group["all"][:full]
        assert not set(held.by_group["all"][full:]) & set(first.by_group["all"])
    for copy in copies:
        assert copy.target == held.by_group["all"][full]


def test_what_depends_on_something_else_is_not_shared() -> None:
    blocks = manager()
    computed(blocks, TEXT[:200])
    assert blocks.share_prefix(TEXT[:200], b"another encoder's text")[1] == 0
    assert blocks.share_prefix(TEXT[:200], reuse=False)[1] == 0


def test_the_least_recently_used_goes_first() -> None:
    blocks = manager(8)
    for begin in (0, 200):
        blocks.free(computed(blocks, TEXT[begin : begin + 200])[0])  # 4 blocks each
    again, cached, _ = blocks.share_prefix(TEXT[:200])
    assert cached == 192
    blocks.free(again)
    # Takes what the last one did not need, and three of the second's, its end first.
    blocks.free(computed(blocks, TEXT[500:700])[0])
    assert blocks.share_prefix(TEXT[:200])[1] == 192
    assert blocks.share_prefix(TEXT[200:400])[1] == 64


def test_a_held_block_is_never_given_away() -> None:
    blocks = manager(4)
    held, _, _ = computed(blocks, TEXT[:200])
    other = blocks.share_prefix(TEXT[300:400])[0]
    assert not blocks.reserve(other, 1)
    blocks.free(other)
    blocks.free(held)
    assert blocks.reserve(blocks.share_prefix(TEXT[300:400])[0], 100)


def test_a_window_gives_back_what_it_has_left() -> None:
    blocks = manager(window=100)
    held, _, _ = computed(blocks, TEXT[:400])
    blocks.slide_window(held, 300)  # sees from 201 on
    assert held.by_group["window 100"][:4] == [RELEASED] * 3 + held.by_group["window 100"][3:4]
    assert blocks.pools["window 100"].used == 4
    assert blocks.pools["all"].used == 7
    blocks.slide_window(held, 300)
    assert blocks.pools["window 100"].used == 4
    # What was given back is found while nobody needs its place.
    other, cached, _ = blocks.share_prefix(TEXT[:400])
    assert cached == 399
    assert other.by_group["window 100"][:4] == [RELEASED] * 4
    blocks.free(other)
    blocks.free(held)
    assert blocks.used == 0


def test_a_beginning_without_its_window_is_not_used() -> None:
    blocks = BlockManager({"all": BlockPool(40), "window": BlockPool(8, 100)})
    held, _, _ = computed(blocks, TEXT[:200])
    blocks.slide_window(held, 400)
    blocks.free(held)
    busy = blocks.share_prefix(TEXT[500:900])[0]
    assert blocks.pools["window"].available == 8
    assert blocks.reserve(busy, 8 * BLOCK)  # takes all of the window's blocks
    held, cached, copies = blocks.share_prefix(TEXT[:200])
    assert (cached, copies) == (0, [])


def test_a_fork_shares_full_blocks_and_copies_the_last() -> None:
    blocks = manager(window=100)
    held, _, _ = computed(blocks, TEXT[:200])
    made = blocks.fork(held, 150)
    assert made is not None
    other, copies = made
    for name in blocks.pools:
        assert other.by_group[name][:2] == held.by_group[name][:2]
        assert other.by_group[name][2] != held.by_group[name][2]
    assert sorted(copy.source for copy in copies) == sorted(t[2] for t in held.by_group.values())
    blocks.free(held)
    blocks.free(other)
    assert blocks.used == 0
    small = manager(4)
    assert small.fork(computed(small, TEXT[:200])[0], 150) is None
    assert small.used == 4


def test_an_encoders_output_is_shared_whole() -> None:
    blocks = BlockManager({"all": BlockPool(8)}, BlockPool(6))
    first, second, other = (blocks.share_prefix([1], reuse=False)[0] for _ in range(3))
    assert blocks.reserve_encoder(first, TEXT[:100])
    assert not first.encoder_filled
    blocks.register_encoder(first, TEXT[:100])
    assert blocks.reserve_encoder(second, TEXT[:100])
    assert second.encoder_filled
    assert second.encoder == first.encoder
    assert blocks.reserve_encoder(other, TEXT[:99])
    assert not set(other.encoder) & set(first.encoder)
    assert not blocks.reserve_encoder(blocks.share_prefix([1], reuse=False)[0], TEXT[:500])
    for held in (first, second, other):
        blocks.free(held)
    assert blocks.used == 0


@settings(max_examples=60)
@given(data=st.data())
def test_against_counting(data: st.DataObject) -> None:
    """Whatever happens, every block is held as often as tables name it, and the rest is free."""
    blocks = BlockManager({"all": BlockPool(12), "window 80": BlockPool(12, 80)})
    live: list[tuple[BlockTables, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        what = data.draw(st.sampled_from(["start", "end", "fork", "grow", "slide"]), "what")
        if what == "start":
            begin = data.draw(st.sampled_from([0, 0, 300]), "begin")
            tokens = TEXT[begin : begin + data.draw(st.integers(1, 300), "length")]
            held = blocks.share_prefix(tokens)[0]
            if blocks.reserve(held, len(tokens)):
                blocks.register(held, tokens, len(tokens))
                live.append((held, tokens))
            else:
                blocks.free(held)
        elif live:
            index = data.draw(st.integers(0, len(live) - 1), "which")
            held, tokens = live[index]
            if what == "end":
                blocks.free(live.pop(index)[0])
            elif what == "fork":
                length = data.draw(st.integers(0, len(tokens)), "at")
                if RELEASED not in held.by_group["window 80"][: -(-length // BLOCK)] and (
                    made := blocks.fork(held, length)
                ):
                    live.append((made[0], tokens[:length]))
            elif what == "grow":
                tokens = tokens + TEXT[600 : 600 + data.draw(st.integers(1, 100), "more")]
                if blocks.reserve(held, len(tokens)):
                    blocks.register(held, tokens, len(tokens))
                    live[index] = (held, tokens)
            else:
                blocks.slide_window(held, len(tokens))
        for name, pool in blocks.pools.items():
            named = Counter(b for held, _ in live for b in held.by_group[name] if b != RELEASED)
            assert pool.used == len(named)
            assert all(pool._references[block] == count for block, count in named.items())
    for held, _ in live:
        blocks.free(held)
    assert blocks.used == 0


def test_a_window_alone_has_room_for_beams() -> None:
    """Of one slot; where no layer looks back farther, all blocks are the window's."""
    shapes = {"decoder.0.attn": CacheShape(1, 8, 8, "window 24", 24)}
    one = cache_blocks(shapes, np.float32, EngineSpec(slots=1), 256, free=1 << 30)
    assert one == cache_blocks(shapes, np.float32, EngineSpec(slots=4), 256, free=1 << 30)
    little = cache_blocks(shapes, np.float32, EngineSpec(slots=1), 256, free=1 << 10)
    assert 4 * little["window 24"] == one["window 24"]
