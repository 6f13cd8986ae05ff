"""Every golden checkpoint gives its reference's logits, hidden states and greedy tokens."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jinfer import LLM, SamplingParams
from tests.compiling import optimized
from tests.reference.numpy_llama import numpy_llama

GOLDENS = Path(__file__).parent / "goldens"
# The references' own rounding is below 3.1e-5; the smallest mistake measured costs 4e-4.
TOLERANCE = 2e-4

# golden -> the golden whose values it must give
CAUSAL = {
    name: name
    for name in (
        *("llama2", "llama31", "mistral", "qwen15", "gpt2", "phi2", "falcon7b", "bloom"),
        *("llama_rope_linear", "qwen25_yarn", "gguf_llama_mixed"),
        *("llama2c_v0", "llama2c_v0_tied", "llama2c_v2_q80"),
        *("aquila2", "baichuan2_7b", "baichuan2_13b", "chatglm2", "falcon40b", "gemma"),
        *("gpt_bigcode", "gpt_neox", "internlm", "minicpm", "openllama", "opt13b", "opt350m"),
        *("orion", "phi3_mini_4k", "smollm2", "starcoder2", "xverse", "yi"),
        *("mixtral", "deepseek_moe", "qwen3_moe", "deepseek_v2", "deepseek_v32"),
        *("qwen3", "gguf_qwen3", "olmo2", "gemma2", "gpt_oss", "minicpm3", "glm"),
        *("lfm2", "mamba", "mamba2", "falcon_h1", "nemotron_h", "qwen3_5", "kimi_linear"),
        *("recurrent_gemma", "minimax", "rwkv4", "granite4_h_tiny", "qwen3_next"),
        *("olmo3", "exaone4", "seed_oss", "ernie45_moe", "internlm3", "ministral3"),
        *("nanochat", "hunyuan_dense", "llama4"),
        *("gemma3n", "gemma4", "dbrx", "modernbert_decoder", "jetmoe"),
    )
}
# The same models as converted to GGUF.
CAUSAL |= {
    f"gguf_{name}": name
    for name in (
        *("baichuan2_7b", "bloom", "chatglm2", "falcon7b", "gemma", "gpt2", "llama2"),
        *("minicpm", "orion", "phi2", "qwen15", "xverse", "mixtral", "deepseek_moe"),
        *("glm", "deepseek_v2"),
    )
}
# What a file does not say, or says otherwise than its checkpoint, by its converter's fault.
UNSAID: dict[str, dict[str, Any]] = {
    # Transformers 5 computes with 10000, and says so in the files that it writes itself, whatever
    # attn_config says.
    "dbrx": {"dims.rope_theta": 10000},
    "gguf_deepseek_v2": {
        "decoder.variants.sparse.modules.ffn.groups": 4,
        "decoder.variants.sparse.modules.ffn.top_k_groups": 2,
    },
    "gguf_glm": {"dims.context": 256, "dims.eps": 1.5625e-07},
}
# Of each attention one (plain, with slopes, with soft-caps, with sinks in windows, latent, in
# chunks, with an indexer), some of them with experts. Their programs are optimized also where those
# of most tests are not, and their steps are run: a step of another one is made of the parts that
# its logits went through.
OPTIMIZED = {"llama2", "bloom", "gemma2", "gpt_oss", "deepseek_v2", "llama4", "deepseek_v32"}
# Their hidden states have another width than their layers, and were left out of the values.
NO_HIDDEN = {"opt350m": 32, "gemma3n": 64}
# Its streams between layers are several.
NO_LAYERS = {"gemma3n"}
# Their references give the streams after each layer, and not what the first is given.
FROM_FIRST_LAYER = {"mamba", "mamba2", "rwkv4"}
# Their streams are normed, scaled or several: no sum of what is added to them.
NO_SUMS = {"opt350m", "minimax", "gemma3n", "gemma4"}
# A compiler may add what has a factor without rounding the product first (FMA).
WITH_FACTORS = {"minicpm", "gguf_minicpm", "minicpm3", "falcon_h1", "granite4_h_tiny"}


def open_model(name: str) -> LLM:
    folder = GOLDENS / name
    file = folder / "model.bin"
    return LLM(file if file.exists() else folder, dtype="float32", **UNSAID.get(name, {}))


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / name / "expected.npz") as arrays:
        return dict(arrays)


def tolerance(name: str) -> float:
    """Largest absolute error of a golden's logits and hidden states."""
    # One of its tokens has so short an output of the delta rule that the norm after it magnifies
    # rounding: instruction sets differ by 1e-4 there.
    if name == "qwen3_next":
        return 3 * TOLERANCE
    # A GPU's kernels round both factors of products with quantized matrices to fp16. (Seen on one:
    # 0.033 in logits with TF32 in the other products, 0.019 in hidden states.)
    rounded = name == "gguf_llama_mixed" and jax.default_backend() == "gpu"
    return 250 * TOLERANCE if rounded else TOLERANCE


def prompts(values: dict[str, np.ndarray]) -> list[list[int]]:
    """The padded batch's rows without their padding, and the long prompt."""
    mask = values["attention_mask"].astype(bool)
    rows = [values["input_ids"][i][mask[i]].tolist() for i in range(2)]
    return [*rows, values["long_input_ids"][0].tolist()]


@pytest.fixture(scope="module", params=CAUSAL)
def name(request: pytest.FixtureRequest) -> str:
    """Of module scope, so that the tests of a golden run together and share its programs."""
    return request.param


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    with optimized() if name in OPTIMIZED else nullcontext():
        yield open_model(name)


