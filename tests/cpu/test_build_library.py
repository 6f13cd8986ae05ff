"""How the custom calls are compiled and found."""

import _ctypes
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jinfer.cpu import build_library, compilers, library_cache
from jinfer.cpu.cpp_sources import FLAGS, ISA_FLAGS, SRC, Unit, units
from jinfer.cpu.isa import ISAS, own_isa
from tests.cpu.helpers import copying_compiler

built = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, as the library is loaded once in each."""
    everything = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=everything, capture_output=True, text=True, check=True)


_ASK = "from jinfer.cpu import build_library as build; print(build.available(), build.available())"


@pytest.fixture(autouse=True)
def _no_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this process may have been made by another test."""
    monkeypatch.setattr(library_cache, "_private", [])


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The library in a cache folder of its own."""
    real = build_library.library_path()
    folder = tmp_path / "libraries" / build_library.key(build_library._target(every=False))
    shutil.copytree(real.parent, folder)
    for path in (folder.parent, folder, folder / real.name):
        path.chmod(0o700)
    return folder / real.name


@pytest.fixture
def copier(tmp_path: Path) -> str:
    return copying_compiler(tmp_path)


def test_missing_compiler_is_logged_in_one_line(tmp_path: Path) -> None:
    done = run(_ASK, CXX="no-such-compiler", JINFER_CACHE=str(tmp_path))
    assert done.stdout.split() == ["False", "False"]
    (line,) = done.stderr.splitlines()
    assert "no C++ compiler no-such-compiler; install g++ or clang++" in line
    assert "slower" in line


def test_environment_variable_disables_custom_calls() -> None:
    done = run(_ASK, **{build_library.OFF: "1"})
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr == ""


def test_compiler_failure_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path))
    with pytest.raises(compilers.BuildError, match="false fails"):
        build_library.library_path()
    assert not list((tmp_path / "libraries").iterdir())


def test_interrupt_ends_compilers(tmp_path: Path) -> None:
    """Nor for what they start; also where the signal is for this process alone."""
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nsleep 40\n", encoding="utf-8")
    slow.chmod(0o700)
    code = f"from jinfer.cpu import compilers; compilers.run_all([[{str(slow)!r}]] * 5, 2)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == -signal.SIGINT


class Build:
    """A library of three objects, in a folder as `library_cache.build` has it."""

    def __init__(self, folder: Path) -> None:
        self.place, self.objects, self.made = folder / "place", folder / "objects", folder / "made"
        self.objects.mkdir()
        self.made.touch()
        self.compiler = folder / "compiler"
        self.compiler.write_text(
            f'#!/bin/sh\necho "$1" >> {self.made}\n[ "$1" != "$FAILS" ] && echo "$1" > "$2"\n'
        )
        self.linker = folder / "linker"
        self.linker.write_text('#!/bin/sh\n[ "$(cat "$@" | tr -d "\\n")" = abc ]\n')
        for program in (self.compiler, self.linker):
            program.chmod(0o700)

    def run(self) -> str:
        """Builds it, from the beginning; which objects were compiled."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        self.made.write_text("")
        outputs = [str(self.place / f"{name}.o") for name in "abc"]
        commands = [[str(self.compiler), Path(out).stem, out] for out in outputs]
        compilers.compile_and_link(commands, [str(self.linker), *outputs], self.objects, 1)
        return self.made.read_text().replace("\n", "")


