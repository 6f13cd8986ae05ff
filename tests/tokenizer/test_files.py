"""Which files make which tokenizer, what other JSON files change, and broken files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jinfer.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tests.tokenizer.test_goldens import GOLDENS

T5 = "tok_spm_unigram_t5/spiece.model"
SPM = "tok_spm_bpe/tokenizer.model"


def build(folder: Path, files: dict[str, str], **configs: Any) -> Tokenizer:
    """A folder of goldens' files under other names, with JSON files; and its tokenizer."""
    for name, source in files.items():
        shutil.copy(GOLDENS / source, folder / name)
    for name, value in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    found = load_tokenizer(folder)
    assert found is not None
    return found


def test_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_llama2c_model_file(tmp_path: Path) -> None:
    model = tmp_path / "stories.bin"
    model.write_bytes(b"weights")
    assert load_tokenizer(model, vocab_size=800) is None
    shutil.copy(GOLDENS / "tok_llama2c/tokenizer.bin", tmp_path)
    found = load_tokenizer(model, vocab_size=700)
    assert found is not None
    assert found.vocab_size == 700
    with pytest.raises(TokenizerError, match=r"tokenizer\.bin: ends in piece 800 of 801"):
        load_tokenizer(model, vocab_size=801)


def test_vocab_txt_is_the_same_as_tokenizer_json(tmp_path: Path) -> None:
    reference = load_tokenizer(GOLDENS / "tok_wordpiece")
    assert reference is not None
    words = [reference.token(id) for id in range(reference.vocab_size)]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    found = build(tmp_path, {}, tokenizer_config={"tokenizer_class": "BertTokenizer"})
    for case in json.loads((GOLDENS / "tok_wordpiece/expected.json").read_text())["cases"]:
        assert found.encode(case["text"]) == case["ids"]
    assert found.encode_pair("Hello", "world") == reference.encode_pair("Hello", "world")
    assert (found.pad_id, found.unk_id, found.mask_id) == (0, 1, 4)


def test_cased_word_piece(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nHello\nhello\n")
    assert build(tmp_path, {}).encode("Hello") == [2, 4, 3]
    lower = build(tmp_path, {}, tokenizer_config={"do_lower_case": True})
    assert lower.encode("Hello") == [2, 5, 3]


def test_roberta_frames_a_text_and_a_pair(tmp_path: Path) -> None:
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "a": 3, "Ġb": 4, "Ġ": 5, "b": 6, "<mask>": 7}
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ b\n")
    config = {"tokenizer_class": "RobertaTokenizer", "mask_token": "<mask>", "pad_token": "<pad>"}
    found = build(tmp_path, {}, vocab=vocabulary, tokenizer_config=config)
    assert found.encode("a b") == [0, 3, 4, 2]
    assert found.encode("a <mask> b") == [0, 3, 7, 4, 2]  # the mask takes the space before it
    assert found.encode_pair("a", "b")[0] == [0, 3, 2, 2, 6, 2]
    assert (found.mask_id, found.pad_id) == (7, 1)


def test_add_bos_token(tmp_path: Path) -> None:
    files = {name: f"tok_gpt2_slow/{name}" for name in ("vocab.json", "merges.txt")}
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>"}
    plain = build(tmp_path, files, tokenizer_config=config).encode("Hello")
    config["add_bos_token"] = True  # type: ignore[assignment]
    assert build(tmp_path, files, tokenizer_config=config).encode("Hello") == [0, *plain]
    off = build(
        tmp_path,
        {"tokenizer.json": "tok_llama3/tokenizer.json"},
        tokenizer_config={"bos_token": "<|begin_of_text|>", "add_bos_token": False},
    )
    assert off.encode("a") == off.encode("a", special=False)


def test_eos_ids_of_generation_config(tmp_path: Path) -> None:
    files = {"tokenizer.json": "tok_llama3/tokenizer.json"}
    assert build(tmp_path, files, config={"eos_token_id": 3}).eos_ids == (3,)
    values = {"eos_token_id": [1, 4], "user_token_id": 2}
    found = build(tmp_path, files, generation_config=values, config={"eos_token_id": 3})
    assert found.eos_ids == (1, 4)
    assert found.special.user == 2


def test_eos_ids_of_config_where_generation_config_has_none(tmp_path: Path) -> None:
    """transformers makes a generation configuration of config.json where there is no file."""
    files = {"tokenizer.json": "tok_llama3/tokenizer.json"}
    own = {"eos_token": "<|end_of_text|>"}
    name_id = build(tmp_path, files, tokenizer_config=own).eos_ids
    assert len(name_id) == 1
    found = build(tmp_path, files, tokenizer_config=own, config={"eos_token_id": [7, 9, -1]})
    assert found.eos_ids == (*name_id, 7, 9)
    inner = {"text_config": {"eos_token_id": 8}}
    assert build(tmp_path, files, tokenizer_config=own, config=inner).eos_ids == (*name_id, 8)
    stated = {"eos_token_id": [5]}
    found = build(tmp_path, files, config={"eos_token_id": [7]}, generation_config=stated)
    assert found.eos_ids == (*name_id, 5)


