"""A process that cannot listen names the cause: the port or the address."""

import socket
from unittest.mock import Mock

import pytest

from api.serve import serve
from api.server.sockets import listen
from counter.config.settings import Settings
from counter.errors import StartupError


def refusal(host: str, port: int) -> str:
    with pytest.raises(StartupError) as caught, listen(host, port):
        pass
    return str(caught.value)


def test_a_taken_port_is_the_ports_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is taken: choose another one with --port" in refusal("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        *((each, "with --host") for each in ("no-such-host.invalid", "127.0.0.1.5", "a" * 80)),
        ("::zz", "with --host"),
        # 203.0.113.0/24 is reserved for documentation.
        ("203.0.113.7", "does not have the address 203.0.113.7"),
    ],
)
def test_a_bad_address_is_not_the_ports_fault(host: str, why: str) -> None:
    """Regression: it said to choose another port."""
    message = refusal(host, 0)
    assert why in message
    assert "with --port" not in message


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_and_names_can_be_listened_on(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("there is no IPv6 here")
    with listen(host, 0) as listener:
        assert listener.getsockname()[1] > 0


def test_the_shared_port_is_not_a_port_of_one_process() -> None:
    settings = Settings(port=9001, metrics_port=9001)
    with pytest.raises(StartupError, match="metrics_port 9001 and port 9001 meet"):
        serve(settings, Mock())


def test_every_process_needs_a_valid_port() -> None:
    """Regression: the processes past the last port failed with a trace, again and again."""
    settings = Settings(port=0, workers=3, metrics_port=65_534)
    with pytest.raises(StartupError, match="up to 65536; choose 65533 or a lower one"):
        serve(settings, Mock())