def test_finished_objects_are_kept_when_a_build_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that turns out to be damaged is made anew, with all others."""
    build = Build(tmp_path)
    monkeypatch.setenv("FAILS", "c")
    with pytest.raises(compilers.BuildError):
        build.run()
    monkeypatch.setenv("FAILS", "none")
    assert build.run() == "c"
    (build.objects / "b.o").unlink()
    (build.objects / "b.o").write_text("b cut")
    assert build.run() == "abc"


def test_objects_that_another_user_could_write_are_removed(tmp_path: Path) -> None:
    (tmp_path / "new-key").mkdir()
    (tmp_path / "new-key").chmod(0o777)
    (tmp_path / "new-key/a.o").touch()
    folder = library_cache._objects(tmp_path, "key")
    assert not list(folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(own_isa() is None, reason="nobody says what this CPU can do")
def test_foreign_instruction_sets_are_not_optimized_and_linked_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[list[str]]()

    def all_of(given: list[list[str]], link: list[str], *_: object) -> None:
        commands.extend([*given, link])

    monkeypatch.setattr(build_library, "compile_and_link", all_of)
    place = library_cache.BuildPaths(tmp_path / "library.so", tmp_path)
    build_library._compile(["c++"], place, 2, build_library.TESTED, jax.ffi.include_dir())
    *compiled, link = commands
    fast = {Path(command[-1]).stem for command in compiled if "-O0" not in command}
    linked = [Path(word).stem for word in link if word.endswith(".o")]
    own = own_isa()
    assert own is not None
    beyond = tuple(f"_{isa}" for isa in ISAS[ISAS.index(own) + 1 :])
    assert fast == {name for name in linked if not name.endswith(beyond)}
    ends = [
        next((n for n, end in enumerate(ISA_FLAGS) if name.endswith(end)), -1) for name in linked
    ]
    assert ends == sorted(ends)
    assert ends[0] == -1  # what has no instructions of its own


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["/usr/bin/ld: cannot find -lstdc++", "collect2: error: ld returned 1"], "cannot find"),
        (["In file included", "a.h:1: error: no", "a.h:2: error: more"], "a.h:1: error: no"),
        (["Killed"], "Killed"),
    ],
)
def test_compiler_error_gives_the_reason(lines: list[str], reason: str) -> None:
    assert reason in compilers.reason(lines)


@built
def test_two_processes_compile_once(copier: str, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\nsleep 0.2\nexec {copier} "$@"\n', encoding="utf-8")
    slow.chmod(0o700)
    environment = {**os.environ, "CXX": str(slow), "JINFER_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", _ASK]
    both = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    shown = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 0]
    assert sorted("compiling" in line for line in shown) == [False, True]
    assert not list((tmp_path / "cache" / "libraries").glob("building-*"))


@built
def test_library_is_found_again() -> None:
    path = build_library.library_path()
    written = path.stat().st_mtime_ns
    assert build_library.library_path() == path
    assert path.stat().st_mtime_ns == written


@built
def test_cached_library_needs_no_compiler_and_no_writable_folder(kept: Path) -> None:
    """As in a container image; nor is a temporary folder made."""
    for path in (kept, kept.parent, kept.parent.parent):
        path.chmod(0o500)
    code = f"import tempfile; tempfile.mkdtemp = None; {_ASK}"
    done = run(code, CXX="no-such-compiler", JINFER_CACHE=str(kept.parents[2]))
    assert done.stdout.split() == ["True", "True"]
    assert done.stderr == ""
    for path in (kept.parent.parent, kept.parent):
        path.chmod(0o700)


@built
@pytest.mark.parametrize("damage", ["cut", "empty", "foreign"])
def test_damaged_library_is_built_again(kept: Path, copier: str, damage: str) -> None:
    whole = kept.read_bytes()
    if damage == "foreign":
        shutil.copy(_ctypes.__file__, kept)
    else:
        kept.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    done = run(_ASK, CXX=copier, JINFER_CACHE=str(kept.parents[2]))
    assert done.stdout.split() == ["True", "True"]
    assert "compiling custom calls" in done.stderr
    assert kept.read_bytes() == whole
    assert [path.name for path in kept.parent.parent.iterdir()] == [kept.parent.name]


@built
@pytest.mark.parametrize("which", [0, 1, 2])
def test_library_that_others_can_write_is_not_loaded(
    kept: Path, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JINFER_CACHE", str(kept.parents[2]))
    assert library_cache.find(kept.parent.name) == kept
    part = (kept, *kept.parents)[which]
    part.chmod(0o777)
    assert library_cache.find(kept.parent.name) is None


@built
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("which", [0, 1, 2])
def test_library_of_another_user_is_not_loaded(
    kept: Path, which: int, copier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JINFER_CACHE", str(kept.parents[2]))
    monkeypatch.setenv("CXX", copier)
    os.chown((kept, *kept.parents)[which], 1234, 1234)
    assert library_cache.find(kept.parent.name) is None
    again = build_library.library_path()
    assert again.stat().st_uid == os.geteuid()
    assert library_cache.find(again.parent.name) == again


@built
def test_cache_folders_are_private(
    tmp_path: Path, copier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was there already, and what a killed build has left in it is removed."""
    folder = tmp_path / "cache" / "libraries"
    left = folder / "new-left"
    left.mkdir(parents=True)
    folder.chmod(0o777)
    os.utime(left, (time.time() - 172800, time.time() - 172800))
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", copier)
    path = build_library.library_path()
    assert path.parent.parent == folder
    for each in (folder, path.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    assert [each.name for each in folder.iterdir()] == [path.parent.name]


@built
def test_library_that_cannot_be_cached_is_reported_and_compiled_once(
    tmp_path: Path, copier: str
) -> None:
    """The cache is no folder here."""
    (tmp_path / "cache").write_text("")
    done = run(_ASK, CXX=copier, JINFER_CACHE=str(tmp_path / "cache"))
    assert done.stdout.split() == ["True", "True"]
    (line,) = done.stderr.splitlines()
    assert "for this process alone: some" in line
    assert (
        f"they cannot be kept ({tmp_path / 'cache' / 'libraries'} cannot be used: Not a directory)"
        in line
    )


def test_reason_why_a_library_cannot_be_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path))
    assert library_cache.writable_cache()[1] == ""
    monkeypatch.setattr(library_cache, "_REQUIRED_BYTES", 1 << 60)
    reason = library_cache.writable_cache()[1]
    assert reason == f"{tmp_path / 'libraries'} has no room for 1073741824.00 GiB"
    monkeypatch.setenv("JINFER_CACHE", "off")
    assert library_cache.writable_cache()[1] == "JINFER_CACHE=off"


