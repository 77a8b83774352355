"""Proxies and certificates of the environment."""

import os
from pathlib import Path

import pytest

from counter.ops.doctor import check_service
from counter_client import AsyncCounterClient, CounterClient, CounterError, Options
from counter_client.addresses import by_proxy, proxies
from counter_client.errors import InvalidParameterError
from tests.cli.shell import Shell
from tests.client.stranger import http, stranger

LOCAL = ("http://127.0.0.1:1", "https://127.0.0.2:1", "http://[::1]:1", "http://localhost:1")
REMOTE = "http://counter.example:8080"
#: Unusable proxies.
BAD = (
    *(
        "socks://127.0.0.1:7890/",
        "ftp://127.0.0.1:1",
        "http://",
        "http://[::1",
        "://",
        "http://h:x",
    ),
    "socks5://127.0.0.1:1",
)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["ALL_PROXY", "http_proxy", "HTTP_PROXY", "HTTPS_PROXY"])
@pytest.mark.parametrize("value", BAD)
def test_loopback_needs_no_proxy(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the client ended with a ValueError."""
    monkeypatch.setenv(name, value)
    for url in LOCAL:
        CounterClient(url).close()
    CounterClient(list(LOCAL), options=Options(hedge_after_s=1.0)).close()


@pytest.mark.parametrize("value", BAD)
async def test_a_proxy_that_cannot_be_used_is_named_by_its_variable(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    for make in (CounterClient, AsyncCounterClient):
        with pytest.raises(InvalidParameterError, match="ALL_PROXY") as caught:
            make([LOCAL[0], REMOTE])
        assert "127.0.0.1:7890" not in str(caught.value)
    CounterClient(REMOTE, options=Options(trust_env=False)).close()
    for exempt in ("counter.example", ".example", "*", "counter.example:8080", "[::1],example"):
        monkeypatch.setenv("NO_PROXY", exempt)
        CounterClient(REMOTE).close()
        assert by_proxy(REMOTE) == ""


@pytest.mark.parametrize(
    "exempt", ["localhost,127.0.0.1,[::1]", "[::1]", "http://[", "a b,,/", "\u2603"]
)
def test_no_proxy_entries_of_other_hosts_are_ignored(
    exempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: [::1] ended the client with an InvalidURL."""
    monkeypatch.setenv("NO_PROXY", exempt)
    monkeypatch.setenv("http_proxy", "127.0.0.1:3128")
    assert {name: each.url for name, each in proxies([REMOTE, LOCAL[0]]).items()} == {
        "http://counter.example": "http://127.0.0.1:3128"
    }
    for url in (*LOCAL, REMOTE):
        CounterClient(url).close()


def test_each_url_has_the_proxy_of_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://one:1")
    monkeypatch.setenv("ALL_PROXY", "http://all:1")
    monkeypatch.setenv("NO_PROXY", "b.example,fd00::1")
    urls = ["http://a.example", "https://a.example:1", "http://b.example", "http://[fd00::1]:1"]
    urls += ["https://[fd00::2]:1"]
    assert {name: each.url.host for name, each in proxies(urls).items()} == {
        "http://a.example": "one",
        "https://a.example": "all",
        "https://[fd00::2]": "all",
    }


def test_requests_go_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its user, which no error shows."""
    body = b'{"namespace":"default","counter":"c","count":0,"as_of":"2026-01-31T08:15:30Z",'
    with stranger(http("200 OK", body + b'"accuracy":"accurate"}')) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//user:secret@"))
        with CounterClient(REMOTE) as client:
            assert client.get("c").count == 0
    assert proxy.asked[0].startswith(b"GET http://counter.example:8080/v1/")
    assert len(proxy.header("proxy-authorization")) == 1
    monkeypatch.setenv("http_proxy", "socks://user:secret@127.0.0.1:1")
    with pytest.raises(CounterError) as caught:
        CounterClient(REMOTE)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_certificates_of_the_environment_that_are_missing_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a missing file ended the client with a FileNotFoundError."""
    monkeypatch.setenv(name, str(tmp_path / "missing"))
    CounterClient(LOCAL[0]).close()
    CounterClient(LOCAL[1], options=Options(trust_env=False)).close()
    if name == "SSL_CERT_FILE":
        with pytest.raises(InvalidParameterError, match=f"{name} .*missing"):
            CounterClient(LOCAL[1])
        (tmp_path / "missing").write_text("no certificate")
        with pytest.raises(InvalidParameterError, match=f"{name} .*missing"):
            CounterClient(LOCAL[1])


def test_a_command_names_the_variable_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", BAD[0])
    shell = Shell(capsys)
    assert shell.run("get", "c", "--url", REMOTE)[0] != 0
    assert "ALL_PROXY" in shell.err
    assert "Traceback" not in shell.err
    assert "ALL_PROXY" in check_service(REMOTE).detail
    shell.run("get", "c", "--url", "http://127.0.0.1:9", "--timeout", "1s")
    assert "does not answer" in shell.err
