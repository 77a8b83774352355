"""Contexts: the service of a command, its key, and their storage."""

import json
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from counter.cli.client import ServiceFlags, key_of
from counter.errors import StartupError
from tests.cli.shell import Shell
from tests.client.stranger import Stranger, http, stranger

KEY = f"ck_{'a' * 12}_{'b' * 32}"
AS_OF = "2026-01-01T00:00:00Z"
JSON = "Content-Type: application/json"
OTHER_KEY = f"ck_{'c' * 12}_{'d' * 32}"
#: A test of a file's mode needs a folder that only the owner can write.
FILE = "counter/contexts.json"


REFUSED = {"status": 401, "code": "key_invalid", "detail": "no", "type": "t", "retry": "never"}


def answer(namespace: str) -> bytes:
    count = {"namespace": namespace, "counter": "c", "count": 1, "as_of": AS_OF}
    return http("200 OK", json.dumps({**count, "accuracy": "accurate"}).encode(), JSON)


@pytest.fixture
def prod() -> Iterator[Stranger]:
    with stranger(answer("shop")) as each:
        yield each


@pytest.fixture
def other() -> Iterator[Stranger]:
    with stranger(answer("default")) as each:
        yield each


def asked(service: Stranger) -> list[tuple[str, str | None]]:
    """The namespace and the key of each request."""
    namespaces = [each.split(b"/")[3].decode() for each in service.asked]
    keys = [key and key.removeprefix("bearer ") for key in service.header("authorization")]
    return list(zip(namespaces, keys, strict=True))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config folder of a user without any context, and nothing in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("URL", "NAMESPACE", "API_KEY", "CONTEXT"):
        monkeypatch.delenv(f"COUNTER_{name}", raising=False)
    return tmp_path


@pytest.fixture
def known(shell: Shell, home: Path, prod: Stranger) -> Shell:
    """With a context ``prod`` that has a namespace and a key, and one that has neither."""
    (home / "prod.key").write_text(f"{KEY}\n", encoding="utf-8")
    (home / "other.key").write_text(OTHER_KEY, encoding="utf-8")
    where = ("--url", prod.url, "--namespace", "shop", "--api-key-file", str(home / "prod.key"))
    shell.said("context", "add", "prod", *where)
    shell.said("context", "add", "open", "--url", prod.url)
    return shell


#: The environment, the flags of a read while ``prod`` is the current context, and the namespace and
#: the key that are sent to its service, or to another one (OTHER).
CHOICES: list[tuple[dict[str, str], list[str], tuple[str, str, str | None]]] = [
    ({}, [], ("PROD", "shop", KEY)),
    ({}, ["--context", "open"], ("PROD", "default", None)),
    ({"CONTEXT": "open"}, [], ("PROD", "default", None)),
    # With a URL nothing of the context: its key would go to another service.
    ({}, ["--url", "OTHER"], ("OTHER", "default", None)),
    ({"URL": "OTHER"}, [], ("OTHER", "default", None)),
    ({"CONTEXT": "prod"}, ["--url", "OTHER"], ("OTHER", "default", None)),
    # The key and the namespace of the environment may be those of its URL.
    (
        {"URL": "OTHER", "NAMESPACE": "videos", "API_KEY": OTHER_KEY},
        ["--context", "prod"],
        ("PROD", "shop", KEY),
    ),
    ({"NAMESPACE": "videos"}, [], ("PROD", "videos", KEY)),
    ({"NAMESPACE": "videos"}, ["-n", "music", "--context", "prod"], ("PROD", "music", KEY)),
    ({}, ["-n", "music", "--api-key-file", "other.key"], ("PROD", "music", OTHER_KEY)),
    ({"API_KEY": OTHER_KEY}, ["--context", "open"], ("PROD", "default", OTHER_KEY)),
    # An empty name asks for no context.
    ({"CONTEXT": "prod"}, ["--context", "", "--url", "OTHER"], ("OTHER", "default", None)),
]


