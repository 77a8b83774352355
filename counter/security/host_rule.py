"""Which names a request may give in Host if no API key is asked for.

A web page whose name was made to resolve to this machine (DNS rebinding) has that name in Host. To
its browser the service is then of the page's own origin, so the page could read every answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address


class HostRule:
    """Decides which hosts are answered: localhost, loopback addresses, and *names*.

    With *any_address*, every IP address is answered: a page that was loaded from an address needs
    no name, so DNS rebinding cannot use one. With *any_host*, everything is.
    """

    def __init__(
        self, names: Sequence[str] = (), *, any_address: bool = False, any_host: bool = False
    ) -> None:
        self._names = frozenset(each.encode() for each in names)
        self._any_address = any_address
        self._any_host = any_host

    def answers(self, host: bytes) -> bool:
        """Return whether a request with this value of the header Host is answered."""
        if self._any_host:
            return True
        name = _name(host)
        if name == b"localhost" or name in self._names:
            return True
        address = _address(name)
        return address is not None and (self._any_address or address.is_loopback)


def _name(host: bytes) -> bytes:
    """The name or address in *host*: without its port, in lower case."""
    name = host.strip().lower()
    if not name.startswith(b"[") or not name.endswith(b"]"):
        before, colon, port = name.rpartition(b":")
        name = before if colon and (port.isdigit() or not port) else name
    # A name with a dot at its end is the same name.
    return name.removesuffix(b".")


@lru_cache(maxsize=1_024)
def _address(name: bytes) -> IPv4Address | IPv6Address | None:
    """The IP address that *name* is, an IPv4 address in IPv6 as itself; None if it is none."""
    bare = name[1:-1] if name[:1] == b"[" and name[-1:] == b"]" else name
    try:
        address = ip_address(bare.decode("ascii"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
