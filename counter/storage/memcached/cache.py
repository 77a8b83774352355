"""The cache in memcached.

A key lives on one server, chosen by rendezvous hashing, so that adding a server moves only the keys
that it gets. The keys of a server that is down are unknown until it is back: a second home for them
would serve old counts when the first one returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pymemcache.client.rendezvous import RendezvousHash
from xxhash import xxh64_intdigest

from counter import limits
from counter.ports import Clock
from counter.storage.memcached import commands
from counter.storage.memcached.connection import MemcachedConnection
from counter.storage.shared.remote_cache import Operations, RemoteCache


class MemcachedCache(RemoteCache[MemcachedConnection]):
    """:class:`counter.ports.Cache` over one or more memcached servers.

    *timeout_us* bounds a connect and each wait for an answer. A best-effort counter has 64 bits:
    a change that does not fit raises InvalidBodyError, and is not made.
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        clock: Clock,
        *,
        timeout_us: int = 100 * limits.MILLISECOND,
        prefix: str = "counter",
    ) -> None:
        names = list(dict.fromkeys(f"{host}:{port}" for host, port in servers))
        index = {name: place for place, name in enumerate(names)}
        hashing = RendezvousHash(names, hash_function=_hash)
        timeout_s = timeout_us / limits.SECOND
        super().__init__(
            {
                f"memcached at {host}:{port}": partial(MemcachedConnection, host, port, timeout_s)
                for host, port in servers
            },
            Operations(
                read=commands.read,
                put=commands.put,
                note=commands.note,
                change=commands.change,
                ping=commands.ask_version,
                unpack_value=commands.unpack_value,
            ),
            clock,
            timeout_us=timeout_us,
            prefix=prefix,
            place=lambda key: index[hashing.get_node(key.decode("ascii"))],
        )


def _hash(text: str, seed: int) -> int:
    """Hash in place of pymemcache's own function, which is written in Python: 0.5 us, not 15."""
    return xxh64_intdigest(text.encode(), seed)
