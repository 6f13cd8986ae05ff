"""Building an engine as its specification sizes it, and listing the programs to be compiled."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jinfer.disk_cache import DiskCache
from jinfer.engine.engine import Engine
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.edit_tables import StepTaps
from jinfer.engine.runner.image_encoder import PATCHES, ImageEncoder
from jinfer.engine.runner.image_rows import EncodedImages, ImageFeatures, ImageShapes
from jinfer.engine.runner.model_runner import SIZES, ModelRunner, flat_sizes
from jinfer.engine.runner.step_key import Sizes, StepKey
from jinfer.engine.scheduling.block_manager import BlockManager
from jinfer.engine.scheduling.block_pool import BlockPool
from jinfer.engine.scheduling.cache_size import cache_blocks
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.engine.scheduling.state_pool import StatePool
from jinfer.loader.open_model import Opened
from jinfer.loader.weights import load_weights
from jinfer.loader.weights.plan_weights import WeightPlan, plan_weights
from jinfer.loader.weights.quantized_cache import entry_key
from jinfer.loader.weights.read_weights import Put, on_device
from jinfer.modelspec.formula import Formula
from jinfer.modelspec.layer_spec import StackSpec
from jinfer.modelspec.position_blocks import RopeSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.nn.lora_rows import is_adapter
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER, STATE, nbytes
from jinfer.ops.backend import backend
from jinfer.parallel.distributed.current_group import current_group
from jinfer.progress import line, track
from jinfer.sampling.sampler_chain import sampler_sets
from jinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinfer.images.prepared_image import PreparedImage
    from jinfer.speculate.build_drafters import OpenedDrafters

_GIB = 1 << 30
_SMALL_WEIGHTS = 1 << 30  # bytes


def plan_images(opened: Opened, program_cache: DiskCache | None = None) -> WeightPlan | None:
    """The plan of the weights of a model's encoder of images; None if it has none."""
    if opened.spec.vision is None or opened.images is None:
        return None
    model = build_abstract_model(opened.spec.vision, np.dtype(opened.dtype), program_cache)
    return plan_weights(model, opened.spec.vision, opened.images, opened.activations)


def build_image_encoder(
    plan: WeightPlan, engine: Engine, program_cache: DiskCache | None = None
) -> ImageEncoder:
    """The encoder of images for an engine, on its home device; `load_image_encoder` follows."""
    return ImageEncoder.of(plan.model, program_cache, engine.runner.programs.home_device)


def encoded_images(opened: Opened, encoder: ImageEncoder) -> EncodedImages:
    """The features of images for an engine: what its encoder gives, and what is kept of it."""
    spec, vision, decoder = opened.spec, opened.spec.vision, opened.spec.decoder
    assert spec.image is not None, "it has an encoder of images"
    assert vision is not None, "it has an encoder of images"
    assert decoder is not None, "it has an encoder of images"
    grid = spec.image.position == "grid"
    if grid and not any(rope.has_grid for rope in _ropes(decoder)):
        reason = '"grid" needs a rope whose three `sections` are all of its pairs; set them'
        raise SpecError(spec.path, "image.position", reason)
    hidden, deepstack = int(spec.dims["hidden"]), 0
    if any("deepstack" in stack.head.assigned for stack in vision.stacks):
        made = encoder.runner.programs.abstract_result(StepKey("encode_image", PATCHES[0], rows=1))
        deepstack = made["deepstack"].shape[-1] // hidden

    def encode(image: PreparedImage) -> ImageFeatures:
        return ImageFeatures(*encoder.encode(image.patches, image.grids).rows(image.order))

    shapes = ImageShapes(hidden, deepstack, grid, spec.image.mask, _feature_place(decoder.stem))
    return EncodedImages(shapes, encode, int(spec.engine.image_cache * _GIB))


def _ropes(stack: StackSpec) -> Iterator[RopeSpec]:
    for layer in stack.layers:
        for _, block in layer.modules:
            if isinstance(rope := getattr(block, "position", None), RopeSpec):
                yield rope


def _feature_place(stem: Formula) -> str:
    """The activation that features replace: the stem's value, or another that it equals."""
    value = stem.statements[-1][1]
    if isinstance(value, ast.Name) and value.id in stem.assigned - {"x"}:
        return f"decoder.stem.{value.id}"
    return "embed"