def test_no_space_before_a_text(tmp_path: Path) -> None:
    """As transformers 4.57's and 5.18's LlamaTokenizer have it; the former's slow one without
    `legacy` reads no add_prefix_space."""
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    config |= {"eos_token": "</s>", "add_prefix_space": False}
    expected = {
        "Hello": ["H", "e", "ll", "o"],
        "  Hello": ["▁▁", "H", "e", "ll", "o"],
        "<s>Hello</s> world": ["<s>", "H", "e", "ll", "o", "</s>", "▁w", "or", "ld"],
        "\nHello": ["<0x0A>", "H", "e", "ll", "o"],
    }
    for legacy in (None, False, True):
        config["legacy"] = legacy
        found = build(tmp_path, {"tokenizer.model": SPM}, tokenizer_config=config)
        for text, names in expected.items():
            ids = found.encode(text, special=False)
            assert [found.token(id) for id in ids] == names
            assert found.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_next_to_sentencepiece(special: bool, tmp_path: Path) -> None:
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    entry = {"content": "<|user|>", "special": special, "rstrip": True}
    word = {"content": "maçã", "special": False, "lstrip": True}
    config["added_tokens_decoder"] = {"800": entry, "801": word}
    found = build(tmp_path, {"tokenizer.model": SPM}, tokenizer_config=config)
    hello = found.encode("Hello", special=False)
    assert found.encode("<|user|>\n Hello maçã", special=False) == [800, *hello, 801]
    plain = found.encode("<|user|>\n Hello", special=False, parse_special=False)
    assert (plain == [800, *hello]) is not special


def test_an_added_word_is_its_letters(tmp_path: Path) -> None:
    """In byte-level names ç and ã stand for bytes, in an added token for themselves."""
    entries = {str(600 + special): {"content": f"maçã{special}", "special": bool(special)}
               for special in (0, 1)}  # fmt: skip
    found = build(
        tmp_path,
        {"tokenizer.json": "tok_llama3/tokenizer.json"},
        tokenizer_config={"added_tokens_decoder": entries},
    )
    text = "a maçã0 maçã1"
    ids = found.encode(text, special=False)
    assert {600, 601} < set(ids)
    assert found.decode(ids, skip_special=False) == text


def test_token_id_that_differs_from_the_vocabulary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The vocabulary's counts, as in transformers."""
    files = {"tokenizer.json": "tok_llama3/tokenizer.json"}
    id = build(tmp_path, files).id("ll")
    entry = {"content": "ll", "special": False}
    config = {"added_tokens_decoder": {"599": entry}}
    found = build(tmp_path, files, tokenizer_config=config)
    assert found.encode("xllx", special=False)[1] == id
    assert f"token 'll' has id {id}, but tokenizer_config.json says 599" in caplog.text


def test_added_tokens(tmp_path: Path) -> None:
    found = build(
        tmp_path,
        {"tokenizer.json": "tok_llama3/tokenizer.json"},
        tokenizer_config={"added_tokens_decoder": {"600": {"content": "<new>", "special": True}}},
        added_tokens={"<tool>": 601},
    )
    assert found.vocab_size == 602
    assert found.encode("<new><tool>", special=False) == [600, 601]
    assert found.decode([600, 601]) == "<tool>"  # not special, so it is text


def test_llama_flags(tmp_path: Path) -> None:
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    config |= {"add_eos_token": True, "eos_token": "</s>"}
    found = build(tmp_path, {"tokenizer.model": SPM}, tokenizer_config=config)
    hello = found.encode("Hello", special=False)
    assert found.encode("Hello") == [*hello, 2]
    spaced = found.encode("<s>Hello", special=False)
    assert spaced == [1, *hello]
    config["legacy"] = False
    modern = build(tmp_path, {"tokenizer.model": SPM}, tokenizer_config=config)
    assert modern.encode("Hello", special=False) == hello
    after = modern.encode("<s>Hello", special=False)
    assert after == [1, *hello[1:]]  # hello begins with a piece that is only the space


