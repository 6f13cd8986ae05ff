"""What sentence-transformers' files beside the weights, and GGUF's keys, say of an embedding."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer import LLM, RequestError
from jinfer.api.text_embeddings import SIMILARITIES, EmbeddingTokens, tokenize_texts
from jinfer.loader.checkpoint import open_checkpoint
from jinfer.loader.config.pooling_config import POOLINGS, PoolingSpec, find_pooling, pool
from jinfer.loader.config.source_errors import SourceError
from tests.families.gguf_files import write_gguf
from tests.loader.resolving import resolved

GOLDENS = Path(__file__).parents[2] / "goldens"
GOLDEN = GOLDENS / "minilm"
DECODER = GOLDENS / "qwen3_embedding"
TEXTS = [[5, 6, 7, 8], [9] * 11]
MODULE = "sentence_transformers.models."


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def model(folder: Path, *modules: str, golden: Path = GOLDEN) -> Path:
    """The golden's files, with these modules after the transformer."""
    for file in golden.iterdir():
        shutil.copy(file, folder / file.name)
    listed = [{"idx": 0, "name": "0", "path": "", "type": MODULE + "Transformer"}]
    for index, kind in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": MODULE + kind})
    write(folder / "modules.json", listed)
    return folder


def pooling(folder: Path, mode: str) -> None:
    modes = {"cls_token", "mean_tokens", "max_tokens", "lasttoken", mode}
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 48} | {f"pooling_mode_{name}": name == mode for name in modes},
    )


def dense(folder: Path, outputs: int, inputs: int, function: str, bias: bool) -> dict[str, Any]:
    """Writes a dense layer and returns its tensors."""
    rng = np.random.default_rng(outputs)
    tensors = {"linear.weight": rng.normal(0, 0.2, (outputs, inputs)).astype(np.float32)}
    if bias:
        tensors["linear.bias"] = rng.normal(0, 0.2, outputs).astype(np.float32)
    config = {"in_features": inputs, "out_features": outputs, "bias": bias}
    write(folder / "config.json", config | {"activation_function": function})
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("Tanh", np.tanh),
        ("ReLU", lambda x: np.maximum(x, 0)),
        ("Sigmoid", lambda x: 1 / (1 + np.exp(-x))),
    ],
)
def test_dense_layers_follow_the_pooling(tmp_path: Path, kind: str, function: Any) -> None:
    folder = model(tmp_path, "Pooling", "Dense", "Dense", "Normalize")
    pooling(folder, "cls_token")
    first = dense(folder / "2_Dense", 64, 48, f"torch.nn.modules.activation.{kind}", True)
    second = dense(folder / "3_Dense", 20, 64, "torch.nn.modules.linear.Identity", False)
    llm = LLM(folder, dtype="float32")
    x = np.stack([hidden[0] for hidden in llm.hidden(TEXTS)])
    x = function(x @ first["linear.weight"].T + first["linear.bias"]) @ second["linear.weight"].T
    np.testing.assert_allclose(llm.embed(TEXTS, normalize=False), x, rtol=0, atol=1e-5)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(llm.embed(TEXTS), x, rtol=0, atol=1e-5)


def test_the_pooling_is_the_checkpoints(tmp_path: Path) -> None:
    """The last token's vector, which is not brought to length 1 without Normalize."""
    folder = model(tmp_path, "Pooling")
    pooling(folder, "lasttoken")
    llm = LLM(folder, dtype="float32")
    last = np.stack([hidden[-1] for hidden in llm.hidden(TEXTS)])
    np.testing.assert_allclose(llm.embed(TEXTS), last, rtol=0, atol=1e-6)


def test_texts_are_cut_to_the_length_it_was_trained_on(tmp_path: Path) -> None:
    """The last token, which ends a text, stays."""
    folder = model(tmp_path, "Pooling", "Normalize")
    pooling(folder, "mean_tokens")
    write(folder / "sentence_bert_config.json", {"max_seq_length": 4})
    llm = LLM(folder, dtype="float32")
    np.testing.assert_array_equal(llm.embed([[5, 6, 7, 8, 9, 10]]), llm.embed([[5, 6, 7, 10]]))


