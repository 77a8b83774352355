"""The logs of real processes: JSON lines, acts with their actors, and no secret."""

import asyncio
import json
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from counter.cli.app import app
from tests.support.rest import fresh
from tests.support.server import ROOT, Server, refused

pytestmark = pytest.mark.usefixtures("child_processes")


PASSWORD = "correct-horse-battery-staple"


def lines_of(text: str) -> list[dict[str, Any]]:
    """Every line of *text*, which must be JSON."""
    return [json.loads(line) for line in text.splitlines()]


def made_key(data: Path, audit: Path) -> tuple[str, str]:
    """A new key, and the log of its creation."""
    flags = ["--namespace", "*", "--scope", "admin", "--data", data, "--audit-log", audit]
    command = [sys.executable, "-m", "counter", "key", "create", *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


async def test_a_run_logs_each_act_and_no_secret(tmp_path: Path) -> None:
    data, audit = tmp_path / "data", tmp_path / "audit.jsonl"
    key, said = made_key(data, audit)
    key_id, secret = key.split("_")[1:]
    flags = {"log_level": "debug", "log_requests": "all", "audit_log": str(audit)}
    server = Server(data, tmp_path / "logs", flags)
    try:
        await server.start()
        async with server.client("videos") as rest:
            refused = await rest.http.get("/v1/namespaces/videos")
            rest.http.headers["authorization"] = f"Bearer {key[:-1]}?"
            mistyped = await rest.http.get("/v1/namespaces/videos")
            assert (refused.status_code, mistyped.status_code) == (401, 401)
            rest.http.headers["authorization"] = f"Bearer {key}"
            await rest.http.put("/v1/namespaces/videos", json={"counter_type": "EVENTUAL"})
            await rest.http.put("/v1/namespaces/videos", json={"accept_limit": "7s"})
            await rest.http.put("/v1/namespaces/videos", json={"accept_limit": "7s"})
            await rest.http.put("/v1/namespaces/videos", json={"shards": 7})
            await rest.add("views", 1, key="card-4929")
            await rest.add("views", 1, fresh(0))
            await rest.post(rest.path("views", "recount"))
            await rest.http.delete("/v1/namespaces/videos")
        reader, writer = await asyncio.open_connection(*server.url[7:].split(":"))
        writer.write(b"junk\r\n\r\n")
        assert b" 400 " in await reader.read()
        writer.close()
        assert await server.stop() == 0
    finally:
        server.clean_up()
    logged = lines_of(server.output("err"))
    assert "counter.api" in {each["logger"] for each in logged}
    requests = [each for each in logged if each["logger"] == "counter.requests"]
    assert [each.get("key") for each in requests] == [None, None, *[key_id] * 8]
    acts = lines_of(audit.read_text(encoding="utf-8"))
    assert [(each["act"], each["who"].partition(":")[0]) for each in acts] == [
        ("key.create", "user"),
        ("namespace.create", "key"),
        ("namespace.change", "key"),
        ("counter.recount", "key"),
        ("namespace.delete", "key"),
    ]
    assert acts[2]["before"] == {"accept_limit": "500ms"}
    assert acts[2]["after"] == {"accept_limit": "7s"}
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600
    # The same acts are in the log, each beside its request.
    audited = [each for each in logged if each["logger"] == "counter.audit"]
    assert [each["act"] for each in audited] == [each["act"] for each in acts[1:]]
    ids = {each["request_id"] for each in requests}
    assert {each["request_id"] for each in audited} <= ids
    everything = said + server.output("err") + server.output("out") + audit.read_text("utf-8")
    for each in (secret, secret[:-1], "4929"):
        assert each not in everything


async def test_a_password_is_in_no_line_of_a_start_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTER_CASSANDRA_PASSWORD", PASSWORD)
    flags = {"store": "cassandra", "contact_points": "127.0.0.1:1", "log_level": "debug"}
    flags |= {"cassandra_username": "counter", "start_timeout": "0s", "lease_time": "never"}
    code, said = refused(tmp_path / "wrong", **flags)
    assert (code, "lease_time" in said) == (2, True)
    assert PASSWORD not in said
    code, said = refused(tmp_path / "away", **{**flags, "lease_time": "10s"}, accept_limit="5s")
    assert code == 2
    assert "127.0.0.1:1" in said
    assert PASSWORD not in said


async def test_an_audit_log_that_cannot_be_written_ends_a_start(tmp_path: Path) -> None:
    code, said = refused(tmp_path / "data", audit_log=str(tmp_path / "missing" / "audit.jsonl"))
    assert code == 2
    assert said.startswith("counter: audit_log '")


@pytest.mark.parametrize("command", ["serve", "rollup", "schema apply", "key list", "audit"])
def test_each_command_with_settings_warns_of_a_variable_that_is_none(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not refused: in Kubernetes other services set variables that begin so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COUNTER_RETENTOIN", "24h")
    monkeypatch.setattr("api.serve.serve", lambda *_: None)
    with suppress(SystemExit):
        app(command.split())
    said = "unknown setting COUNTER_RETENTOIN in the environment; is it COUNTER_RETENTION?"
    assert said in caplog.messages
