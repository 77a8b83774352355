"""The settings of Cassandra: how they are written, what is refused, what is often a mistake."""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from counter.config.report import effective, load
from counter.storage.cassandra import CassandraKind
from counter.storage.cassandra.options import Placement
from counter.storage.cassandra.settings import CassandraSettings
from counter.storage.sqlite import SqliteKind
from counter.types import CounterType, PayloadCheck
from tests.support.settings import check_document, refusal
from tests.support.times import HOUR, MILLISECOND, SECOND

CASSANDRA: dict[str, Any] = {"store": "cassandra", "contact_points": "127.0.0.1"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory, and an environment, in which nothing is set."""
    monkeypatch.chdir(tmp_path)


def made(**values: Any) -> CassandraSettings:
    """Return settings of a cluster, as text gives them."""
    return CassandraSettings(**CASSANDRA, **values)


def test_the_document_has_each_setting_with_its_default_and_bounds() -> None:
    check_document(CassandraKind(), "Cassandra", contact_points="one")


def test_cassandra_is_many_with_a_clock_each() -> None:
    settings = CassandraSettings(**CASSANDRA)
    assert not settings.rollup
    assert settings.shards == 16
    dataset = settings.dataset()
    assert dataset.clock_skew_max_us == 500 * MILLISECOND
    assert dataset.time_bucket_us == HOUR
    assert dataset.write_timeout_us == 2 * SECOND
    assert settings.placements() == {"default": Placement((("", 3),))}


def test_a_default_depends_on_other_settings() -> None:
    settings = made(rollup=True, shards=4, clock_skew_max="1s")
    assert (settings.rollup, settings.shards, settings.clock_skew_max) == (True, 4, SECOND)


def test_contact_points_are_a_list_or_text_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [("one", 9042), ("two", 9043)]
    given = CassandraSettings(store="cassandra", contact_points=("one", "two:9043"))
    assert given.contact_endpoints() == expected
    monkeypatch.setenv("COUNTER_CONTACT_POINTS", "one, two:9043")
    assert CassandraSettings(store="cassandra").contact_endpoints() == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, (("", 3),)),
        ("3", (("", 3),)),
        ("dc1:3,dc2:2", (("dc1", 3), ("dc2", 2))),
        ("dc1=3", (("dc1", 3),)),
        ({"dc1": 3}, (("dc1", 3),)),
    ],
)
def test_replication_is_a_number_or_one_for_each_data_center(
    value: Any, expected: tuple[tuple[str, int], ...]
) -> None:
    settings = CassandraSettings(**CASSANDRA, replication=value, write_consistency="ALL")
    assert settings.replication == expected


@pytest.mark.parametrize("value", [0, 17, "", "dc1:", "dc1:x", ":3", {}, True, 1.5, "-1"])
def test_any_other_replication_is_refused(value: Any) -> None:
    assert "replication" in refusal(**CASSANDRA, replication=value)


def test_a_consistency_that_may_miss_an_acknowledged_add_is_refused() -> None:
    assert "write_consistency" in refusal(**CASSANDRA, write_consistency="ONE")
    assert "read_consistency" in refusal(**CASSANDRA, read_consistency="LOCAL_ONE")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"store": "cassandra"}, ["contact_points is empty", "--contact-points"]),
        ({"contact_points": "one"}, ["store is sqlite", "--store cassandra"]),
        ({**CASSANDRA, "contact_points": "host:"}, ["is not host or host:port"]),
        ({"tls_cert": __file__}, ["tls_cert and tls_key belong together"]),
        ({"tls_cert": __file__, "tls_key": __file__}, ["--tls-ca"]),
        ({"cassandra_username": "me"}, ["'me'", "COUNTER_CASSANDRA_PASSWORD"]),
        ({"cassandra_password": "hush"}, ["no cassandra_username"]),
        (
            {"replication": "dc1:3", "local_datacenter": "dc9"},
            ["'dc9'", "replication names dc1"],
        ),
        (
            {**CASSANDRA, "replication": "dc1:2,dc2:1", "write_consistency": "QUORUM"},
            ["2 data centers (dc1, dc2)", "EACH_QUORUM", "--single-datacenter"],
        ),
        ({"single_datacenter": True}, ["single_datacenter is set", "--local-datacenter"]),
    ],
)
def test_contradictory_settings_are_refused_with_values_and_the_fix(
    values: dict[str, Any], words: list[str]
) -> None:
    message = refusal(**values)
    assert [word for word in words if word not in message] == [], message


def test_processes_of_one_data_center_may_read_and_write_at_its_quorum() -> None:
    two = {**CASSANDRA, "replication": "dc1:3,dc2:3", "local_datacenter": "dc2"}
    assert "--single-datacenter" in refusal(**two)
    settings = CassandraSettings(**two, single_datacenter=True)
    assert settings.placements()["default"].datacenter == "dc2"


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_password_has_one_source(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "password"
    path.write_text(f"{mark}from the file\n", encoding="utf-8")
    login = {**CASSANDRA, "cassandra_username": "me", "cassandra_password_file": path}
    settings = CassandraSettings(**login)
    assert settings.cassandra_password is not None
    assert settings.cassandra_password.get_secret_value() == "from the file"
    assert "keep one of them" in refusal(**login, cassandra_password="hush")


def test_a_password_that_is_not_text_is_named_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(b"hush\xff")
    message = refusal(**CASSANDRA, cassandra_username="me", cassandra_password_file=path)
    assert message == f"cassandra_password_file: {str(path)!r} is not text in UTF-8"


def test_a_password_may_come_through_a_pipe() -> None:
    """As a shell's <(...) does: what was read once is gone."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"hush\n")
        os.close(writer)
        settings = made(cassandra_username="me", cassandra_password_file=f"/dev/fd/{reader}")
    finally:
        os.close(reader)
    assert settings.cassandra_password is not None
    assert settings.cassandra_password.get_secret_value() == "hush"


def test_a_file_that_cannot_be_read_is_named() -> None:
    message = refusal(**CASSANDRA, tls_ca="none.pem")
    assert "tls_ca" in message
    assert "'none.pem' cannot be read: No such file" in message


@pytest.mark.parametrize("shown", [repr, str, CassandraSettings.model_dump_json])
def test_a_password_is_never_shown(shown: Any) -> None:
    settings = made(cassandra_username="me", cassandra_password="hush")
    assert "hush" not in shown(settings)


def test_a_password_is_not_shown_by_a_refusal_either() -> None:
    values = {**CASSANDRA, "cassandra_password": "hush"}
    assert "hush" not in refusal(**values)
    with pytest.raises(ValidationError) as caught:
        CassandraSettings(**values)
    assert "hush" not in str(caught.value)


def test_a_dataset_of_the_file_has_its_own_copies_and_consistencies() -> None:
    Path("counter.toml").write_text(
        'store = "cassandra"\ncontact_points = ["one"]\n'
        '[datasets.videos]\nreplication = {dc1 = 3, dc2 = 2}\nwrite_consistency = "EACH_QUORUM"\n'
        '[datasets.brief]\nwrite_consistency = "ALL"\n'
    )
    assert CassandraSettings().placements() == {
        "default": Placement((("", 3),)),
        "brief": Placement((("", 3),), "ALL"),
        "videos": Placement((("dc1", 3), ("dc2", 2)), "EACH_QUORUM"),
    }


def test_the_name_of_a_keyspace_is_bounded() -> None:
    assert "48" in refusal(**CASSANDRA, keyspace="k" * 20, datasets={"v" * 31: {}})


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "BEST_EFFORT"),
        ({}, "only if payload_check is strict"),
        ({"replication": 1}, "one copy"),
        ({"payload_check": "strict"}, "each add is a compare-and-set"),
        ({"accept_limit": "5m"}, "make rollup_window at least 30s"),
    ],
)
def test_likely_mistakes_are_warned_of(values: dict[str, Any], word: str) -> None:
    text = "\n".join(made(**values).warnings())
    assert word in text