@pytest.mark.parametrize(
    ("mode", "kind", "function", "error"),
    [
        ("soft_tokens", "Dense", "Identity", "the pooling 'pooling_mode_soft_tokens' is not known"),
        ("cls_token", "CNN", "Identity", "a module of kind 'CNN' is not known"),
        (
            "cls_token",
            "Dense",
            "torch.nn.GLU",
            "activation_function torch.nn.GLU is not known; did",
        ),
    ],
)
def test_what_is_not_known(tmp_path: Path, mode: str, kind: str, function: str, error: str) -> None:
    folder = model(tmp_path, "Pooling", kind)
    pooling(folder, mode)
    dense(folder / f"2_{kind}", 8, 48, function, False)
    with pytest.raises(SourceError, match=error):
        LLM(folder)


@pytest.mark.parametrize("path", ["../outside", "/etc", "1_Pooling/../../outside", "nul\0"])
def test_modules_stay_in_the_folder(tmp_path: Path, path: str) -> None:
    folder = model(tmp_path, "Pooling", "Normalize")
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = path
    write(folder / "modules.json", listed)
    with pytest.raises(SourceError, match=r"modules\.json: .* leads out of the folder"):
        LLM(folder)


@pytest.mark.parametrize("shape", [(7, 3), (0, 32), (32,)])
def test_a_dense_layer_of_another_width(tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = model(tmp_path, "Dense")
    write(folder / "1_Dense" / "config.json", {"activation_function": "torch.nn.Identity"})
    save_file(
        {"linear.weight": np.zeros(shape, np.float32)}, folder / "1_Dense" / "model.safetensors"
    )
    with pytest.raises(SourceError, match=r"linear\.weight \["):
        LLM(folder)


def found(folder: Path) -> PoolingSpec:
    found = resolved(folder, {})
    return find_pooling(found.spec, found.checkpoint, found.config)


def test_a_decoder_follows_its_modules(tmp_path: Path) -> None:
    """A mean, a dense layer, no length of 1, and a limit of its own."""
    folder = model(tmp_path, "Pooling", "Dense", golden=DECODER)
    pooling(folder, "mean_tokens")
    layer = dense(folder / "2_Dense", 24, 64, "torch.nn.modules.linear.Identity", True)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 6})
    llm = LLM(folder, dtype="float32")
    x = np.stack([hidden.mean(axis=0) for hidden in llm.hidden([[5, 6, 7, 8, 9, 30], [5, 6]])])
    x = x @ layer["linear.weight"].T + layer["linear.bias"]
    got = llm.embed([[5, 6, 7, 8, 9, 10, 11, 30], [5, 6]])
    np.testing.assert_allclose(got, x, rtol=0, atol=1e-5)


def test_poolings() -> None:
    """As sentence-transformers has them; what comes before the sixth row is a prompt's."""
    x = np.random.default_rng(3).normal(size=(9, 4)).astype(np.float32)
    kept, weights = x[6:], np.array([7, 8, 9], np.float32)[:, None]
    expected = {
        "mean": kept.mean(0),
        "first": x[6],
        "last": x[8],
        "max": kept.max(0),
        "mean_sqrt_len": kept.sum(0) / np.sqrt(3),
        "weighted_mean": (kept * weights).sum(0) / 24,
    }
    got = pool([x], POOLINGS, [6])[0]
    wanted = np.concatenate([expected[name] for name in POOLINGS])
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "take"),
    [
        ({"pooling_mode": "mean"}, ("mean",)),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 48}, ("last",)),
        ({"pooling_mode": ["cls", "max"], "include_prompt": True}, ("first", "max")),
        ({"pooling_mode": "weightedmean", "pooling_mode_mean_tokens": True}, ("weighted_mean",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("first", "mean")),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len",)),
        ({"pooling_mode_mean_tokens": False}, ("mean",)),
    ],
)
def test_both_forms_of_the_pooling(tmp_path: Path, config: Any, take: tuple[str, ...]) -> None:
    folder = model(tmp_path, "Pooling", "Normalize")
    write(folder / "1_Pooling" / "config.json", config)
    said = found(folder)
    assert (said.take, said.include_prompt, said.normalize) == (take, True, True)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"pooling_mode": "meen"}, "the pooling 'meen' is not known; did you mean 'mean'"),
        ({"pooling_mode": []}, r"the pooling \[\] is not known"),
        ({"pooling_mode": ["mean", 3]}, "the pooling 3 is not known"),
    ],
)
def test_poolings_that_are_not_known(tmp_path: Path, config: Any, error: str) -> None:
    folder = model(tmp_path, "Pooling")
    write(folder / "1_Pooling" / "config.json", config)
    with pytest.raises(SourceError, match=rf"1_Pooling/config\.json: {error}"):
        found(folder)


