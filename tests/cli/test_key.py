"""``counter key``: the key is printed once and alone; outputs and exit codes."""

import asyncio
import json
import os
import sqlite3
import stat
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from counter.clock import SystemClock
from counter.security.keys import KeyRing
from counter.storage.sqlite.settings import SqliteSettings
from tests.cli.shell import Shell


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory in which nothing is set."""
    monkeypatch.chdir(tmp_path)


class KeyShell(Shell):
    """Runs ``counter key``."""

    def run(self, *words: str, stdin: bytes | None = None) -> tuple[int, str]:
        return super().run("key", *words, stdin=stdin)

    def create(self, *words: str) -> str:
        """The key that is made."""
        return self.said("create", *(words or ("--namespace", "videos", "--scope", "write")))

    def listed(self) -> Sequence[dict[str, Any]]:
        keys: Sequence[dict[str, Any]] = json.loads(self.said("list", "--json"))["keys"]
        return keys


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> KeyShell:
    return KeyShell(capsys)


def test_a_key_is_printed_alone_and_never_again(shell: KeyShell) -> None:
    """So that a script can catch it. The disk does not have it either."""
    text = shell.create()
    key_id, secret = text.split("_")[1:]
    assert text == f"ck_{key_id}_{secret}"
    assert f"key {key_id} is shown only now" in shell.err
    assert "it is the first key: from now on" in shell.err
    said = shell.err
    for words in (["list"], ["list", "--json"], ["revoke", text], ["rotate", text]):
        _, out = shell.run(*words)
        said += out + shell.err
    shell.create()
    assert "first key" not in shell.err
    assert secret not in said
    assert secret.encode() not in b"".join(each.read_bytes() for each in Path("data").iterdir())


async def test_a_process_that_serves_from_the_directory_learns_of_it(shell: KeyShell) -> None:
    """Which it holds alone, so far as counts go."""
    settings = SqliteSettings()
    store = settings.kind.open(settings, SystemClock())
    await store.open()
    ring = KeyRing(store.keys, SystemClock())
    await ring.refresh()
    assert not ring.required
    try:
        text = await in_thread(shell.create)
        await ring.refresh()
        found = ring.find(text.encode())
        assert found is not None
        await ring._save_uses()
        assert (await in_thread(shell.listed))[0]["last_used"] is not None
        await in_thread(shell.run, "revoke", text)
        await ring.refresh()
        assert ring.required
        assert ring.find(text.encode()) is None
    finally:
        await store.close()


async def in_thread(call: Any, *args: Any) -> Any:
    """The result of *call* in a thread without an event loop."""
    return await asyncio.to_thread(call, *args)


def test_only_its_owner_may_read_the_file(shell: KeyShell) -> None:
    old = os.umask(0)
    try:
        shell.create()
    finally:
        os.umask(old)
    assert stat.S_IMODE(Path("data/keys.sqlite3").stat().st_mode) == 0o600


def test_keys_are_listed(shell: KeyShell) -> None:
    """Nothing is cut or folded, and a label is no markup."""
    assert "there are no keys: no request needs one" in shell.fails(0, "list")
    assert not Path("data").exists()
    shell.create("--namespace", "*", "--scope", "admin")
    limits = ["--requests", "100/s", "--adds", "6/m", "--reservations", "0/s", "--resolutions"]
    label = "[red]the one of continuous integration"
    names = ["--namespace", "videos", "--namespace", "team-*", "--label", label]
    text = shell.create(*names, "--scope", "read", "--expires", "90d", *limits, "1/s")
    plain, full = shell.listed()
    assert full["id"] == text.split("_")[1]
    assert (full["label"], full["scope"], full["state"]) == (label, "read", "valid")
    assert full["namespaces"] == ["videos", "team-*"]
    assert full["limits"] == {
        "requests_per_s": 100,
        "adds_per_s": 0.1,
        "reservations_per_s": 0,
        "resolutions_per_s": 1,
    }
    assert (plain["expires_at"], plain["limits"], plain["last_used"]) == (None, {}, None)
    _, table = shell.run("list")
    head, first, second = table.splitlines()
    assert " ".join(head.split()) == (
        "ID LABEL NAMESPACES SCOPE LIMITS CREATED EXPIRES LAST USED STATE"
    )
    assert first.split()[:4] == [plain["id"], "-", "*", "admin"]
    assert f"  {label}  videos,team-*  read   requests 100/s, adds 0.1/s, reserv" in second
    assert ", reservations unlimited, resolutions 1/s  " in second


def test_a_rotation_prints_the_new_key_and_when_the_old_one_ends(shell: KeyShell) -> None:
    old = shell.create()
    code, out = shell.run("rotate", old.split("_")[1], "--grace", "10m")
    assert code == 0
    said = shell.err
    new_id = out.strip().split("_")[1]
    first, second = shell.listed()
    assert (first["state"], first["replaced_by"], second["state"]) == ("replaced", new_id, "valid")
    assert f"key {first['id']} is valid until {first['expires_at']}: give its clients" in said
    code, out = shell.run("rotate", "-", "--json", stdin=f"{old}\n".encode())
    assert (code, out) == (1, "")
    assert f"was rotated before, to {new_id}: rotate that one" in shell.err
    code, out = shell.run("rotate", new_id, "--grace", "0s", "--json")
    body = json.loads(out)
    assert (code, body["replaces"], body["state"]) == (0, new_id, "valid")
    assert body["key"].startswith(f"ck_{body['id']}_")
    states = [each["state"] for each in shell.listed()]
    assert states == ["replaced", "expired", "valid"]
    rows = shell.run("list")[1].splitlines()[1:]
    assert rows[0].endswith(f"replaced by {new_id}")
    assert rows[1].endswith(f"expired, replaced by {body['id']}")


@pytest.mark.parametrize("form", ["{key}", " {key} ", "ck_{id}_", "ck_{id}_abcd"])
def test_a_valid_key_is_refused_as_an_argument(form: str, shell: KeyShell) -> None:
    """Regression: every user of the machine could read it in the list of processes."""
    key = shell.create()
    key_id = key.split("_")[1]
    assert f"give the id, counter key rotate {key_id}, or - and the key on" in shell.fails(
        2, "rotate", form.format(key=key, id=key_id)
    )
    assert key not in shell.err
    assert [each["state"] for each in shell.listed()] == ["valid"]


def test_a_key_is_read_from_standard_input(shell: KeyShell) -> None:
    first = shell.create()
    for command in ("rotate", "revoke"):
        assert "standard input is empty" in shell.fails(2, command, "-", stdin=b"\n")
    assert shell.run("rotate", f"ck_{first.split('_')[1]}")[0] == 0
    code, _ = shell.run("revoke", "-", stdin=f"{first}\nmore\n".encode())
    assert code == 0
    assert shell.listed()[0]["state"] == "revoked"


def test_a_revocation_says_how_soon_it_holds(shell: KeyShell) -> None:
    key_id = shell.create().split("_")[1]
    assert "rejects it within two seconds" in shell.fails(0, "revoke", key_id)
    assert "cannot read the keys, after 60 s" in shell.err
    code, out = shell.run("revoke", key_id, "--json")
    assert (code, json.loads(out)["state"]) == (0, "revoked")
    assert f"key {key_id} was revoked before, at 2" in shell.err


def test_an_unknown_id_ends_with_1(shell: KeyShell) -> None:
    key_id = shell.create().split("_")[1]
    unknown = ("a" if key_id[0] != "a" else "b") + key_id[1:]
    for command in ("revoke", "rotate"):
        assert shell.run(command, unknown) == (1, "")
        assert f"there is no key {unknown!r}; counter key list shows them" in shell.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--scope", "root", "--expires", "soon", "--adds", "5"],
            "--scope: 'root' is none of read, write, admin",
        ),
        (["--scope", "root", "--expires", "soon"], "--expires: 'soon' is not a duration"),
        (["--scope", "root", "--adds", "5"], "--adds: '5' is not a rate"),
        (["--scope", "read", "--namespace", "a*b"], "namespace 'a*b' is not valid for a key"),
        (["--scope", "read", "--requests", "1e10/s"], "requests is 1e+10/s; it must be at most"),
    ],
)
def test_all_wrong_values_are_reported_and_end_with_2(
    words: list[str], message: str, shell: KeyShell
) -> None:
    assert f"counter: {message}" in shell.fails(2, "create", "--namespace", "videos", *words)
    assert not Path("data").exists()


def test_a_file_that_was_cut_short_rejects_all_requests(shell: KeyShell) -> None:
    """It is not taken for a service that never had a key. Regression: an empty one was."""
    shell.create()
    assert [each.name for each in Path("data").iterdir()] == ["keys.sqlite3"]
    for content in (b"", b"SQLite"):
        Path("data/keys.sqlite3").write_bytes(content)
        assert "data/keys.sqlite3" in shell.fails(2, "list")
        assert "restore it from a backup" in shell.err


def test_a_file_of_a_later_version_is_left_alone(shell: KeyShell) -> None:
    shell.create()
    with closing(sqlite3.connect("data/keys.sqlite3")) as connection:
        connection.execute("PRAGMA user_version = 9")
    assert "has version 9, and this program knows 2: use the newer program" in shell.fails(
        2, "list"
    )


def test_a_directory_that_cannot_be_made_is_named(shell: KeyShell) -> None:
    Path("data").write_text("a file")
    words = ["--namespace", "videos", "--scope", "read"]
    assert "counter: data/keys.sqlite3 cannot be made: [Errno " in shell.fails(2, "create", *words)


def test_a_file_without_permission_is_reported(
    shell: KeyShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By root, who may all, it cannot be seen."""
    shell.create()

    def refuse(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr("sqlite3.connect", refuse)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "must be able to read and write it" in shell.fails(2, "list")


def test_files_made_by_root_belong_to_the_service(
    shell: KeyShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user that owns the data directory must be able to read its keys."""
    given: list[tuple[str, int, int]] = []
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.chown", lambda path, *ids: given.append((str(path), *ids)))
    shell.create()
    shell.create()
    owner = Path("data").stat()
    ((path, *ids),) = given
    assert path.startswith("data/.keys.sqlite3.")
    assert ids == [owner.st_uid, owner.st_gid]


def test_a_file_that_cannot_be_used_is_named(shell: KeyShell) -> None:
    """With the fix."""
    Path("data").mkdir()
    Path("data/keys.sqlite3").write_bytes(b"no database, and longer than its head " * 10)
    for words in (["list"], ["create", "--namespace", "videos", "--scope", "read"]):
        assert shell.run(*words)[0] == 2
        assert "counter: data/keys.sqlite3: SQLite: file is not a database" in shell.err
        assert "restore it from a backup" in shell.err


def test_changes_of_keys_are_in_the_audit_log(shell: KeyShell) -> None:
    flags = ["--audit-log", "audit.jsonl"]
    text = shell.create("--namespace", "videos", "--scope", "read", *flags)
    key_id = text.split("_")[1]
    _, out = shell.run("rotate", key_id, *flags)
    shell.run("revoke", key_id, *flags)
    shell.run("revoke", "missing", *flags)
    lines = [json.loads(line) for line in Path("audit.jsonl").read_text().splitlines()]
    assert [(each["act"], each["key"]) for each in lines] == [
        ("key.create", key_id),
        ("key.rotate", key_id),
        ("key.revoke", key_id),
    ]
    assert lines[1]["new_key"] == out.split("_")[1]
    assert text.split("_")[2] not in Path("audit.jsonl").read_text()
