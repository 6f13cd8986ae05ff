"""The model as a pure function: values of the references, derivatives of finite differences."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jinfer import LLM, Edit, RequestError, Steer
from jinfer.api.pure_function import PureFunction
from jinfer.quant import QuantizedTensor
from tests import test_encoders as encoders
from tests import test_goldens as decoders

TOLERANCE = 2e-4
GOLDENS = decoders.GOLDENS

# Values inside that derivatives are taken of: beside a state space; with experts and latent
# attention; with soft-caps in windows; with scores by distance; with every format of GGUF.
INSIDE = {
    "falcon_h1": ("decoder.0.x", "decoder.1.attn.heads", "decoder.1.ffn_down"),
    "deepseek_v2": ("decoder.0.x@1", "decoder.1.attn.latent", "decoder.1.ffn"),
    "gemma2": ("embed", "decoder.1.attn.pattern", "decoder.0.ffn.gate"),
    "bloom": ("embed", "decoder.1.attn.scores", "decoder.0.ffn.up"),
    "gguf_llama_mixed": ("decoder.0.x", "decoder.1.attn.k", "hidden"),
}

type Params = dict[str, Any]


@cache
def function(name: str) -> tuple[PureFunction, Params]:
    """The function outlives the model that it is of."""
    with decoders.open_model(name) as llm:
        return llm.function(remat=name == "gemma2")


@pytest.fixture(scope="module", autouse=True)
def _let_arrays_go() -> Iterator[None]:
    yield
    function.cache_clear()


@pytest.mark.parametrize(("name", "of"), decoders.CAUSAL.items())
def test_logits_of_decoders(name: str, of: str) -> None:
    """Two texts of a padded batch at a time, by `jax.vmap`."""
    (apply, params), values = function(name), decoders.expected(of)
    lengths = values["attention_mask"].sum(axis=1)

    @jax.jit
    def both(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return jax.vmap(lambda ids, length: apply(params, ids, length=length))(tokens, lengths)

    logits = both(params, values["input_ids"], lengths)
    assert logits.dtype == jnp.float32
    for got, reference, length in zip(logits, values["logits"], lengths, strict=True):
        ours, theirs = got[:length], reference[:length]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=decoders.tolerance(name))


@pytest.mark.parametrize(("name", "of"), encoders.ENCODERS.items())
def test_hidden_states_of_encoders(name: str, of: str) -> None:
    """The second text, with padding that it does not see."""
    (apply, params), values = function(name), encoders.expected(of)
    length = int(values["attention_mask"][1].sum())
    types = values["token_type_ids"][1] if "token_type_ids" in values else None
    hidden = jax.jit(partial(apply, want="hidden"))
    got = hidden(params, values["input_ids"][1], length=length, token_type_ids=types)
    reference = values["last_hidden_state"][1][:length]
    np.testing.assert_allclose(got[:length], reference, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", encoders.TRANSLATORS)
def test_logits_of_encoder_decoders(name: str) -> None:
    (apply, params), values = function(name), encoders.expected(name)
    length = int(values["attention_mask"][1].sum())
    source = {"encoder_ids": values["input_ids"][1], "encoder_length": length}
    compiled = jax.jit(partial(apply, capture="*.0.*.pattern"))
    got, captured = compiled(params, values["decoder_input_ids"][1], **source)
    np.testing.assert_allclose(got, values["logits"][1], rtol=0, atol=TOLERANCE)
    # Of the encoder, the decoder, and the decoder's of what the encoder read, without its padding.
    sizes = sorted(pattern.shape[1:] for pattern in captured.values())
    assert sizes == [(12, 12), (12, 24), (24, 24)]
    for pattern in captured.values():
        np.testing.assert_allclose(pattern[..., :length, :length].sum(axis=2), 1, rtol=1e-5)


@pytest.mark.parametrize("name", INSIDE)
def test_derivatives(name: str) -> None:
    """Of embeddings, parameters and values inside, against central differences."""
    apply, params = function(name)
    tokens = decoders.expected(name)["input_ids"][0][:12]
    plain = {
        key: each.astype(jnp.float32)  # whatever the checkpoint has them in
        for key, each in params.items()
        if not isinstance(each, QuantizedTensor)
    }
    shapes = jax.eval_shape(partial(apply, capture=INSIDE[name]), params, tokens)[1]
    added = {key: jnp.zeros(each.shape) for key, each in shapes.items()}
    inputs = apply.embed(params, tokens), added, plain

    def logit(x: jax.Array, added: Params, some: Params) -> jax.Array:
        edits = {key: partial(jnp.add, delta) for key, delta in added.items()}
        return apply({**params, **some}, tokens, embeddings=x, edits=edits)[-1, 42]

    gradients = jax.jit(jax.grad(logit, argnums=(0, 1, 2)))(*inputs)
    for gradient in jax.tree.leaves(gradients):
        assert np.isfinite(gradient).all()
    assert all(gradient.any() for gradient in gradients[1].values())
    # Given rows stand in place of the table's, which only a tied head still reads.
    assert {key for key, each in gradients[2].items() if not each.any()} <= {"embed.weight"}
    # Directions: of one token's embedding, of all, of each value inside, of all parameters twice.
    rng, count = np.random.default_rng(0), 4 + len(added)

    def along(at: jax.Array, *these: int) -> np.ndarray:
        size = 1e-3 * (float(jnp.sqrt(jnp.mean(jnp.square(at)))) or 1)
        steps = size * rng.standard_normal((count, *at.shape)).astype(np.float32)
        steps[[n for n in range(count) if n not in these]] = 0
        return steps

    steps: Any = (
        along(inputs[0], 0, 1),
        {key: along(at, n) for n, (key, at) in enumerate(added.items(), start=2)},
        {key: along(at, count - 2, count - 1) for key, at in plain.items()},
    )
    steps[0][0, 1:] = 0

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0))
    def moved(sign: jax.Array, step: Any) -> jax.Array:
        return logit(*jax.tree.map(lambda at, by: at + sign * by, inputs, step))

    there, back = (np.asarray(moved(jnp.float32(sign), steps), np.float64) for sign in (1, -1))
    slopes = sum(
        step.reshape(count, -1).astype(np.float64) @ np.asarray(gradient, np.float64).reshape(-1)
        for step, gradient in zip(jax.tree.leaves(steps), jax.tree.leaves(gradients), strict=True)
    )
    least = 1e-2 * np.median(abs(slopes))
    np.testing.assert_allclose((there - back) / 2, slopes, rtol=1e-2, atol=least)


def test_values_by_name() -> None:
    """Those of a trace of the engine's; put in their own place they change nothing."""
    ids, names = [5, 9, 2, 77, 31, 8], ["decoder.*.x", "decoder.1.attn.pattern"]
    with decoders.open_model("llama2") as llm:
        trace = llm.trace(ids, names)
    apply, params = function("llama2")
    compiled = jax.jit(lambda params, edits: apply(params, ids, capture=names, edits=edits))
    logits, captured = compiled(params, {})
    assert list(captured) == list(trace.names)
    for name, value in captured.items():
        np.testing.assert_allclose(value, trace[name], rtol=0, atol=TOLERANCE)
    edits = {"decoder.0.x": captured["decoder.0.x"], "decoder.1.attn.pattern": trace[names[1]]}
    np.testing.assert_allclose(compiled(params, edits)[0], logits, rtol=0, atol=TOLERANCE)
    heads = captured["decoder.1.attn.pattern"].shape[0]
    blind = compiled(params, {"decoder.1.attn.pattern": np.zeros((heads, 6, 6))})
    assert abs(blind[0] - logits).max() > 0.01
    assert not blind[1]["decoder.1.attn.pattern"].any()
    # What a request has in words, as a function.
    steer = Steer("decoder.0.x", np.ones(64), 5.0)
    listed: list[Edit | Steer] = [Edit("decoder.1.attn.heads", "set", 0, head=1), steer]
    functions = {
        "decoder.1.attn.heads": lambda heads: heads.at[:, 1].set(0),
        "decoder.0.x": lambda x: x + 5,
    }
    same_edits: list[Any] = [listed, functions]
    both = jax.jit(lambda params: [apply(params, ids, edits=each) for each in same_edits])
    told, same = both(params)
    np.testing.assert_allclose(same, told, rtol=0, atol=TOLERANCE)
    assert abs(told - logits).max() > 0.01


