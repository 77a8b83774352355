"""``counter plan``: what is given as text, what is printed, and what it ends with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from counter.cli.app import app
from counter.cli.commands.plan import ClusterFlags
from counter.config.settings import Settings
from counter.durations import format_duration
from counter.quantities import parse_count

Captured = pytest.CaptureFixture[str]

DEDUP = (
    "dedup --rate 80/s --caller 10s --retry 90s --network 30s --clock 5s --margin 20%"
    " --duplicates 6% --incident 10m --record-size 200B"
)
STORAGE = "storage --retention P7D --read-interval PT24H --events-per-day 1000000 --event-size 64"
CLUSTER = "cluster --adds 75000/s --counters 1e6 --retention 7d"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory in which there is nothing."""
    monkeypatch.chdir(tmp_path)


def run(words: str) -> int:
    """The exit code of ``counter plan`` with *words*."""
    try:
        app(["plan", *words.split()])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("command", ["dedup", "storage", "postgresql", "dynamodb", "cluster"])
def test_each_says_what_it_does_and_ends_with(command: str, capsys: Captured) -> None:
    assert run(f"{command} --help") == 0
    help_text = capsys.readouterr().out
    assert "Exit codes: 0" in help_text
    assert "--json" in help_text


@pytest.mark.usefixtures("child_processes")
def test_they_are_imported_only_when_they_are_run() -> None:
    """A service that starts has no use for them."""
    code = "import sys, counter.cli.app; sys.exit(any('plan' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_window_of_tokens_is_planned(capsys: Captured) -> None:
    assert run(f"{DEDUP} --json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["ttl_seconds"], plan["keys"]) == (135, 12_960)
    assert plan["duplicates_per_second"] == 4.8
    assert plan["duplicates_in_incident"] == 2_880
    assert plan["collision_probability"] == pytest.approx(2.47e-31, rel=1e-3)
    assert plan["bytes_per_day"] == 1_382_400_000
    assert plan["warnings"] == []


def test_durations_are_read_as_iso_8601_too(capsys: Captured) -> None:
    iso = "dedup --rate 4800/m --caller PT10S --retry PT1M30S --network PT30S --clock PT5S"
    run(f"{iso} --json")
    one = json.loads(capsys.readouterr().out)
    assert (one["ttl_seconds"], one["keys"]) == (135, 10_800)


def test_a_day_of_a_thousand_a_second_is_17_gigabytes(capsys: Captured) -> None:
    assert run("dedup --rate 1000/s --ttl 24h") == 0
    text = capsys.readouterr().out
    assert "= 86,400,000" in text
    assert "= 17.28 GB" in text


def test_tokens_that_are_forgotten_too_early_are_warned_of(capsys: Captured) -> None:
    assert run(f"{DEDUP} --ttl 1m --json") == 0
    out, err = capsys.readouterr()
    (warning,) = json.loads(out)["warnings"]
    assert err == f"counter: warning: {warning}\n"


def test_the_events_of_a_counter_are_planned(capsys: Captured) -> None:
    assert run(f"{STORAGE} --json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "seconds_per_slice": 86_400,
        "seconds_per_interval": 86_400,
        "buckets_per_id": 8,
        "seconds_per_bucket": 5,
        "accept_limit": 600,
        "read_amplification": 8,
    }


def test_events_may_be_kept_for_ever(capsys: Captured) -> None:
    assert run("storage --retention unlimited --events-per-day 10 --json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["seconds_per_slice"], plan["accept_limit"]) == (0, 0)


def test_a_cluster_is_planned_with_its_arithmetic(capsys: Captured) -> None:
    assert run(CLUSTER) == 0
    out, err = capsys.readouterr()
    assert "api_adds" in out
    assert "75,000/s / 8,010/s" in out
    assert "counter: warning: 25 workers share 16 shards" in err


def test_a_postgresql_server_is_planned_with_its_arithmetic(capsys: Captured) -> None:
    """30 B of an event for 2 days, at 100 a second: 518.4 MB."""
    need = (
        "--adds 100/s --counters 10 --retention 1d --slice 1d --event-size 30B --server-adds 500/s"
    )
    assert run(f"postgresql {need} --disk 1GB --json") == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert (plan["servers"], plan["api_processes"], plan["max_connections"]) == (1, 2, 36)
    assert "518.4 MB" in out
    assert err == ""


def test_one_postgresql_server_may_not_be_enough(capsys: Captured) -> None:
    assert run("postgresql --adds 20000/s --counters 1e6 --gets 1e6/s") == 0
    told = capsys.readouterr().err
    assert "such servers, and only one writes" in told
    assert "counter plan cluster" in told
    assert "connections are more than PostgreSQL's default of 100" in told


def test_units_of_dynamodb_are_planned_with_their_arithmetic(capsys: Captured) -> None:
    """Each add is alone in its window: 6 writes, of which it is one."""
    need = "--adds 1000/s --counters 1e6 --dirty 1e6 --processes 2 --write-price 0.5"
    assert run(f"dynamodb {need} --hottest 10/s") == 0
    out, err = capsys.readouterr()
    assert "rollups: head and row                       1,000/s * 2" in out
    assert "million * 0.5" in out
    assert "an event takes 6.8" in err
    assert run(f"dynamodb {need} --json") == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert plan["api_processes"] == 2
    assert plan["write_units"]["events"] == 1_000
    assert err.splitlines() == [f"counter: warning: {each}" for each in plan["warnings"]]


def test_measured_rates_are_taken_from_a_file(capsys: Captured) -> None:
    figure = {"what": "api_adds", "value": 50_000, "unit": "/s"}
    report = {"subject": "capacity", "measured_at": "2026-12-01T08:00Z", "figures": [figure]}
    Path("rates.json").write_text(json.dumps([report]))
    run(f"{CLUSTER} --json")
    before = json.loads(capsys.readouterr().out)
    assert run(f"{CLUSTER} --rates rates.json --json") == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert plan["rates"]["api_adds"] == {
        "per_second": 50_000,
        "source": "rates.json, 2026-12-01T08:00Z",
    }
    assert plan["api_processes"] == 3 < before["api_processes"]
    assert plan["cassandra_nodes"] == before["cassandra_nodes"]
    assert err.splitlines() == [f"counter: warning: {each}" for each in plan["warnings"]]


def test_settings_that_contradict_the_clients_are_warned_of(capsys: Captured) -> None:
    clients = "--retry 8d --client-clock 6s --max-staleness 10s --hottest 100/s"
    assert run(f"{CLUSTER} {clients}") == 0
    told = capsys.readouterr().err
    for part in ("retention 7d", "key_ttl is 1d", "6s slow", "6s fast", "20s behind", "23.04 MB"):
        assert part in told


def test_settings_that_are_given_are_those_that_are_checked(capsys: Captured) -> None:
    """An hour does not divide the slice, so a partition spans all of it."""
    given = "--retention 1d --slice 90m --future-limit 2s --key-ttl 1h --time-bucket 30m"
    clients = "--retry 2h --client-clock 3s --hottest 100/s"
    assert run(f"cluster --adds 1/s --counters 1 {given} {clients}") == 0
    told = capsys.readouterr().err
    for part in ("key_ttl is 1h", "3s fast and future_limit is 2s", "time_bucket 30m"):
        assert part in told
    assert run("cluster --adds 1/s --counters 1 --slice 90m --hottest 100/s") == 0
    assert "time_bucket 1h30m" in capsys.readouterr().err


def test_a_cluster_is_planned_with_the_settings_that_one_has() -> None:
    """The flags' defaults and those of a process must not drift apart."""
    have = Settings(store="cassandra", contact_points=("10.0.0.1",))
    flags = ClusterFlags(adds="1/s", counters="1")
    same = ("retention", "write_timeout", "clock_skew_max", "rollup_window", "accept_limit")
    for name in (*same, "lease_time"):
        assert getattr(flags, name) == format_duration(getattr(have, name)), name
    assert parse_count(flags.event_buckets) == have.event_buckets
    assert parse_count(flags.shards) == have.shards
    assert (("", parse_count(flags.replication)),) == have.replication
    assert flags.payload_check == have.payload_check


def test_all_that_cannot_be_read_is_reported_at_once(capsys: Captured) -> None:
    assert run("dedup --rate 80 --caller 3x --margin 20") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "counter: --rate: '80' is not a rate; write it like 80/s, 4.8/m or 1e6/d",
        "counter: --caller: '3x' is not a duration; write it like 5s, 250ms, 1h30m or 7d",
        "counter: --margin: '20' is not a percentage; write it like 20%",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("dedup --rate 80/s", "caller + retry + network + clock is 0s"),
        ("dedup --rate 80/s --ttl 40000d", "ttl is 40000d; it must be from 1ms to 36500d"),
        ("storage --retention 5h --events-per-day 1", "retention is 5h; it must be from 6h to"),
        ("storage --events-per-day 1.5", "--events-per-day: 1.5 is not a whole number"),
        (
            "postgresql --adds 1/s --counters 1 --disk-use 0%",
            "disk_use is 0%; it must be more than",
        ),
        ("postgresql --adds 1/s --counters 1 --connections 1", "connections is 1; it must be"),
        ("cluster --adds 1/s --counters 1 --load 0%", "load is 0%; it must be more than 0%"),
        ("cluster --adds 1/s --counters 1 --retention 1h", "retention is 1h; a slice is chosen"),
        ("cluster --adds 1/s --counters 1 --counter-type X", "'X' is none of BEST_EFFORT, EVEN"),
        ("cluster --adds 1/s --counters 1 --rates gone", "--rates: 'gone' cannot be read"),
        ("cluster --adds 1/s --counters 1 --time-bucket 0s", "time_bucket is 0s; it must be from"),
    ],
)
def test_a_wrong_value_is_named_with_its_bound(words: str, told: str, capsys: Captured) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


def test_what_is_missing_ends_with_2_too(capsys: Captured) -> None:
    assert run("dedup") == 2
    assert "--rate" in "".join(capsys.readouterr())