def test_a_length_of_1_before_a_dense_layer(tmp_path: Path) -> None:
    folder = model(tmp_path, "Pooling", "Normalize", "Dense")
    pooling(folder, "cls_token")
    dense(folder / "3_Dense", 8, 48, "Identity", False)
    said = found(folder)
    assert (len(said.layers), said.normalize) == (2, False)


@pytest.mark.parametrize(
    ("key", "value"),
    [("module_input_name", "token_embeddings"), ("use_residual", True)],
)
def test_a_dense_layer_that_does_more(tmp_path: Path, key: str, value: Any) -> None:
    folder = model(tmp_path, "Pooling", "Dense")
    pooling(folder, "cls_token")
    dense(folder / "2_Dense", 48, 48, "Identity", False)
    config = json.loads((folder / "2_Dense" / "config.json").read_text())
    write(folder / "2_Dense" / "config.json", config | {key: value})
    with pytest.raises(SourceError, match=f"2_Dense/config.json: {key} = .* is not followed"):
        found(folder)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"sentence_bert_config.json": 30, "tokenizer_config.json": 20}, 30),
        ({"sentence_xlm-roberta_config.json": 40}, 40),
        ({"sentence_bert_config.json": None, "tokenizer_config.json": 20}, 20),
        ({"tokenizer_config.json": 1000000000000000019884624838656}, None),
    ],
)
def test_the_most_tokens(tmp_path: Path, files: dict[str, Any], most: int | None) -> None:
    """Newer files leave them to the tokenizer's own."""
    folder = model(tmp_path, "Pooling")
    pooling(folder, "mean_tokens")
    for name, number in files.items():
        key = "model_max_length" if name.startswith("tokenizer") else "max_seq_length"
        write(folder / name, {key: number})
    assert found(folder).max_tokens == most


def gguf_with(path: Path, tensors: dict[str, np.ndarray] | None = None, **more: Any) -> Path:
    """The golden's GGUF with other keys, and further tensors."""
    checkpoint = open_checkpoint(GOLDENS / "gguf_minilm")
    keys = {
        key.removeprefix("bert."): value
        for key, value in checkpoint.metadata.items()
        if key.startswith("bert.")
    }
    whole = {name: tensor.read() for name, tensor in checkpoint.tensors.items()} | (tensors or {})
    tokens = len(checkpoint.metadata["tokenizer.ggml.tokens"])
    write_gguf(path, "bert", keys | {"vocab_size": tokens} | more, whole)
    return path


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / name / "expected.npz") as arrays:
        return dict(arrays)


def test_a_gguf_with_a_dense_layer_of_another_width(tmp_path: Path) -> None:
    dense = {"dense_2.weight": np.zeros((8, 47), np.float32)}
    path = gguf_with(tmp_path / "m.gguf", dense, pooling_type=1)
    with pytest.raises(SourceError, match=r"m\.gguf: dense_\*\.weight \[8, 47\] does not take 48"):
        found(path)


@pytest.mark.parametrize(("number", "take"), [(1, "mean"), (2, "first"), (3, "last")])
def test_a_gguf_says_its_pooling(tmp_path: Path, number: int, take: str) -> None:
    said = found(gguf_with(tmp_path / "m.gguf", pooling_type=number))
    assert (said.take, said.normalize, said.declared) == ((take,), True, True)


def test_a_gguf_pooled_by_its_first_token(tmp_path: Path) -> None:
    values = expected("minilm")
    rows = [values["input_ids"][0].tolist()]
    types = [values["token_type_ids"][0].tolist()]
    llm = LLM(gguf_with(tmp_path / "m.gguf", pooling_type=2), dtype="float32")
    got = llm.embed(rows, token_type_ids=types)
    np.testing.assert_allclose(got, values["cls_l2"][:1], rtol=0, atol=1e-4)