def test_nothing_is_captured() -> None:
    """Parameters go through a compiled program as arguments, and tables of positions are small."""
    apply, params = function("llama2")
    tokens = jnp.arange(12)
    captured = jax.make_jaxpr(apply)(params, tokens).consts
    assert sum(np.asarray(each).nbytes for each in captured) < 4096
    twice = {**params, "logits.weight": 2 * params["logits.weight"]}
    compiled = jax.jit(apply).lower(params, tokens).compile()
    np.testing.assert_allclose(compiled(twice, tokens), 2 * compiled(params, tokens), rtol=1e-5)


def test_layers_are_computed_again_backwards() -> None:
    """What a backward pass holds beside parameters; its gradient is among `test_derivatives`."""
    function_of_llama, params = function("llama2")
    tokens, whole = np.arange(100), {each.shape for each in params.values()}

    def held(apply: PureFunction) -> int:
        def backwards(x: jax.Array, params: Params) -> Any:
            return jax.vjp(lambda x: apply(params, tokens, embeddings=x), x)[1]

        x = jax.eval_shape(apply.embed, params, tokens)
        leaves = jax.tree.leaves(jax.eval_shape(backwards, x, params))
        return sum(each.size for each in leaves if each.shape not in whole)

    assert held(replace(function_of_llama, remat=True)) < held(function_of_llama) / 5