def test_unloadable_library_is_not_rebuilt_twice(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-shared*) echo linked >> "$0.log";; esac\n'
        'while [ "$#" -gt 1 ]; do [ "$1" = -o ] && echo nothing > "$2"; shift; done\nexit 0\n'
    )
    compiler.chmod(0o755)
    done = run(_ASK, CXX=str(compiler), JINFER_CACHE=str(tmp_path / "cache"))
    assert done.stdout.split() == ["False", "False"]
    assert "no custom calls: models run several times slower" in done.stderr
    assert (tmp_path / "compiler.log").read_text().split() == ["linked"]


@built
def test_user_without_a_home_folder(copier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("JINFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", copier)
    path = build_library.library_path()
    assert path.exists()
    assert build_library.library_path() == path


def test_compiler_is_probed_for_newer_flags(tmp_path: Path) -> None:
    """Those leave out kernels, and not all of the library."""
    older = tmp_path / "older"
    older.write_text('#!/bin/sh\ncase "$*" in *-mavx512bf16*) exit 1;; esac\nexit 0\n')
    older.chmod(0o755)
    assert not build_library._supports([str(older)], ISA_FLAGS["_avx512bf16"])
    assert not build_library._supports([str(older)], ISA_FLAGS["_amx"])
    assert build_library._supports([str(older)], ISA_FLAGS["_avx512"])


@pytest.mark.parametrize(
    ("machine", "isas"),
    [
        ("x86_64", {"portable", "avx2", "avxvnni", "avx512", "avx512bf16", "amx"}),
        ("aarch64", {"portable", "neon"}),
        ("riscv64", {"portable"}),
    ],
)
def test_a_machine_compiles_its_own_kernels(
    machine: str, isas: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    linear = [path.stem for path in build_library._sources() if path.stem.startswith("linear_")]
    assert sorted(linear) == sorted(f"linear_{isa}" for isa in isas)
    bf16 = [
        path.stem
        for path in build_library._sources()
        if path.stem.startswith(("dense_p", "dense_bf16"))
    ]
    own = ["dense_bf16_amx", "dense_bf16_avx512bf16", "dense_portable"]
    assert bf16 == (own if machine == "x86_64" else ["dense_portable"])


@built
@pytest.mark.skipif(own_isa() is None, reason="nobody says what this CPU can do")
def test_at_first_use_there_are_kernels_for_this_machine_alone(
    tmp_path: Path, copier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library with all of them is preferred, and built on request."""
    own = own_isa()
    assert os.environ.get(build_library.LOWER) or own == build_library.isa()
    assert {path.stem for path in build_library._sources(own)} < {
        path.stem for path in build_library._sources()
    }
    assert not any(path.stem.endswith("_portable") for path in build_library._sources("avx2"))
    stems = {path.stem for path in build_library._sources("avxvnni")}
    assert stems > {"linear_avxvnni", "rowwise_avx2"}
    assert "linear_avx2" not in stems
    stems = {path.stem for path in build_library._sources("avx512bf16")}
    assert stems > {"linear_avx512bf16", "dense_avx512", "dense_bf16_avx512bf16"}
    assert "linear_avx512" not in stems
    stems = {path.stem for path in build_library._sources("amx")}
    assert stems > {"linear_amx", "dense_avx512", "dense_bf16_amx"}
    assert not stems & {"linear_avx512bf16", "dense_bf16_avx512bf16"}
    stems = {path.stem for path in build_library._sources("neon")}
    assert stems > {"linear_neon", "rowwise_portable"}
    assert "linear_portable" not in stems
    for variable in (build_library.EVERY, build_library.LOWER):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("JINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", copier)
    assert build_library.library_path().parent.name == build_library.key(own)
    assert build_library.library_path(every=True).parent.name == build_library.key()
    assert build_library.library_path().parent.name == build_library.key()


def test_extra_flags_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for flags in ("", "-fsanitize=address", ""):
        monkeypatch.setenv(build_library.FLAGS, flags)
        build_library.own_key.cache_clear()
        found.append(build_library.key())
    monkeypatch.undo()
    build_library.own_key.cache_clear()
    assert found[0] == found[2] != found[1]


@built
def test_instructions_can_be_lowered(caplog: pytest.LogCaptureFixture) -> None:
    best = build_library.isa()
    with build_library.lowered_isa("portable"):
        assert build_library.isa() == "portable"
    assert build_library.isa() == best
    with caplog.at_level(logging.WARNING):
        done = run(
            "from jinfer.cpu import build_library as build; print(build.isa())",
            **{build_library.LOWER: "portable"},
        )
    assert done.stdout.strip() == "portable"


def names(compiled: Path) -> list[str]:
    """What an object gives to others."""
    lines = subprocess.run(
        ["nm", "-C", "--defined-only", "--extern-only", str(compiled)],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    found = [line.split(maxsplit=2)[2] for line in lines]
    return [name for name in found if not name.startswith("DW.ref.")]


FASTER = [unit for unit in units(build_library._sources()) if "-mavx2" in unit.flags]


@built
@pytest.mark.soak
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm lists names")
@pytest.mark.parametrize("unit", FASTER, ids=lambda unit: unit.name)
def test_kernel_objects_share_no_symbol(unit: Unit, tmp_path: Path) -> None:
    """A linker takes one of all functions of a name, perhaps one for instructions that lack."""
    include = ("-I", jax.ffi.include_dir(), "-I", str(SRC))
    compiler = [*build_library._compiler(), *FLAGS, *unit.flags, *include]
    out = tmp_path / "kernels.o"
    subprocess.run([*compiler, "-c", str(unit.write(tmp_path)), "-o", str(out)], check=True)
    assert sorted(names(out)) == sorted(f"jinfer::{path.stem}()" for path in unit.paths)