def test_xlm_roberta_shifts_the_ids(tmp_path: Path) -> None:
    base = build(tmp_path, {"spiece.model": T5})
    ids = base.encode("Hello world", special=False)  # pieces of the library, <unk> is 2 here
    config = {"tokenizer_class": "XLMRobertaTokenizer", "mask_token": "<mask>"}
    (tmp_path / "spiece.model").unlink()
    found = build(tmp_path, {"sentencepiece.bpe.model": T5}, tokenizer_config=config)
    assert found.encode("Hello world") == [0, *(id + 1 for id in ids), 2]
    assert (found.unk_id, found.pad_id, found.mask_id) == (3, 1, 701)


def test_mbart_puts_the_language_last(tmp_path: Path) -> None:
    codes = ["ar_AR", "en_XX", "fr_XX"]
    config = {"tokenizer_class": "MBartTokenizer", "additional_special_tokens": codes}
    found = build(tmp_path, {"sentencepiece.bpe.model": T5}, tokenizer_config=config)
    assert found.special.languages == {"ar_AR": 701, "en_XX": 702, "fr_XX": 703}
    assert found.encode("Hello")[-2:] == [2, 702]
    assert found.encode("Hello", language="fr_XX")[-2:] == [2, 703]
    with pytest.raises(TokenizerError, match="the tokenizer has: ar_AR, en_XX, fr_XX"):
        found.encode("Hello", language="de_DE")


def test_chatglm(tmp_path: Path) -> None:
    config = {"tokenizer_class": "ChatGLMTokenizer"}
    found = build(tmp_path, {"tokenizer.model": SPM}, tokenizer_config=config)
    assert found.special.prefix == (801, 803)  # [gMASK] sop, after the 800 pieces
    word = found.encode("philosophy", special=False)
    assert 803 not in word
    assert found.decode(found.encode("philosophy")) == "philosophy"


def test_marian(tmp_path: Path) -> None:
    vocabulary = {"</s>": 0, "<unk>": 1, "▁": 2, "H": 3, ">>fra<<": 4, "<pad>": 5}
    config = {"tokenizer_class": "MarianTokenizer", "eos_token": "</s>", "unk_token": "<unk>"}
    found = build(tmp_path, {"source.spm": T5}, vocab=vocabulary, tokenizer_config=config)
    assert found.encode(">>fra<< H") == [4, 2, 1, 0] or found.encode(">>fra<< H") == [4, 2, 3, 0]
    assert found.vocab_size == 6


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer.json", "{", "not a tokenizer.json"),
        ("tokenizer.json", '{"model": 3}', "not a tokenizer.json"),
        ("tokenizer.model", "nonsense", "not a sentencepiece model"),
        ("tokenizer_config.json", "[]", "must be a JSON object"),
        ("tokenizer_config.json", "\xff", "not readable as JSON"),
        ("tokenizer_config.json", '{"bos_token": 3, "x": {}}', "a token must be a string"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "has 'x' for an id"),
        ("tokenizer_config.json", '{"additional_special_tokens": 3}', "must be a list"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id must be an id"),
        ("added_tokens.json", '{"a": "b"}', "token 'a' must have an id"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, file: str, text: str, words: str) -> None:
    shutil.copy(GOLDENS / "tok_wordpiece/tokenizer.json", tmp_path)
    if file == "tokenizer.model":
        (tmp_path / "tokenizer.json").unlink()
    (tmp_path / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(TokenizerError, match=words) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path / file) in str(error.value)
    assert "\n" not in str(error.value)


def test_merges_errors(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("a b c\n")
    with pytest.raises(TokenizerError, match=r"merges\.txt, line 1: a merge is two tokens"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("a b\n")
    with pytest.raises(TokenizerError, match=r"merges\.txt: "):
        load_tokenizer(tmp_path)


SOURCES = (
    "tok_wordpiece/tokenizer.json",
    "tok_llama3/tokenizer.json",
    "tok_spm_bpe/tokenizer.model",
    "tok_llama2c/tokenizer.bin",
    "tok_gpt2_slow/vocab.json",
    "tok_gpt2_slow/merges.txt",
    "tok_gpt2_slow/tokenizer_config.json",
)


@pytest.mark.parametrize("source", SOURCES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_broken_files_are_tokenizer_errors(tmp_path: Path, source: str, data: Any) -> None:
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree((GOLDENS / source).parent, folder)
    file = folder / Path(source).name
    broken = bytearray(file.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(broken) - 1), max_size=4)):
        broken[place] = data.draw(st.integers(0, 255))
    file.write_bytes(broken[: data.draw(st.integers(0, len(broken)))])
    try:
        found = load_tokenizer(folder)
    except TokenizerError as error:
        reason = str(error)
    else:
        reason = str(folder)
        assert found is None or isinstance(found.decode(found.encode("Hello 東京")), str)
    assert str(folder) in reason
