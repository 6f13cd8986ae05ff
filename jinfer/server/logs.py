"""Logs: a line for each thing that happens, of JSON or for a person, without anybody's words."""

from __future__ import annotations

import logging
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
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
    """The same for a person in a terminal: 14:03:07 model loaded: seconds 1.2, model m."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        more = {k: v for k, v in vars(record).items() if k not in _STANDARD and v is not None}
        words = ", ".join(f"{key} {_shown(value)}" for key, value in more.items())
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{when} {level}{record.getMessage()}{words and f': {words}'}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class _Queued(QueueHandler):
    """Hands records on as they are."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def set_up(*, plain: bool, level: str) -> QueueListener:
    """Sends what is logged to standard error, from a thread of its own.

    A terminal or a pipe that nobody reads from would hold up the event loop else.

    Returns:
        What has to be stopped at the end, so that the last lines come out.
    """
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(PlainLines() if plain else JsonLines())
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = _Queued(records)
    listener = QueueListener(records, stream)
    listener.start()
    for name in ("jinfer", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    # uvicorn's own lines say little beside ours.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("jinfer").level))
    return listener
