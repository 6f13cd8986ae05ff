"""tools/inspect: what it says of checkpoints that fit, that nearly fit, and that nobody knows."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.cli.inspect.inspect_checkpoint import main, proposals
from jinfer.cli.inspect.match_checkpoint import describe
from jinfer.cli.propose.propose_spec import propose_spec
from jinfer.cli.quantize.quantize_checkpoint import convert

GOLDENS = Path(__file__).parents[1] / "goldens"
Tensors = dict[str, np.ndarray]


def changed(folder: Path, change: Callable[[Tensors], Any], architecture: str = "") -> Path:
    """A copy of the golden llama2 with other tensors, or another architecture's name."""
    source = GOLDENS / "llama2"
    folder.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if architecture:
        config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "type", "words"),
    [
        ("llama2", "decoder-only", ["found by architectures = LlamaForCausalLM", "x = x + attn("]),
        (
            "gguf_llama2",
            "decoder-only",
            ["found by general.architecture = llama", "gguf", "eps 1e-05"],
        ),
        ("llama2c_v0/model.bin", "decoder-only", ["the family of llama2.c files"]),
        ("bert", "encoder-only", ["encoder.{0..2}.attn.q.weight", "pooled = tanh(pooler("]),
        ("t5", "encoder-decoder", ["cross(cross_norm(x), encoded)", "decoder.{0..1}.cross.k"]),
        ("mixtral", "decoder-only", ["experts.{0..3}.w1.weight", "experts.gate.weight[{0..3}]"]),
        ("gpt2", "decoder-only", ["attn.q.weight + decoder.{0..2}.attn.k.weight + decoder."]),
    ],
)
def test_a_checkpoint_that_fits(
    name: str, type: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, GOLDENS / name)
    for item in (*words, "Every parameter has its tensor"):
        assert item in text
    assert re.search(rf"^type +{type}$", text, flags=re.MULTILINE)


def test_every_tensor_and_every_parameter_is_listed_once() -> None:
    found = describe(GOLDENS / "llama2", {})
    assert {row.tensor.name for row in found.rows} == set(found.opened.checkpoint.tensors)
    held = [parameter for row in found.rows for parameter in row.parameters]
    assert len(held) == len(set(held)) == 30


def test_sizes_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = describe(GOLDENS / "llama2", {})
    assert found.sizes is not None
    stored = sum(int(np.prod(t.shape)) for t in found.opened.checkpoint.tensors.values())
    assert found.sizes.parameters == stored == 155072
    assert found.sizes.embeddings == 320 * 64
    assert found.sizes.total_bytes(16) == 2 * stored
    assert found.sizes.total_bytes(32) == 4 * stored
    assert found.sizes.embedding_bytes(3.5) == 320 * 64 * 7 / 8
    # Three layers, two arrays of 64 numbers, two bytes each.
    assert found.sizes.cache_per_token == 3 * 2 * 64 * 2
    assert "768 B a token, 192.00 KiB for a context of 256" in printed(capsys, GOLDENS / "llama2")


def test_a_tied_head_counts_once_and_its_copy_is_no_problem() -> None:
    found = describe(GOLDENS / "llama2c_v0_tied" / "model.bin", {})
    assert found.fits
    assert found.sizes is not None
    assert found.sizes.embeddings == found.spec.dims["vocab"] * found.spec.dims["hidden"]  # type: ignore[union-attr]


def test_what_does_not_fit_is_listed_and_lines_are_proposed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: Tensors) -> None:
        for i in range(3):
            old = tensors.pop(f"model.layers.{i}.self_attn.q_proj.weight")
            tensors[f"model.layers.{i}.self_attn.query.weight"] = old
            old = tensors.pop(f"model.layers.{i}.mlp.down_proj.weight")
            tensors[f"model.layers.{i}.mlp.zebra.weight"] = old
        tensors["model.extra\x1b.weight"] = np.zeros(7, np.float32)
        tensors["model.norm.weight"] = np.zeros(5, np.float32)

    text = printed(capsys, changed(tmp_path, change))
    assert "\n  model.layers.{0..2}.mlp.zebra.weight\n" in text
    assert "\n  model.extra?.weight\n" in text
    assert (
        "decoder.{0..2}.ffn.down.weight [64, 112]: "
        "looked for model.layers.{0..2}.mlp.down_proj.weight\n" in text
    )
    assert "model.norm.weight is [5] for decoder.norm.weight, but the specification says" in text
    assert '"decoder.{i}.attn.q" = "model.layers.{i}.self_attn.query"  # by its words' in text
    assert '"decoder.{i}.ffn.down" = "model.layers.{i}.mlp.zebra"  # by its shape' in text
    assert "Every parameter has its tensor" not in text


def test_one_missing_tensor_and_one_extra(tmp_path: Path) -> None:
    found = describe(changed(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), {})
    assert [item.parameter for item in found.missing] == ["decoder.1.ffn.up.weight"]
    assert not found.unused
    extra = {"model.layers.1.mlp.gate_proj.bias": np.zeros(112, np.float32)}
    found = describe(changed(tmp_path, lambda t: t.update(extra)), {})
    assert [tensor.name for tensor in found.unused] == list(extra)
    assert not found.missing


