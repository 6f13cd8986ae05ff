"""The scheduler, with nothing to compute: a step adds tokens that it makes up."""

import random
from dataclasses import replace

import pytest

from jinfer.engine.requests import QueueFullError, Request
from jinfer.engine.runner.model_runner import flat_sizes
from jinfer.engine.scheduling.block_manager import BlockManager
from jinfer.engine.scheduling.block_pool import BlockPool
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.engine.scheduling.step_plan import StepPlan, split_budget
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.sampling.sampling_params import SamplingParams

SIZES = (16, 64, 256, 512)


def scheduler(
    blocks: int = 100,
    slots: int = 4,
    chunk: int = 512,
    mixed: int = 64,
    queue: int | None = None,
) -> Scheduler:
    manager = BlockManager({"all": BlockPool(blocks)})
    return Scheduler(manager, slots, chunk, mixed, SIZES, queue)


def sequence(
    id: int, length: int, new: int = 10, *, begin: int | None = None, **more: int
) -> RunningSequence:
    first = id * 10_000 if begin is None else begin
    prompt = tuple(range(first, first + length))
    request = Request(id, prompt, SamplingParams(), length + new, **more)  # type: ignore[arg-type]
    return RunningSequence(request, id, list(prompt))


def launch(plan: StepPlan, blocks: BlockManager) -> None:
    """What the engine notes when it launches a plan."""
    for chunk in plan.chunks:
        chunk.sequence.computed += chunk.count
        held = chunk.sequence.block_tables
        assert held is not None
        blocks.register(held, chunk.sequence.tokens, chunk.sequence.computed)
        chunk.sequence.in_flight += chunk.samples
    for one in plan.decoding:
        one.in_flight += plan.steps


def read(sequences: list[RunningSequence]) -> None:
    """What it does when it has read the results."""
    for one in sequences:
        if one.in_flight:
            count = min(one.in_flight, one.request.limit - len(one.tokens))
            one.tokens += [7_000_000 + len(one.tokens) + i for i in range(count)]
            one.in_flight = 0
            one.computed = len(one.tokens) - 1


def test_a_prompt_alone_is_computed_in_whole_chunks() -> None:
    s = scheduler()
    s.submit(one := sequence(1, 1500))
    counts = []
    while True:
        plan = s.plan(8)
        if plan.decoding:
            break
        counts.append([chunk.count for chunk in plan.chunks])
        launch(plan, s.blocks)
    assert counts == [[512], [512], [476]]
    assert plan.decoding == (one,)


def test_a_chunk_is_not_mostly_padding() -> None:
    s = scheduler()
    s.submit(sequence(1, 300))
    counts = []
    for _ in range(3):
        launch(plan := s.plan(8), s.blocks)
        counts.append(sum(chunk.count for chunk in plan.chunks))
    assert counts == [256, 44, 0]