def load_image_encoder(encoder: ImageEncoder, plan: WeightPlan, *, progress: bool = False) -> None:
    """Gives an encoder of images its weights."""
    device = encoder.runner.programs.device
    put: Put = on_device
    if device is not None:
        from jinfer.speculate.draft_model import put_on

        put = put_on(device)
    encoder.runner.parameters = load_weights.load(plan, put, progress=progress)


def build_engine(
    opened: Opened,
    model: AbstractModel,
    program_cache: DiskCache | None = None,
    images: WeightPlan | None = None,
) -> Engine:
    """An engine whose weights are yet to be loaded.

    Args:
        model: its parameters as they will be stored.
        program_cache: where its programs are kept.
        images: the plan of the encoder of images, whose weights take memory as well.

    Raises:
        SpecError: `[partition]` asks for what cannot be.
    """
    spec = opened.spec.engine
    if spec.kv_tokens is not None and spec.kv_tokens < BLOCK:
        raise SpecError(
            opened.spec.path,
            "engine.kv_tokens",
            f"{spec.kv_tokens} is less than a block of the cache, {BLOCK} tokens: a sequence needs "
            "room for its prompt and its answer",
        )
    programs: CompiledPrograms
    if current_group() is not None:
        programs = _in_processes(opened, model)
    elif opened.spec.partition.is_plain:
        others = 0 if images is None else nbytes(images.model.parameters)
        programs = _on_one_device(opened, model, program_cache, others)
    else:
        programs = _in_stages(opened, model)
    pipeline: Any = programs.pipeline
    blocks = programs.sizes.blocks
    windows = {shape.group: shape.window for shape in model.caches.values()}
    pools = {g: BlockPool(n, windows[g]) for g, n in blocks.items() if g not in (ENCODER, STATE)}
    encoder = BlockPool(blocks[ENCODER]) if ENCODER in blocks else None
    states = StatePool(blocks[STATE], spec.state_snapshots) if STATE in blocks else None
    mixed = max(spec.mixed_chunk, spec.slots + 1)
    scheduler = Scheduler(
        BlockManager(pools, encoder, states),
        spec.slots,
        spec.prefill_chunk,
        mixed,
        flat_sizes(spec.prefill_chunk, mixed, spec.slots),
        spec.queue,
        1 if pipeline is None else pipeline.lanes.count,
    )
    return Engine(runner=ModelRunner(programs=programs), scheduler=scheduler)


def open_drafts(
    opened: Opened, source: str | Path, overrides: Mapping[str, Any]
) -> OpenedDrafters | None:
    """What `[speculation]` asks for, opened; None: nothing."""
    if not opened.spec.speculation.draft:
        return None
    # Here: without speculative decoding none of its imports is needed.
    from jinfer.speculate.build_drafters import open_drafters

    return open_drafters(opened, source, overrides)


def forget_tokenizer(tokenizer: Tokenizer | None) -> None:
    """Frees the grammars (`jinfer.sampling.structured`) and the trie of a closed model."""
    structured = sys.modules.get("jinfer.sampling.structured")
    if structured is not None and tokenizer is not None:
        structured.forget_constraints(tokenizer)


def load(
    engine: Engine, plan: WeightPlan, images: WeightPlan | None = None, *, progress: bool = False
) -> None:
    """Gives an engine its weights, on the devices where they are to be, and its offload's stores.

    Args:
        images: the plan of its encoder of images, on which cached prefixes depend too.

    Raises:
        SpecError: a store cannot be had.
    """
    pipeline: Any = engine.runner.programs.pipeline
    start_offload(engine, plan, images)
    if pipeline is None:
        loaded = load_weights.load(plan, progress=progress)
        known = dict(zip(plan.plain.names, loaded, strict=True)) | empty_adapters(
            engine.runner.model
        )
        engine.runner.parameters = tuple(known[name] for name in engine.runner.model.names)
        return
    from jinfer.parallel.sharded_loading import load_stages

    if progress and pipeline.memory:
        line(pipeline.memory)
    engine.runner.leaves = load_stages(plan, pipeline.stages, progress=progress)


