"""Recurrent states: a device whose states are the tokens they sum up shows every wrong reuse."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from jinfer.engine.requests import Request
from jinfer.engine.scheduling.block_manager import BlockCopy, BlockManager, BlockTables
from jinfer.engine.scheduling.block_pool import BlockPool
from jinfer.engine.scheduling.border_snapshots import keep_borders, reserve_borders, spread
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.engine.scheduling.state_pool import StatePool
from jinfer.engine.scheduling.step_plan import StepPlan
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.sampling.sampling_params import SamplingParams

SIZES = (16, 64, 256, 512)


@dataclass
class Device:
    """Computes no numbers: a state is the list of the tokens before, a KV block its tokens."""

    scheduler: Scheduler
    states: dict[int, list[int]] = field(default_factory=dict)
    kv: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    computed: int = 0

    def copy(self, copies: list[BlockCopy] | tuple[BlockCopy, ...]) -> None:
        for one in copies:
            if one.group == "state":
                self.states[one.target] = list(self.states[one.source])
            else:
                self.kv[one.group, one.target] = dict(self.kv[one.group, one.source])

    def compute(self, tables: BlockTables, tokens: list[int], start: int, count: int) -> None:
        assert tables.state is not None
        before = self.states[tables.state] if start else []
        assert before == tokens[:start], "a state of other tokens"
        for position in range(start, start + count):
            for name, table in tables.by_group.items():
                block = name, table[position // BLOCK]
                self.kv.setdefault(block, {})[position % BLOCK] = tokens[position]
                first = 0 if self.scheduler.blocks.pools[name].window is None else position - 7
                for seen in range(max(0, first), position + 1):
                    assert self.kv[name, table[seen // BLOCK]][seen % BLOCK] == tokens[seen]
        self.states[tables.state] = tokens[: start + count]
        self.computed += count

    def run(self, plan: StepPlan, new: int) -> None:
        """What the engine does with a plan, and with its results."""
        blocks = self.scheduler.blocks
        self.copy(plan.copies)
        done = []
        for one in (*plan.decoding, *(chunk.sequence for chunk in plan.chunks)):
            assert one.block_tables is not None
            blocks.slide_window(one.block_tables, min(one.computed, len(one.tokens) - 1))
        for chunk in plan.chunks:
            one = chunk.sequence
            assert one.block_tables is not None
            reserve_borders(blocks, one.block_tables, chunk.start, chunk.start + chunk.count)
            self.compute(one.block_tables, one.tokens, chunk.start, chunk.count)
            for border, block in one.block_tables.copies.items():
                self.states[block] = one.tokens[: border * BLOCK]
            one.computed += chunk.count
            blocks.register(one.block_tables, one.tokens, one.computed)
            keep_borders(blocks, one.block_tables)
            if one.computed in one.snapshots:
                self.copy(blocks.snapshot(one.block_tables, one.tokens[: one.computed]))
            done += [one] if chunk.samples else []
        for one in plan.decoding:
            assert one.block_tables is not None
            for _ in range(plan.steps):
                if len(one.tokens) > len(one.request.prompt) + new:
                    break
                self.compute(one.block_tables, one.tokens, len(one.tokens) - 1, 1)
                one.tokens.append(7000 + len(one.tokens) % 5)
            one.computed = len(one.tokens) - 1
        for one in done:
            one.tokens.append(9000)
            one.computed = len(one.tokens) - 1
        for one in list(self.scheduler.running):
            if len(one.tokens) >= one.request.limit:
                assert one.block_tables is not None
                blocks.register(one.block_tables, one.tokens, one.computed)
                self.scheduler.remove(one)


def make(
    states: int, *, kv: int = 60, window: int = 0, slots: int = 4, most: int | None = None
) -> Device:
    pools = {"all": BlockPool(kv)} if kv else {}
    pools |= {"window 8": BlockPool(80, 8)} if window else {}
    manager = BlockManager(pools, None, StatePool(states, most))
    return Device(Scheduler(manager, slots, 256, 64, SIZES))


def sequence(id: int, prompt: list[int], new: int) -> RunningSequence:
    request = Request(id, tuple(prompt), SamplingParams(), len(prompt) + new)
    return RunningSequence(request, id, list(prompt))


def run(device: Device, sequences: list[RunningSequence], new: int) -> None:
    for one in sequences:
        device.scheduler.submit(one)
    for _ in range(10_000):
        if not (device.scheduler.running or device.scheduler.waiting):
            break
        device.run(device.scheduler.plan(4), new)
    assert not device.scheduler.running
    assert not device.scheduler.waiting
    assert device.scheduler.blocks.used == 0


def prompts(common: int, count: int, own: int) -> list[list[int]]:
    return [[*range(common), *range(1000 * i, 1000 * i + own)] for i in range(1, count + 1)]


@pytest.mark.parametrize("kv", [60, 0])
def test_a_common_prompt_is_computed_once(kv: int) -> None:
    device = make(24, kv=kv * 10)
    sequences = [sequence(i, one, 5) for i, one in enumerate(prompts(1000, 16, 30))]
    run(device, sequences, 5)
    decoded = 16 * 4
    assert device.computed <= 1064 + 16 * 30 + decoded
    assert sequences[-1].cached == 1000


def test_prompts_of_the_same_tokens_share_all_but_the_last() -> None:
    device = make(12)
    sequences = [sequence(i, list(range(300)), 3) for i in range(4)]
    run(device, sequences, 3)
    assert [one.cached for one in sequences] == [0, 299, 299, 299]


def test_a_conversation_goes_on_from_its_last_state() -> None:
    device = make(12)
    first = sequence(0, list(range(100)), 20)
    run(device, [first], 20)
    more = sequence(1, [*first.tokens, *range(500, 510)], 5)
    run(device, [more], 5)
    assert more.cached == len(first.tokens) - 1


@pytest.mark.parametrize("kv", [200, 0])
@pytest.mark.parametrize("common", [64, 96, 200, 400, 1000])
def test_the_second_prompt_reuses_whole_blocks(common: int, kv: int) -> None:
    device = make(100, kv=kv)
    every = [sequence(i, one, 2) for i, one in enumerate(prompts(common, 3, 40))]
    for one in every:
        run(device, [one], 2)
    whole = common // BLOCK * BLOCK
    assert [one.cached for one in every] == [0, whole, whole]


def test_few_snapshots_of_a_long_prompt() -> None:
    """The second reuses half at least, and leaves one where it parted for the third."""
    device = make(12, kv=200)
    every = [sequence(i, one, 2) for i, one in enumerate(prompts(1000, 3, 600))]
    for one in every:
        run(device, [one], 2)
    assert [one.cached for one in every] == [0, 8 * BLOCK, 1000 // BLOCK * BLOCK]
    assert spread(1, 20, 20) == [*range(1, 21)]
    assert spread(1, 20, 11) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert spread(3, 40, 3) == [8, 16, 32]


def test_beginnings_that_came_twice_outlast_others() -> None:
    """Snapshots are few: those of ten other prompts do not displace a common beginning."""
    device = make(12, kv=400, most=4)
    system = [7] * 150
    for i in range(2):
        run(device, [sequence(i, [*system, *range(1000 * i, 1000 * i + 40)], 2)], 2)
    for i in range(2, 12):
        run(device, [sequence(i, [*range(1000 * i, 1000 * i + 300)], 2)], 2)
    later = sequence(20, [*system, *range(500)], 2)
    run(device, [later], 2)
    assert later.cached == 128
    assert device.scheduler.blocks.states is not None
    assert device.scheduler.blocks.states.snapshots == 4


def test_a_conversation_outlasts_prompts_that_are_passed() -> None:
    device = make(12, kv=400)
    first = sequence(0, list(range(100)), 20)
    run(device, [first], 20)
    run(device, [sequence(1, [*range(5000, 7000)], 2)], 2)
    more = sequence(2, [*first.tokens, *range(500, 510)], 5)
    run(device, [more], 5)
    assert more.cached == len(first.tokens) - 1


def test_snapshots_give_way_to_sequences() -> None:
    device = make(4, slots=4)
    for turn in range(3):
        run(device, [sequence(i, [turn, i, *range(300)], 3) for i in range(4)], 3)
    states = device.scheduler.blocks.states
    assert states is not None
    assert states.snapshots == 4


@pytest.mark.parametrize("most", [0, 2])
def test_a_budget_of_snapshots(most: int) -> None:
    device = make(12, most=most)
    for turn in range(4):
        run(device, [sequence(i, [turn, i, *range(300)], 3) for i in range(3)], 3)
        states = device.scheduler.blocks.states
        assert states is not None
        assert states.snapshots == most


def test_fork_copies_the_state() -> None:
    manager = BlockManager({"all": BlockPool(9)}, None, StatePool(2))
    tables, _, _ = manager.share_prefix(range(10))
    assert manager.reserve_all(tables, 10, 0)
    forked = manager.fork(tables, 9)
    assert forked is not None
    assert BlockCopy("state", tables.state, forked[0].state) in forked[1]  # type: ignore[arg-type]
    assert manager.fork(tables, 9) is None
    manager.free(tables)
    manager.free(forked[0])
    assert manager.used == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_find_their_own_states(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.choice([1, 3, 6])
    device = make(
        slots + rng.choice([0, 1, 5]),
        kv=rng.choice([0, 20, 40]),
        window=rng.choice([0, 8]),
        most=rng.choice([None, 0, 1, 3]),
        slots=slots,
    )
    new = rng.randint(1, 90)
    stems = [[rng.randrange(9) for _ in range(rng.randint(1, 600))] for _ in range(3)]
    for turn in range(4):
        every = []
        for i in range(rng.randint(1, 9)):
            stem = rng.choice(stems)
            own = [rng.randrange(9) for _ in range(rng.randint(1, 80))]
            every.append(sequence(100 * turn + i, stem[: rng.randint(0, len(stem))] + own, new))
            if rng.random() < 0.3:
                stems.append(every[-1].tokens)
        run(device, every, new)
    device.scheduler.blocks.clear()
