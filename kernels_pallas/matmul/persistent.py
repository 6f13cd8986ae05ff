"""A chain of quantized matmuls as one persistent Mosaic GPU kernel for Hopper.

Every program stays on its multiprocessor for all links of a chain (`chain`). One of its warp groups
only copies: tile after tile of 64 rows and 1,024 inputs, of all links, into a ring of stages. So
while programs wait for each other between links, the ring fills with the next link's weights. The
others, consumers, compute x of a link, wait until all programs have, and multiply: each tile's
slices are shared among them, and each adds up its own, as partial sums that the next link's
computation adds.

Interpret mode has no semaphores: there each step (a link's x, its products) is a launch of its own,
unless there is one program, which waits for nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas import mosaic_common
from kernels_pallas.matmul.chain import (
    MOST_ROWS,
    OUTPUTS,
    SUPERBLOCK,
    ChainCut,
    ChainLink,
    ChainResult,
    Intermediate,
    PartialSums,
)
from kernels_pallas.matmul.chain_products import NUMBERS, WORDS, LinkRefs, Shared, consume, produce
from kernels_pallas.matmul.chain_rows import RowOperand, RowTargets, compute_rows, row_tasks
from kernels_pallas.matmul.prologue import PrologueOperand
from kernels_pallas.mosaic_common import plgpu
from kernels_pallas.ptx import fence_async

# Registers of a thread: of the warp group that copies, and of those that compute, by their number.
# What these take the other must have given back (a launch gives all 168 or 96), or they wait for
# ever.
_COPYING, _COMPUTING = 40, {2: 232, 4: 104}


class Step(NamedTuple):
    """A part of the kernel's work: a link's x, or its products."""

    link: int
    kind: str


@dataclass(frozen=True)
class _Plan:
    """What the kernel is compiled for.

    Attributes:
        rows: of x.
        steps: that this launch computes.
    """

    links: tuple[ChainLink, ...]
    cut: ChainCut
    rows: int
    steps: tuple[Step, ...]
    interpret: bool


def run_chain(
    links: Sequence[ChainLink],
    rows: int,
    cut: ChainCut,
    *,
    interpret: bool = False,
) -> ChainResult:
    """Computes a chain.

    Args:
        links: whose matrices `chain_supports` accepts.
        rows: of x, at most `MOST_ROWS`.
    """
    steps = [Step(n, kind) for n in range(len(links)) for kind in ("x", "products")]
    state: dict[tuple[Any, ...], Any] = {}
    launches = [[step] for step in steps] if interpret and cut.programs > 1 else [steps]
    for launched in launches:
        plan = _Plan(tuple(links), cut, rows, tuple(launched), interpret)
        state |= _launch(plan, state)
    return ChainResult(
        tuple(
            tuple(state[n, "parts", m] for m in range(len(link.matrices)))
            for n, link in enumerate(links)
        ),
        tuple(
            tuple(state[n, "extra", m][:rows] for m in range(len(link.extra)))
            for n, link in enumerate(links)
        ),
    )


def _launch(plan: _Plan, state: dict[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Runs some steps on the results of earlier ones, and returns theirs."""
    fixed: dict[tuple[Any, ...], Any] = {}
    for n, link in enumerate(plan.links):
        fixed[n, "index", 0] = jnp.zeros((1,), jnp.int32) if link.index is None else link.index
        for m, operand in enumerate(link.operands):
            if isinstance(operand, PrologueOperand):
                fixed[n, "operand", m] = _flat(operand, plan.rows)
        for m, matrix in enumerate(link.matrices):
            words = matrix.half_words()
            fixed[n, "words", m] = words.reshape(*words.shape[:2], -1)
            (numbers,) = matrix.numbers()
            fixed[n, "numbers", m] = numbers.reshape(*numbers.shape[:2], -1)
    given = fixed | state
    out = {key: shape for step in plan.steps for key, shape in _results(plan, step).items()}

    def kernel(*refs: Any) -> None:
        _kernel(plan, dict(zip([*given, *out], refs, strict=True)))

    call = mosaic_common.mosaic_call(
        kernel,
        "persistent_chain",
        list(out.values()),
        {"program": plan.cut.programs},
        warp_groups=plan.cut.consumers + 1,
        interpret=plan.interpret,
    )
    return dict(zip(out, call(*given.values()), strict=True))


def _flat(operand: PrologueOperand, rows: int) -> Array:
    """An operand in the shape of its kind."""
    array = operand.array
    shapes = {
        "full": (rows, -1),
        "parts": array.shape,
        "vector": (-1,),
        "row": (rows,),
        "one": (1,),
    }
    flat: Array = array.reshape(shapes[operand.kind])
    return flat


def _results(plan: _Plan, step: Step) -> dict[tuple[Any, ...], jax.ShapeDtypeStruct]:
    """The arrays that a step writes."""
    n, link = step.link, plan.links[step.link]
    if step.kind == "products":
        parts = plan.cut.split[n] * plan.cut.consumers
        return {
            (n, "parts", m): jax.ShapeDtypeStruct((parts, MOST_ROWS, matrix.outputs), jnp.float32)
            for m, matrix in enumerate(link.matrices)
        }
    copies = plan.cut.programs if plan.cut.computes_alone(n) else 1
    lead = (copies, link.superblocks, MOST_ROWS)
    width = link.superblocks * SUPERBLOCK
    return {
        (n, "x", 0): jax.ShapeDtypeStruct((*lead, SUPERBLOCK), jnp.float16),
        (n, "highest", 0): jax.ShapeDtypeStruct(lead, jnp.float32),
    } | {
        (n, "extra", m): jax.ShapeDtypeStruct((MOST_ROWS, width), dtype)
        for m, dtype in enumerate(link.extra)
    }


