"""The settings that only Cassandra has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr
from pydantic_settings import NoDecode

from counter.config.settings import DatasetSettings, Settings
from counter.config.values import List, ReadableFile, Word, endpoint, read_secret
from counter.errors import StartupError
from counter.storage.cassandra.options import CassandraOptions, Placement, Tls, gap_of

CASSANDRA_PORT: Final = 9042
REPLICAS_MAX: Final = 16
_KEYSPACE_CHARS_MAX: Final = 48
_DATACENTER: Final = re.compile(r"[\w.-]{1,48}", re.ASCII)

WriteConsistency = Literal["LOCAL_QUORUM", "QUORUM", "EACH_QUORUM", "ALL"]
ReadConsistency = Literal["LOCAL_QUORUM", "QUORUM", "ALL"]


def _check_contact_point(text: str) -> str:
    endpoint(text, CASSANDRA_PORT)
    return text


#: A list of ``host[:port]``.
ContactPoints = Annotated[List[Annotated[str, AfterValidator(_check_contact_point)]], Word("HOSTS")]


def _to_replication(value: Any) -> Any:
    if isinstance(value, tuple):
        return value
    if isinstance(value, str) and not value.isdigit():
        pairs = [each.partition(":") for each in value.replace("=", ":").split(",")]
        value = {name.strip(): copies.strip() for name, _, copies in pairs}
    if not isinstance(value, Mapping):
        return (("", _copies(value)),)
    if not value:
        raise ValueError("it names no data center; write 3, or dc1:3,dc2:3")
    for name in value:
        if _DATACENTER.fullmatch(name) is None:
            raise ValueError(f"{name[:60]!r} is not the name of a data center")
    return tuple((name, _copies(copies)) for name, copies in value.items())


def _copies(value: Any) -> int:
    text = "" if isinstance(value, bool | float) else str(value)
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= REPLICAS_MAX):
        raise ValueError(
            f"{str(value)[:60]!r} is not a number of copies from 1 to {REPLICAS_MAX};"
            " write 3, or dc1:3,dc2:3"
        )
    return int(text)


def _replication_text(value: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{name}:{copies}" if name else str(copies) for name, copies in value)


#: Replicas by data center, as in :class:`Placement`; written ``3``, for every data center, or
#: ``dc1:3,dc2:3``.
Replication = Annotated[
    tuple[tuple[str, int], ...],
    NoDecode,
    BeforeValidator(_to_replication),
    PlainSerializer(_replication_text),
    Word("COPIES"),
]


def _password(data: dict[str, Any]) -> SecretStr | None:
    path = data["cassandra_password_file"]
    try:
        return None if path is None else SecretStr(read_secret(path))
    except ValueError as error:
        raise StartupError(f"cassandra_password_file: {error}") from None


class CassandraDataset(DatasetSettings):
    """A table ``[datasets.NAME]`` of the file."""

    replication: Replication | None = None
    write_consistency: WriteConsistency | None = None
    read_consistency: ReadConsistency | None = None


class CassandraSettings(Settings):
    """The settings of a process over Cassandra. ``keyspace`` is that which all datasets share."""

    contact_points: ContactPoints = Field(
        (), description="Cassandra nodes to connect to: host[:port],host[:port]"
    )
    local_datacenter: str | None = Field(None, description="Cassandra's data center to connect to")
    single_datacenter: bool = Field(
        False, description="All API processes and workers run in local_datacenter"
    )
    cassandra_username: str | None = Field(None, description="The user that logs in to Cassandra")
    cassandra_password_file: ReadableFile | None = Field(
        None, description="A file with the password"
    )
    cassandra_password: SecretStr | None = Field(
        default_factory=_password, description="The password; never a flag"
    )
    tls_ca: ReadableFile | None = Field(
        None, description="The certificate authority to trust; turns TLS on"
    )
    tls_cert: ReadableFile | None = Field(None, description="This process's own certificate")
    tls_key: ReadableFile | None = Field(None, description="The key of the certificate")
    tls_check_host: bool = Field(
        True, description="Require that each node's certificate names the address of the node"
    )
    replication: Replication = Field(
        (("", 3),), description="Copies of the data: 3, or dc1:3,dc2:3"
    )
    write_consistency: Annotated[WriteConsistency, Word("LEVEL")] = Field(
        "LOCAL_QUORUM", description="The copies that acknowledge a write"
    )
    read_consistency: Annotated[ReadConsistency, Word("LEVEL")] = Field(
        "LOCAL_QUORUM", description="The copies that answer a read"
    )
    extra_datasets: Mapping[str, CassandraDataset] = {}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._login_problems()
        yield from self._place_problems()
        if self.store == "cassandra":
            yield from self._problems_of_use()
        elif self.contact_points:
            yield (
                f"contact_points is {','.join(self.contact_points)} and store is {self.store},"
                " which has none: add --store cassandra, or omit contact_points"
            )

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        if self.store != "cassandra":
            return
        if self.cache == "memory":
            yield (
                "cache is memory: conflicts of tokens between processes are detected only if"
                " payload_check is strict; use memcached://host:port or redis://host:port"
            )
        for name, placement in self.placements().items():
            if max(copies for _, copies in placement.replication) == 1:
                yield (
                    f"dataset {name!r} has one copy: if a node is lost, its data is lost;"
                    " with three nodes, give --replication 3"
                )

    def placements(self) -> Mapping[str, Placement]:
        """Return the replication and consistency of each dataset."""
        home = (self.local_datacenter or "") if self.single_datacenter else ""
        names = ("replication", "write_consistency", "read_consistency")
        return {
            dataset: Placement(
                **{name: self.of_dataset(own, name) for name in names}, datacenter=home
            )
            for dataset, own in self.settings_of_datasets()
        }

    def contact_endpoints(self) -> Sequence[tuple[str, int]]:
        """Return (host, port) of each contact point."""
        return [endpoint(each, CASSANDRA_PORT) for each in self.contact_points]

    def options(self) -> CassandraOptions:
        """Return how to reach the cluster, and how its data lie."""
        tls = None
        if self.tls_ca is not None:
            tls = Tls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_check_host)
        password = self.cassandra_password
        placements = self.placements()
        return CassandraOptions(
            contact_points=self.contact_endpoints(),
            local_datacenter=self.local_datacenter,
            keyspace=self.keyspace,
            username=self.cassandra_username,
            password=None if password is None else password.get_secret_value(),
            tls=tls,
            datasets=[(each, placements[each.name]) for each in self.datasets()],
        )

    def _problems_of_use(self) -> Iterator[str]:
        if not self.contact_points:
            yield (
                "store is cassandra and contact_points is empty:"
                " give --contact-points host[:port],host[:port]"
            )
        for name, placement in self.placements().items():
            # The number of data centers of a plain number is known only after connecting.
            gap = gap_of(name, placement, dict(placement.replication))
            if gap is not None:
                yield gap
        for name in self.extra_datasets:
            keyspace = f"{self.keyspace}_{name}"
            if len(keyspace) > _KEYSPACE_CHARS_MAX:
                yield (
                    f"keyspace {keyspace!r} has {len(keyspace)} characters;"
                    f" Cassandra allows {_KEYSPACE_CHARS_MAX}: choose a shorter name"
                )

    def _login_problems(self) -> Iterator[str]:
        given = "cassandra_password" in self.model_fields_set
        if given and self.cassandra_password_file is not None:
            yield "cassandra_password and cassandra_password_file are both set: keep one of them"
        if self.cassandra_username is None and self.cassandra_password is not None:
            yield "there is a password and no cassandra_username: give both or neither"
        if self.cassandra_username is not None and self.cassandra_password is None:
            yield (
                f"cassandra_username is {self.cassandra_username!r} and there is no password:"
                " give --cassandra-password-file, or COUNTER_CASSANDRA_PASSWORD in the environment"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "tls_cert and tls_key belong together: give both or neither"
        if self.tls_cert is not None and self.tls_ca is None:
            yield "tls_cert is set and tls_ca is not, without which TLS is off: give --tls-ca"

    def _place_problems(self) -> Iterator[str]:
        home = self.local_datacenter
        if self.single_datacenter and home is None:
            yield "single_datacenter is set and local_datacenter is not: give --local-datacenter"
        for name, placement in self.placements().items():
            places = dict(placement.replication)
            if home is not None and "" not in places and home not in places:
                yield (
                    f"local_datacenter is {home!r} and dataset {name!r} has no copies there:"
                    f" replication names {', '.join(places)}"
                )
