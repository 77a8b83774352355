"""Settings: precedence, notation, and refusals."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from counter.config.report import document_of, effective, load
from counter.config.settings import Settings, warnings_of
from counter.config.values import endpoint, memcached_servers, redis_server, without_password
from counter.errors import StartupError
from counter.types import Dataset, PayloadCheck, Placement
from tests.support.times import DAY, HOUR, MILLISECOND, SECOND

CASSANDRA: dict[str, Any] = {"store": "cassandra", "contact_points": "127.0.0.1"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory, and an environment, in which nothing is set."""
    monkeypatch.chdir(tmp_path)


def made(**values: Any) -> Settings:
    """Settings of a cluster, as text gives them."""
    return Settings(**CASSANDRA, **values)


def refusal(**values: Any) -> str:
    """The error of invalid settings."""
    with pytest.raises(StartupError) as caught:
        load(values)
    return str(caught.value)


class TestSources:
    """Flags, else the environment, else a file, else defaults."""

    def test_a_flag_wins_over_the_environment_and_that_over_a_file(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("counter.toml").write_text('port = 1\nhost = "file"\ndata = "file"')
        monkeypatch.setenv("COUNTER_PORT", "2")
        monkeypatch.setenv("COUNTER_HOST", "environment")
        loaded = load({"port": "3"})
        settings = loaded.settings
        assert (settings.port, settings.host, str(settings.data)) == (3, "environment", "file")
        assert settings.workers == 1
        assert loaded.origins == {
            "port": "flag --port",
            "host": "environment COUNTER_HOST",
            "data": "file counter.toml",
        }

    @pytest.mark.parametrize("by", ["flag", "environment"])
    def test_a_file_is_named_by_flag_or_environment(
        self, by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("counter.toml").write_text("port = 1")
        Path("other.toml").write_text("port = 2")
        if by == "environment":
            monkeypatch.setenv("COUNTER_CONFIG", "other.toml")
            assert load({}).settings.port == 2
        else:
            assert load({"config": "other.toml"}).settings.port == 2

    @pytest.mark.parametrize("mark", ["", "\ufeff"])
    def test_a_file_may_begin_with_a_byte_order_mark(self, mark: str) -> None:
        Path("counter.toml").write_text(f"{mark}port = 1\r\nhost = 'h'\r\n", encoding="utf-8")
        assert load({}).settings.port == 1

    def test_a_named_file_that_is_not_there_is_refused(self) -> None:
        assert "'none.toml' is not there" in refusal(config="none.toml")

    def test_a_file_that_is_not_toml_is_refused_with_the_position(self) -> None:
        Path("counter.toml").write_text("port = 1\nhost = \ndata = 2")
        assert "counter.toml: it is not TOML" in refusal()
        assert "line 2" in refusal()

    def test_a_file_names_no_other_file(self) -> None:
        Path("counter.toml").write_text('config = "other.toml"')
        assert "there can be only one" in refusal()

    def test_an_unknown_name_in_the_file_is_refused_with_the_near_one(self) -> None:
        Path("counter.toml").write_text('retentoin = "7d"')
        assert refusal() == (
            "retentoin (file counter.toml): there is no such setting; is it retention?"
        )

    def test_an_unknown_name_in_the_environment_is_reported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COUNTER_RETENTOIN", "7d")
        assert load({}).warnings == (
            "unknown setting COUNTER_RETENTOIN in the environment; is it COUNTER_RETENTION?",
        )

    def test_an_empty_variable_counts_as_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A compose file passes unset variables as empty text."""
        monkeypatch.setenv("COUNTER_PORT", "")
        loaded = load({})
        assert loaded.settings.port == 8080
        assert loaded.origins == {}

    def test_every_error_is_reported_with_its_value_and_its_origin(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last one is set by orchestrators for a service named counter."""
        Path("counter.toml").write_text('retention = "1m"')
        monkeypatch.setenv("COUNTER_PORT", "tcp://10.0.0.1:80")
        assert refusal(slice="soon").splitlines() == [
            "port (environment COUNTER_PORT): Input should be a valid integer, unable to parse"
            " string as an integer (it is 'tcp://10.0.0.1:80')",
            "retention (file counter.toml): it is 1m; it must be from 10m to 365d",
            "slice (flag --slice): 'soon' is not a duration; write it like 5s, 250ms, 1h30m or 7d",
        ]


class TestDefaults:
    """Settings that depend on the store."""

    def test_sqlite_is_one_process_with_its_own_clock(self) -> None:
        settings = Settings()
        assert settings.rollup
        assert settings.shards == 1
        assert settings.dataset() == Dataset(
            id=0,
            name="default",
            retention_us=7 * DAY,
            slice_us=DAY,
            time_bucket_us=DAY,
            event_buckets=1,
            write_timeout_us=SECOND,
            clock_skew_max_us=0,
        )

    def test_cassandra_is_many_with_a_clock_each(self) -> None:
        settings = Settings(**CASSANDRA)
        assert not settings.rollup
        assert settings.shards == 16
        dataset = settings.dataset()
        assert dataset.clock_skew_max_us == 500 * MILLISECOND
        assert dataset.time_bucket_us == HOUR
        assert dataset.write_timeout_us == 2 * SECOND
        assert settings.placements() == {"default": Placement((("", 3),))}

    def test_a_default_depends_on_other_settings(self) -> None:
        settings = made(rollup=True, shards=4, clock_skew_max="1s")
        assert (settings.rollup, settings.shards, settings.clock_skew_max) == (True, 4, SECOND)

    def test_new_namespaces_get_what_is_set(self) -> None:
        settings = made(payload_check="strict", shards=2, clock_skew_max="5s", rollup_window="1m")
        namespace = settings.default_namespace()
        assert namespace.payload_check is PayloadCheck.STRICT
        assert namespace.shards == 2
        assert namespace.rollup_window_us == 60 * SECOND
        assert namespace.future_limit_us == 10 * SECOND


class TestValues:
    """How they are written."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("cassandra", ("cassandra", 9042)),
            ("10.0.0.1:9043", ("10.0.0.1", 9043)),
            ("::1", ("::1", 9042)),
            ("[::1]:9043", ("::1", 9043)),
        ],
    )
    def test_a_contact_point_is_a_host_and_may_have_a_port(
        self, text: str, expected: tuple[str, int]
    ) -> None:
        assert endpoint(text, 9042) == expected

    @pytest.mark.parametrize("text", ["", ":9042", "host:", "host:0", "host:70000", "a b", "a:b"])
    def test_an_invalid_contact_point_is_refused(self, text: str) -> None:
        assert "is not host or host:port" in refusal(store="cassandra", contact_points=text)

    def test_contact_points_are_a_list_or_text_with_commas(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = [("one", 9042), ("two", 9043)]
        assert Settings(**CASSANDRA | {"contact_points": ["one", "two:9043"]}).contact_endpoints()
        monkeypatch.setenv("COUNTER_CONTACT_POINTS", "one, two:9043")
        assert Settings(store="cassandra").contact_endpoints() == expected

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
        self, value: Any, expected: tuple[tuple[str, int], ...]
    ) -> None:
        settings = Settings(**CASSANDRA, replication=value, write_consistency="ALL")
        assert settings.replication == expected

    @pytest.mark.parametrize("value", [0, 17, "", "dc1:", "dc1:x", ":3", {}, True, 1.5, "-1"])
    def test_any_other_replication_is_refused(self, value: Any) -> None:
        assert "replication" in refusal(**CASSANDRA, replication=value)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("memory", ()),
            ("memcached://one", (("one", 11211),)),
            ("memcached://one:1,two:2/", (("one", 1), ("two", 2))),
        ],
    )
    def test_a_cache_is_in_memory_or_at_servers(
        self, text: str, expected: tuple[tuple[str, int], ...]
    ) -> None:
        assert memcached_servers(text) == expected

    @pytest.mark.parametrize(
        "text",
        ["redes://one", "memcached://", "memcached://a/b", "memcached://me:pw@one", "Memory"],
    )
    def test_any_other_cache_is_refused(self, text: str) -> None:
        assert "cache" in refusal(cache=text)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("redis://one", ("redis://one", "one:6379")),
            ("valkey://one:1/", ("redis://one:1/", "one:1")),
            ("rediss://u:p@[::1]:7/15", ("rediss://u:p@[::1]:7/15", "::1:7")),
            (
                "valkeys://:a%40b%2F@one/0?ssl_ca_certs=/a.pem",
                ("rediss://:a%40b%2F@one/0?ssl_ca_certs=/a.pem", "one:6379"),
            ),
            ("memory", None),
            ("memcached://one", None),
        ],
    )
    def test_a_cache_may_be_in_redis(self, text: str, expected: tuple[str, str] | None) -> None:
        assert Settings(cache=text).redis_server() == redis_server(text) == expected

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("redis://", "is not like redis://user:password@host:port/0"),
            ("valkey://one:0", "is not like valkey://user:password@host:port/0"),
            ("redis://one:port", "is not like"),
            ("redis://one,two", "one host"),
            ("redis://:hush@", "is not like"),
            ("redis://:hu/sh@one", "special characters of the password as %XX"),
            ("redis://:hu#sh@one", "is not like"),
            ("redis://:hu?sh@one", "is not like"),
            ("redis://:hush@one/first", "no number of a database"),
            ("redis://:hush@one/1/2", "no number of a database"),
            ("redis://:hush@one/-1", "no number of a database"),
            ("redis://:hush@one/0?db=1", "redis:// has no option 'db'"),
            ("redis://:hush@one?ssl_ca_certs=a", "redis:// has no option 'ssl_ca_certs'"),
            ("rediss://one?ssl_cert_reqs=none", "rediss:// has no option 'ssl_cert_reqs'"),
            ("redis://one?password=hush", "redis:// has no option 'password'"),
            ("REDIS://:hush@one", "is neither memory nor memcached://"),
            ("redis:/:hush@one", "is neither memory nor memcached://"),
            (":hush@one", "is neither memory nor memcached://"),
            ("memcached://me:hush@one", "more than hosts and ports"),
        ],
    )
    def test_a_wrong_address_of_redis_is_refused_without_its_password(
        self, text: str, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COUNTER_CACHE", text)
        message = refusal()
        assert "cache (environment COUNTER_CACHE)" in message
        assert words in message
        assert "hush" not in message
        assert "hu" not in message.replace("is not like", "")

    def test_a_password_of_the_cache_is_no_flag_and_not_shown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = "redis://me:hush@one:1/2"
        message = refusal(cache=url)
        assert "cache (flag --cache): a password does not belong on a command line" in message
        assert "hush" not in message
        monkeypatch.setenv("COUNTER_CACHE", url)
        loaded = load({})
        assert loaded.settings.cache == url
        shown = (effective(loaded), str(document_of(loaded)), repr(loaded), str(loaded.settings))
        assert [text for text in shown if "hush" in text] == []
        assert 'cache = "redis://********@one:1/2"' in shown[0]

    @given(st.text(max_size=20), st.sampled_from(["redis://", "rediss:/", "x:", "", "MEM://"]))
    def test_no_part_of_a_url_before_the_last_at_sign_is_shown(
        self, secret: str, scheme: str
    ) -> None:
        """Of a URL that is written wrong too."""
        shown = without_password(f"{scheme}:SECRET{secret}SECRET@host")
        assert "SECRET" not in shown
        assert shown.endswith("********@host")

    @pytest.mark.parametrize("value", [5, 5.0, True])
    def test_a_duration_without_a_unit_is_refused(self, value: Any) -> None:
        assert "a duration needs a unit" in refusal(retention=value)

    def test_a_consistency_that_may_miss_an_acknowledged_add_is_refused(self) -> None:
        assert "write_consistency" in refusal(**CASSANDRA, write_consistency="ONE")
        assert "read_consistency" in refusal(**CASSANDRA, read_consistency="LOCAL_ONE")


class TestRelations:
    """Settings that must fit each other."""

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"store": "cassandra"}, ["contact_points is empty", "--contact-points"]),
            ({"contact_points": "one"}, ["store is sqlite", "--store cassandra"]),
            ({"workers": 2}, ["workers is 2", "one process", "--workers 1"]),
            ({"accept_limit": "2d"}, ["accept_limit is 2d", "1h"]),
            ({"slice": "10d"}, ["slice is 10d", "retention of 7d"]),
            ({"rollup_window": "7s"}, ["rollup_window 7s", "slice of 1d"]),
            ({"time_bucket": "7h"}, ["time_bucket is 7h", "slice of 1d"]),
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
        self, values: dict[str, Any], words: list[str]
    ) -> None:
        message = refusal(**values)
        assert [word for word in words if word not in message] == [], message

    def test_processes_of_one_data_center_may_read_and_write_at_its_quorum(self) -> None:
        two = {**CASSANDRA, "replication": "dc1:3,dc2:3", "local_datacenter": "dc2"}
        assert "--single-datacenter" in refusal(**two)
        settings = Settings(**two, single_datacenter=True)
        assert settings.placements()["default"].datacenter == "dc2"

    @pytest.mark.parametrize("mark", ["", "\ufeff"])
    def test_a_password_has_one_source(self, tmp_path: Path, mark: str) -> None:
        path = tmp_path / "password"
        path.write_text(f"{mark}from the file\n", encoding="utf-8")
        login = {**CASSANDRA, "cassandra_username": "me", "cassandra_password_file": path}
        settings = Settings(**login)
        assert settings.cassandra_password is not None
        assert settings.cassandra_password.get_secret_value() == "from the file"
        assert "keep one of them" in refusal(**login, cassandra_password="hush")

    def test_a_password_that_is_not_text_is_named_and_not_shown(self, tmp_path: Path) -> None:
        path = tmp_path / "password"
        path.write_bytes(b"hush\xff")
        message = refusal(**CASSANDRA, cassandra_username="me", cassandra_password_file=path)
        assert message == f"cassandra_password_file: {str(path)!r} is not text in UTF-8"

    def test_a_password_may_come_through_a_pipe(self) -> None:
        """As by a shell's <(...): it can be read only once."""
        reader, writer = os.pipe()
        try:
            os.write(writer, b"hush\n")
            os.close(writer)
            settings = made(cassandra_username="me", cassandra_password_file=f"/dev/fd/{reader}")
        finally:
            os.close(reader)
        assert settings.cassandra_password is not None
        assert settings.cassandra_password.get_secret_value() == "hush"

    def test_a_file_that_cannot_be_read_is_named(self) -> None:
        message = refusal(**CASSANDRA, tls_ca="none.pem")
        assert "tls_ca" in message
        assert "'none.pem' cannot be read: No such file" in message

    @pytest.mark.parametrize("shown", [repr, str, Settings.model_dump_json])
    def test_a_password_is_never_shown(self, shown: Any) -> None:
        settings = made(cassandra_username="me", cassandra_password="hush")
        assert "hush" not in shown(settings)

    def test_a_password_is_not_shown_by_a_refusal_either(self) -> None:
        values = {**CASSANDRA, "cassandra_password": "hush"}
        assert "hush" not in refusal(**values)
        with pytest.raises(ValidationError) as caught:
            Settings(**values)
        assert "hush" not in str(caught.value)


class TestDatasets:
    """Tables ``[datasets.NAME]`` of the file."""

    def test_a_dataset_inherits_the_defaults(self) -> None:
        Path("counter.toml").write_text(
            'store = "cassandra"\ncontact_points = ["one"]\nclock_skew_max = "1s"\n'
            '[datasets.videos]\nretention = "30d"\nreplication = {dc1 = 3, dc2 = 2}\n'
            'write_consistency = "EACH_QUORUM"\n'
            '[datasets.brief]\nretention = "1h"\nslice = "10m"\nwrite_consistency = "ALL"\n'
        )
        settings = Settings()
        default, brief, videos = settings.datasets()
        assert [default.name, brief.name, videos.name] == ["default", "brief", "videos"]
        assert (videos.retention_us, videos.slice_us) == (30 * DAY, DAY)
        assert (brief.slice_us, brief.time_bucket_us) == (HOUR // 6, HOUR // 6)
        assert {each.clock_skew_max_us for each in settings.datasets()} == {SECOND}
        assert settings.placements() == {
            "default": Placement((("", 3),)),
            "brief": Placement((("", 3),), "ALL"),
            "videos": Placement((("dc1", 3), ("dc2", 2)), "EACH_QUORUM"),
        }

    @pytest.mark.parametrize(
        ("name", "own", "words"),
        [
            ("default", {}, ["'default'", "outside of [datasets.NAME]"]),
            ("Videos", {}, ["'Videos'", "[a-z]"]),
            ("videos", {"retention": "1m"}, ["datasets.videos.retention", "10m"]),
            ("videos", {"slices": "1d"}, ["datasets.videos.slices", "is it slice?"]),
            ("videos", {"retention": "1h"}, ["dataset 'videos': slice is 1d", "retention of 1h"]),
            ("videos", {"slice": "90m", "time_bucket": "1h"}, ["time_bucket is 1h"]),
            ("videos", {"slice": "1m", "clock_skew_max": "40s"}, ["clock_skew_max is 40s"]),
            ("v" * 31, {}, ["48"]),
        ],
    )
    def test_an_error_in_a_dataset_is_reported_with_its_name(
        self, name: str, own: dict[str, Any], words: list[str]
    ) -> None:
        message = refusal(**CASSANDRA, keyspace="k" * 20, datasets={name: own})
        assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "BEST_EFFORT"),
        ({"replication": 1}, "one copy"),
        ({"payload_check": "strict"}, "each add is a compare-and-set"),
        ({"accept_limit": "5m"}, "make rollup_window at least 30s"),
    ],
)
def test_likely_mistakes_are_warned_of(values: dict[str, Any], word: str) -> None:
    text = "\n".join(warnings_of(Settings(**CASSANDRA, **values)))
    assert word in text


def test_good_settings_of_a_cluster_have_no_warnings() -> None:
    settings = made(
        cache="memcached://one", replication="dc1:3,dc2:3", write_consistency="EACH_QUORUM"
    )
    assert list(warnings_of(settings)) == []
    assert list(warnings_of(Settings())) == []
