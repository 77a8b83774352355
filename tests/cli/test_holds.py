"""Holds at the command line, against a running service: output and exit codes."""

import json
import re
import shlex
from pathlib import Path
from uuid import uuid4

import pytest

from counter_client import Token
from tests.cli.shell import Shell
from tests.cli.test_service_commands import answers_lost

pytestmark = pytest.mark.usefixtures("at_service")


def test_an_amount_is_held_and_settled(shell: Shell, name: str) -> None:
    hold = shell.said("hold", name, "50", "--expires-in", "1m", "--at-most", "100")
    assert shell.said("get", name) == "0"
    assert shell.err == "counter: beside it, open holds reserve 50\n"
    (found,) = shell.documents("get", name)
    assert (found["count"], found["held"]) == (0, 50)
    assert shell.said("holds", name).splitlines()[1].split()[-2:] == ["50", hold]
    (listed,) = shell.documents("holds", name)
    assert (listed["hold"], listed["amount"], listed["state"]) == (hold, 50, "open")
    assert shell.said("settle", hold, "37") == f"{name}: 37 of 50 held is counted"
    (settled,) = shell.documents("settle", hold, "37")
    assert (settled["settled"], settled["count"], settled["held"]) == (37, 37, 0)
    assert "settled with 37" in shell.fails(1, "settle", hold, "38")
    assert "settled with 37" in shell.fails(1, "release", hold)
    assert shell.documents("holds", name) == []
    assert shell.said("get", name) == "37"


def test_a_hold_is_released_and_extended(shell: Shell, name: str) -> None:
    hold = shell.said("hold", name, "-5", "--expires-in", "1m")
    said = shell.said("extend", hold, "--expires-in", "2m")
    (extended,) = shell.documents("extend", hold, "--expires-in", "1s")
    assert said == f"{name}: -5 is held until {extended['expires_at']}"
    for _ in range(2):
        assert shell.said("release", hold) == f"{name}: -5 is released"
    assert "was released" in shell.fails(1, "settle", hold, "-5")


def test_more_than_was_held_is_counted(shell: Shell, name: str) -> None:
    hold = shell.said("hold", name, "5", "--expires-in", "1m")
    assert shell.said("settle", hold, "8") == f"{name}: 8 of 5 held is counted"
    assert shell.err == "counter: that is more than was held; it counts in full\n"


def test_a_hold_without_room_has_a_code_of_its_own(shell: Shell, name: str) -> None:
    given = ["--expires-in", "1m", "--at-most", "100"]
    shell.said("hold", name, "60", *given)
    refused = f"counter '{name}' was 0, with 60 held, and +41 would have taken it past at_most 100"
    assert refused in shell.fails(5, "hold", name, "41", *given)
    assert "with 60 held" in shell.fails(5, "add", name, "41", "--at-most", "100")
    shell.said("hold", name, "40", *given)


def test_the_events_of_holds_say_what_they_are(shell: Shell, name: str) -> None:
    token = str(Token.new())
    hold = shell.said("hold", name, "5", "--expires-in", "1m", "--at-most", "7", "--token", token)
    assert shell.said("token", "resolve", token, name) == f"held: {name} +5, by {hold}"
    shell.fails(5, "hold", name, "3", "--expires-in", "1m", "--at-most", "7")
    shell.said("settle", hold, "4")
    [end] = [x for x in shell.documents("events", name) if x["hold"]["state"] == "settled"]
    token = f"{end['event_id']}@{end['event_time']}"
    said = shell.said("token", "resolve", token, name)
    assert said == f"settled: {name} +4, by the end of a hold of +5, {hold}"
    marks = re.findall(r"@\S+Z  (.*)$", shell.said("events", name), re.MULTILINE)
    assert sorted(marks) == ["hold +3  refused +3", "hold +5", "settled +5"]
    shown = [each["hold"] for each in shell.documents("events", name)]
    assert {"amount": 5, "state": "begun", "id": hold} in shown
    assert {"amount": 5, "state": "settled", "id": hold} in shown


def test_an_export_has_what_was_settled(shell: Shell, name: str, tmp_path: Path) -> None:
    """And no open hold: it is settled where it was begun, and counts there."""
    shell.said("settle", shell.said("hold", name, "50", "--expires-in", "1m"), "37")
    hold = shell.said("hold", name, "9", "--expires-in", "1m")
    file, other = str(tmp_path / "counts.ndjson"), f"made-{uuid4().hex}"
    assert shell.run("export", file, "--prefix", name)[0] == 0
    assert shell.run("import", file, "--namespace", other, "--create", "--verify")[0] == 0
    (moved,) = shell.documents("get", name, "--namespace", other, "--max-staleness", "0s")
    assert (moved["count"], moved.get("held", 0)) == (37, 0)
    assert shell.documents("holds", name, "--namespace", other) == []
    assert "no such hold" in shell.fails(1, "settle", hold, "8", "--namespace", other)
    shell.said("settle", hold, "8")
    assert shell.said("get", name) == "45"


def test_the_same_token_or_key_is_one_hold(shell: Shell, name: str) -> None:
    for given in (["--token", str(Token.new())], ["--key", f"order {uuid4()}"]):
        words = ["hold", name, "5", "--expires-in", "1m", *given]
        assert shell.said(*words) == shell.said(*words)
        assert "another payload" in shell.fails(1, *words[:2], "6", *words[3:])
        cancel = ["cancel", *words[1:], "--operation", "hold"]
        assert shell.said(*cancel) == f"{name}: the hold was begun, and is cancelled"
        assert "was released" in shell.fails(1, *words)


def test_a_hold_whose_answer_is_lost_is_finished(shell: Shell, name: str) -> None:
    """The command that is printed begins no second one. An end may be sent again."""
    with answers_lost():
        assert shell.run("hold", name, "5", "--expires-in", "1m", "--at-most", "7")[0] == 4
    command = shlex.split(shell.err.splitlines()[-1])
    assert command[:4] == ["counter", "hold", name, "5"]
    hold = shell.said(*command[1:])
    assert [each["hold"] for each in shell.documents("holds", name)] == [hold]
    with answers_lost():
        assert "send the same command again" in shell.fails(4, "settle", hold, "4")
    assert shell.said("settle", hold, "4") == f"{name}: 4 of 5 held is counted"
    with answers_lost():
        _, out = shell.run("hold", name, "-5", "--expires-in", "1m", "--json")
    unknown = json.loads(out)
    assert (unknown["amount"], unknown["expires_in"], unknown["applied"]) == (-5, "1m", None)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["hold", "c", "5"], "--expires-in"),
        (["hold", "c"], "AMOUNT is missing"),
        (["hold", "c", "x", "--expires-in", "1m"], "AMOUNT"),
        (["hold", "c", "0", "--expires-in", "1m"], "amount is 0"),
        (["hold", "c", "5", "--expires-in", "9"], "expires_in"),
        (
            ["hold", "c", "5", "--expires-in", "99d"],
            "which is retention / 10",
        ),
        (["settle", "c", "5"], "is not the id of a hold"),
        (["release", "c"], "is not the id of a hold"),
        (["extend", "c", "--expires-in", "1m"], "is not the id of a hold"),
        (["holds", "c", "--limit", "-1"], "--limit"),
        (["cancel", "c", "5", "--operation", "hold", "--key", "k"], "--expires-in"),
        (["cancel", "c", "5", "--expires-in", "1m", "--key", "k"], "--expires-in"),
    ],
)
def test_wrong_words_send_nothing(shell: Shell, words: list[str], fault: str) -> None:
    assert fault in shell.fails(2, *words)
