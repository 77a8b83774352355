"""Settings survive being written down, in a file or in the environment; so do durations in them."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from counter.config.report import Loaded, effective, load
from counter.config.settings import settings_model
from counter.config.store_kinds import store_names
from counter.errors import StartupError
from counter.quantities import format_duration
from tests.support.times import DAY, HOUR, MILLISECOND, MINUTE, SECOND

#: Any text that a file's name or a variable can hold.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
names = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
spans = st.sampled_from([MILLISECOND, SECOND, 90 * SECOND, MINUTE, HOUR, DAY, 7 * DAY])
durations = (spans | st.integers(1, 10**13)).map(format_duration)
endpoints = st.builds("{}:{}".format, names, st.integers(1, 65_535))
copies = st.integers(1, 16)

of_any_store = {
    "port": st.integers(0, 65_535),
    "host": names,
    "data": texts,
    "keyspace": st.from_regex(r"[a-z][a-z0-9_]{0,30}", fullmatch=True),
    "local_datacenter": texts,
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "cache_timeout": durations,
    "cache_entries_max": st.integers(1, 10_000_000),
    "retention": durations,
    "slice": durations,
    "write_timeout": durations,
    "rollup_window": durations,
    "accept_limit": durations,
    "payload_check": st.sampled_from(["off", "guard", "strict"]),
    "drain_timeout": durations,
    "batch_items_max": st.integers(1, 50_000),
    "namespaces_max": st.integers(1, 1_000_000),
    "shards_max": st.integers(1, 1_000_000),
}
of_a_cluster = of_any_store | {
    "contact_points": st.lists(endpoints, min_size=1, max_size=3).map(",".join),
    "workers": st.integers(1, 64),
    "cache": st.lists(endpoints, min_size=1, max_size=2).map(lambda e: "memcached://" + ",".join(e))
    | endpoints.map(lambda e: f"valkey://{e}/1"),
    "replication": copies.map(str)
    | st.dictionaries(names, copies, min_size=1, max_size=2).map(
        lambda each: ",".join(f"{name}:{number}" for name, number in each.items())
    ),
    "clock_skew_max": durations,
    "shards": st.integers(1, 1_024),
    "event_buckets": st.integers(1, 256),
    "event_buckets_max": st.integers(1, 256),
    "rollup": st.booleans(),
    "write_consistency": st.sampled_from(["LOCAL_QUORUM", "QUORUM", "EACH_QUORUM", "ALL"]),
}


def valid(store: str, values: dict[str, Any]) -> dict[str, Any]:
    """*values* less whatever does not fit: each is refused with its name, or they are together."""
    kept: dict[str, Any] = {"store": store}
    if store == "cassandra":
        kept["contact_points"] = values.pop("contact_points", "127.0.0.1")
    for name, value in values.items():
        try:
            settings_model()(**kept | {name: value})
        except ValidationError:
            continue
        kept[name] = value
    return kept


def given_of(
    store: str, fields: dict[str, st.SearchStrategy[Any]]
) -> st.SearchStrategy[dict[str, Any]]:
    known = {name: each for name, each in fields.items() if name in settings_model().model_fields}
    return st.fixed_dictionaries({}, optional=known).map(lambda each: valid(store, each))


given_settings = st.one_of(
    [
        given_of(store, fields)
        for store, fields in {"sqlite": of_any_store, "cassandra": of_a_cluster}.items()
        if store in store_names()
    ]
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory, and an environment, in which nothing is set."""
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith("COUNTER_"):
                del os.environ[name]
        yield


PER_EXAMPLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def plain(loaded: Loaded) -> dict[str, Any]:
    """The settings, less the file that they came from."""
    return loaded.settings.model_dump(exclude={"config"})


@PER_EXAMPLE
@given(given_settings)
@example({"store": "sqlite", "data": "a\x7fb"})
@example({"store": "sqlite", "data": 'a"b\\c\nd'})
def test_printed_settings_are_a_file_that_gives_the_same(values: dict[str, Any]) -> None:
    loaded = load(values)
    Path("again.toml").write_text(effective(loaded), encoding="utf-8")
    again = load({"config": "again.toml"})
    assert plain(again) == plain(loaded)
    assert set(values) <= set(again.origins)


@PER_EXAMPLE
@given(given_settings)
def test_environment_and_flags_give_the_same(values: dict[str, Any]) -> None:
    with patch.dict(os.environ, {f"COUNTER_{k.upper()}": str(v) for k, v in values.items()}):
        loaded = load({})
    assert plain(loaded) == plain(load(values))
    assert {name: origin.split()[0] for name, origin in loaded.origins.items()} == dict.fromkeys(
        values, "environment"
    )


@PER_EXAMPLE
@given(
    st.sampled_from(sorted(settings_model().model_fields)),
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.lists(st.integers()),
)
@example("cache", None)
def test_any_value_is_accepted_or_refused_by_name(name: str, value: Any) -> None:
    """Whatever is wrong with a setting is said; nothing of it is a fault of the program's own."""
    assume(name not in ("config", "extra_datasets"))
    with suppress(StartupError):
        load({name: value})
