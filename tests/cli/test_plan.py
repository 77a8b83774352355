"""``counter plan``: its input, output and exit codes."""

import subprocess
import sys
from typing import Any

import pytest

from tests.cli.shell import Shell


def plan(shell: Shell, words: str) -> Any:
    """The plan, as JSON."""
    (found,) = shell.documents("plan", *words.split())
    return found


DEDUP = (
    "dedup --rate 80/s --caller 10s --retry 90s --network 30s --clock 5s --margin 20%"
    " --duplicates 6% --incident 10m --record-size 200B"
)
STORAGE = "storage --retention 7d --read-interval 24h --events-per-day 1000000 --event-size 64"


@pytest.mark.usefixtures("child_processes")
def test_they_are_imported_only_when_they_are_run() -> None:
    """A service that starts has no use for them."""
    code = "import sys, counter.cli.app; sys.exit(any('plan' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_window_of_tokens_is_planned(shell: Shell) -> None:
    found = plan(shell, DEDUP)
    assert (found["ttl_seconds"], found["keys"]) == (135, 12_960)
    assert found["duplicates_per_second"] == 4.8
    assert found["duplicates_in_incident"] == 2_880
    assert found["collision_probability"] == pytest.approx(2.47e-31, rel=1e-3)
    assert found["bytes_per_day"] == 1_382_400_000
    assert found["warnings"] == []


def test_a_day_of_a_thousand_a_second_is_17_gigabytes(shell: Shell) -> None:
    text = shell.said("plan", "dedup", "--rate", "1000/s", "--ttl", "24h")
    assert "= 86,400,000" in text
    assert "= 17,280,000,000" in text


def test_tokens_that_are_forgotten_too_early_are_warned_of(shell: Shell) -> None:
    (warning,) = plan(shell, f"{DEDUP} --ttl 1m")["warnings"]
    assert shell.err == f"counter: warning: {warning}\n"


def test_the_events_of_a_counter_are_planned(shell: Shell) -> None:
    assert plan(shell, STORAGE) == {
        "seconds_per_slice": 86_400,
        "seconds_per_interval": 86_400,
        "buckets_per_id": 8,
        "seconds_per_bucket": 5,
        "accept_limit": 600,
        "read_amplification": 8,
    }
    for_ever = plan(shell, "storage --retention unlimited --events-per-day 10")
    assert (for_ever["seconds_per_slice"], for_ever["accept_limit"]) == (0, 0)


def test_all_that_cannot_be_read_is_reported_at_once(shell: Shell) -> None:
    words = ["dedup", "--rate", "80", "--caller", "3x", "--margin", "20"]
    assert shell.fails(2, "plan", *words).splitlines() == [
        "counter: --rate: '80' is not a rate; write it like 80/s, 4.8/m or 1e6/d",
        "counter: --caller: '3x' is not a duration; write it like 5s, 250ms, 1h30m or 7d",
        "counter: --margin: '20' is not a percentage; write it like 20%",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dedup", "--rate is missing"),
        ("dedup --rate 80/s", "caller + retry + network + clock is 0s"),
        ("dedup --rate 80/s --ttl 40000d", "ttl is 40000d; it must be from 1ms to 36500d"),
        ("storage --retention 5h --events-per-day 1", "retention is 5h; it must be from 6h to"),
        ("storage --events-per-day 1.5", "--events-per-day: 1.5 is not a whole number"),
    ],
)
def test_a_wrong_value_is_named_with_its_bound(words: str, message: str, shell: Shell) -> None:
    assert message in shell.fails(2, "plan", *words.split())
