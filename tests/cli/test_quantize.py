"""tools/quantize: the files it writes, the table it prints, and what it refuses."""

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.cli.inspect.inspect_checkpoint import main as inspect
from jinfer.cli.quantize.quantize_checkpoint import ErrorSums, FormatRow, convert, main, to_text
from jinfer.cli.toml_writer import toml_text
from jinfer.loader.checkpoint.orbax import orbax_api
from jinfer.loader.config.pooling_config import Projection
from jinfer.loader.open_model import open_model
from jinfer.quant import parse_format
from jinfer.quant.calibration_stats import InputStats
from jinfer.quant.quantize_matrix import Method, quantize
from tests.loader.resolving import resolved

GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL = GOLDENS / "llama2"
SMALL: dict[str, Any] = {"quantization": {"weights": "q4", "threshold": 0, "method": "mse"}}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_the_table_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    options = ("--weights", "q3.5", "--set", "quantization.threshold=0", "--json", report)
    assert run(MODEL, tmp_path / "out", "--method", "rtn", *options) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == [
        *("format", "parameters", "weights", "MiB", "bits", "error", "outputs")
    ]
    assert "outputs: products with inputs were not measured" in printed
    rows = json.loads(report.read_text())["formats"]
    by_name = {row["format"]: row for row in rows}
    assert list(by_name) == ["q6", "q3.5", "float32", "all"]
    assert by_name["q3.5"]["bits"] > 4.5  # rows of 112 are padded to 128
    assert by_name["q6"]["error"] < by_name["q3.5"]["error"] < 0.15
    assert by_name["float32"]["error"] is None
    total = by_name.pop("all")
    assert total["nbytes"] == sum(row["nbytes"] for row in by_name.values())
    assert total["weights"] == 155_072
    assert total["nbytes"] < (tmp_path / "out" / "model.safetensors").stat().st_size


def test_the_error_is_that_of_the_weights(tmp_path: Path) -> None:
    for outliers in (0.0, 0.02):
        tables = {"quantization": {**SMALL["quantization"], "outliers": outliers}}
        out = tmp_path / str(outliers)
        rows = {row.format: row for row in convert(str(MODEL), out, tables)}
        ours = LLM(out)
        leaves: dict[str, Any] = dict(
            zip(ours._engine.runner.model.names, ours._engine.runner.parameters, strict=True)
        )
        plain = LLM(MODEL, quantization={"weights": "plain"})
        errors = squares = 0.0
        for name, expected in zip(
            plain._engine.runner.model.names, plain._engine.runner.parameters, strict=True
        ):
            if name.startswith("decoder") and "norm" not in name:
                errors += float(((leaves[name].dequantize() - expected) ** 2).sum())
                squares += float((expected**2).sum())
        name = "q4 and outliers" if outliers else "q4"
        assert rows[name].error == pytest.approx((errors / squares) ** 0.5, rel=1e-4)


def test_the_table_of_a_small_model() -> None:
    rows = [
        FormatRow("q4", 2, 2048, 1280, 0.07654, 0.01234),
        FormatRow("float32", 1, 64, 256, None),
    ]
    assert to_text(rows).splitlines()[1:] == [
        "q4                            2          2,048       0.0   5.000    7.65%    1.23%",
        "float32                       1             64       0.0  32.000                  ",
        "all                           3          2,112       0.0   5.818                  ",
        "bits: of a weight, with its share of scales, bases and padding",
        "error, outputs: of the weights, and of their products with the inputs that were read; "
        "root mean square",
    ]


