"""What is needed to reach a cluster, and how the data of each dataset lie on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from counter.limits import SECOND
from counter.types import Dataset, Placement

DEFAULT_PORT = 9042


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates by path: the authority's, and this client's own where asked for."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class CassandraOptions:
    """How to connect. A dataset's keyspace is named ``<keyspace>_<name>``."""

    contact_points: Sequence[tuple[str, int]]
    local_datacenter: str | None = None
    keyspace: str = "counter"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    read_timeout_us: int = 2 * SECOND
    datasets: Sequence[tuple[Dataset, Placement]] = ()
