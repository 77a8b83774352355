"""``counter plan``: its input, output and exit codes."""

import json
import subprocess
import sys

import pytest

from counter.cli.app import app

Captured = pytest.CaptureFixture[str]

DEDUP = (
    "dedup --rate 80/s --caller 10s --retry 90s --network 30s --clock 5s --margin 20%"
    " --duplicates 6% --incident 10m --record-size 200B"
)
STORAGE = "storage --retention 7d --read-interval 24h --events-per-day 1000000 --event-size 64"


def run(words: str) -> int:
    """The exit code of ``counter plan`` with *words*."""
    try:
        app(["plan", *words.split()])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("command", ["dedup", "storage"])
def test_help_names_exit_codes(command: str, capsys: Captured) -> None:
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
    ("words", "message"),
    [
        ("dedup --rate 80/s", "caller + retry + network + clock is 0s"),
        ("dedup --rate 80/s --ttl 40000d", "ttl is 40000d; it must be from 1ms to 36500d"),
        ("storage --retention 5h --events-per-day 1", "retention is 5h; it must be from 6h to"),
        ("storage --events-per-day 1.5", "--events-per-day: 1.5 is not a whole number"),
    ],
)
def test_a_wrong_value_is_named_with_its_bound(words: str, message: str, capsys: Captured) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_missing_flag_ends_with_2(capsys: Captured) -> None:
    assert run("dedup") == 2
    assert "--rate" in "".join(capsys.readouterr())