def test_errors_of_products_rank_methods() -> None:
    """Feedback has the larger error of the weights, and the smaller one of what they give."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(64, 96)).astype(np.float32)
    inputs = rng.normal(size=(500, 4)) @ rng.normal(size=(4, 96)) + rng.normal(size=(500, 96)) / 4
    mean = (inputs.T @ inputs / 500).astype(np.float32)
    found = dict[str, ErrorSums]()
    for method in get_args(Method):
        hessian = mean if method == "gptq" else None
        tensor = quantize(weights, parse_format("q3"), method=method, hessian=hessian)
        found[method] = ErrorSums()
        found[method].add(tensor, weights, InputStats(mean, np.array(500, np.float32)))
        wrong = inputs @ (tensor.dequantize() - weights).T
        given = inputs @ weights.T
        share = np.square(wrong).mean() / np.square(given).mean()
        assert found[method].outputs == pytest.approx(share, rel=0.1)
    assert found["mse"].errors < found["gptq"].errors
    assert (found["gptq"].outputs or 1) < 0.5 * (found["mse"].outputs or 0)


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_that_is_there(
    tmp_path: Path, full: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if full:
        (out / "notes").write_text("mine")
    assert run(MODEL, out) == (2 if full else 0)
    if full:
        assert capsys.readouterr().err == (
            f"error: {out}: is there already; name another folder, or remove it\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(MODEL, tmp_path / "out") == 0
    capsys.readouterr()
    cases = {
        (tmp_path / "out", tmp_path / "again"): "is converted already; give the checkpoint",
        (tmp_path / "nowhere", tmp_path / "new"): "there is no such file or folder",
        (MODEL, MODEL / "config.json"): "is there already",
        (MODEL, tmp_path / "new", "--weights", "q7"): "quantization.weights: no quantization form",
        (MODEL, tmp_path / "new", "--calibration", tmp_path / "no"): "No such file",
    }
    for arguments, words in cases.items():
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    # Nothing is left of what failed.
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("orbax", [False, True])
def test_damage_found_late_leaves_nothing(
    orbax: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jinfer.cli.quantize.quantize_checkpoint.copy_companions", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(str(MODEL), tmp_path / "out", SMALL, orbax=orbax)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["save", "finalize"])
def test_orbax_that_fails_leaves_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax_api(tmp_path).partial, where, stop)
    with pytest.raises(KeyboardInterrupt):
        convert(str(MODEL), tmp_path / "out", SMALL, orbax=True)
    assert list(tmp_path.iterdir()) == []


def test_arrays_in_a_folder_of_orbax(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    shutil.copytree(MODEL, source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDENS / "tok_gpt2" / name, source)
    options = ("--weights", "q4", "--set", "quantization.threshold=0")
    assert run(source, tmp_path / "files", *options) == 0
    table = capsys.readouterr().out.splitlines()[:-1]
    assert run(source, tmp_path / "orbax", *options, "--orbax") == 0
    assert capsys.readouterr().out.splitlines()[:-1] == table
    shutil.rmtree(source)
    names = {path.name for path in (tmp_path / "files").iterdir()} - {"model.safetensors"}
    assert {path.name for path in (tmp_path / "orbax").iterdir()} == {
        *("model.orbax", "model.orbax.json"),
        *names,
    }
    expected, ours = LLM(tmp_path / "files"), LLM(tmp_path / "orbax")
    assert ours.encode("Hello there") == expected.encode("Hello there")
    assert np.array_equal(ours.logits([[1, 2, 3]])[0], expected.logits([[1, 2, 3]])[0])
    assert inspect([str(tmp_path / "orbax")]) == 0
    assert "Every parameter has its tensor" in capsys.readouterr().out
    assert run(tmp_path / "orbax", tmp_path / "again") == 2
    assert "is converted already" in capsys.readouterr().err


def test_without_orbax(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert run(MODEL, tmp_path / "out", "--orbax") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'out'}: needs the package orbax-checkpoint")
    assert error.endswith("-m pip install 'jinfer[orbax]'\n")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_specification_goes_along(tmp_path: Path) -> None:
    """Its families that are not jinfer's, its prompt, what the user set, but not its folder."""
    folder = tmp_path / "source"
    (folder / "weights").mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        shutil.copy(MODEL / name, folder / "weights" / name)
    (folder / "base.toml").write_text(
        'family = "llama"\n[prompt]\nsystem = "Be \\"brief\\"."\n[generation]\ntop_k = 5\n'
    )
    (folder / "spec.toml").write_text(
        'family = "base.toml"\nweights = "weights"\n'
        '[prompt]\ntemplate = "<{query}>\\n\\tend"\n[dims]\neps = 1e-5\n'
    )
    overrides = {
        "quantization": {**SMALL["quantization"], "activations": "float",
                         "rules": [{"match": "*.attn.q", "weights": "q8"}]},
        "generation": {"temperature": 0.5},
        "dims": {"context": 64},
    }  # fmt: skip
    out = tmp_path / "out"
    convert(str(folder), out, overrides)
    expected = resolved(folder, overrides).spec
    shutil.rmtree(folder)
    ours = resolved(out, {}).spec
    for key in ("dims", "prompt", "generation", "quantization", "stacks", "shared", "dtype"):
        assert getattr(ours, key) == getattr(expected, key), key
    assert LLM(out).context == 64


