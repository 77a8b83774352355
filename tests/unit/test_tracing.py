"""The switch of traces, and its error if they are not possible."""

import sys
from pathlib import Path

import pytest

from counter.config.settings import Settings
from counter.errors import StartupError
from counter.telemetry import open_tracing
from counter.telemetry.tracing import Tracing


def test_traces_are_off_unless_asked_for(tmp_path: Path) -> None:
    tracing = open_tracing(Settings())
    assert type(tracing) is Tracing


def test_without_the_extra_a_start_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "counter.telemetry.otel", raising=False)
    # As if it is not installed: the API may be there without the SDK.
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(StartupError, match=r"opentelemetry.sdk.* is not installed: pip install"):
        open_tracing(Settings(traces="otlp"))
