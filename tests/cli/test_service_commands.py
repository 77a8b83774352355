"""The commands against a running service: output and exit codes."""

import io
import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import pytest

from counter_client import CounterClient, Token, Unfinished, UnreachableError
from counter_client.retrying import Send
from counter_client.transport import SyncTransport
from tests.cli.shell import Shell
from tests.support.in_thread import Service

pytestmark = pytest.mark.usefixtures("at_service")

#: The same at every collection: it is part of tests' names.
TOKEN = "8fa0ccf7-4c84-42bc-b1e0-ff71bde8f6a3@2026-11-21T04:55:02.911482Z"


def test_an_add_is_counted_and_read(shell: Shell, name: str) -> None:
    assert shell.said("add", name) == f"{name}: 1 added"
    assert shell.said("add", name, "-3") == f"{name}: -3 added"
    assert shell.said("add", name, "10", "--get") == "8"
    assert shell.said("get", name) == "8"
    (added,) = shell.documents("add", name, "2", "--get")
    assert (added["counter"], added["count"], added["replayed"]) == (name, 10, False)
    assert shell.said("get", name, "other", "--max-staleness", "0s").splitlines()[1:] == [
        f"{name}     10",
        f"{'other':<{len(name)}}      0",
    ]
    counts = shell.documents("get", name, "other")
    assert [(each["count"], each["accuracy"]) for each in counts] == [
        (10, "accurate"),
        (0, "accurate"),
    ]
    assert shell.said("clear", name) == f"{name}: cleared"
    assert shell.said("get", name) == "0"


