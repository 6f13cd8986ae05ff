"""A wheel with the custom calls compiled, where `JINFER_PREBUILT` asks for it: `make wheel`.

It names the folder of XLA's headers, those of the oldest jaxlib that is to take them. All other
builds have Python and sources alone, and all else is in pyproject.toml.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
LIBRARY = Path("jinfer", "cpu", "prebuilt_library")
HEADERS = os.environ.get("JINFER_PREBUILT", "")


class WithLibrary(build_py):
    def run(self) -> None:
        super().run()
        into = Path(self.build_lib).resolve() / LIBRARY
        command = [sys.executable, "-m", "jinfer.cpu", "--into", into, "--headers", HEADERS]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit("error: no wheel without the custom calls; the line above says why")


class OfThisSystem(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class ForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """For this system's C library or a newer one (PEP 600)."""
        libc, version = platform.libc_ver()
        if libc != "glibc":
            return "py3", "none", super().get_tag()[2]
        major, minor = version.split(".")[:2]
        return "py3", "none", f"manylinux_{major}_{minor}_{platform.machine()}"


if HEADERS:
    commands = {"build_py": WithLibrary, "bdist_wheel": ForAnyPython}
    setup(distclass=OfThisSystem, cmdclass=commands)
else:
    setup()
