"""How settings must fit each other. Each problem names the values, the bound and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from counter.config_rules_serving import serving_problems, serving_warnings
from counter.durations import format_duration
from counter.errors import CounterError
from counter.namespaces import check_settings
from counter.placements import gap_of
from counter.types import Dataset

if TYPE_CHECKING:
    from counter.config import Settings

_DATASET: Final = re.compile(r"[a-z][a-z0-9_]{0,30}", re.ASCII)
#: Cassandra's own bound.
_KEYSPACE_CHARS_MAX: Final = 48


def problems_of(settings: Settings) -> Iterator[str]:
    """What is wrong with settings that are each within their own bounds."""
    yield from _store_problems(settings)
    yield from serving_problems(settings)
    yield from _login_problems(settings)
    yield from _place_problems(settings)
    for name in settings.extra_datasets:
        yield from _name_problems(settings, name)
    for dataset in settings.datasets():
        yield from _dataset_problems(dataset)
    try:
        check_settings(settings.default_namespace(), settings.dataset())
    except CounterError as error:
        yield error.detail


def warnings_of(settings: Settings) -> Iterator[str]:
    """What is allowed and often a mistake."""
    yield from serving_warnings(settings)
    # Only what reads settings needs it: not each command's start.
    from counter.planner_rules import creation_warnings

    yield from creation_warnings(
        settings.default_namespace(),
        settings.dataset(),
        lease_time_us=settings.lease_time,
        shared=settings.store == "cassandra",
    )
    if settings.store == "sqlite":
        return
    if settings.cache == "memory":
        yield (
            "cache is memory: every process counts BEST_EFFORT counters for itself, and another"
            " payload under a used token is found by the store only where payload_check is strict;"
            " use memcached://host:port"
        )
    for name, placement in settings.placements().items():
        copies = [number for _, number in placement.replication]
        if max(copies) == 1:
            yield (
                f"dataset {name!r} is kept in one copy: with a node its data are gone;"
                " give --replication 3 where there are three nodes"
            )


def _store_problems(settings: Settings) -> Iterator[str]:
    if settings.store == "cassandra":
        if not settings.contact_points:
            yield (
                "store is cassandra and contact_points is empty:"
                " give --contact-points host[:port],host[:port]"
            )
        return
    if settings.contact_points:
        yield (
            f"contact_points is {','.join(settings.contact_points)} and store is sqlite, which"
            " has none: add --store cassandra, or leave it out"
        )
    if settings.workers > 1:
        yield (
            f"workers is {settings.workers} and store is sqlite, whose data directory one process"
            " holds: use --workers 1, or --store cassandra"
        )


def _login_problems(settings: Settings) -> Iterator[str]:
    given = "cassandra_password" in settings.model_fields_set
    if given and settings.cassandra_password_file is not None:
        yield "cassandra_password and cassandra_password_file are both set: keep one of them"
    if settings.cassandra_username is None and settings.cassandra_password is not None:
        yield "there is a password and no cassandra_username: give both or neither"
    if settings.cassandra_username is not None and settings.cassandra_password is None:
        yield (
            f"cassandra_username is {settings.cassandra_username!r} and there is no password:"
            " give --cassandra-password-file, or COUNTER_CASSANDRA_PASSWORD in the environment"
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        yield "tls_cert and tls_key belong together: give both or neither"
    if settings.tls_cert is not None and settings.tls_ca is None:
        yield "tls_cert is set and tls_ca is not, without which TLS is off: give --tls-ca"


def _place_problems(settings: Settings) -> Iterator[str]:
    home = settings.local_datacenter
    if settings.single_datacenter and home is None:
        yield "single_datacenter is set and local_datacenter is not: give --local-datacenter"
    for name, placement in settings.placements().items():
        places = dict(placement.replication)
        # How many data centers a plain number means is known when the service connects.
        gap = gap_of(name, placement, places) if settings.store == "cassandra" else None
        if gap is not None:
            yield gap
        if home is not None and "" not in places and home not in places:
            yield (
                f"local_datacenter is {home!r} and dataset {name!r} has no copies there:"
                f" replication names {', '.join(places)}"
            )


def _name_problems(settings: Settings, name: str) -> Iterator[str]:
    if _DATASET.fullmatch(name) is None:
        yield f"dataset {name[:60]!r} does not match [a-z][a-z0-9_]{{0,30}}"
    elif name == "default":
        yield "dataset 'default' is set by the settings outside of [datasets.NAME]"
    keyspace = f"{settings.keyspace}_{name}"
    if len(keyspace) > _KEYSPACE_CHARS_MAX:
        yield (
            f"keyspace {keyspace!r} has {len(keyspace)} characters;"
            f" Cassandra allows {_KEYSPACE_CHARS_MAX}: choose a shorter name"
        )


def _dataset_problems(dataset: Dataset) -> Iterator[str]:
    slice_text = format_duration(dataset.slice_us)
    at = "" if dataset.name == "default" else f"dataset {dataset.name!r}: "
    if dataset.slice_us > dataset.retention_us and at:
        yield (
            f"{at}slice is {slice_text}; it must not be longer than the retention of"
            f" {format_duration(dataset.retention_us)}"
        )
    if dataset.slice_us % dataset.time_bucket_us:
        yield (
            f"{at}time_bucket is {format_duration(dataset.time_bucket_us)}; it must divide the"
            f" slice of {slice_text}"
        )
    if 2 * dataset.clock_skew_max_us > dataset.slice_us and at:
        yield (
            f"{at}clock_skew_max is {format_duration(dataset.clock_skew_max_us)}; it must be at"
            f" most half the slice of {slice_text}"
        )