@pytest.mark.parametrize(("environment", "flags", "expected"), CHOICES)
def test_flags_come_before_the_environment_and_that_before_the_current_context(
    known: Shell,
    prod: Stranger,
    other: Stranger,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    flags: list[str],
    expected: tuple[str, str, str | None],
) -> None:
    known.said("context", "use", "prod")
    prod.pieces = [answer(expected[1])]
    for name, value in environment.items():
        monkeypatch.setenv(f"COUNTER_{name}", value.replace("OTHER", other.url))
    said = known.said("get", "c", *(other.url if each == "OTHER" else each for each in flags))
    assert said == "1"
    found = [("PROD", *each) for each in asked(prod)] + [("OTHER", *each) for each in asked(other)]
    assert found == [expected]


def test_a_url_and_a_context_that_are_given_alike_are_refused(
    known: Shell, prod: Stranger, other: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known.run("get", "c", "--context", "prod", "--url", other.url) == (2, "")
    assert known.err == "counter: --context and --url both name a service: give one of them\n"
    monkeypatch.setenv("COUNTER_CONTEXT", "prod")
    monkeypatch.setenv("COUNTER_URL", other.url)
    assert "COUNTER_CONTEXT and COUNTER_URL" in known.fails(2, "get", "c")
    assert prod.asked + other.asked == []


def test_the_key_of_a_context_is_given_for_its_url_alone(known: Shell, prod: Stranger) -> None:
    """Also if the context is replaced while a command runs."""
    assert key_of(ServiceFlags(url=prod.url, context="prod")) == KEY
    with pytest.raises(StartupError, match="its key is sent nowhere else"):
        key_of(ServiceFlags(url="http://127.0.0.1:9", context="prod"))


def test_a_key_is_never_printed(known: Shell) -> None:
    known.said("context", "use", "prod")
    for json_flag in ([], ["--json"]):
        code, out = known.run("context", "list", *json_flag)
        assert (code, f"set, id {'a' * 12}" in out) == (0, True)
        assert "b" * 32 not in out + known.err
    _, shown = known.documents("context", "list")
    assert (shown["name"], shown["current"], shown["namespace"]) == ("prod", True, "shop")


def test_an_error_names_the_context(known: Shell, prod: Stranger) -> None:
    prod.pieces = [http("401 Unauthorized", json.dumps({**REFUSED, "applied": None}).encode())]
    assert known.run("get", "c", "--context", "prod")[0] == 2
    assert known.err.endswith(f"counter: context 'prod' was used: {prod.url}\n")
    known.said("context", "add", "gone", "--url", "http://127.0.0.1:9")
    assert known.run("get", "c", "--context", "gone")[0] == 2
    assert known.err.endswith("counter: context 'gone' was used: http://127.0.0.1:9\n")
    assert known.run("get", "c", "--context", "never") == (2, "")
    assert known.err.startswith("counter: there is no context 'never'; those of ")


def test_an_unknown_outcome_is_finished_in_the_context(
    known: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current one may be another when the command is run."""
    known.said("context", "use", "prod")
    # A key may have been sent before.
    with patch("counter_client.sync.time.sleep", side_effect=KeyboardInterrupt):
        known.said("context", "add", "gone", "--url", "http://127.0.0.1:9", "-n", "shop")
        assert known.run("add", "c", "--key", "k", "--context", "gone")[0] == 130
    assert known.err.splitlines()[-1] == "counter add c 1 --key k --context gone"
    monkeypatch.setenv("COUNTER_CONTEXT", "gone")
    with patch("counter_client.sync.time.sleep", side_effect=KeyboardInterrupt):
        known.run("add", "c", "--key", "k", "-n", "music")
    command = shlex.split(known.err.splitlines()[-1])
    assert command[-4:] == ["--context", "gone", "--namespace", "music"]


def test_contexts_are_added_replaced_and_removed(known: Shell) -> None:
    assert known.run("context", "add", "prod", "--url", "http://127.0.0.1:9")[0] == 1
    assert "--replace replaces it" in known.err
    known.said("context", "add", "prod", "--url", "http://127.0.0.1:9", "--replace")
    _, shown = known.documents("context", "list")
    assert (shown["url"], shown["api_key"], shown["namespace"]) == (
        *("http://127.0.0.1:9", None, None),
    )
    known.said("context", "use", "prod")
    known.said("context", "remove", "prod")
    known.said("context", "remove", "open")
    assert known.said("context", "list") == ""
    assert "counter context add makes one" in known.err
    for words in (["use", "prod"], ["remove", "prod"]):
        assert known.run("context", *words) == (2, "")


def test_an_invalid_context_is_not_stored(shell: Shell, home: Path) -> None:
    (home / "bad.key").write_text("no key at all\n", encoding="utf-8")
    for name, words in (
        ("-x", ["--url", "http://a"]),
        ("a b", ["--url", "http://a"]),
        ("x", ["--url", "ftp://a"]),
        ("x", ["--url", "http://a", "--namespace", "A B"]),
        ("x", ["--url", "http://a", "--namespace", ""]),
        ("x", ["--url", "http://a", "--api-key-file", str(home / "bad.key")]),
        ("x", ["--url", "http://a", "--api-key-file", str(home / "gone.key")]),
        ("x", ["--url", "https://a", "--tls-ca", str(home / "gone.pem")]),
        ("x", []),
    ):
        assert shell.run("context", "add", *words, "--", name) == (2, ""), (name, words)
        assert "no key at all" not in shell.err
    assert not (home / "config" / FILE).exists()


def test_only_its_owner_may_read_the_file(known: Shell, home: Path) -> None:
    path = home / "config" / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for place, mode in ((path, 0o644), (path.parent, 0o770)):
        good = stat.S_IMODE(place.stat().st_mode)
        place.chmod(mode)
        assert f"{place} has the mode 0{mode:o}" in known.fails(2, "get", "c", "--context", "prod")
        assert f"chmod {good:o} {place}" in known.err
        place.chmod(good)
    assert known.run("get", "c", "--context", "prod")[0] == 0


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"contexts": {}}', '{"contexts": {"a": {"url": 5}}, "current": null}', "\xff"],
)
def test_a_file_that_holds_no_contexts_is_an_error_that_names_it(
    shell: Shell, home: Path, text: str
) -> None:
    path = home / "config" / FILE
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    path.chmod(0o600)
    assert shell.run("get", "c") == (2, "")
    assert shell.err == (
        f"counter: {path} does not hold contexts: mend it, or remove it and add them again\n"
    )
    # Help and a URL do without it.
    assert shell.run("get", "--help")[0] == 0
    assert shell.run("get", "c", "--url", "http://127.0.0.1:9")[0] == 2
    assert str(path) not in shell.err


def test_a_failed_write_keeps_the_old_contexts(known: Shell, home: Path) -> None:
    path = home / "config" / FILE
    before = path.read_bytes()
    with patch("counter.cli.contexts.os.replace", side_effect=OSError(28, "No space left")):
        assert known.run("context", "use", "prod") == (2, "")
    assert known.err == f"counter: {path} cannot be written: No space left\n"
    assert (path.read_bytes(), os.listdir(path.parent)) == (before, ["contexts.json"])


def test_without_a_home_there_are_no_contexts(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    with patch("counter.cli.contexts.Path.home", side_effect=RuntimeError):
        assert shell.said("context", "list") == ""
        assert "set HOME or XDG_CONFIG_HOME" in shell.fails(
            2, "context", "add", "a", "--url", "http://a"
        )


def test_the_file_is_in_the_home_directory_otherwise(
    shell: Shell, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(home))
    shell.said("context", "add", "a", "--url", "http://a")
    assert (home / ".config" / FILE).exists()