def test_a_gguf_that_gives_no_vector_of_a_text(tmp_path: Path) -> None:
    """A ranker's says nothing of vectors: a pooling of one's own gives some."""
    none = found(gguf_with(tmp_path / "m.gguf", pooling_type=0))
    assert (none.take, none.declared) == ((), False)
    assert "bert.pooling_type is 0, which gives no vector" in none.refusal
    assert (
        "is 9, which is not known" in found(gguf_with(tmp_path / "m.gguf", pooling_type=9)).refusal
    )
    llm = LLM(gguf_with(tmp_path / "m.gguf", pooling_type=4), dtype="float32")
    with pytest.raises(
        RequestError, match=r"m\.gguf: bert\.pooling_type is 4, a score by a ranking"
    ):
        llm.embed(TEXTS)
    assert llm.embed(TEXTS, pooling="mean").shape == (2, 48)
    with pytest.raises(RequestError, match=r"pooling is .cls.; .*allowed: first"):
        llm.embed(TEXTS, pooling="cls")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with words, prompts of which one stands before every text, and small letters."""
    folder = model(tmp_path_factory.mktemp("prompted"), "Pooling", "Normalize")
    pooling(folder, "mean_tokens")
    write(
        folder / "1_Pooling" / "config.json",
        {"pooling_mode": "mean", "include_prompt": False},
    )
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "Cat", "ask", "tell", "Tell", ":"]
    words += [f"word{number}" for number in range(320 - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    marks = {str(id): {"content": word, "special": True} for id, word in enumerate(words[:5])}
    write(
        folder / "tokenizer_config.json",
        {"added_tokens_decoder": marks, "do_lower_case": False, "tokenizer_class": "BertTokenizer"},
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True})
    write(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": "ask: ", "document": "Tell: ", "none": ""},
            "default_prompt_name": "query",
            "similarity_fn_name": "dot",
        },
    )
    return LLM(folder, dtype="float32")


def words_of(llm: LLM, given: Any, name: str | None = None) -> list[tuple[str, int]]:
    found = tokenize_texts(llm.session, given, name)
    return [(" ".join(map(llm.session.tokenizer.token, one.ids)), one.skipped) for one in found]


def test_prompts(prompted: LLM) -> None:
    """The default one, one that is named, and none; what is no text is taken as it is."""
    assert words_of(prompted, "Cat") == [("[CLS] ask : cat [SEP]", 3)]
    assert words_of(prompted, ["cat", "tell"], "document") == [
        ("[CLS] tell : cat [SEP]", 3),
        ("[CLS] tell : tell [SEP]", 3),
    ]
    assert words_of(prompted, "cat", "none") == [("[CLS] cat [SEP]", 0)]
    assert tokenize_texts(prompted.session, [[2, 6, 3]], None) == [EmbeddingTokens([2, 6, 3])]
    with pytest.raises(RequestError, match="no prompt 'qery'; did you mean 'query'"):
        prompted.embed("cat", prompt_name="qery")
    with pytest.raises(RequestError, match="prompt_name is for texts"):
        prompted.embed([[2, 6, 3]], prompt_name="query")
    with pytest.raises(ValueError, match="no prompt 'query'; the model has no prompts"):
        PoolingSpec(("mean",)).prompt("query")


def test_a_prompt_that_does_not_count(prompted: LLM) -> None:
    """It is read, and its tokens are no part of the mean."""
    hidden = prompted.hidden([prompted.encode("tell: cat")])[0]
    wanted = hidden[3:].mean(axis=0)
    got = prompted.embed("Cat", prompt_name="document")[0]
    np.testing.assert_allclose(got, wanted / np.linalg.norm(wanted), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"prompts": ["query: "]}, "prompts is .*; it has to be texts by name"),
        ({"prompts": {"a": 1}}, "prompts is .*; it has to be texts by name"),
        ({"default_prompt_name": "q"}, "default_prompt_name is 'q', which no prompt has"),
        ({"similarity_fn_name": "cosin"}, "similarity_fn_name is 'cosin'; did you mean 'cosine'"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, config: Any, error: str) -> None:
    folder = model(tmp_path, "Pooling")
    pooling(folder, "mean_tokens")
    write(folder / "config_sentence_transformers.json", config)
    with pytest.raises(SourceError, match=rf"config_sentence_transformers\.json: {error}"):
        found(folder)


def test_similarities() -> None:
    a, b = np.array([[3.0, 4.0]], np.float32), np.array([[4.0, 3.0]], np.float32)
    got = {name: float(near(a, b)[0]) for name, near in SIMILARITIES.items()}
    assert got == pytest.approx(
        {"cosine": 0.96, "dot": 24, "euclidean": -np.sqrt(2), "manhattan": -2}
    )
