"""The command `jinfer`: subcommands, their help, start-up time, and messages for wrong words."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jinfer
from jinfer.cli import entry_point, main
from jinfer.cli.entry_point import COMMANDS, GROUPS, Subcommand

ROOT = Path(__file__).parents[2]
# Modules of a folder with a `main`.
RUN = {
    folder: {
        path.stem for path in (ROOT / folder).rglob("*.py") if "\ndef main(" in path.read_text()
    }
    for folder in ("jinfer/cli", "tools")
}
BENCHMARKS = [item.name.removeprefix("bench ") for item in COMMANDS if item.name[:6] == "bench "]
SOON = 1.0  # seconds of its own work; JAX alone takes as long to import on a slow machine


def run(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m jinfer` with these words, in a process of its own."""
    command = [sys.executable, "-m", "jinfer", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_every_command_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr().out
    assert main(["--help"]) == main(["help"]) == 0
    assert capsys.readouterr().out == alone * 2
    lines = dict(re.findall(r"^  (\w+) +(\S.*)$", alone, re.MULTILINE))
    assert set(lines) == {command.name.split()[0] for command in COMMANDS}
    assert ", ".join(BENCHMARKS) in lines["bench"]


@pytest.mark.parametrize("words", [["bench"], ["bench", "--help"], ["help", "bench"]])
def test_a_group_lists_its_own(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    found = re.findall(r"^  bench (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert found == BENCHMARKS


def test_every_program_is_a_command() -> None:
    """Modules with a `main`, but for the dispatcher and what runs in a Python without jinfer."""
    modules = {command.module.rpartition(".")[2] for command in COMMANDS}
    assert modules >= RUN["jinfer/cli"] - {"entry_point", "llama_peer"}
    assert all(name.split()[0] in GROUPS for name in entry_point._NAMES if " " in name)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_begins_with_the_command(
    command: Subcommand, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.name.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jinfer {command.name} [")


@pytest.mark.parametrize(
    "script",
    [
        # The way to find them is the same for all.
        pytest.param(script, marks=[] if script == "bench_models" else [pytest.mark.soak])
        for script in sorted(RUN["tools"])
    ],
)
def test_a_script_of_the_source_tree(script: str) -> None:
    command = [sys.executable, "-m", f"tools.{script}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m tools.{script} [-h]")


def test_former_commands_name_their_scripts() -> None:
    """Benchmarks that were commands, and are scripts of the source tree."""
    scripts = {name.replace(" ", "_") for name in entry_point._SCRIPTS}
    assert scripts == {name for name in RUN["tools"] if name.startswith("bench_")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["genrate", "x"], "there is no command 'genrate'; did you mean 'generate'? there are: "),
        (["bench", "gpu"], "there is no command 'bench gpu'; did you mean 'bench cpu'? there are"),
        (
            ["bench", "lora", "m.gguf"],
            "'bench lora' is a script of jinfer's source tree; run",
        ),
        (["xyz"], "there is no command 'xyz'; there are: generate, chat, "),
        (["model.gguf"], "model.gguf is no command; did you mean 'jinfer generate model.gguf'?"),
        (["hf://a/b"], "hf://a/b is no command; did you mean 'jinfer generate hf://a/b'?"),
        ([str(ROOT)], f"{ROOT} is no command; did you mean 'jinfer generate {ROOT}'?"),
    ],
)
def test_a_wrong_word(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {said}")
    assert printed.err.count("\n") == 1


def test_words_reach_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "nowhere.toml", "--prompt", "x"]) == 2
    assert "nowhere.toml: there is no such file" in capsys.readouterr().err
    assert main(["chat", str(ROOT / "tests/goldens/llama2")]) == 2
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "jinfer", "list"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_ends_without_a_traceback(error: type[BaseException], tmp_path: Path) -> None:
    """Ctrl-C while a program is imported, or a reader that has gone."""
    (tmp_path / "stops.py").write_text(f"def main(arguments):\n    raise {error.__name__}\n")
    script = (
        "import sys; from jinfer.cli import entry_point\n"
        "entry_point._NAMES['list'] = entry_point.Subcommand('list', 'stops', '')\n"
        "sys.argv[1:] = ['list']; entry_point.enter()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == {KeyboardInterrupt: 130, BrokenPipeError: 1}[error]
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["bench"], ["genrate"]])
def test_help_needs_no_jax(words: list[str]) -> None:
    script = (
        "import sys; from jinfer.cli import main; main(sys.argv[1:]); "
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, check=False)
    after = os.times()
    assert done.returncode == 0
    # What the machine does beside it does not count.
    assert after.children_user - before.children_user < SOON


def test_the_version_is_the_checkouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    said = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert said is not None
    assert capsys.readouterr().out == f"jinfer {said[1]}\n"
    assert jinfer.__version__ == said[1]


def test_the_version_of_an_installation(tmp_path: Path) -> None:
    from importlib.metadata import version

    from jinfer.version import find_version

    assert find_version(tmp_path / "jinfer") == version("jinfer")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "7"\n')
    assert find_version(tmp_path / "jinfer") == version("jinfer")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "jinfer"\nversion = "7"\n')
    assert find_version(tmp_path / "jinfer") == "7"


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = run("bench")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m jinfer bench NAME")


def test_names_of_the_package() -> None:
    assert set(jinfer.__all__) <= set(dir(jinfer))
    assert all(getattr(jinfer, name) is not None for name in jinfer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        jinfer.LMM  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("run", "there is no command 'run'; there is: jinfer chat MODEL"),
        ("ps", "there is: jinfer list, which shows the models on this machine"),
        ("-v", "there is: jinfer --version"),
        ("embed", "/v1/embeddings"),
    ],
)
def test_words_of_other_programs(word: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "x"]) == 2
    assert words in capsys.readouterr().err
