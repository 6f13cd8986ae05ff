"""What a line of the log for a person has."""

import logging

from jinfer.server.http import request_log


def test_a_request_for_a_person() -> None:
    """It fits two lines of a terminal of 80 columns."""
    said = {"msg": "request", "name": "jinfer.access", "levelno": 20, "request_id": "0" * 32,
            "method": "POST", "path": "/v1/chat/completions", "status": 200, "seconds": 1.18,
            "model": "smollm2_135m_instruct", "prompt_tokens": 31, "completion_tokens": 3,
            "finish_reason": "length", "ignored": ["store"]}  # fmt: skip
    line = request_log.PlainLines().format(logging.makeLogRecord(said))
    assert line[9:].startswith("POST /v1/chat/completions 200: seconds 1.18, prompt 31, answer 3, ")
    assert len(line) <= 160
    assert line.endswith("end length, model smollm2_135m_instruct, ignored store")
    assert "0" * 32 not in line
    failed = logging.makeLogRecord({**said, "status": 500})
    assert "request_id " + "0" * 32 in request_log.PlainLines().format(failed)