@pytest.fixture(scope="module")
def values(name: str) -> dict[str, np.ndarray]:
    return expected(CAUSAL[name])


def test_logits(name: str, llm: LLM, values: dict[str, np.ndarray]) -> None:
    *rows, long = llm.logits(prompts(values))
    compared = [(row, values["logits"][i][: len(row)]) for i, row in enumerate(rows)]
    for got, reference in [*compared, (long[3::4], values["long_logits"][0])]:
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, reference, rtol=0, atol=tolerance(name))


def test_hidden_states(name: str, llm: LLM, values: dict[str, np.ndarray]) -> None:
    got = llm.hidden(prompts(values)[:1])[0]
    if name in NO_HIDDEN:
        assert got.shape == (24, NO_HIDDEN[name])
        return
    np.testing.assert_allclose(got, values["hidden_states_row0"][-1], rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("name", [n for n in CAUSAL if n not in NO_LAYERS], indirect=True)
def test_streams_after_layers(name: str, llm: LLM, values: dict[str, np.ndarray]) -> None:
    """What the first layer is given, and the residual stream after all layers but the last."""
    with np.load(GOLDENS / "layers.npz") as arrays:
        reference = arrays[CAUSAL[name]]
    trace = llm.trace(prompts(values)[0], ["embed", "decoder.*.x"])
    streams = ["embed", *(f"decoder.{i}.x" for i in range(len(reference)))]
    first = CAUSAL[name] in FROM_FIRST_LAYER
    for stream, expected in zip(streams[first : first + len(reference)], reference, strict=True):
        np.testing.assert_allclose(
            trace[stream][20:], expected, rtol=0, atol=tolerance(name), err_msg=stream
        )


@pytest.mark.parametrize("name", [n for n in CAUSAL if n not in NO_SUMS], indirect=True)
def test_contributions_add_up_to_the_stream(name: str, llm: LLM) -> None:
    """To the bit, in the order of the formulas: `embed` and all `*.added` are the last `x`."""
    assert llm.spec.decoder is not None
    layers = llm.spec.decoder.layers
    last = f"decoder.{len(layers) - 1}.x"
    trace = llm.trace([1, 5, 9, 2, 40, 7, 3, 11, 77], ["embed", last, "decoder.*.added"])
    total = trace["embed"]
    for i, layer in enumerate(layers):
        for one in layer.wiring.contributions:
            total = total + trace[f"decoder.{i}.{one.name}"]
    assert len(trace) - 2 == sum(len(layer.wiring.contributions) for layer in layers)
    if name in WITH_FACTORS or jax.default_backend() == "gpu":
        np.testing.assert_allclose(total, trace[last], rtol=0, atol=1e-5)
    else:
        np.testing.assert_array_equal(total, trace[last])


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in OPTIMIZED else pytest.mark.soak) for n in CAUSAL],
    indirect=True,
)
def test_greedy_tokens(llm: LLM, values: dict[str, np.ndarray]) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    together = llm.generate(prompts(values), params)
    assert [answer.token_ids for answer in together] == values["greedy"].tolist()
    assert {answer.finish_reason for answer in together} == {"length"}


def test_rope_factors_of_a_gguf() -> None:
    """A GGUF carries Llama 3.1's scaling as a tensor, by which the frequencies are divided.

    The converter that wrote this file computed that tensor for an original context of 8192, while
    the checkpoint's config.json says 64; so it equals the checkpoint with 8192 put in its place.
    """
    key = "decoder.modules.attn.position.scaling"
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    overrides: dict[str, Any] = {key: scaling, "dtype": "float32"}
    reference = LLM(GOLDENS / "llama31", **overrides)
    asked = prompts(expected("llama31"))
    converted = open_model("gguf_llama31")
    for got, wanted in zip(converted.logits(asked), reference.logits(asked), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    ours, theirs = (m.generate(asked, params) for m in (converted, reference))
    assert [a.token_ids for a in ours] == [a.token_ids for a in theirs]


def test_a_gguf_that_does_not_say_its_scales(tmp_path: Path) -> None:
    """A MiniCPM 3 file has no place for them, so a specification says those that differ."""
    spec = tmp_path / "mine.toml"
    spec.write_text(
        f'family = "minicpm3"\nweights = "{GOLDENS / "gguf_minicpm3"}"\n'
        '[dims]\nembedding_scale = 6\nlogits_divisor = "hidden / 32"\n'
    )
    llm, values = LLM(spec, dtype="float32"), expected("minicpm3")
    *rows, long = llm.logits(prompts(values))
    compared = [(row, values["logits"][i][: len(row)]) for i, row in enumerate(rows)]
    for got, reference in [*compared, (long[3::4], values["long_logits"][0])]:
        np.testing.assert_allclose(got, reference, rtol=0, atol=TOLERANCE)


def test_stories260k_against_numpy() -> None:
    """A real llama2.c checkpoint against a forward pass written in NumPy."""
    path = GOLDENS / "stories260K" / "model.bin"
    llm = LLM(path, dtype="float32")
    tokens = [1, *np.random.default_rng(7).integers(3, 512, 63).tolist()]
    reference = numpy_llama(path, np.array(tokens))
    np.testing.assert_allclose(llm.logits([tokens])[0], reference, rtol=0, atol=TOLERANCE)
    # Without a tokenizer beside it, ids are served: the greedy continuation is NumPy's, too.
    answer = llm.generate([tokens], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    assert answer.text == ""
    for token in answer.token_ids:
        assert token == int(np.argmax(numpy_llama(path, np.array(tokens))[-1]))
        tokens.append(token)
