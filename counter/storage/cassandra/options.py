"""What is needed to reach a cluster, and how the data of each dataset lie on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from counter.limits import STORE_TIMEOUT_US
from counter.types import Dataset, Placement

if TYPE_CHECKING:
    from counter.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates by path: the authority's, and this client's own where asked for."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    #: Whether a node's certificate must name the address at which it is reached.
    check_host: bool = True


@dataclass(frozen=True, slots=True)
class CassandraOptions:
    """How to connect. A dataset's keyspace is named ``<keyspace>_<name>``."""

    contact_points: Sequence[tuple[str, int]]
    local_datacenter: str | None = None
    keyspace: str = "counter"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    read_timeout_us: int = STORE_TIMEOUT_US
    datasets: Sequence[tuple[Dataset, Placement]] = ()


def options_of(settings: Settings) -> CassandraOptions:
    """What *settings* say of Cassandra."""
    tls = None
    if settings.tls_ca is not None:
        tls = Tls(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_check_host)
    password = settings.cassandra_password
    placements = settings.placements()
    return CassandraOptions(
        contact_points=settings.contact_endpoints(),
        local_datacenter=settings.local_datacenter,
        keyspace=settings.keyspace,
        username=settings.cassandra_username,
        password=None if password is None else password.get_secret_value(),
        tls=tls,
        datasets=[(each, placements[each.name]) for each in settings.datasets()],
    )
