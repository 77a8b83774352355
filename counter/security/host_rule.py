"""Check the header Host of requests if no API key is required.

With DNS rebinding, the name of a web page is made to resolve to this machine, and requests of the
page have that name in Host. The browser then considers the service to be of the page's own origin,
so the page could read every response.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address


class HostRule:
    """Decides which hosts are allowed: localhost, loopback addresses, and *names*.

    With *any_address*, every IP address is allowed: DNS rebinding needs a name and cannot use an
    address. With *any_host*, everything is allowed.
    """

    def __init__(
        self, names: Sequence[str] = (), *, any_address: bool = False, any_host: bool = False
    ) -> None:
        self._names = frozenset(each.encode() for each in names)
        self._any_address = any_address
        self._any_host = any_host

    def answers(self, host: bytes) -> bool:
        """Return whether a request with this value of the header Host is allowed."""
        if self._any_host:
            return True
        name = _name(host)
        if name == b"localhost" or name in self._names:
            return True
        address = _address(name)
        return address is not None and (self._any_address or address.is_loopback)


def _name(host: bytes) -> bytes:
    """Return the name or address in *host*: without its port, in lower case."""
    name = host.strip().lower()
    if not name.startswith(b"[") or not name.endswith(b"]"):
        before, colon, port = name.rpartition(b":")
        name = before if colon and (port.isdigit() or not port) else name
    # A trailing dot does not change the name.
    return name.removesuffix(b".")


@lru_cache(maxsize=1_024)
def _address(name: bytes) -> IPv4Address | IPv6Address | None:
    """Return the IP address in *name*, with IPv4-mapped IPv6 addresses as IPv4; None if it is no
    address."""
    bare = name[1:-1] if name[:1] == b"[" and name[-1:] == b"]" else name
    try:
        address = ip_address(bare.decode("ascii"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