def test_lora_is_learnt_and_put_in_place() -> None:
    """By another project's optimizer. This model's matrices are in float32: nothing is rounded."""
    with decoders.open_model("gpt2") as llm, jax.numpy_dtype_promotion("standard"):
        (apply, params), tokens = llm.function(), jnp.array([5, 9, 2, 77, 31, 8])
        rng = np.random.default_rng(0)
        names = [name for name in params if name.endswith(("attn.q.weight", "ffn.down.weight"))]
        lora = {}
        for owner in (name.removesuffix("weight") for name in names):
            outputs, inputs = params[f"{owner}weight"].shape
            lora[f"{owner}lora_a"] = jnp.array(rng.standard_normal((4, inputs)), jnp.float32)
            lora[f"{owner}lora_b"] = jnp.zeros((outputs, 4))
        optimizer = optax.adam(1e-2)

        def loss(lora: Params, params: Params) -> jax.Array:
            logits = apply({**params, **lora}, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], tokens[1:]).mean()

        @jax.jit
        def step(lora: Params, state: Any, params: Params) -> Any:
            value, gradient = jax.value_and_grad(loss)(lora, params)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(lora, updates), state, value

        state, losses = optimizer.init(lora), []
        for _ in range(20):
            lora, state, value = step(lora, state, params)
            losses.append(float(value))
        assert losses[-1] < losses[0] / 2
        terms = {n: lora[n[:-6] + "lora_b"] @ lora[n[:-6] + "lora_a"] for n in names}
        llm.update_weights({name: llm.weights[name].values + term for name, term in terms.items()})
        learnt = apply({**params, **lora}, tokens)
        np.testing.assert_allclose(llm.logits([tokens])[0], learnt, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gguf_llama_mixed", "mixtral", "minicpm3"])
def test_lora_beside_any_matrix(name: str) -> None:
    """Of quantized ones, stacks of experts, and those that latent attention reads as arrays."""
    apply, params = function(name)
    rng, tokens = np.random.default_rng(0), jnp.array([5, 9, 2, 77, 31, 8])
    lora, summed = dict[str, Any](), dict(params)
    for key in params:
        if key.startswith("decoder.1.") and len(shape := params[key].shape) > 1:
            (*stack, outputs, inputs), owner = shape, key.removesuffix("weight")
            a = 0.1 * jnp.array(rng.standard_normal((*stack, 3, inputs)), jnp.float32)
            b = 0.1 * jnp.array(rng.standard_normal((*stack, outputs, 3)), jnp.float32)
            lora |= {f"{owner}lora_a": a, f"{owner}lora_b": b}
            whole = params[key]
            whole = whole if isinstance(whole, jax.Array) else whole.dequantize()
            summed[key] = whole.astype(jnp.float32) + jnp.matmul(b, a)
    assert lora
    compiled = jax.jit(apply)
    got, wanted = compiled({**params, **lora}, tokens), compiled(summed, tokens)
    assert abs(got - compiled(params, tokens)).max() > 0.01
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE)


