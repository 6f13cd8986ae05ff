"""Logging: one line per event, as JSON or for a terminal, without prompts."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}

_REQUEST = {"method", "path", "status"}
# Field name in a terminal -> attribute of the log record.
_SHORT = {
    "seconds": "seconds",
    "prompt": "prompt_tokens",
    "answer": "completion_tokens",
    "end": "finish_reason",
}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **{k: v for k, v in vars(record).items() if k not in _STANDARD},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class PlainLines(logging.Formatter):
    """Formats a record for a terminal: `14:03:07 model loaded: seconds 1.2, model m`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        more = {k: v for k, v in vars(record).items() if k not in _STANDARD and v is not None}
        event = record.getMessage()
        if more.keys() >= _REQUEST:
            event, more = _request(more)
        words = ", ".join(f"{key} {_shown(value)}" for key, value in more.items())
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{when} {level}{event}{words and f': {words}'}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _request(fields: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Format a request in a few columns, with its id for server errors only."""
    more = dict(fields)
    method, path, status = (more.pop(name) for name in ("method", "path", "status"))
    if not isinstance(status, int) or status < HTTPStatus.INTERNAL_SERVER_ERROR:
        more.pop("request_id", None)
    columns = {short: more.pop(name) for short, name in _SHORT.items() if name in more}
    return f"{method} {path} {status}", {**columns, **more}


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class _QueueHandler(QueueHandler):
    """Queues records unchanged."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def set_up_logging(*, plain: bool, level: str) -> QueueListener:
    """Log to standard error from a thread of its own.

    A terminal or pipe that is not read would otherwise block the event loop.

    Returns:
        The listener; stop it at exit to flush the last lines.
    """
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(PlainLines() if plain else JsonLines())
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = _QueueHandler(records)
    listener = QueueListener(records, stream)
    listener.start()
    for name in ("jinfer", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    # uvicorn's own access lines add little.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("jinfer").level))
    return listener