def _kernel(plan: _Plan, refs: dict[tuple[Any, ...], Any]) -> None:
    cut = plan.cut
    words = mosaic_common.shared_memory_transforms(64, 16)
    tile = functools.partial(plgpu.SMEM, transforms=words)
    staged = [tile((cut.consumers, OUTPUTS, 64), jnp.float16)] if plan.interpret else []
    pl.run_scoped(
        lambda *shared: _run(plan, refs, Shared(*shared)),
        tile((cut.stages, OUTPUTS, WORDS), jnp.uint16),
        tile((cut.stages, OUTPUTS, NUMBERS), jnp.float16),
        tile((cut.x_stages, MOST_ROWS, SUPERBLOCK), jnp.float16),
        plgpu.Barrier(num_arrivals=2, num_barriers=cut.stages),
        plgpu.Barrier(num_arrivals=cut.consumers, num_barriers=cut.stages),
        plgpu.Barrier(num_barriers=cut.x_stages),
        plgpu.Barrier(num_arrivals=cut.consumers, num_barriers=cut.x_stages),
        plgpu.Barrier(num_arrivals=cut.consumers),
        staged,
        collective_axes="group",
    )


def _run(plan: _Plan, refs: dict[tuple[Any, ...], Any], shared: Shared) -> None:
    """One warp group."""
    group = lax.axis_index("group")
    links = [_link_refs(plan, refs, n) for n in range(len(plan.links))]
    several = plan.cut.programs > 1 and len(plan.steps) > 1
    semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((len(plan.steps),))) if several else None
    registers = _COMPUTING.get(plan.cut.consumers)
    multiplied = [links[step.link] for step in plan.steps if step.kind == "products"]

    @pl.when(group == plan.cut.consumers)
    def copy() -> None:
        if registers is not None:
            plgpu.set_max_registers(_COPYING, action="decrease")
        produce(plan.cut, multiplied, shared)

    @pl.when(group < plan.cut.consumers)
    def compute() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers, action="increase")
        done = jnp.int32(0), jnp.int32(0)
        for n, step in enumerate(plan.steps):
            link = links[step.link]
            if step.kind == "x":

                @pl.when(group == 0)
                def rows(step: Step = step) -> None:
                    _compute_x(plan, refs, step.link)
                    if not plan.interpret:
                        fence_async()

            else:
                done = consume(plan.cut, link, shared, group, done, interpret=plan.interpret)
            if n == len(plan.steps) - 1:
                continue
            alone = step.kind == "x" and plan.cut.computes_alone(step.link)
            if semaphores is None or alone:
                plgpu.barrier_arrive(shared.joined)
                plgpu.barrier_wait(shared.joined)
            else:
                arrivals = plan.cut.programs * plan.cut.consumers
                semaphore = semaphores.at[n]
                plgpu.semaphore_signal(semaphore, memory_scope="gpu")
                plgpu.semaphore_wait(semaphore, arrivals, decrement=False, memory_scope="gpu")
            if step.kind == "x" and not plan.interpret:
                fence_async()


def _link_refs(plan: _Plan, refs: dict[tuple[Any, ...], Any], n: int) -> LinkRefs:
    count = len(plan.links[n].matrices)
    own = lax.axis_index("program") if plan.cut.computes_alone(n) else 0
    x, highest = (refs.get((n, name, 0)) for name in ("x", "highest"))
    return LinkRefs(
        split=plan.cut.split[n],
        superblocks=plan.links[n].superblocks,
        index=refs[n, "index", 0],
        words=[refs[n, "words", m] for m in range(count)],
        numbers=[refs[n, "numbers", m] for m in range(count)],
        x=None if x is None else x.at[own],
        highest=None if highest is None else highest.at[own],
        parts=[refs.get((n, "parts", m)) for m in range(count)],
    )


def _compute_x(plan: _Plan, refs: dict[tuple[Any, ...], Any], n: int) -> None:
    """A program's share of a link's x; all of it if programs compute alone."""
    link, alone = plan.links[n], plan.cut.computes_alone(n)
    program = lax.axis_index("program")
    own = program if alone else 0
    operands = []
    for m, operand in enumerate(link.operands):
        match operand:
            case PartialSums(earlier, matrix):
                operands.append(RowOperand(refs[earlier, "parts", matrix], "parts"))
            case Intermediate(earlier, place):
                operands.append(RowOperand(refs[earlier, "extra", place], "full"))
            case PrologueOperand():
                operands.append(RowOperand(refs[n, "operand", m], operand.kind))
    extra = [refs[n, "extra", m] for m in range(len(link.extra))]
    targets = RowTargets(refs[n, "x", 0].at[own], refs[n, "highest", 0].at[own], extra)
    tasks, step = row_tasks(link, plan.rows), 1 if alone else plan.cut.programs
    first = jnp.int32(0) if alone else program
    keeps = (program == 0) if alone else jnp.bool_(True)

    def one(i: Array, _: None) -> None:
        compute_rows(
            link,
            first + i * step,
            operands,
            targets,
            keeps_extra=keeps,
            interpret=plan.interpret,
        )

    lax.fori_loop(0, lax.div(jnp.maximum(tasks - first, 0) + (step - 1), step), one, None)