def test_tokenizers_go_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(MODEL, source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDENS / "tok_gpt2" / name, source)
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "short.jinja").write_text("short")
    convert(str(source), tmp_path / "out", SMALL)
    convert(str(MODEL), tmp_path / "other", {**SMALL, "tokenizer": str(source)})
    expected = LLM(source, **{"quantization.weights": "plain"})  # type: ignore[arg-type]
    shutil.rmtree(source)
    for out in ("out", "other"):
        ours = LLM(tmp_path / out)
        for text in ("Hello there", "ça va?"):
            assert ours.encode(text) == expected.encode(text)
        message = [{"role": "user", "content": "Hi"}]
        assert ours.encode_chat(message) == expected.encode_chat(message)
    assert (tmp_path / "out" / "additional_chat_templates" / "short.jinja").exists()


def test_the_tokenizer_of_a_gguf_file_goes_along(tmp_path: Path) -> None:
    source = GOLDENS / "gguf_llama2" / "model.gguf"
    convert(str(source), tmp_path / "out", SMALL)
    expected, ours = LLM(source), LLM(tmp_path / "out")
    assert expected.tokenizer is not None
    assert ours.tokenizer is not None
    assert ours.encode("abc def") == expected.encode("abc def")
    assert ours.session.opened.checkpoint.metadata == expected.session.opened.checkpoint.metadata


def test_the_tokenizer_of_llama2c_goes_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(GOLDENS / "llama2c_v0" / "model.bin", source)
    shutil.copy(GOLDENS / "tok_llama2c" / "tokenizer.bin", source)
    convert(str(source / "model.bin"), tmp_path / "out", SMALL)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["model.safetensors", "spec.toml", "tokenizer.bin"]


def test_the_pooling_goes_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "minilm", source)
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Dense"):
        (source / name).mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    (source / "2_Dense" / "config.json").write_text("{}")
    hidden = json.loads((source / "config.json").read_text())["hidden_size"]
    dense = np.random.default_rng(0).normal(size=(8, hidden)).astype(np.float32)
    save_file({"linear.weight": dense}, source / "2_Dense" / "model.safetensors")
    convert(str(source), tmp_path / "out", {"quantization": {"weights": "plain"}})
    shutil.rmtree(source)
    ours = open_model(tmp_path / "out", {}).pooling
    assert ours.take == ("first",)
    (layer,) = ours.layers
    assert isinstance(layer, Projection)
    assert np.array_equal(layer.weight, dense)


def test_plain_parameters_keep_what_the_file_says(tmp_path: Path) -> None:
    convert(str(MODEL), tmp_path / "out", {"quantization": {"weights": "plain"}})
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(array.dtype == np.float32 for array in stored.values())
    # Half the size, where the user says that this is what it is computed in.
    convert(str(MODEL), tmp_path / "half", {"dtype": "float16"})
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert half["embed.weight"].dtype == np.float16
    expected = LLM(MODEL, dtype="float16").logits([[1, 2, 3]])[0]
    assert np.array_equal(LLM(tmp_path / "half").logits([[1, 2, 3]])[0], expected)


def test_a_converted_checkpoint_can_be_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(str(GOLDENS / "gguf_llama2" / "model.gguf"), tmp_path / "out", SMALL)
    assert inspect([str(tmp_path / "out")]) == 0
    assert "Every parameter has its tensor" in capsys.readouterr().out


@pytest.mark.parametrize(
    "table",
    [
        {"a": 1, "b": 1.5, "c": True, "d": "x", "e": [1, "y", {"z": 0}], "f": 1e-6},
        {"text": 'a "quoted" \\ line', "lines": 'one\ntwo """three"""\n\ttab\x7f\r\n', "ü": "é"},
        {"a": {"b": {"c": 1}, "d": {}}, "decoder.{i}.attn": "x", "e f": {"g.h": [1.0]}},
        {"a": {}, "b": {"c": []}, "big": 10**15, "small": -1e300},
    ],
)
def test_what_is_written_as_toml_is_read_again(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(table)) == table
