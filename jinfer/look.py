"""Look inside a model: `jinfer look SOURCE --view NAME [--prompt TEXT] [--out FILE]`.

The views of `jinfer.views`, written to a file: a page that needs nothing else, or an image.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.run_command import check_writable, overrides_of, run
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.cli.terminal.generate_flags import token_ids
from jinfer.modelspec.toml_tables import merge
from jinfer.views.view_table import VIEWS, keywords

if TYPE_CHECKING:
    from jinfer import LLM

_SUFFIXES = (".html", ".svg")
_FLAGS = {"chosen": "--strategies"}  # flags that are not called like the keyword


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Errors are one line, never a traceback."""
    return run(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = CliParser(
        prog=prog_of_module(__spec__.name),
        description="Draws a view of a model's computation on a prompt, as a page or an image.",
        epilog="\n".join(["views:", *(f"  {n:14}{one.about}" for n, one in VIEWS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", help="a spec (.toml), a checkpoint folder or file, package://..., hf://...")
    add("--view", choices=list(VIEWS), default="tokens", metavar="NAME",
        help="the view, one of those below (tokens)")  # fmt: skip
    add("--prompt", metavar="TEXT", help="the text, without a chat template")
    add("--prompt-file", metavar="FILE", help="a UTF-8 file with the text")
    add("--ids", metavar="IDS", help='token ids instead of a text, such as "1 15043"')
    add("--chat", action="store_true", help="put the text into the chat template as a user message")
    add("--out", metavar="FILE", help="the file to write: .html or .svg (VIEW.html)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set any key of the spec")
    add("--top", type=int, metavar="N", help="tokens, lens: alternatives per token")
    add("--layer", type=int, metavar="N", help="patterns: the layer (0); -1: the last layer")
    add("--module", metavar="NAME", help="patterns: the attention module (attn)")
    add("--answer", metavar="TOKEN", help="attribution: the token, as text (the likeliest)")
    add("--against", metavar="TOKEN", help="attribution: subtract the logit of this token")
    add("--position", type=int, metavar="N", help="attribution: the position of the prompt (-1)")
    add("--max-tokens", type=int, metavar="N", help="length of the answer, in views that have one")
    add("--branches", type=int, metavar="N", help="alternatives: number of branches (4)")
    add("--ahead", type=int, metavar="N", help="alternatives: tokens per branch (8)")
    add("--strategies", dest="chosen", nargs="+", metavar="NAME",
        help="strategies: only these (all)")  # fmt: skip
    add("--reference", metavar="SOURCE",
        help="quantization: compare with this model (the source without quantization)")  # fmt: skip
    return parser


def _run(options: argparse.Namespace) -> int:
    view, out = VIEWS[options.view], Path(options.out or f"{options.view}.html")
    given = {name: getattr(options, name) for one in VIEWS.values() for name in one.takes}
    try:
        chosen = keywords(options.view, given)
    except LookupError as error:
        name, others = error.args
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        return _refuse(f"{flag} is for --view {' or '.join(others)}, not {options.view}")
    if out.suffix not in _SUFFIXES:
        return _refuse(f"--out {out}: a view is a page or an image; end it in .html or .svg")
    texts = {"--prompt": options.prompt, "--prompt-file": options.prompt_file, "--ids": options.ids}
    flags = [flag for flag, value in texts.items() if value is not None]
    if len(flags) > 1:
        return _refuse(f"{' and '.join(flags)} each give the text; keep one")
    if options.chat and options.ids is not None:
        return _refuse("--chat makes a text a message, and --ids are tokens; leave one out")
    if not flags and view.prompt:
        return _refuse(
            f"--view {options.view} needs a text: --prompt TEXT, --prompt-file FILE, or --ids IDS"
        )
    given_ids = None if options.ids is None else token_ids(options.ids)
    text = options.prompt
    if options.prompt_file is not None:
        text = Path(options.prompt_file).read_text(encoding="utf-8-sig")
    check_writable(out)
    llm = _opened(options.source, overrides_of(options.set))
    if "reference" in view.takes:
        plain = {"quantization": {"weights": "plain"}}
        overrides = merge(overrides_of(options.set), plain) if options.reference is None else {}
        chosen["reference"] = _opened(options.reference or options.source, overrides)
    prompt = given_ids
    if text is not None:
        prompt = llm.encode_chat(text) if options.chat else llm.encode(text)
    if prompt is not None and options.view != "memory":
        chosen["prompt"] = prompt
    drawn = view.make(llm, **chosen)
    print(f"{drawn.save(out)}: {drawn.title}, {drawn.about}")
    return 0


def _opened(source: str, overrides: dict[str, Any]) -> LLM:
    # Here: help and refusals need not wait for JAX.
    from jinfer import LLM

    return LLM(source, progress=sys.stderr.isatty(), **overrides)


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
