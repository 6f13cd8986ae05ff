"""Counts of parameters, and bytes at each width."""

from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.open_model import open_model
from jinfer.loader.weights.model_size import (
    WIDTHS,
    Sizes,
    count_text,
    gib_text,
    sizes_of,
    stored_bits,
)
from jinfer.loader.weights.storage_plan import choose_storages
from jinfer.loader.weights.tensor_mapping import find_origins
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import resolve
from jinfer.modelspec.spec_files import families, read_toml, with_families
from jinfer.nn.abstract_model import build_abstract_model
from tests.modelspec.helpers import facts

BERT = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "hidden_act": "gelu",
}  # fmt: skip


def spec_of(family: str, config: dict[str, Any], names: tuple[str, ...] = ()) -> ModelSpec:
    path = families()[family]
    tables = with_families(read_toml(path), path)
    return resolve(tables, str(path), facts(config, names), {})


def test_shared_parameters_count_once() -> None:
    albert = BERT | {"vocab_size": 30000, "embedding_size": 128, "type_vocab_size": 2}
    sizes = sizes_of(spec_of("albert", albert, ("pooler.weight",)))
    tables = (30000 + 512 + 2 + 2) * 128
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert sizes.parameters == tables + 129 * 768 + layer + 768 * 769 == 11_683_584
    deberta = BERT | {"vocab_size": 128100, "position_buckets": 256, "type_vocab_size": 0}
    deberta |= {"position_biased_input": False, "relative_attention": True}
    assert sizes_of(spec_of("deberta_v2", deberta)).parameters == 183_831_552


def test_bits_of_a_weight() -> None:
    assert [stored_bits(bits) for bits in WIDTHS] == [3, 4, 4.5, 5, 6, 7, 8.5, 16, 32]
    for role in ("table", "head"):
        assert [stored_bits(bits, role) for bits in WIDTHS] == [7] * 6 + [8.5, 16, 32]
    assert [stored_bits(bits, "plain") for bits in WIDTHS] == [16] * 8 + [32]


@pytest.mark.parametrize("bits", [bits for bits in WIDTHS if bits < 16])
def test_bytes_of_a_width_equal_its_format(bits: float) -> None:
    keys = {"quantization.weights": f"q{bits:g}", "quantization.threshold": 0}
    opened = open_model(Path(__file__).parents[2] / "goldens" / "llama2", keys)
    model = build_abstract_model(opened.spec, "float16")
    origins = find_origins(model, opened.checkpoint, opened.spec.tensors)
    storages = choose_storages(model, opened.spec.quantization, origins, "float", "here")
    assert len(storages) > 20
    total = sum(
        storages[name].abstract(one.shape).nbytes if name in storages else 2 * one.size
        for name, one in zip(model.names, model.parameters, strict=True)
    )
    assert sizes_of(opened.spec).total_bytes(bits) == total


def test_padding_counts() -> None:
    """Rows of 576 weights in 3.5 bits take the room of 640."""
    sizes = Sizes(matrices=2 * 64 * 576, shapes=(("matrix", (64, 576), 2),))
    assert sizes.matrix_bits(3.5) == 4.5 * 640 / 576
    assert sizes.matrix_bits(4) == 5
    assert sizes.total_bytes(3.5) == 2 * 64 * 640 * 4.5 / 8
    assert Sizes(matrices=576).matrix_bits(3.5) == 4.5


def test_embeddings_and_all_the_rest() -> None:
    sizes = Sizes(embeddings=800, matrices=1600, heads=400, plain=80)
    assert sizes.parameters == 2880
    assert sizes.embedding_bytes(4) == 800 * 7 / 8
    assert sizes.other_bytes(4) == (1600 * 5 + 400 * 7 + 80 * 16) / 8
    assert sizes.total_bytes(32) == 4 * 2880


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1K"),
        (999_499, "999K"),
        (999_500, "1M"),
        (999_885_952, "1B"),
        (6_738_415_616, "6.74B"),
        (671e9, "671B"),
        (12e15, "12000T"),
    ],
)
def test_counts_as_text(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("gib", "text"),
    [
        (0.0042, "0.004"),
        (0.0996, "0.10"),
        (1.5, "1.50"),
        (9.996, "10.0"),
        (99.96, "100"),
        (2500, "2500"),
    ],
)
def test_memory_as_text(gib: float, text: str) -> None:
    assert gib_text(gib * 2**30) == text