def test_a_spec_proposed_for_an_unknown_architecture_has_the_right_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a plain decoder needs no change."""
    folder = changed(tmp_path / "unknown", lambda t: None, "SomethingNewForCausalLM")
    text = printed(capsys, folder)
    assert "no family is known for SomethingNewForCausalLM" in text
    assert "model.layers.{0..2}.self_attn.q_proj.weight" in text
    _, _, proposed = text.partition("A proposed specification, to save as a .toml:\n")
    spec = tmp_path / "something_new.toml"
    spec.write_text('weights = "unknown"\n' + proposed)
    with np.load(GOLDENS / "llama2" / "expected.npz") as expected:
        asked = expected["input_ids"][0][expected["attention_mask"][0] > 0].tolist()
        correct = expected["logits"][0][: len(asked)]
    got = LLM(spec, dtype="float32").logits([asked])[0]
    np.testing.assert_allclose(got, correct, rtol=0, atol=2e-4)


def test_a_proposed_spec_is_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for a checkpoint whose family is known: a variant of it starts from there."""
    folder = changed(tmp_path / "weights", lambda t: None)
    file = tmp_path / "mine.toml"
    text = printed(capsys, folder, "--propose-spec", file)
    assert text.endswith(
        f"A proposed specification is in {file}.\n\nEvery parameter has its tensor, "
        "and every tensor its place.\n"
    )
    assert 'weights = "weights"\n' in file.read_text()
    assert describe(file, {}).fits
    file.write_text("# changed by hand")
    assert main([str(folder), "--draft", str(file)]) == 2  # the former name of the flag
    error = capsys.readouterr().err
    assert error.startswith("note: --draft is now called --propose-spec\n")
    assert "mine.toml: --propose-spec: is there already" in error
    assert file.read_text() == "# changed by hand"


def test_a_proposed_spec_reads_config_json_and_lists_unread_keys(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda t: None, "SomethingNewForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "partial_rotary_factor": 0.25,
        "some_scale": 0.1,
        "odd\nkey": [1],
        "bos_token_id": 1,
    }
    config["intermediate_size"] = None
    (folder / "config.json").write_text(json.dumps(config))
    found = describe(folder, {"family": "llama"})
    lines = propose_spec(found.opened).splitlines()
    assert 'rotary_dim   = "floor(head_dim * $partial_rotary_factor) | head_dim"' in lines
    assert 'intermediate = "$intermediate_size | 112"' in lines
    assert any(line.startswith("attn ") and 'dim = "rotary_dim"' in line for line in lines)
    _, _, rest = propose_spec(found.opened).partition("which nothing here reads:\n")
    assert "#   some_scale = 0.1\n#   odd\\nkey = [1]\n" in rest
    assert all(line.startswith("#   ") for line in rest.splitlines())
    assert "partial_rotary_factor" not in rest
    assert "bos_token_id" not in rest


def test_lines_are_proposed_where_only_some_of_a_module_is_there(tmp_path: Path) -> None:
    """The specification wants a bias that the file lacks: its matrix still has a likely line."""

    def change(tensors: Tensors) -> None:
        for i in range(3):
            old = tensors.pop(f"model.layers.{i}.self_attn.q_proj.weight")
            tensors[f"model.layers.{i}.self_attn.query.weight"] = old

    biased = {"decoder": {"modules": {"attn": {"bias": "q"}}}}
    found = describe(changed(tmp_path, change), biased)
    lines = [str(line) for line in proposals(found)]
    assert lines == ['"decoder.{i}.attn.q" = "model.layers.{i}.self_attn.query"']


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "gguf_llama2", "mixtral", "bloom", "phi2"])
def test_a_proposed_spec_names_most_tensors(name: str) -> None:
    """Its lines of [tensors] are those of the family."""
    found = describe(GOLDENS / name, {})
    assert found.spec is not None
    lines = [line for line in propose_spec(found.opened).splitlines() if line.startswith('"')]
    right = sum(1 for line in lines if _agrees(line, found.spec.tensors.entries))
    assert right >= 0.8 * len(lines) > 6


def _agrees(line: str, entries: Any) -> bool:
    parameter, _, source = line.partition(" = ")
    of_family = {name: entry.names for name, entry in entries}.get(parameter.strip('"'), ())
    return any(f'{name}"' in source for name in of_family)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    printed(capsys, GOLDENS / "mixtral", "--json", file)
    report = json.loads(file.read_text())
    assert report["family"] == "mixtral"
    assert report["memory"]["16"] == 2 * report["parameters"]
    assert report["missing"] == report["unused"] == report["wrong_shape"] == []
    (router,) = (
        t for t in report["tensors"] if t["name"].endswith("1.block_sparse_moe.gate.weight")
    )
    assert router["parameters"] == ["decoder.1.ffn.router.weight"]
    assert report == json.loads(printed(capsys, GOLDENS / "mixtral", "--json", "-"))


