"""``counter token resolve`` says "counted" only if the service does."""

import json

import pytest

from counter_client.calls import Response
from counter_client.retrying import Answer, Send
from counter_client.transport import SyncTransport
from tests.cli.shell import Shell

TOKEN = "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30Z"
SETTINGS = {"namespace": "default", "counter_type": "ACCURATE"}
EVENT = {"event_item_key": 0, "event_id": TOKEN[:36], "delta": 1}


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Without a service."""
    monkeypatch.setenv("COUNTER_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda _: None)
    return Shell(capsys)


@pytest.mark.parametrize("body", [b"{}", b"null", b'{"status": "ok"}', b"[]", b"<html>", b""])
@pytest.mark.parametrize("words", [[TOKEN, "views", "1"], ["key:order-1", "views", "1"]])
def test_a_page_of_a_proxy_is_not_an_outcome(
    words: list[str], body: bytes, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: any 2xx with JSON was "counted: once, however often it was sent"."""
    found = {"namespace": SETTINGS, "events": {"events": [], "next_page": None}}

    def send(_: SyncTransport, send: Send) -> Answer:
        if send.request.operation in found:
            return Response(200, json.dumps(found[send.request.operation]).encode())
        return Response(200, body)

    monkeypatch.setattr(SyncTransport, "send", send)
    assert "it is unknown whether it is counted" in shell.fails(4, "token", "resolve", *words)


@pytest.mark.parametrize("time", ["2026-01-31T08:15:31Z", "2026-01-31T08:15:30.000001Z"])
def test_an_event_of_another_time_is_not_that_of_the_token(
    time: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = EVENT | {"event_time": time}
    found = {"namespace": SETTINGS, "events": {"events": [event], "next_page": None}}

    def send(_: SyncTransport, send: Send) -> Answer:
        return Response(200, json.dumps(found[send.request.operation]).encode())

    monkeypatch.setattr(SyncTransport, "send", send)
    assert shell.run("token", "resolve", TOKEN, "views") == (4, "")