def test_streams_do_not_wait_for_a_long_prompt() -> None:
    s = scheduler(mixed=64)
    streams = [sequence(i, 5, 500) for i in range(3)]
    for one in streams:
        s.submit(one)
    for _ in range(3):
        launch(s.plan(1), s.blocks)
        read(streams)
    s.submit(long := sequence(9, 1000))
    steps = 0
    while long.computed < 1000:
        plan = s.plan(8)
        assert set(plan.decoding) == set(streams)
        assert plan.steps == 1
        assert sum(chunk.count for chunk in plan.chunks) + 3 <= 64
        launch(plan, s.blocks)
        read(streams)
        steps += 1
    assert steps == -(-1000 // 61) + 1  # of the last one's 27 tokens, 16 and then the rest


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    s = scheduler()
    s.submit(sequence(1, 2000))
    s.submit(short := sequence(2, 30))
    plan = s.plan(8)
    assert {chunk.sequence: chunk.count for chunk in plan.chunks}[short] == 30
    assert sum(chunk.count for chunk in plan.chunks) == 64, "no longer than that: it waits"


def test_shares() -> None:
    assert split_budget([("a", 100), ("b", 5), ("c", 100)], 60) == [("a", 55), ("b", 5)]
    assert split_budget([("a", 100), ("b", 50), ("c", 90)], 60) == [("a", 30), ("b", 30)]
    assert split_budget([("a", 20), ("b", 50), ("c", 20)], 60) == [("a", 20), ("b", 20), ("c", 20)]
    assert split_budget([("a", 1), ("b", 1)], 60) == [("a", 1), ("b", 1)]
    assert split_budget([("a", 9), ("b", 9), ("c", 9)], 2) == [("a", 2)]
    assert split_budget([("a", 9), ("b", 1)], 1) == [("a", 1)]
    assert split_budget([], 60) == []


def test_prompts_that_come_together_are_done_one_after_the_other() -> None:
    wanted = dict.fromkeys("abcd", 94)
    done = []
    for step in range(7):
        for name, count in split_budget(list(wanted.items()), 64):
            wanted[name] -= count
            if not wanted[name]:
                done.append((name, step))
                del wanted[name]
    assert done == [("a", 1), ("b", 2), ("c", 4), ("d", 5)]


def test_priorities_then_arrival() -> None:
    s = scheduler(slots=2)
    for id, priority in ((1, 0), (2, 5), (3, -1), (4, 0)):
        s.submit(sequence(id, 10, priority=priority))
    assert [one.request.id for one in s.plan(8).admitted] == [3, 1]
    s.remove(s.running[0])
    assert [one.request.id for one in s.plan(8).admitted] == [4]


def test_one_of_a_lower_priority_gives_way() -> None:
    """Its slot goes to a request that waits, as soon as its tokens have been read."""
    s = scheduler(slots=2, queue=0)
    low = [sequence(i, 10, 100, priority=9) for i in (1, 2)]
    for one in low:
        s.submit(one)
    while not all(one.in_flight for one in low):
        launch(s.plan(8), s.blocks)
    with pytest.raises(QueueFullError):
        s.submit(sequence(3, 10, priority=9))
    high = sequence(4, 200)
    s.submit(high)
    assert s.plan(8).must_read
    read(low)
    plan = s.plan(8)
    assert plan.admitted == (high,)
    assert low[1].preempted == 1
    assert (plan.chunks[0].count, plan.decoding) == (200, ()), "the other one waits for its prompt"
    launch(plan, s.blocks)
    read([high])
    assert set(s.plan(8).decoding) == {low[0], high}
    s.remove(high)
    assert s.plan(8).admitted == (low[1],)


def test_blocks_of_a_lower_priority_are_given_back() -> None:
    s = scheduler(blocks=4, slots=2)
    low, high = sequence(1, 3 * BLOCK, 1, priority=1), sequence(2, 3 * BLOCK, 1)
    s.submit(low)
    launch(s.plan(1), s.blocks)
    s.submit(high)
    read([low])
    assert s.plan(1).admitted == (high,)
    assert low.preempted == 1


def test_the_queue_is_bounded() -> None:
    s = scheduler(queue=2, slots=1)
    for id in (1, 2, 4):
        s.submit(sequence(id, 10))
    with pytest.raises(QueueFullError, match=r"2 requests wait already.*engine\.queue"):
        s.submit(sequence(3, 10))


def test_deadlines() -> None:
    s = scheduler(slots=1)
    for id, deadline in ((1, 5), (2, 9), (3, None)):
        s.submit(sequence(id, 10, deadline=deadline))  # type: ignore[arg-type]
    s.plan(1)
    assert [one.request.id for one in s.expired(6.0)] == [1]
    assert [one.request.id for one in s.expired(9.0)] == [1, 2]


def test_the_last_to_come_is_preempted_and_computed_again() -> None:
    s = scheduler(blocks=8)
    first, second = sequence(1, 200, 200), sequence(2, 190, 200)
    for one in (first, second):
        s.submit(one)
    for _ in range(200):
        plan = s.plan(1)
        if plan.must_read:
            read([first, second])
            continue
        launch(plan, s.blocks)
        if second.preempted:
            break
    read([first])
    assert second.block_tables is None
    assert second.tokens[:190] == list(second.request.prompt)
    assert first.block_tables is not None
    s.remove(first)
    plan = s.plan(1)
    assert plan.admitted == (second,)
    assert second.computed > 0, "some of its blocks have not been needed by others"
    assert s.preemptions == 1


def test_tokens_are_read_before_anybody_is_preempted() -> None:
    s = scheduler(blocks=7)
    pair = [sequence(i, 190, 200) for i in (1, 2)]
    for one in pair:
        s.submit(one)
    waited = 0
    for _ in range(20):
        if (plan := s.plan(1)).must_read:
            waited += 1
            assert any(one.in_flight for one in pair)
            assert not s.preemptions
            break
        launch(plan, s.blocks)
    assert waited


def test_a_beginning_that_another_computes_is_waited_for() -> None:
    s = scheduler()
    leader = sequence(1, 1000, begin=0)
    followers = [sequence(i, 1000 + i, begin=0) for i in range(2, 5)]
    for one in (leader, *followers):
        s.submit(one)
    other = sequence(8, 20)
    s.submit(other)
    plan = s.plan(8)
    assert set(plan.admitted) == {leader, other}
    launch(plan, s.blocks)
    read([leader, other])
    launch(plan := s.plan(8), s.blocks)
    while leader.computed < 1000:
        launch(s.plan(1), s.blocks)
        read([leader, other])
    plan = s.plan(1)
    assert all(990 < (one.cached or 0) <= 1000 for one in followers[:2])


@pytest.mark.parametrize("seed", range(40))
def test_everybody_ends_and_nothing_leaks(seed: int) -> None:
    """Random arrivals, cancellations and a small pool: all end, in finitely many steps."""
    rng = random.Random(seed)
    s = scheduler(
        rng.randint(6, 20), rng.randint(1, 5), rng.choice([64, 512]), mixed=rng.choice([16, 64])
    )
    most = s.blocks.pools["all"].count * BLOCK
    left = [
        sequence(
            i, rng.randint(1, min(300, most - 60)), rng.randint(1, 50), priority=rng.randint(0, 1)
        )
        for i in range(12)
    ]
    alive: list[RunningSequence] = []
    steps = 0
    while left or alive:
        steps += 1
        assert steps < 3000
        if left and rng.random() < 0.3:
            s.submit(one := left.pop())
            alive.append(one)
        if alive and rng.random() < 0.02:
            s.remove(alive.pop(rng.randrange(len(alive))))
        plan = s.plan(rng.choice([1, 8]))
        if not plan.must_read:
            launch(plan, s.blocks)
            slots = [one.slot for one in s.running]
            assert len(set(slots)) == len(slots)
        if plan.must_read or plan.empty or rng.random() < 0.7:
            read(s.running)
        for one in [one for one in alive if len(one.tokens) >= one.request.limit]:
            assert len(one.tokens) == one.request.limit
            s.remove(one)
            alive.remove(one)
    assert s.blocks.used == 0
    assert not s.running
    assert not s.waiting


def test_lanes_take_turns() -> None:
    """Sequences are spread over lanes; a call has those of one lane, and an empty one no turn."""
    s = scheduler(slots=6)
    s.micro_batches = 3
    both = [sequence(number, 5) for number in (1, 2)]
    for one in both:
        s.submit(one)
    launch(plan := s.plan(1), s.blocks)
    assert [one.slot % 3 for one in both] == [0, 1]
    assert [chunk.sequence for chunk in plan.chunks] == [both[0]]
    launch(plan := s.plan(1), s.blocks)
    assert [chunk.sequence for chunk in plan.chunks] == [both[1]]
    read(both)
    turns: list[RunningSequence] = []
    for _ in range(4):
        launch(plan := s.plan(1), s.blocks)
        turns += plan.decoding
    assert turns == [*both, *both]
    assert s.calls_ahead(launched=True, unread=4) == 2
    # Nothing could be launched, so one result at least is waited for.
    assert s.calls_ahead(launched=False, unread=2) == 1
    assert s.calls_ahead(launched=False, unread=1) == 0
    s.submit(third := sequence(3, 5))
    s.plan(1)
    assert third.slot % 3 == 2


def test_a_prompt_is_not_dripped_in_beside_streams() -> None:
    """A step of 16 beside 15 streams would take one of its tokens at a time."""
    s = scheduler(slots=16)
    streams = [sequence(i, 1) for i in range(15)]
    for one in (*streams, new := sequence(99, 7)):
        s.submit(one)
    plan = s.plan(1)
    assert len(plan.decoding) == 15
    assert [(chunk.sequence, chunk.count) for chunk in plan.chunks] == [(new, 7)]


def test_steps_are_not_mostly_padding() -> None:
    s = replace(scheduler(), sizes=(1, 4, 8, 16, 32, 64, 256, 512))
    assert s.fit_batch(96) == 64, "64 and 32 instead of 256"
    assert s.fit_batch(200) == 64
    assert s.fit_batch(250) == 250
    assert s.fit_batch(5) == 5, "two steps cost more than three rows"
    assert s.fit_batch(40, decoding=30) == 40, "of 32 rows two would be left"


def test_sizes_of_batches_are_doubled_up_to_a_chunk() -> None:
    usual = flat_sizes(512, 96, 8)
    assert usual[-1] == 512
    assert flat_sizes(2000, 96, 8) == (*usual, 1024, 2000)
    assert flat_sizes(20, 17, 40)[-1] == 41