def test_good_settings_of_a_cluster_have_no_warnings() -> None:
    settings = made(
        cache="memcached://one",
        replication="dc1:3,dc2:3",
        write_consistency="EACH_QUORUM",
    )
    assert list(settings.warnings()) == []


def advice(**changed: Any) -> Sequence[str]:
    """Return what is advised about a namespace with the default settings but *changed*."""
    return list(CassandraKind().advice(replace(made().default_namespace(), **changed)))


def test_a_strict_check_is_expensive() -> None:
    (strict,) = advice(payload_check=PayloadCheck.STRICT)
    assert "payload_check is strict" in strict


def test_a_count_that_leaves_the_cache_long_before_the_next_comes_is_read_again() -> None:
    (again,) = advice(cache_ttl_us=SECOND // 2)
    assert "cache_ttl is 500ms and rollup_window is 10s" in again
    assert "up to 20 times" in again
    assert advice(cache_ttl_us=SECOND) == []
    assert advice(cache_ttl_us=0) == [], "it is off on purpose"


def test_a_best_effort_namespace_costs_no_more() -> None:
    strict: dict[str, Any] = {"payload_check": PayloadCheck.STRICT, "cache_ttl_us": MILLISECOND}
    assert advice(counter_type=CounterType.BEST_EFFORT, **strict) == []
    assert list(SqliteKind().advice(replace(made().default_namespace(), **strict))) == []


def test_printed_settings_are_a_file_that_gives_the_same(tmp_path: Path) -> None:
    given = {"contact_points": "a,b:9043", "replication": "dc1:3", "clock_skew_max": "250ms"}
    first = effective(load({"store": "cassandra", **given}))
    (tmp_path / "again.toml").write_text(first)
    again = effective(load({"config": "again.toml"}))
    assert tomllib.loads(again) == tomllib.loads(first)
    assert "file again.toml" in again


def test_a_password_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTER_CASSANDRA_PASSWORD", "hush")
    monkeypatch.setenv("COUNTER_CASSANDRA_USERNAME", "me")
    text = effective(load(CASSANDRA))
    assert 'cassandra_password = "********"' in text
    assert "hush" not in text
