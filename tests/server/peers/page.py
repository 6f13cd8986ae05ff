"""The tables of README.md."""

from tests.server.peers import (
    llama_chat,
    llama_messages,
    llama_routes,
    vllm_chat,
    vllm_serve,
    vllm_text,
    vllm_vectors,
)
from tests.server.peers.suite import Suite
from tests.server.running import ROOT

PAGE = ROOT / "tests" / "server" / "peers" / "README.md"
_MODULES = (llama_routes, llama_messages, vllm_serve, vllm_text, vllm_vectors)  # they add cases
SUITES: tuple[Suite, ...] = (llama_chat.LLAMA, vllm_chat.VLLM)


def page(text: str) -> str:
    """The page with its tables anew."""
    for suite in SUITES:
        begin, end = f"<!-- {suite.name} -->", f"<!-- end of {suite.name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{suite.table()}\n{end}{rest.partition(end)[2]}"
    return text