def empty_adapters(model: AbstractModel) -> dict[str, Any]:
    """The stacks of a model's adapters before any is loaded."""
    shapes = zip(model.names, model.parameters, strict=True)
    found = {name: np.zeros(one.shape, one.dtype) for name, one in shapes if is_adapter(name)}
    return {name: jax.device_put(values) for name, values in found.items()}


def place_parameters(engine: Engine, values: Mapping[str, Any]) -> None:
    """Puts other values of some parameters in place of what an engine has of them.

    Calls that are in flight keep those that they were given. Nothing is compiled.

    Args:
        values: name of each parameter -> its values in NumPy, stored as it is; of a model on
            several devices none of a quantized one.
    """
    pipeline: Any = engine.runner.programs.pipeline
    if pipeline is None:
        changed = {name: jax.device_put(each) for name, each in values.items()}
        known = zip(engine.runner.model.names, engine.runner.parameters, strict=True)
        engine.runner.parameters = tuple(changed.get(name, old) for name, old in known)
        return
    from jinfer.parallel.sharded_loading import replaced_leaves

    engine.runner.leaves = replaced_leaves(pipeline.stages, engine.runner.leaves, values)


def _on_one_device(
    opened: Opened, model: AbstractModel, program_cache: DiskCache | None, others: int
) -> CompiledPrograms:
    blocks = cache_blocks(
        model.caches,
        opened.kv_cache,
        opened.spec.engine,
        opened.context,
        used=nbytes(model.parameters) + others,
    )
    return CompiledPrograms(model, _sizes(opened, model, blocks), program_cache)


def _in_stages(opened: Opened, model: AbstractModel) -> CompiledPrograms:
    # Here: one device needs none of this, nor the modules that it imports.
    from jinfer.parallel.memory_plan import memory_planner, resolve_auto
    from jinfer.parallel.microbatches import MicroBatches
    from jinfer.parallel.pipeline import Pipeline
    from jinfer.parallel.placement import ModelToPlace, free_memory_of, make_stages, partition_plan

    dtype = np.dtype(opened.dtype)
    whole = ModelToPlace(opened.spec, model, opened.context, dtype, opened.kv_cache)
    whole, why = resolve_auto(whole)
    plan, spec = partition_plan(whole), whole.spec
    memory = memory_planner(plan, whole, free_memory_of(plan, spec)).requested()
    if memory.problem:
        raise SpecError(spec.path, "partition", memory.problem)
    sizes = _sizes(opened, model, dict(memory.blocks.total))
    pipeline = Pipeline(
        model=model,
        sizes=sizes,
        stages=make_stages(plan, whole),
        lanes=MicroBatches(plan.lanes, spec.engine.slots),
        hosted=memory.blocks.hosted,
        memory=f"{why}\n\n{memory}" if why else str(memory),
    )
    return CompiledPrograms(model, sizes, pipeline=pipeline)


def _in_processes(opened: Opened, model: AbstractModel) -> CompiledPrograms:
    from jinfer.parallel.distributed.build_programs import build_distributed_programs

    group = current_group()
    assert group is not None, "the process has joined a job"
    return build_distributed_programs(group, model, opened, partial(_sizes, opened, model))


def _sizes(opened: Opened, model: AbstractModel, blocks: dict[str, int]) -> Sizes:
    vocab, room = opened.spec.dims.get("vocab", 0), model.modules.adapters
    slots, adapters = opened.spec.engine.slots, 0 if room is None else room.count
    offsets = opened.spec.image is not None and opened.spec.image.position == "grid"
    return Sizes(slots, opened.context, vocab, blocks, opened.kv_cache, adapters, offsets)


def first_shapes(engine: Engine, prompt: int, taps: StepTaps | None = None) -> list[StepKey]:
    """The programs that one request of the usual kind needs.

    Args:
        taps: the activations that it captures and edits.
    """
    if not engine.runner.model.modules.spec.generates:
        return []
    scheduler, shapes = engine.scheduler, [StepKey("set_slot")]
    while prompt > 1:
        count = scheduler.fit_batch(min(scheduler.chunk, prompt))
        shapes.append(StepKey("logits", engine.scheduler.batch_size(count), 1, taps=taps))
        prompt -= count
    stages = sampler_sets()[0]
    chosen = StepKey("sample", chosen=1, stages=stages)
    return [*dict.fromkeys(shapes), chosen, StepKey("decode", 1, stages=stages, taps=taps)]