def test_dequantized_parameters() -> None:
    with LLM(GOLDENS / "gguf_llama_mixed", dtype="float32") as llm:
        apply, params = llm.function(dequantize=True)
        assert {type(each) for each in params.values()} == {type(jnp.zeros(()))}
        assert set(params) == set(llm.weights)
        name = "decoder.0.ffn.down.weight"
        np.testing.assert_array_equal(params[name], llm.weights[name].values)
    quantized = function("gguf_llama_mixed")[1]
    assert any(isinstance(each, QuantizedTensor) for each in quantized.values())
    assert repr(apply) == "apply(params, tokens) -> logits | hidden"


def test_what_is_refused() -> None:
    apply: Any
    encoder: Any
    apply, params = function("llama2")
    encoder, its = function("bert")
    owner, whole = "decoder.0.attn.q.", params["decoder.0.attn.q.weight"]
    a = jnp.zeros((2, whole.shape[1]))
    cases: list[tuple[Any, str]] = [
        (lambda: apply(params, [[1, 2]]), r"2 axes; .* jax.vmap\(apply, in_axes=\(None, 0\)\)"),
        (lambda: apply(params, []), "tokens has 0 tokens; from 1 to"),
        (lambda: apply(params, [1.0]), "tokens are float64; give whole numbers"),
        (lambda: apply(params, np.zeros(0, int)), "tokens has 0 tokens; from 1 to"),
        (lambda: apply(params, [[1], [1, 2]]), "tokens are .*; give those of one text"),
        (lambda: apply(params, "text"), "tokens are 'text'; give whole numbers"),
        (lambda: apply(None, [1]), "params are no dictionary; give those of llm.function"),
        (lambda: apply(params, [1], length=2), "length of tokens is 2; give a number from 1 to 1"),
        (lambda: apply(params, [1], length=0.5), "length of tokens is 0.5; give a number"),
        (lambda: apply(params, [1], embeddings="x"), "embeddings is 'x'; give an array of num"),
        (lambda: apply(params, [1], capture=3), "capture is 3; give names"),
        (
            lambda: apply(params, [1], edits={"embed": lambda _: None}),
            r"edits: embed is \[1, \d+\], and the edit gives None",
        ),
        (
            lambda: apply(params, [1], edits=Edit("decoder.0.attn.pattern", "set", np.ones(9))),
            "the value has shape .*; give a number, or",
        ),
        (lambda: apply(params, [1, 9999]), "tokens are from 0 to"),
        (lambda: apply(params, [1], want="pooled"), "no 'pooled'; want is one of logits, hidden"),
        (lambda: apply(params, [1], token_type_ids=[0]), "token_type_ids are for an encoder"),
        (lambda: apply(params, [1], encoder_ids=[0]), "encoder_ids are for a model with an enc"),
        (lambda: apply(params, [1], embeddings=jnp.zeros((1, 3))), r"embeddings is \[1, 3\]; give"),
        (lambda: apply({}, [1]), "params has no .*; give all that llm.function"),
        (lambda: apply({**params, "x": 1}, [1]), "there is no parameter 'x'; "),
        (lambda: apply({**params, f"{owner}weight": a}, [1]), r"q.weight is \[2, \d+\]; give"),
        (lambda: apply({**params, f"{owner}lora_a": a}, [1]), "params has no .*q.lora_b, and"),
        (
            lambda: apply({**params, f"{owner}lora_a": a, f"{owner}lora_b": a}, [1]),
            r"q.lora_b is \[2, \d+\]; give \[\d+, 2\]",
        ),
        (lambda: apply(params, [1], capture="decoder.0.y"), "no value 'decoder.0.y'; did you mean"),
        (lambda: apply(params, [1], capture=[3]), "a name is 3; give a text such as"),
        (
            lambda: apply(params, [1], edits=["decoder.0.x"]),
            "edits are .*; give names with a func.* list of Edit",
        ),
        (
            lambda: apply(params, [1], edits={"decoder.0.x": np.zeros(3)}),
            r"edits: decoder.0.x is \[1, \d+\], and the edit gives \[3\]",
        ),
        (lambda: encoder(its, [1], token_type_ids=[2]), "token_type_ids are from 0 to 1"),
        (lambda: encoder(its, [1], token_type_ids=[0, 0]), r"token_type_ids is \[2\]; give \[1\]"),
        (lambda: function("t5")[0](function("t5")[1], [1]), "give encoder_ids, which the encoder"),
    ]
    for call, error in cases:
        with pytest.raises(RequestError, match=error):
            call()