def test_the_same_token_or_key_counts_once(shell: Shell, name: str) -> None:
    """A token may be written as a UUIDv7 too."""
    as_uuid = str(UUID(int=time.time_ns() // 10**6 << 80 | 7 << 76 | 2 << 62))
    for given in (["--token", str(Token.new())], ["--key", "order 1"], ["--token", as_uuid]):
        assert shell.said("add", name, "5", *given) == f"{name}: 5 added"
        assert shell.said("add", name, "5", *given).endswith("was counted before, and is not again")
        assert shell.run("add", name, "6", *given)[0] == 1
    assert shell.said("get", name) == "15"
    token = str(Token.new())
    assert shell.said("clear", name, "--token", token) == f"{name}: cleared"
    assert shell.said("clear", name, "--token", token) == f"{name}: was cleared before"


def test_an_add_past_a_bound_is_refused_with_a_code_of_its_own(shell: Shell, name: str) -> None:
    """It is the same answer for every retry, and other bounds are another payload."""
    shell.said("add", name, "3", "--at-most", "3")
    given = ["-5", "--at-least", "-1", "--key", "order 1"]
    for _ in range(2):
        refused = f"counter '{name}' was 3, and -5 would have taken it past at_least -1"
        assert refused in shell.fails(5, "add", name, *given)
        shell.said("add", name)
    assert "another payload" in shell.fails(1, "add", name, "-5", "--key", "order 1")
    assert shell.said("add", name, "-6", "--at-least=-1", "--get") == "-1"
    assert "no count is both" in shell.fails(2, "add", name, "--at-least", "5", "--at-most", "4")
    assert shell.fails(5, "token", "resolve", "key:order 1", name, "-5", "--at-least", "-1")
    assert "another payload" in shell.fails(1, "cancel", name, "-5", "--key", "order 1")
    said = shell.said("cancel", name, *given)
    assert said == f"{name}: -5 was not counted, and is cancelled"
    assert shell.said("get", name) == "-1"


def test_a_bounded_add_is_finished_with_its_bounds(shell: Shell, name: str) -> None:
    shell.said("add", name, "2")
    for code, delta in ((0, "-2"), (5, "-9")):
        with answers_lost():
            assert shell.run("add", name, delta, "--at-least=-1", "--at-most", "7")[0] == 4
        command = shlex.split(shell.err.splitlines()[-1])
        assert command[:6] == ["counter", "add", name, delta, "--at-least=-1", "--at-most"]
        assert shell.run(*command[1:])[0] == code
    token = shell.said("token", "new")
    shell.run("token", "resolve", token, name, "--at-least", "-3")
    words = shlex.split(shell.err.splitlines()[-1].replace("DELTA", "-3"))[1:]
    assert shell.said(*words).startswith("counted: once")
    with answers_lost():
        _, out = shell.run("add", name, "--at-most", "0", "--json")
    assert json.loads(out)["at_most"] == 0


def test_a_namespace_has_bounds_until_they_are_taken_away(shell: Shell, name: str) -> None:
    made = f"made-{uuid4().hex}"
    (found,) = shell.documents("namespace", "create", made, "--at-least", "0")
    assert found["bounds"] == {"at_least": 0}
    change = ["namespace", "change", made]
    (found,) = shell.documents(*change, "--at-most", "5")
    assert found["bounds"] == {"at_least": 0, "at_most": 5}
    shown = shell.said("namespace", "show", made).splitlines()
    assert shown[-1].split(maxsplit=1) == ["bounds", '{"at_least": 0, "at_most": 5}']
    refused = shell.fails(5, "add", name, "6", "--namespace", made)
    assert "past at_most 5 of the namespace; there was room for 5" in refused
    (found,) = shell.documents(*change, "--no-bounds", "--at-most", "-5")
    assert found["bounds"] == {"at_most": -5}
    (found,) = shell.documents(*change, "--no-bounds")
    assert "bounds" not in found
    assert shell.said("add", name, "6", "--namespace", made) == f"{name}: 6 added"


@pytest.mark.parametrize("changes", [1, 4, 5])
def test_a_change_keeps_the_bound_that_is_set_meanwhile(
    shell: Shell, service: Service, changes: int
) -> None:
    """Or fails, if another administrator is faster each time: no bound is lost."""
    made = f"made-{uuid4().hex}"
    shell.said("namespace", "create", made, "--at-most", "100")
    others = iter(range(1, changes + 1))
    read = CounterClient.namespace

    def overtaken(client: CounterClient) -> Any:
        found = read(client)
        if at_most := next(others, None):
            with CounterClient(service.url, made) as other:
                other.change_namespace(bounds={"at_most": at_most})
        return found

    change = ["namespace", "change", made, "--at-least", "-3", "--cache-ttl", "3s"]
    with patch.object(CounterClient, "namespace", overtaken):
        code, _ = shell.run(*change)
    said = shell.err
    (found,) = shell.documents("namespace", "show", made)
    if changes < 5:
        assert (code, found["cache_ttl"]) == (0, "3s")
        assert found["bounds"] == {"at_least": -3, "at_most": changes}
    else:
        assert code == 1
        assert "read it again" in said
        assert found["bounds"] == {"at_most": changes}


def test_a_token_or_key_is_cancelled(shell: Shell, name: str) -> None:
    """Counted or not, and as often as it is asked for."""
    for given in (["--token", str(Token.new())], ["--key", "order 1"]):
        shell.said("add", name, "5", *given)
        for _ in range(2):
            said = shell.said("cancel", name, "5", *given)
            assert said == f"{name}: 5 was counted, and is cancelled"
        assert "was cancelled" in shell.fails(1, "add", name, "5", *given)
        assert "another payload" in shell.fails(1, "cancel", name, "6", *given)
    never = ["--token", str(Token.new())]
    assert shell.said("cancel", name, *never) == f"{name}: 1 was not counted, and is cancelled"
    (shown,) = shell.documents("cancel", name, *never)
    assert (shown["counter"], shown["was_counted"], shown["token"]) == (name, False, never[1])
    assert "never will" in shell.fails(1, "token", "resolve", never[1], name, "1")
    assert shell.said("get", name) == "0"


def test_a_clear_and_a_delete_are_cancelled(shell: Shell, name: str) -> None:
    shell.said("add", name, "5")
    for operation, more in (("clear", []), ("delete", ["--yes"])):
        given = ["--key", "monday"]
        shell.said(operation, name, *given, *more)
        assert shell.said("get", name) == "0"
        said = shell.said("cancel", name, "--operation", operation, *given)
        assert said == f"{name}: the {operation} was counted, and is cancelled"
        assert shell.said("get", name) == "5"


@pytest.mark.parametrize(
    "words",
    [
        ["get"],
        ["get", ""],
        ["get", "c", "--max-staleness", "soon"],
        ["add", "c", "1.5"],
        ["add", "c", "9223372036854775808"],
        ["add", "c", "--token", "t"],
        ["add", "c", "--key", "k", "--token", TOKEN],
        ["add", ""],
        ["cancel", "c"],
        ["cancel", "c", "--token", "t"],
        ["cancel", "c", "1", "--operation", "clear", "--key", "k"],
        ["cancel", "c", "--operation", "get", "--key", "k"],
        ["history", "c", "--from", "yesterday"],
        ["history", "c", "--step", "1us"],
        ["events", "c", "--limit", "-1"],
        ["watch", "c", "--count", "0"],
        ["watch", "c", "--for", "long"],
        ["top", "--limit", "0"],
        ["top", "--span", "1ms"],
        ["namespace", "create", "made", "--counter-type", "X"],
        ["namespace", "change", "default"],
        ["namespace", "delete", "default"],
        ["token", "new", "0"],
        ["token", "resolve", TOKEN],
        ["token", "resolve", "{}"],
        ["token", "resolve", TOKEN, "c", "x"],
    ],
    ids=" ".join,
)
def test_bad_input_ends_with_2_and_one_message(words: list[str], shell: Shell) -> None:
    code, out = shell.run(*words)
    assert (code, out) == (2, "")
    assert shell.err.startswith("counter: ")
    assert "Traceback" not in shell.err


@pytest.mark.parametrize(
    "words",
    [
        ["get", "c"],
        ["add", "c"],
        ["cancel", "c", "--key", "k"],
        ["watch", "c"],
        ["history", "c"],
        ["events", "c"],
    ],
    ids=" ".join,
)
def test_an_unknown_namespace_ends_with_1(words: list[str], shell: Shell) -> None:
    code, out = shell.run(*words, "--namespace", "nowhere")
    assert (code, out) == (1, "")
    assert "there is no namespace 'nowhere'" in shell.err
    assert "counter namespace create makes one" in shell.err


def test_an_add_that_reached_no_service_is_not_counted(shell: Shell) -> None:
    """It ends with 2; with a given token, which may have been sent before, it ends with 4."""
    away = ["--url", "http://127.0.0.1:9"]
    with time_in_hand():
        assert "nothing was sent: it is not counted" in shell.fails(2, "add", "c", *away)
        assert shell.run("add", "c", "--key", "k", *away) == (4, "")
    assert shell.err.splitlines()[-1] == "counter add c 1 --key k --url http://127.0.0.1:9"


@contextmanager
def time_in_hand() -> Iterator[Callable[[float], None]]:
    """Make the clock of clients move only while they sleep, and by the result's argument."""
    now_s = 0.0

    def go_on(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=go_on)
    with patch("counter_client.sync.time", clock):
        yield go_on


@contextmanager
def answers_lost(instead: BaseException | None = None) -> Iterator[None]:
    """Lose each response after its request arrived; or raise *instead* then."""
    works = SyncTransport.send

    with time_in_hand() as go_on:

        def sends(transport: SyncTransport, send: Send) -> UnreachableError:
            works(transport, send)
            if instead is not None:
                raise instead
            go_on(send.timeout_s)
            return UnreachableError("the answer is lost")

        with patch.object(SyncTransport, "send", sends):
            yield


def test_an_unknown_outcome_is_finished_by_the_command_that_is_printed(
    shell: Shell, service: Service, name: str
) -> None:
    with answers_lost():
        code, out = shell.run("add", name, "-2", "--get")
        assert (code, out) == (4, "")
        assert "it is unknown whether it is counted: the answer is lost" in shell.err
    command = shlex.split(shell.err.splitlines()[-1])
    assert command[:5] == ["counter", "add", name, "-2", "--get"]
    assert command[-2:] == ["--url", service.url]
    assert shell.said(*command[1:]) == "-2"
    assert "-2 was counted before, and is not again" in shell.err


def test_a_cancel_without_an_answer_is_repeated(shell: Shell, name: str) -> None:
    """It never prints the command that adds."""
    cancel = ["cancel", name, "--key", "k"]
    shell.said("add", name, "--key", "k")
    with answers_lost():
        said = shell.fails(4, *cancel)
    with answers_lost(KeyboardInterrupt()):
        said += shell.fails(130, *cancel)
    assert said.count("send the same command again") == 2
    assert "counter add" not in said
    assert shell.said(*cancel) == f"{name}: 1 was counted, and is cancelled"


def test_a_script_reads_the_outcome_as_json(shell: Shell, name: str) -> None:
    with answers_lost():
        code, out = shell.run("clear", name, "--json")
    assert code == 4
    document = json.loads(out)
    assert (document["applied"], document["counter"]) == (None, name)
    assert shell.said(*shlex.split(document["finish"])[1:]) == f"{name}: was cleared before"


def test_an_add_that_is_interrupted_can_be_finished_too(shell: Shell, name: str) -> None:
    with answers_lost(instead=KeyboardInterrupt()):
        assert shell.run("add", name)[0] == 130
    command = shlex.split(shell.err.splitlines()[-1])
    assert shell.said(*command[1:]).endswith("was counted before, and is not again")


def test_an_interrupted_add_that_was_never_sent_is_said_not_to_count(shell: Shell) -> None:
    """Regression: it was said to be unknown."""
    with patch("counter_client.sync.time.sleep", side_effect=KeyboardInterrupt):
        assert shell.run("add", "c", "--url", "http://127.0.0.1:9")[0] == 130
    assert shell.err.endswith("counter: interrupted; nothing was sent: it is not counted\n")


def test_a_clock_that_is_behind_is_helped_once(shell: Shell, name: str) -> None:
    """A token of the program is not replaced."""
    old = Token.parse(f"{uuid4()}@2026-01-01T00:00:00Z")
    with patch.object(Token, "new", return_value=old):
        assert shell.said("add", name) == f"{name}: 1 added"
    assert "clock is behind the service's" in shell.err
    assert "was not applied in time and never will be" in shell.fails(
        1, "add", name, "--token", str(old)
    )


def test_a_token_is_looked_up_or_resolved(shell: Shell, name: str) -> None:
    """Without the delta nothing is decided: a token that is in time would be used up."""
    token = shell.said("token", "new")
    assert shell.run("token", "resolve", token, name) == (4, "")
    *_, command = shell.err.splitlines()
    assert command.endswith(" DELTA")
    assert shell.said("events", name) == ""
    words = shlex.split(command.replace("DELTA", "3"))[1:]
    assert shell.said(*words).startswith("counted: once")
    assert shell.said("get", name) == "3"
    late = f"{uuid4()}@2026-01-01T00:00:00Z"
    assert "not counted, and it never will be" in shell.fails(
        1, "token", "resolve", late, name, "3"
    )
    assert shell.run("token", "resolve", late, name, "3", "--json")[1] == '{"applied": false}\n'
    assert shell.run("token", "resolve", "key:never-sent", name)[0] == 4
    assert shell.documents("token", "resolve", "key:never-sent", name, "1") == [{"applied": True}]


def test_the_command_that_decides_it_is_ready_for_a_shell(shell: Shell, name: str) -> None:
    """Regression: it failed for names like a flag, and had no --json form."""
    token = shell.said("token", "new")
    code, out = shell.run("token", "resolve", "--json", "--", token, f"-{name}")
    assert (code, out) == (4, '{"applied": null}\n')
    *_, command = shell.err.splitlines()
    words = shlex.split(command.replace("DELTA", "-3"))[1:]
    assert shell.said(*words).startswith("counted: once")
    assert shell.said("get", "--", f"-{name}") == "-3"


def test_an_unfinished_add_of_a_program_is_resolved_as_it_was_stored(
    shell: Shell, name: str
) -> None:
    stored = Unfinished("atomic/add", "default", ((name, -1), ("other", 1)), str(Token.new()))
    assert shell.said("token", "resolve", str(stored)).startswith("counted")
    assert shell.said("get", name) == "-1"


def test_tokens_are_made_here_or_by_the_service(shell: Shell) -> None:
    one, two = shell.said("token", "new", "2").splitlines()
    assert Token.parse(one) != Token.parse(two)
    (served,) = shell.documents("token", "new", "--served")
    assert served["text"] == f"{served['token']}@{served['generation_time']}"


def test_a_namespace_from_its_making_to_its_end(shell: Shell) -> None:
    made = f"made-{uuid4().hex}"
    text = shell.said("namespace", "create", made, "--counter-type", "EVENTUAL", "--shards", "2")
    settings = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert (settings["counter_type"], settings["shards"]) == ("EVENTUAL", "2")
    assert "exists already" in shell.fails(
        1, "namespace", "create", made, "--counter-type", "EVENTUAL"
    )
    (changed,) = shell.documents("namespace", "change", made, "--cache-ttl", "3s")
    assert (changed["cache_ttl"], changed["shards"]) == ("3s", 2)
    assert f"counter: warning: {changed.pop('warnings')[0]}" in shell.err
    assert shell.documents("namespace", "show", made) == [changed]
    assert changed in shell.documents("namespace", "list")
    assert made in shell.said("namespace", "list")
    assert shell.said("namespace", "delete", made, "--yes") == f"{made}: deleted"
    assert shell.run("namespace", "show", made)[0] == 1
    shell.said("namespace", "create", made, "--counter-type", "EVENTUAL")
    gone = {"namespace": made, "deleted": True}
    assert shell.documents("namespace", "delete", made, "--yes") == [gone]


def test_a_namespace_is_accurate_unless_it_is_said_in_any_case(shell: Shell) -> None:
    """Regression: the type had to be given, in capitals."""
    for given, kind in (
        ([], "ACCURATE"),
        (["--counter-type", "Eventual"], "EVENTUAL"),
        (["--counter-type", "best-effort"], "BEST_EFFORT"),
    ):
        (made,) = shell.documents("namespace", "create", f"made-{uuid4().hex}", *given)
        assert made["counter_type"] == kind
    assert shell.run("namespace", "create", "made", "--counter-type", "exact")[0] == 2
    assert shell.err.startswith("counter: counter_type: ")


def test_advice_is_a_command_too(shell: Shell) -> None:
    assert shell.run("get", "c", "--namespace", "nowhere")[0] == 1
    assert "counter namespace create makes one" in shell.err
    assert shell.run("history", "c", "--step", "1us")[0] == 2
    assert shell.err.startswith("counter: step is 1us; ")


def test_event_rules_are_read_from_a_file(shell: Shell, tmp_path: Path) -> None:
    rule = {"type": "order.paid", "counter": "orders.{subject}", "delta": "data.quantity"}
    toml = "[[event_rules]]\n" + "".join(f'{name} = "{text}"\n' for name, text in rule.items())
    made = f"made-{uuid4().hex}"
    shell.said("namespace", "create", made, "--counter-type", "ACCURATE")
    document = json.dumps({"event_rules": [rule]})
    for name, text in (
        *(("r.toml", toml), ("r.json", document)),
        *(("marked.toml", f"\ufeff{toml}"), ("marked.json", f"\ufeff{document}")),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        flags = ("--event-rules", str(tmp_path / name))
        (changed,) = shell.documents("namespace", "change", made, *flags)
        assert changed["event_rules"] == [rule]
    for name, wrong in (("none.toml", None), ("bad.toml", "="), ("x.json", "[]"), ("y.toml", "")):
        if wrong is not None:
            (tmp_path / name).write_text(wrong, encoding="utf-8")
        flags = ("--event-rules", str(tmp_path / name))
        assert shell.run("namespace", "change", made, *flags)[0] == 2
        assert name in shell.err
        assert "[[event_rules]] in TOML" in shell.err


def test_a_namespace_is_deleted_by_its_name_twice(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = f"made-{uuid4().hex}"
    shell.said("namespace", "create", made, "--counter-type", "BEST_EFFORT")
    for typed, code in (("yes", 1), (made, 0)):
        monkeypatch.setattr("sys.stdin", Terminal(f"{typed}\n"))
        assert shell.run("namespace", "delete", made)[0] == code
        assert "is deleted with its counters, events and tokens, for ever" in shell.err


def test_a_counter_is_deleted_when_that_is_confirmed(
    shell: Shell, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.said("add", name, "5")
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert shell.run("delete", name)[0] == 2
    assert shell.said("get", name) == "5"
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert shell.said("delete", name) == f"{name}: deleted"
    assert f"{name} is set to 0" in shell.err
    assert shell.said("list", name) == "COUNTER  COUNT"
    monkeypatch.setattr("sys.stdin", Terminal(""))
    token = str(Token.new())
    assert shell.said("delete", name, "--yes", "--token", token) == f"{name}: deleted"
    assert shell.said("delete", name, "--yes", "--token", token) == f"{name}: was deleted before"
    assert shell.said("add", name, "2", "--get") == "2"


def test_counters_are_listed_with_their_counts(shell: Shell, name: str) -> None:
    for place, count in (("a", "5"), ("b", "70"), ("c", "-1")):
        shell.said("add", f"{name}/{place}", count)
    assert shell.said("list", f"{name}/").splitlines()[1:] == [
        f"{name}/a      5",
        f"{name}/b     70",
        f"{name}/c     -1",
    ]
    found = shell.documents("list", f"{name}/", "--by", "count", "--limit", "2")
    assert [(each["counter"], each["count"]) for each in found] == [
        (f"{name}/b", 70),
        (f"{name}/a", 5),
    ]
    assert "there are more than 2: --limit 0 for all of them" in shell.err
    shell.said("clear", f"{name}/b")
    assert len(shell.documents("list", f"{name}/", "--limit", "0")) == 3
    assert shell.run("list", "--by", "size")[0] == 2
    assert shell.run("list", "--limit", "-1")[0] == 2


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True
