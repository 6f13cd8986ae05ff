"""Measure drafts: `python -m tools.measure_drafts FOLDER... [--logits]` drafts a spec for each.

Every folder is a checkpoint, or has checkpoints in its subfolders. A draft is made of names, shapes
and config.json alone, whatever families there are, so that each checkpoint counts as unseen. One
with an expected.npz (`tokens` or `input_ids`, and `logits`) is compared with it, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jinfer.api.user_errors import USER_ERRORS
from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.loader.open_model import open_files

from .checkpoint_layers import module_name
from .draft_spec import draft
from .match_checkpoint import CheckpointMatch, describe
from .run_main import run

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
TOLERANCE = 2e-4


@dataclass(frozen=True)
class DraftResult:
    """What became of a draft.

    Attributes:
        resolves: it opens, every parameter has its tensor and every tensor its place.
        named: it does not, but a comment of the draft names all that is left over.
        difference: of the logits from the expected ones; None if there are none to compare.
        problem: why it does not resolve, or has no logits.
    """

    name: str
    resolves: bool
    named: bool = False
    difference: float | None = None
    problem: str = ""

    @property
    def equal(self) -> bool:
        """Whether the logits are the expected ones."""
        return self.difference is not None and self.difference < TOLERANCE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = CliParser(
        prog=prog_of_module(__spec__.name),
        description="Drafts a specification for each checkpoint, and counts what they are worth.",
    )
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoints, or folders of them")
    parser.add_argument("--logits", action="store_true", help="compare logits, too")
    return run(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    results = []
    for source in checkpoints(options.folders):
        result = measure(source, options.logits)
        results.append(result)
        word = "resolves" if result.resolves else "named" if result.named else "FAILS"
        off = "" if result.difference is None else f"{result.difference:.1e}"
        print(f"{result.name:<28} {word:<9} {off:<8} {result.problem}".rstrip(), flush=True)
    compared = [result for result in results if result.difference is not None]
    print(f"{len(results)} checkpoints: {sum(r.resolves for r in results)} resolve, ", end="")
    print(
        f"{sum(r.named for r in results)} name what is missing; of {len(compared)} compared ",
        end="",
    )
    print(f"{sum(r.equal for r in compared)} have the expected logits")
    return 0


def checkpoints(folders: Sequence[Path]) -> Iterator[Path]:
    """The checkpoints that are these folders, or in their subfolders."""
    for folder in folders:
        for place in sorted([folder, *(p for p in folder.iterdir() if p.is_dir())]):
            found = [file for pattern in _WEIGHTS for file in place.glob(pattern)]
            if found:
                yield found[0] if found[0].suffix == ".gguf" else place


def measure(source: Path, logits: bool = False) -> DraftResult:
    """Drafts a specification in a folder for temporary files, and opens it."""
    name = source.parent.name if source.is_file() else source.name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.toml"
        try:
            text = draft(open_files(source, {}), str(source.resolve()))
            file.write_text(text, encoding="utf-8")
            found = describe(file, {})
        except USER_ERRORS as error:
            return DraftResult(name, False, problem=str(error).replace(f"{file}: ", ""))
        if not found.fits:
            return DraftResult(name, False, _named(found, text), problem=_problem(found))
        place = source if source.is_dir() else source.parent
        expected = _expected(place)
        if not logits or expected is None:
            return DraftResult(name, True)
        try:
            return DraftResult(name, True, difference=_difference(file, *expected))
        except USER_ERRORS as error:
            return DraftResult(name, True, problem=str(error).replace(f"{file}: ", ""))


def _named(found: CheckpointMatch, text: str) -> bool:
    """Whether comments of the draft name every tensor without a place, and nothing else lacks."""
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    names = {f'"{module_name(tensor.name)}"' for tensor in found.unused}
    names |= {key.partition(".")[0] for key in found.consequences if found.refused}
    wrong = found.spec is None or bool(found.missing) or bool(found.wrong)
    return not wrong and all(name in comments for name in names)


def _problem(found: CheckpointMatch) -> str:
    if found.spec is None:
        return found.problem
    parts = [f"no place for {tensor.name}" for tensor in found.unused[:3]]
    parts += [f"no tensor for {each.parameter}" for each in found.missing[:3]]
    parts += list(found.wrong[:1])
    parts += [f"refused for {', '.join(found.consequences)}"] if found.refused else []
    return "; ".join(parts)


def _expected(place: Path) -> tuple[list[int], np.ndarray] | None:
    """Tokens of one text, and the logits that a reference gave; None if there are none.

    Those of a GGUF file may be its checkpoint's, in the folder of the same name without `gguf_`.
    """
    for folder in (place, place.parent / place.name.removeprefix("gguf_")):
        if not (folder / "expected.npz").exists():
            continue
        with np.load(folder / "expected.npz") as arrays:
            types = arrays["token_type_ids"].any() if "token_type_ids" in arrays else False
            if "logits" not in arrays or types or "decoder_input_ids" in arrays:
                continue
            tokens = arrays["tokens"] if "tokens" in arrays else arrays["input_ids"][0]
            wanted = arrays["logits"]
            return tokens.tolist(), wanted[0] if wanted.ndim == 3 else wanted
    return None


def _difference(file: Path, tokens: list[int], wanted: np.ndarray) -> float:
    """The greatest difference of logits from the expected ones."""
    from jinfer import LLM  # here: it imports JAX

    got = np.asarray(LLM(file, dtype="float32").logits([tokens])[0])
    if got.shape[-1] != wanted.shape[-1]:
        return float("inf")
    return float(np.abs(got - wanted[: len(got)]).max())


if __name__ == "__main__":
    sys.exit(main())