def test_settings_change_the_specification(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, GOLDENS / "llama2", "--set", "dims.intermediate=100")
    assert "is [112, 64] for decoder.0.ffn.gate.weight, but the specification says [100" in text
    text = printed(capsys, GOLDENS / "llama2", "--set", "family=gpt2")
    assert "none" not in text.split("family", 1)[0]
    assert "no specification  " in text


@pytest.mark.parametrize("orbax", [False, True])
def test_a_converted_checkpoint_is_described_and_not_its_source(
    orbax: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    rules = [
        {"match": "decoder.*.attn.v", "weights": "q8"},
        {"match": "logits", "weights": "plain"},
    ]
    keys = {"weights": "q3.5", "threshold": 0, "outliers": 0.01, "rules": rules}
    convert(str(GOLDENS / "gguf_llama2"), out, {"quantization": keys}, orbax=orbax)
    report = json.loads(printed(capsys, out, "--json", "-"))
    files = out.rglob("*") if orbax else out.glob("*.safetensors")
    stored = sum(path.stat().st_size for path in files if path.is_file())
    assert report["converted"]
    assert 0 < report["bytes_in_file"] < stored
    types = {tensor["name"]: tensor["type"] for tensor in report["tensors"]}
    assert types["decoder.1.attn.q.weight"].startswith("q3.5, ")
    assert types["decoder.1.attn.v.weight"].startswith("q8, ")
    assert types["logits.weight"] == "F32"
    assert types["decoder.norm.weight"] == "F32"
    assert not any(name.startswith(("blk.", "output")) for name in types)
    assert report["missing"] == report["unused"] == report["wrong_shape"] == []
    text = printed(capsys, out)
    kind = "Orbax" if orbax else "safetensors"
    assert re.search(rf"^format +converted, in {kind}; made from gguf$", text, re.MULTILINE)
    assert re.search(r"^made with +weights q3.5, .*threshold 0", text, re.MULTILINE)
    assert re.search(r"decoder.\{0..2\}.attn.v.weight .* q8, .* \(was F16\)", text)
    assert "Every parameter has its tensor" in text
    assert "0 B" not in text


def test_a_converted_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    convert(str(GOLDENS / "mixtral"), tmp_path / "out", {})
    assert describe(tmp_path / "out", {}).fits
    found = describe(tmp_path / "out", {"dims": {"intermediate": 24, "layers": 4}})
    assert any("decoder.0.ffn.experts.gate.weight is [" in item for item in found.wrong)
    assert "decoder.3.attn.q.weight" in [item.parameter for item in found.missing]
    found = describe(tmp_path / "out", {"dims": {"layers": 1}})
    assert "decoder.1.attn.q.weight" in [tensor.name for tensor in found.unused]


def test_what_layers_share_is_listed_once(tmp_path: Path) -> None:
    source = changed(tmp_path / "source", lambda t: None)
    over: Any = {"tensors": {"decoder.{i}.ffn.up": "model.layers.{i}.mlp.gate_proj",
                             "ignore": ["*.up_proj.weight"]}}  # fmt: skip
    convert(str(source), tmp_path / "out", over)
    found = describe(tmp_path / "out", {})
    (row,) = (row for row in found.rows if "decoder.1.ffn.up.weight" in row.parameters)
    assert row.parameters == ["decoder.1.ffn.gate.weight", "decoder.1.ffn.up.weight"]


def test_drawing_and_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, page = tmp_path / "wiring.svg", tmp_path / "report.html"
    printed(capsys, GOLDENS / "llama2", "--svg", svg, "--html", page)
    assert svg.read_text().startswith("<svg ")
    html = page.read_text()
    assert svg.read_text() in html
    assert "model.layers.{0..2}.self_attn.q_proj.weight" in html


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no such file"),
        (["{empty}"], "holds no checkpoint"),
        (["{llama2}", "--set", "x"], "key=value"),
        (["{unknown}", "--svg", "{empty}/x.svg"], "nothing to draw"),
        (["{llama2}", "--propose-spec", "{empty}/none/x.toml"], "there is no folder"),
        (["{llama2}", "--json", "{empty}/none/x.json"], "there is no folder"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"empty": tmp_path / "empty", "llama2": GOLDENS / "llama2"}
    places["empty"].mkdir()
    places["unknown"] = changed(tmp_path / "unknown", lambda t: None, "NobodyKnows")
    assert main([argument.format_map(places) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err


def test_a_specification_beside_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDENS / "llama2", tmp_path / "weights")
    (tmp_path / "mine.toml").write_text('family = "llama"\nweights = "weights"\n')
    text = printed(capsys, tmp_path / "mine.toml")
    assert "llama (named by the specification)" in text


def test_the_time_of_a_proposal_is_linear_in_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 20,000 it took minutes."""
    save_file({f"w{n}": np.zeros(1, np.float32) for n in range(20_000)}, tmp_path / "w.safetensors")
    begun = time.thread_time()
    assert main([str(tmp_path / "w.safetensors")]) == 0
    assert time.thread_time() - begun < 20
    assert "w19999" in capsys.readouterr().out
