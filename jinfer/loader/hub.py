"""Model hub: repositories fetched by huggingface_hub, or found in its cache without a network."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinfer.loader.config.source_errors import SourceError
from jinfer.modelspec.spec_errors import nearest_hint

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm"]
HUB_WEIGHTS = ["*.safetensors", "*.bin", "*.gguf"]

_PATIENCE = 10.0  # seconds for the hub's first answer
_REPOSITORY = "models--"  # how folders of the cache begin
# Errors of a connection, as huggingface_hub, requests and httpx call them: which of the two it
# brings along depends on its version.
_LOST = {
    "ConnectionError",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "Timeout",
    "TransportError",
}
_log = logging.getLogger("jinfer")


def fetched(source: str, name: str, file: str, revision: str | None) -> Path:
    """Fetch a repository and return the folder of its snapshot, or a file in it.

    If the hub cannot be reached, or HF_HUB_OFFLINE is set, the cache is used.

    Args:
        source: the user's source, for errors.
        name: `owner/name`.
        file: a file of the repository; "": the folder.

    Raises:
        SourceError: the repository or the file does not exist, or is not in the cache.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
    except ImportError as error:
        raise SourceError(
            f"{source}: needs the package huggingface_hub; run: "
            f"{sys.executable} -m pip install 'jinfer[hub]'"
        ) from error
    offline = constants.HF_HUB_OFFLINE
    reason = "HF_HUB_OFFLINE is set" if offline else _unresolved(constants.ENDPOINT)
    if not reason:
        try:
            return _downloaded(hub, source, name, file, revision)
        except SourceError:
            raise
        except Exception as error:  # the hub's library raises its own, its HTTP library's, OSError
            message = str(error).strip() or type(error).__name__
            message = message.splitlines()[0]
            if not _is_lost(error):
                raise SourceError(f"{source}: {message}") from error
            reason = f"{_host(constants.ENDPOINT)} cannot be reached ({message})"
    found = _cached(hub, source, name, file, revision, reason)
    if not offline:
        _log.warning("%s: %s; its copy in the cache is used: %s", source, reason, found)
    return found


def snapshot(path: Path) -> Path:
    """Return the snapshot in a repository's folder of the hub's cache; other paths unchanged.

    Raises:
        SourceError: there is no snapshot, or there are several and none is `main`.
    """
    folder = path.parent if path.name == "snapshots" else path
    if not (folder.name.startswith(_REPOSITORY) and (folder / "snapshots").is_dir()):
        return path
    snapshots = {each.name: each for each in (folder / "snapshots").iterdir() if each.is_dir()}
    main = folder / "refs" / "main"
    name = main.read_text(errors="replace").strip()[:100] if main.is_file() else ""
    if name in snapshots:
        return snapshots[name]
    if len(snapshots) == 1:
        return next(iter(snapshots.values()))
    listed = ", ".join(sorted(snapshots)[:5])
    what = f"several snapshots ({listed}): name one of them" if snapshots else "no snapshot"
    raise SourceError(f"{path}: is a folder of the hub's cache and holds {what}")


def repository(path: Path) -> str:
    """Return `owner/name` of a snapshot in the cache; "" for other paths."""
    snapshots = path.parent
    if snapshots.name != "snapshots" or not snapshots.parent.name.startswith(_REPOSITORY):
        return ""
    return snapshots.parent.name.removeprefix(_REPOSITORY).replace("--", "/")


def _downloaded(hub: Any, source: str, name: str, file: str, revision: str | None) -> Path:
    # Not list_repo_files, which retries for half a minute if nobody answers.
    about = hub.model_info(name, revision=revision, timeout=_PATIENCE)
    files = [each.rfilename for each in about.siblings or ()]
    if file and file not in files:
        raise SourceError(f"{source}: there is no {file} in {name}; {nearest_hint(file, files)}")
    # A repository often has the same weights in several formats: only the safest is fetched.
    weights = next((w for w in HUB_WEIGHTS if any(Path(f).match(w) for f in files)), "*.bin")
    patterns = [*(p for p in HUB_FILES if p not in HUB_WEIGHTS), file or weights]
    folder = hub.snapshot_download(name, revision=revision, allow_patterns=patterns)
    return Path(folder) / file


def _cached(hub: Any, source: str, name: str, file: str, revision: str | None, reason: str) -> Path:
    """Return the copy of a repository in the cache. Raises `SourceError` if there is none."""
    try:
        folder = hub.snapshot_download(name, revision=revision, local_files_only=True)
    except Exception as error:
        raise SourceError(
            f"{source}: {reason}, and the hub's cache has no copy of it; "
            "a folder or a .gguf needs no network"
        ) from error
    path = Path(folder) / file
    if not path.exists():
        raise SourceError(f"{source}: {reason}, and its copy in the cache, {folder}, has no {file}")
    return path


def _host(endpoint: str) -> str:
    return urlsplit(endpoint).hostname or endpoint


def _unresolved(endpoint: str) -> str:
    """Return the reason why the hub's name cannot be resolved; "" if it can, or a proxy does it."""
    from urllib.request import getproxies  # with all of SSL, which starts without a hub do without

    if getproxies():  # they look names up themselves
        return ""
    host = _host(endpoint)
    try:
        socket.getaddrinfo(host, 443)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"{host} cannot be reached ({reason})"
    return ""


def _is_lost(error: Exception) -> bool:
    """Whether the hub did not answer, or answered that it cannot at the moment."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return bool(names & _LOST) or (isinstance(status, int) and status >= 500)
