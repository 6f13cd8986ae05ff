"""LoRA adapters beside a model: several in a batch, loaded and unloaded while it runs."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.requests import RequestError
from jinfer.nn.lora_rows import AdapterSlots
from jinfer.ops.matmul.dense import reads_16_bit_weights
from tests.engine.adapters import in_steps_of_int8, merge_by_hand, write_adapter
from tests.engine.tiny import GOLDEN, PROMPTS, held

RANKS = (4, 8, 16, 64)
WITH = ("r4", None, "r8", "r64", None, "r16", "r4", None)  # of each of eight requests
KEYS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 3}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {f"r{rank}": write_adapter(folder / f"r{rank}", rank, rank) for rank in RANKS}


def opened(**keys: Any) -> LLM:
    return LLM(GOLDEN, **{"dtype": "float32", "engine.slots": 8, **keys})


@pytest.fixture(scope="module")
def llm(adapters: dict[str, Path]) -> Iterator[LLM]:
    with opened(**{"engine.max_adapters": 5}) as llm:
        for name, path in adapters.items():
            llm.load_adapter(name, path)
        yield llm


def answer(llm: LLM, prompt: list[int], adapter: str | None = None) -> tuple[list[int], np.ndarray]:
    """Tokens, and the log-probabilities of the likeliest at each place."""
    (one,) = llm.generate([prompt], adapter=adapter, **KEYS)
    assert one.logprobs is not None
    return one.token_ids, np.array([[top.logprob for top in each.top] for each in one.logprobs])


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1])


def test_several_in_one_batch(llm: LLM, adapters: dict[str, Path], tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        mixed = list(pool.map(lambda i: answer(llm, PROMPTS[i], WITH[i]), range(8)))
    for prompt, name, found in zip(PROMPTS, WITH, mixed, strict=False):
        assert same(found, answer(llm, prompt, name)), name
    i = WITH.index("r4")
    for name in (None, "r4"):
        logits = llm.trace(PROMPTS[i], "logits", adapter=name)["logits"][-1]
        top = np.sort(jax.nn.log_softmax(logits))[::-1][: mixed[i][1].shape[1]]
        assert np.allclose(top, mixed[i][1][0], atol=1e-4) == (name is not None)
    with opened() as plain:
        for prompt, name, found in zip(PROMPTS, WITH, mixed, strict=False):
            assert same(found, answer(plain, prompt)) == (name is None)
    for name in ("r4", "r64"):
        i = WITH.index(name)
        with LLM(merge_by_hand(adapters[name], tmp_path / name), dtype="float32") as merged:
            tokens, logprobs = answer(merged, PROMPTS[i])
        assert tokens == mixed[i][0]
        np.testing.assert_allclose(mixed[i][1], logprobs, atol=2e-4)


def test_loading_compiles_nothing(llm: LLM, tmp_path: Path) -> None:
    events = list[str]()

    def hear(event: str, duration_secs: float, **_: str | int) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    prompt = [*PROMPTS[3], *PROMPTS[6]]
    first = answer(llm, prompt, "r4"), answer(llm, prompt, "r4")  # whole, and its end alone
    programs, compiled = llm.compilations, len(events)
    assert compiled, "the listener hears of compilations"
    for seed in (77, 78):
        llm.load_adapter("other", write_adapter(tmp_path / "other", 2, seed))
        others = answer(llm, prompt, "other"), answer(llm, prompt, "other")
        assert same(*others)
        assert not same(others[0], first[0])
        llm.unload_adapter("other")
    assert (llm.compilations, len(events)) == (programs, compiled)
    with pytest.raises(RequestError, match="there is no adapter 'other'"):
        answer(llm, prompt, "other")


def test_stacks_in_int8(llm: LLM, adapters: dict[str, Path], tmp_path: Path) -> None:
    keys = {"engine.max_adapters": 4, "engine.adapter_dtype": "int8"}
    with opened(**keys, adapters={name: str(path) for name, path in adapters.items()}) as coded:
        assert coded.session.adapters.slots == AdapterSlots(4, 64, "int8")
        with ThreadPoolExecutor(8) as pool:
            mixed = list(pool.map(lambda i: answer(coded, PROMPTS[i], WITH[i]), range(8)))
        for prompt, name, found in zip(PROMPTS, WITH, mixed, strict=False):
            assert same(found, answer(coded, prompt, name)), name
            assert same(found, answer(llm, prompt, name)) == (name is None)
        logits = coded.trace(PROMPTS[3], "logits", adapter="r16")["logits"]
        programs = coded.compilations
        coded.unload_adapter("r8")
        coded.load_adapter("other", adapters["r16"])  # in a slot that had another's factors
        assert same(answer(coded, PROMPTS[5], "other"), mixed[5])
        assert coded.compilations == programs
    llm.load_adapter("steps", in_steps_of_int8(adapters["r16"], tmp_path / "steps"))
    wanted = llm.trace(PROMPTS[3], "logits", adapter="steps")["logits"]
    llm.unload_adapter("steps")
    np.testing.assert_allclose(logits, wanted, atol=2e-4)


def test_prefixes_are_their_own(llm: LLM) -> None:
    prompt = [(7 * i) % 300 + 3 for i in range(130)]

    def cached(adapter: str | None) -> int:
        return llm.generate([prompt], adapter=adapter, max_tokens=2)[0].usage.cached_tokens

    assert [cached(None), cached("r4"), cached("r8"), cached("r4"), cached(None)] == [
        *(0, 0, 0),
        *(128, 128),
    ]


def test_beams_and_quantized_weights(adapters: dict[str, Path]) -> None:
    """The type is named by nobody: adapters in slots have 16 bits, where these are multiplied."""
    keys = {"dtype": "auto", "quantization.weights": "q8", "quantization.threshold": 0}
    beams: dict[str, Any] = {"max_tokens": 5, "strategy": "beam", "beams": 3, "ignore_eos": True}
    with opened(adapters={"a": str(adapters["r16"])}, **keys) as llm:
        kind = "float16" if reads_16_bit_weights() else "float32"
        assert llm.session.adapters.slots == AdapterSlots(1, 16, kind)
        alone = answer(llm, PROMPTS[3], "a")
        with ThreadPoolExecutor(4) as pool:
            mixed = list(pool.map(lambda name: answer(llm, PROMPTS[3], name), ("a", None) * 2))
        assert same(mixed[0], alone)
        assert same(mixed[0], mixed[2])
        assert mixed[1][0] != alone[0]
        (with_a,) = llm.generate([PROMPTS[3]], adapter="a", **beams)
        (without,) = llm.generate([PROMPTS[3]], **beams)
        assert with_a.token_ids != without.token_ids
        assert not held(llm)


def test_drafts_are_verified_with_it(adapters: dict[str, Path], llm: LLM) -> None:
    prompt = PROMPTS[4] * 8
    drafts = {"speculation.draft": ["ngram", {"skip": [1]}], "speculation.nodes": 4}
    with opened(adapters={"a": str(adapters["r4"])}, **drafts) as drafting:
        found = drafting.generate([prompt], adapter="a", max_tokens=12, ignore_eos=True)[0]
        assert drafting.stats().draft_tokens
    plain = llm.generate([prompt], adapter="r4", max_tokens=12, ignore_eos=True)[0]
    assert found.token_ids == plain.token_ids


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"dora": True},
        {"alpha_pattern": {"q_proj": 3}, "targets": ("q_proj",)},
        {
            "alpha_pattern": {r"x\.q_proj": 5, r"layers\.\d+\..*(q|k)_proj": 3},
            "targets": ("q_proj",),
        },
        {
            "alpha_pattern": {r"^model\.layers\.[0-9]\.self_attn\.q_proj$": 3},
            "targets": ("q_proj",),
        },
    ],
    ids=lambda config: next(iter(config)),
)
def test_merged_at_loading(config: dict[str, Any], tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", 4, 1, **config)
    with opened(adapters={"a": {"source": str(adapter), "merge": True}}) as llm:
        assert llm.session.adapters.slots is None
        found = llm.logits([PROMPTS[3]])[0]
    if "alpha_pattern" in config:
        said = json.loads((adapter / "adapter_config.json").read_text()) | {"lora_alpha": 3}
        (adapter / "adapter_config.json").write_text(json.dumps(said))
    with LLM(merge_by_hand(adapter, tmp_path / "merged"), dtype="float32") as merged:
        np.testing.assert_allclose(found, merged.logits([PROMPTS[3]])[0], atol=1e-4)


def test_head_and_embedding_are_replaced(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    head = {"base_model.model.lm_head.weight": rng.normal(0, 0.1, (320, 64))}
    adapter = write_adapter(tmp_path / "a", 2, 1, tensors=head, modules_to_save=["lm_head"])
    with opened(adapters={"a": {"source": str(adapter), "merge": True}}) as llm:
        hidden, found = llm.hidden([PROMPTS[0]])[0], llm.logits([PROMPTS[0]])[0]
    np.testing.assert_allclose(found, hidden @ next(iter(head.values())).T, atol=1e-4)
    with opened(**{"engine.max_adapters": 1}) as llm, pytest.raises(USER_ERRORS) as caught:
        llm.load_adapter("a", adapter)
    assert "lm_head.weight (modules_to_save) can only be merged" in str(caught.value)


@pytest.mark.parametrize("saved", [False, True])
def test_the_head_of_a_tied_model_is_changed_alone(tmp_path: Path, saved: bool) -> None:
    """What slots refuse with "set merge = true" is merged: the embedding stays."""
    base, rng = tmp_path / "tied", np.random.default_rng(5)
    shutil.copytree(GOLDEN, base)
    said = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(said))
    tensors = load_file(GOLDEN / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, base / "model.safetensors")
    table = tensors["model.embed_tokens.weight"].astype(np.float32)
    a, b = rng.normal(0, 0.1, (4, 64)), rng.normal(0, 0.1, (320, 4))
    pair = {f"base_model.model.lm_head.lora_{n}.weight": each for n, each in (("A", a), ("B", b))}
    pair = {"base_model.model.lm_head.weight": table + 2 * b @ a} if saved else pair
    adapter = write_adapter(tmp_path / "a", 4, 1, base=base, targets=(), tensors=pair)
    room: dict[str, Any] = {"engine.max_adapters": 1}
    with LLM(base, dtype="float32", **room) as llm:
        hidden = llm.hidden([PROMPTS[0]])[0]
        with pytest.raises(USER_ERRORS, match=r"lm_head.*can only be merged.*set merge = true"):
            llm.load_adapter("a", adapter)
    merged = {"a": {"source": str(adapter), "merge": True}}
    with LLM(base, dtype="float32", adapters=merged) as llm:
        np.testing.assert_array_equal(llm.hidden([PROMPTS[0]])[0], hidden)
        found = llm.logits([PROMPTS[0]])[0]
    np.testing.assert_allclose(found, hidden @ (table + 2 * b @ a).T, atol=1e-4)


def test_saved_norms_and_matrices_are_merged(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "model.safetensors")
    names = ("model.layers.1.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight")
    own = {name: (tensors[name] * 1.5).astype(np.float32) for name in names}
    saved = {f"base_model.model.{name}": each for name, each in own.items()}
    adapter = write_adapter(tmp_path / "a", 4, 1, targets=(), tensors=saved)
    with opened(adapters={"a": {"source": str(adapter), "merge": True}}) as llm:
        found = llm.logits([PROMPTS[0]])[0]
    shutil.copytree(GOLDEN, tmp_path / "by_hand")
    save_file(tensors | own, tmp_path / "by_hand" / "model.safetensors")
    with LLM(tmp_path / "by_hand", dtype="float32") as by_hand:
        np.testing.assert_array_equal(found, by_hand.logits([PROMPTS[0]])[0])


PAIR = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
ZEROS: dict[tuple[int, ...], np.ndarray] = {
    shape: np.zeros(shape)
    for shape in ((4, 64), (4, 60), (64, 4), (64, 3), (60, 4), (320, 4), (64,))
}


@pytest.mark.parametrize(
    ("keys", "tensors", "said"),
    [
        ({"rank": 80}, {}, "its rank is 80, and there is room for 64; set engine.max_adapter_rank"),
        ({"peft_type": "IA3"}, {}, "adapter_config.json: peft_type is 'IA3'; only LORA is read"),
        ({"bias": "all"}, {}, "bias = 'all': only adapters without biases are read"),
        ({"target_parameters": ["x"]}, {}, "target_parameters has 'x'; of parameters only"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = 'pissa': its base is not"),
        ({"lora_alpha": "x"}, {}, "lora_alpha is 'x', which is no factor"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "q_proj has rank 4, but its configuration says 2"),
        ({"alpha_pattern": [3]}, {}, "alpha_pattern is [3], not a table of modules"),
        ({"rank_pattern": {"q.*": 2}}, {}, "q_proj has rank 4, but its configuration says 2"),
        ({"rank_pattern": {"(q": 2}}, {}, "rank_pattern has patterns that cannot be matched with"),
        (
            {"alpha_pattern": {"((\\w|.)+)+;": 2}},
            {},
            "cannot be matched with modules: takes too long",
        ),
        ({"dora": True}, {}, "no room for magnitudes (DoRA); set engine.dora_adapters"),
        ({}, {f"{PAIR}A.weight": (4, 60)}, "q_proj is for a matrix [64, 60], and decoder.0.attn.q"),
        ({}, {f"{PAIR}B.weight": (60, 4)}, "q_proj is for a matrix [60, 64], and decoder.0.attn.q"),
        ({}, {f"{PAIR}B.weight": (64, 3)}, "are [4, 64] and [64, 3], not [rank, in] and"),
        ({}, {f"{PAIR}C.weight": (4, 64)}, "lora_C.weight is a part of an adapter that is not"),
        (
            {},
            {
                "base_model.model.visual.proj.lora_A.weight": (4, 64),
                "base_model.model.visual.proj.lora_B.weight": (64, 4),
            },
            "visual.proj is no matrix of this model: the adapter belongs to another one",
        ),
        (
            {},
            {
                "base_model.model.lm_head.lora_A.weight": (4, 64),
                "base_model.model.lm_head.lora_B.weight": (320, 4),
            },
            "lm_head can only be merged into the weights: set merge = true",
        ),
        ({}, {"base_model.model.visual.norm.weight": (64,)}, "visual.norm is no matrix of this"),
    ],
)
def test_errors(
    llm: LLM, tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], said: str
) -> None:
    arrays = {name: ZEROS[shape] for name, shape in tensors.items()}
    given = {"rank": 4, "seed": 1, **keys}
    path = write_adapter(tmp_path / "a", tensors=arrays, **given)
    with pytest.raises(USER_ERRORS) as caught:
        llm.load_adapter("a", path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_names_and_room(llm: LLM, adapters: dict[str, Path], tmp_path: Path) -> None:
    def refused(said: str, name: Any, source: Any) -> None:
        with pytest.raises(USER_ERRORS) as caught:
            llm.load_adapter(name, source)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)

    refused("there is an adapter 'r4' already", "r4", adapters["r4"])
    refused("an adapter's name is 3", 3, adapters["r4"])
    refused("there is no such file or folder", "x", tmp_path / "absent")
    refused("is no LoRA adapter: there is no adapter_config.json", "x", GOLDEN)
    (tmp_path / "adapter_config.json").write_text("{}")
    refused("is an adapter without adapter_model.safetensors or adapter_model.bin", "x", tmp_path)
    llm.load_adapter("fifth", adapters["r4"])
    refused("5 adapters are loaded, and there is room for 5; unload one", "x", adapters["r4"])
    llm.unload_adapter("fifth")
    with opened() as plain, pytest.raises(RequestError, match="no room for adapters"):
        plain.load_adapter("x", adapters["r4"])
