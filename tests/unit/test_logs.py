"""Logging: levels, formats, and failures of the output."""

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from counter.config.settings import Settings
from counter.telemetry.logs import REQUEST_ID, log_to_stderr

CHANGED = ("", "counter", "counter.requests", "counter.audit")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stderr_of(settings: Settings, stream: io.StringIO, **lines: int) -> list[str]:
    """The output of a process without a configuration, when each logger of *lines* logs."""
    changed = [logging.getLogger(each) for each in CHANGED]
    levels = [each.level for each in changed]
    try:
        with patch.object(sys, "stderr", stream), patch.object(logging.root, "handlers", []):
            log_to_stderr(settings)
            for name, level in lines.items():
                logging.getLogger(name.replace("_", ".")).log(level, "from %s", name)
    finally:
        for logger, level in zip(changed, levels, strict=True):
            logger.setLevel(level)
    return stream.getvalue().splitlines()


def settings(tmp_path: Path, **given: Any) -> Settings:
    return Settings(**given)


@pytest.mark.parametrize(("log_format", "stream", "is_json"), [
    ("auto", Terminal(), False),
    ("auto", io.StringIO(), True),
    ("text", io.StringIO(), False),
    ("json", Terminal(), True),
], ids=["auto-terminal", "auto-pipe", "text", "json"])  # fmt: skip
def test_a_person_reads_text_and_a_machine_json(
    tmp_path: Path, log_format: str, stream: io.StringIO, is_json: bool
) -> None:
    [line] = stderr_of(settings(tmp_path, log_format=log_format), stream, counter_x=30)
    assert line.startswith("{") == is_json
    if is_json:
        assert json.loads(line)["message"] == "from counter_x"
    else:
        assert line.endswith(" WARNING counter.x: from counter_x")


def test_requests_and_acts_do_not_go_by_the_level(tmp_path: Path) -> None:
    lines = stderr_of(
        settings(tmp_path, log_level="error", log_format="text"),
        io.StringIO(),
        counter_x=30,
        counter_requests=20,
        counter_audit=20,
        library=20,
    )
    assert [line.split(" ")[2] for line in lines] == ["counter.requests:", "counter.audit:"]


def test_each_line_names_the_request_that_it_was_written_for(tmp_path: Path) -> None:
    reset = REQUEST_ID.set("req-1")
    try:
        [line] = stderr_of(settings(tmp_path, log_format="json"), io.StringIO(), counter_x=40)
    finally:
        REQUEST_ID.reset(reset)
    assert json.loads(line)["request_id"] == "req-1"
