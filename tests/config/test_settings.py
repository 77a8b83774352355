"""Settings: precedence, notation, and refusals."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.config.report import document_of, effective, load
from counter.config.settings import Settings
from counter.config.values import endpoint, memcached_servers, redis_server, without_password
from counter.types import Dataset, PayloadCheck
from tests.support.settings import refusal
from tests.support.times import DAY, HOUR, SECOND


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory, and an environment, in which nothing is set."""
    monkeypatch.chdir(tmp_path)


def texts(**values: Any) -> dict[str, Any]:
    """Return settings as text gives them."""
    return values


class TestSources:
    """Flags, else the environment, else a file, else defaults."""

    def test_a_flag_wins_over_the_environment_and_that_over_a_file(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("counter.toml").write_text('port = 1\nhost = "file"\nkeyspace = "file"')
        monkeypatch.setenv("COUNTER_PORT", "2")
        monkeypatch.setenv("COUNTER_HOST", "environment")
        loaded = load({"port": "3"})
        settings = loaded.settings
        assert (settings.port, settings.host, settings.keyspace) == (3, "environment", "file")
        assert settings.workers == 1
        assert loaded.origins == {
            "port": "flag --port",
            "host": "environment COUNTER_HOST",
            "keyspace": "file counter.toml",
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

    @pytest.mark.parametrize(
        ("section", "near"), [("dataset.audit", "; is it datasets?"), ("serve", "")]
    )
    def test_an_unknown_section_is_refused_with_the_near_one(self, section: str, near: str) -> None:
        Path("counter.toml").write_text(f"[{section}]\nport = 1")
        assert refusal() == (
            f"{section.partition('.')[0]} (file counter.toml): there is no such section, only"
            f" [datasets.NAME]{near}"
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

    def test_new_namespaces_get_what_is_set(self) -> None:
        settings = Settings(
            **texts(payload_check="strict", shards=2, clock_skew_max="5s", rollup_window="1m")
        )
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
    def test_an_invalid_endpoint_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="is not host or host:port"):
            endpoint(text, 9042)

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


class TestRelations:
    """Settings that must fit each other."""

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"workers": 2}, ["workers is 2", "one process", "--workers 1"]),
            ({"accept_limit": "2d"}, ["accept_limit is 2d", "1h"]),
            ({"slice": "10d"}, ["slice is 10d", "retention of 7d"]),
            ({"rollup_window": "7s"}, ["rollup_window 7s", "slice of 1d"]),
            ({"time_bucket": "7h"}, ["time_bucket is 7h", "slice of 1d"]),
        ],
    )
    def test_contradictory_settings_are_refused_with_values_and_the_fix(
        self, values: dict[str, Any], words: list[str]
    ) -> None:
        message = refusal(**values)
        assert [word for word in words if word not in message] == [], message


class TestDatasets:
    """Tables ``[datasets.NAME]`` of the file."""

    def test_a_dataset_inherits_the_defaults(self) -> None:
        Path("counter.toml").write_text(
            'clock_skew_max = "1s"\n'
            '[datasets.videos]\nretention = "30d"\n'
            '[datasets.brief]\nretention = "1h"\nslice = "10m"\n'
        )
        settings = Settings()
        default, brief, videos = settings.datasets()
        assert [default.name, brief.name, videos.name] == ["default", "brief", "videos"]
        assert (videos.retention_us, videos.slice_us) == (30 * DAY, DAY)
        assert (brief.slice_us, brief.time_bucket_us) == (HOUR // 6, HOUR // 6)
        assert {each.clock_skew_max_us for each in settings.datasets()} == {SECOND}

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
        ],
    )
    def test_an_error_in_a_dataset_is_reported_with_its_name(
        self, name: str, own: dict[str, Any], words: list[str]
    ) -> None:
        message = refusal(datasets={name: own})
        assert [word for word in words if word not in message] == [], message


def test_likely_mistakes_are_warned_of() -> None:
    text = "\n".join(Settings(**texts(accept_limit="5m")).warnings())
    assert "make rollup_window at least 30s" in text


def test_good_settings_have_no_warnings() -> None:
    assert list(Settings().warnings()) == []
