"""Beyond this machine it listens only with API keys and TLS, or if a setting allows it."""

import socket
from pathlib import Path
from typing import Any, cast

import pytest

from api.server.sockets import check_exposure, say_where
from counter.cli.app import app as command
from counter.config.report import load
from counter.config.settings import Settings
from counter.errors import StartupError
from tests.support.certificates import Authority, Signed
from tests.support.server import refused


class Listener:
    """A socket as far as its address goes: nothing is opened to anybody here."""

    def __init__(self, host: str) -> None:
        self._host = host

    def getsockname(self) -> tuple[Any, ...]:
        return (self._host, 8080, 0, 0) if ":" in self._host else (self._host, 8080)


def check(host: str, *, keys: bool, **settings: Any) -> None:
    listeners = cast("list[socket.socket]", [Listener("127.0.0.1"), Listener(host)])
    check_exposure(Settings(**settings), listeners, keys=keys)


def refusal(host: str, *, keys: bool, **settings: Any) -> str:
    with pytest.raises(StartupError) as caught:
        check(host, keys=keys, **settings)
    return str(caught.value)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Signed:
    return Authority(tmp_path_factory.mktemp("authority")).sign()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_this_machine_needs_neither(host: str) -> None:
    check(host, keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "fe80::1%2", "::ffff:10.1.2.3"])
def test_anybody_else_needs_both(host: str, own: Signed) -> None:
    tls = own.settings
    assert host in refusal(host, keys=False)
    assert "counter key create" in refusal(host, keys=False, **tls)
    assert "--tls-in-front" in refusal(host, keys=True)
    assert "--insecure" in refusal(host, keys=True)
    check(host, keys=True, **tls)
    check(host, keys=True, tls_in_front=True)


def test_only_the_missing_part_is_asked_for(own: Signed) -> None:
    assert "--https-cert" not in refusal("::", keys=False, tls_in_front=True)
    assert "key create" not in refusal("::", keys=True)


def test_insecure_is_allowed_with_a_warning(caplog: pytest.LogCaptureFixture, own: Signed) -> None:
    check("0.0.0.0", keys=False, insecure=True)
    assert "0.0.0.0:8080 although there is no API key" in caplog.text
    assert "there is no TLS" in caplog.text
    caplog.clear()
    check("0.0.0.0", keys=True, insecure=True, **own.settings)
    assert caplog.text == ""


@pytest.mark.slow
@pytest.mark.usefixtures("child_processes")
def test_a_process_refuses_before_it_answers_anybody(tmp_path: Path) -> None:
    code, said = refused(tmp_path, host="0.0.0.0")
    assert code == 2
    assert "counter: refusing to listen on 0.0.0.0:" in said
    assert "counter: either listen only on this machine: --host 127.0.0.1" in said
    assert "--insecure" in said
    assert "there is no API key" in said
    with pytest.raises(SystemExit) as ended:
        command(["key", "create", "--namespace", "*", "--scope", "read", "--data", str(tmp_path)])
    assert not ended.value.code
    code, said = refused(tmp_path, host="0.0.0.0")
    assert code == 2
    assert "there is no TLS" in said
    assert "there is no API key" not in said


def test_the_address_is_reported_with_its_scheme(
    own: Signed, capsys: pytest.CaptureFixture[str]
) -> None:
    say_where(cast(socket.socket, Listener("::1")), Settings())
    assert capsys.readouterr().out.startswith("Serving on http://[::1]:8080\n")
    say_where(cast(socket.socket, Listener("127.0.0.1")), Settings(**own.settings))
    out = capsys.readouterr().out
    assert out.startswith("Serving on https://127.0.0.1:8080\n")
    # For the command line, and for curl.
    assert "counter add hello --url https://127.0.0.1:8080 --tls-ca CA.pem\n" in out
    assert "curl --cacert CA.pem --json" in out


def load_error(**flags: Any) -> str:
    with pytest.raises(StartupError) as caught:
        load(flags)
    return str(caught.value)


def test_files_of_tls_belong_together(own: Signed, tmp_path: Path) -> None:
    cert, key = str(own.cert), str(own.key)
    assert "give --https-key" in load_error(https_cert=cert)
    assert "https_cert is not" in load_error(https_key=key)
    assert "https_client_ca is set and https_cert is not" in load_error(https_client_ca=cert)
    assert "https_key_password_file" in load_error(https_key_password_file=key)
    assert "cannot be read: No such file" in load_error(
        https_cert=str(tmp_path / "none"), https_key=key
    )


def test_a_key_that_everybody_can_read_is_warned_of(own: Signed) -> None:
    flags = {name: str(path) for name, path in own.settings.items()}
    assert load(flags).warnings == ()
    own.key.chmod(0o644)
    (warning,) = load(flags).warnings
    assert warning == f"https_key {own.key} can be read by every user of this machine: " + (
        f"chmod o-r {own.key}"
    )
