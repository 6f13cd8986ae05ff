"""Writes README.md; `--run` tries the cases first."""

import sys
import tempfile
from pathlib import Path

from tests.server.peers.page import PAGE, SUITES, page
from tests.server.peers.served import all_servers

if "--run" in sys.argv:
    with tempfile.TemporaryDirectory() as folder, all_servers(Path(folder)) as servers:
        for suite in SUITES:
            print(*suite.run(servers), sep="\n")
            print(f"{suite.name}: {suite.holding()} of {suite.applying()} hold")
PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