def announce_first(engine: Engine, prompt: int, *, progress: bool = False) -> None:
    """Starts making the programs of one request of the usual kind, before weights are loaded.

    Programs that have to be compiled are waited for on a CPU if weights are small: they are read in
    less time, and would be in memory together with what compilers need, which is freed. The weights
    of a large model are read meanwhile.
    """
    keys, programs = first_shapes(engine, prompt), engine.runner.programs
    small = backend() == "cpu" and nbytes(engine.runner.model.parameters) <= _SMALL_WEIGHTS
    compiles = programs.program_cache is not None and not programs.stored(keys)
    futures = programs.announce(keys)
    if small and compiles:
        for future in track(futures, "compiling", unit="program", shown=progress):
            wait([future])  # an error is that of the request, which compiles again


def announce_stored(engine: Engine) -> None:
    """Starts loading what is kept of the programs that requests of the usual kind need.

    They are read while the weights are. Nothing is compiled: nobody has asked for anything yet.
    """
    programs = engine.runner.programs
    programs.announce(key for key in first_shapes(engine, 1) if programs.stored([key]))


def all_shapes(engine: Engine) -> list[StepKey]:
    """The programs that requests of every kind but beam and contrastive search may need."""
    if not engine.runner.model.modules.spec.generates:
        return []
    slots = engine.runner.programs.sizes.slots
    counts = sorted({engine.runner.padded_rows(n) for n in range(1, slots + 1)})
    flat = [
        StepKey("logits", size, chosen)
        for size in engine.scheduler.sizes
        for chosen in sorted({1, engine.runner.sampled_rows(size, 2)})
    ]
    if (images := engine.runner.images) is not None:
        flat += [replace(key, images=images.shapes) for key in flat if key.tokens >= SIZES[0]]
    shapes = [StepKey("set_slot"), StepKey("copy_blocks"), *flat]
    choices = sorted({shape.chosen for shape in flat})
    for stages in sampler_sets():
        shapes += [StepKey("sample", chosen=count, stages=stages) for count in choices]
        shapes += [StepKey("decode", count, stages=stages) for count in counts]
    return shapes


def start_offload(engine: Engine, plan: WeightPlan, images: WeightPlan | None = None) -> None:
    """Connects an engine with the stores that `[engine]` asks for, if any.

    Raises:
        SpecError: a store cannot be had.
    """
    asked, path = plan.spec.engine, plan.spec.path
    if not engine.runner.model.caches:
        return
    engine.weights_key = entry_key(plan, "kv cache")
    if images is not None:
        engine.weights_key += entry_key(images, "kv cache")
    ram, disk = int(asked.cache_ram * _GIB), None
    if not ram and asked.cache_disk is None:
        return
    # Imported here, because most models ask for none.
    from jinfer.disk_cache import NoCacheError
    from jinfer.engine.offload.disk_store import DiskStore
    from jinfer.engine.offload.prefix_offload import PrefixOffload, cache_identity

    if ram > (available := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        reason = (
            f"{asked.cache_ram:g} GiB are more than the {available / _GIB:.0f} of this machine; "
            "it counts GiB, not MiB"
        )
        raise SpecError(path, "engine.cache_ram", reason)
    if reason := offload_refusal(engine):
        key = "cache_ram" if ram else "cache_disk"
        raise SpecError(path, f"engine.{key}", f"cannot be had {reason}")
    if asked.cache_disk is not None:
        folder = Path(asked.cache_disk).expanduser()
        try:
            identity = cache_identity(engine.runner.programs, engine.weights_key)
            disk = DiskStore(folder, identity, int(asked.cache_disk_size * _GIB))
        except NoCacheError as error:
            raise SpecError(path, "engine.cache_disk", str(error)) from None
    engine.offload = PrefixOffload(engine.runner, engine.scheduler, ram, disk)


def offload_refusal(engine: Engine) -> str:
    """Why blocks cannot be taken from an engine's devices and put back; "": they can."""
    if current_group() is not None:
        return "with several processes, each of which has a part of the cache; leave it out"
    pipeline = engine.runner.programs.pipeline
    if pipeline is not None and pipeline.hosted:
        return "with partition.host_kv_cache; leave one of them out"
    return ""
