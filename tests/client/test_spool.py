"""Adds on a client's disk are counted exactly once, wherever the client ends."""

import os
import shutil
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counter_client.buffer import Limits, Merging
from counter_client.calls import Calls
from counter_client.delivery import Delivery
from counter_client.errors import InvalidParameterError, StoreUnavailableError
from counter_client.failures import ClosedError, SpoolBusyError, UnknownOutcomeError
from counter_client.retrying import Do, Effect, Pause, Send, Steps
from counter_client.spool import _SCHEMA, ADOPT_EVERY_S, Spool
from tests.client.ledger import Ledger, drawing, forever
from tests.client.script import Script, batch
from tests.support.child import run_python

CALLS = Calls("default")
#: A disk that is not waited for: thousands of transactions are tried.
MEMORY = next((each for each in ("/dev/shm",) if Path(each).is_dir()), None)
ADDS = st.dictionaries(st.sampled_from("abcd"), st.integers(-(2**65), 2**65), max_size=4)


def unsent(path: Path) -> dict[str, int]:
    """The totals of the spool at *path*."""
    with closing(Spool(path, "default")) as spool:
        return dict(spool.unsent())


@contextmanager
def opened(path: Path, namespace: str = "default") -> Iterator[Spool]:
    """The spool at *path* / ``spool``."""
    with closing(Spool(path / "spool", namespace)) as spool:
        yield spool


@contextmanager
def full(spool: Spool) -> Iterator[None]:
    """No write succeeds, and it is reported."""
    spool._own._db.execute("PRAGMA query_only = 1")
    with pytest.raises(StoreUnavailableError):
        yield
    spool._own._db.execute("PRAGMA query_only = 0")


def crash_in(steps: Steps[None], ledger: Ledger, effects: int) -> None:
    """Execute the first *effects* effects of *steps*, then stop."""
    answer = None
    try:
        effect: Effect = next(steps)
        for _ in range(effects):
            match effect:
                case Send():
                    answer = ledger.answer(effect)
                case Do():
                    answer = effect.work()
                case Pause():
                    answer = None
            effect = steps.send(answer)
    except StopIteration:
        return


def send_all(path: Path, script: Script) -> None:
    """Send everything that the spool at *path* holds."""
    spool = Spool(path, "default")
    while piece := spool.seal():
        script.run(Delivery(CALLS, piece, spool.renew).for_ever(script.policy()))
        spool.finish()
    spool.close()


@settings(max_examples=60)
@given(st.lists(st.tuples(ADDS, st.integers(0, 6)), max_size=8), st.data())
def test_each_add_is_counted_once_over_any_number_of_crashes(
    lives: list[tuple[dict[str, int], int]], data: st.DataObject
) -> None:
    """Each life of a client puts adds, and ends in the middle of sending."""
    ledger = drawing(data, most=20)
    script = forever(ledger)
    expected = Counter[str]()
    with TemporaryDirectory(dir=MEMORY) as place:
        path = Path(place) / "spool"
        for adds, effects in lives:
            spool = Spool(path, "default")
            expected.update(adds)
            spool.put(dict(adds))
            if piece := spool.seal():
                steps = Delivery(CALLS, piece, spool.renew).for_ever(script.policy())
                crash_in(steps, ledger, effects)
                if all(each.result is not None for each in piece) and data.draw(st.booleans()):
                    spool.finish()
            spool.close()
        send_all(path, script)
    assert ledger.counts == expected


def test_what_was_never_sent_gets_its_token_when_it_is(tmp_path: Path) -> None:
    """So it does not grow too old on the disk, however long the client is away."""
    with opened(tmp_path) as spool:
        spool.put({"a": 1})
    with opened(tmp_path) as again:
        assert (dict(again.unsent()), again.unfinished()) == ({"a": 1}, [])
        [item] = again.seal()
    with opened(tmp_path) as last:
        assert [each.token for each in last.unfinished()] == [item.token]


def test_what_an_earlier_life_sent_may_be_counted(tmp_path: Path) -> None:
    """Regression: a refusal was reported as definite. A new token could count the add twice."""
    too_old = {"code": "token_too_old", "retry": "never", "applied": None, "detail": "too old"}
    with opened(tmp_path) as spool:
        spool.put({"a": 1})
        spool.seal()
    with opened(tmp_path) as again:
        script = Script([batch(too_old)])
        script.run(Delivery(CALLS, again.seal(), again.renew).for_ever(script.policy()))
        [rejected] = again.finish()
    assert isinstance(rejected.error, UnknownOutcomeError)


@pytest.fixture
def everyone_may_read() -> Iterator[None]:
    """As the umask of most machines lets all of them read new files."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Gives the file at a path to another user."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 12_345, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12_345)

    return give


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_directory_that_another_user_made_for_others_is_refused(
    is_linked: bool, stranger: Callable[[Path], None], tmp_path: Path
) -> None:
    """Regression: its owner could replace the files."""
    path = tmp_path / "spool"
    if is_linked:
        (tmp_path / "own").mkdir()
        path.symlink_to(tmp_path / "own")
    else:
        path.mkdir()
        path.chmod(0o777)
    Spool(path, "default").close()
    stranger(path)
    with pytest.raises(InvalidParameterError, match="give a directory of its own"):
        Spool(path, "default")


#: Of a slot, and of the choice of one.
NAMES = (
    *("default.0", "default.0-wal", "default.0-shm", "default.0-journal", "default.0-lock"),
    *("default.0-commits", "default-lock", "default-lock-journal"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["link", "dangling", "hard", "fifo", "directory"])
def test_a_planted_link_is_not_followed(kind: str, name: str, tmp_path: Path) -> None:
    """Regression: the file that it names became a database, and lost its permissions."""
    path, victim, none = tmp_path / "spool", tmp_path / "victim", tmp_path / "none"
    path.mkdir()
    victim.write_text("precious")
    victim.chmod(0o644)
    match kind:
        case "link":
            (path / name).symlink_to(victim)
        case "dangling":
            (path / name).symlink_to(none)
        case "hard":
            (path / name).hardlink_to(victim)
        case "fifo":
            os.mkfifo(path / name)
        case _:
            (path / name).mkdir()
    with suppress(InvalidParameterError), closing(Spool(path, "default")) as spool:
        # A slot that is refused is skipped.
        assert stat.S_IMODE((path / "default.1").stat().st_mode) == 0o600
        spool.put({"a": 1})
    assert victim.read_text() == "precious"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644
    assert not none.exists()


@pytest.mark.parametrize("name", ["default.0", "default-lock"])
def test_a_file_of_another_user_is_not_used(
    name: str, stranger: Callable[[Path], None], tmp_path: Path
) -> None:
    """Regression: adds that another user wrote were sent."""
    path = tmp_path / "spool"
    with closing(Spool(path, "default")) as spool:
        spool.put({"planted": 1})
    stranger(path / name)
    with suppress(InvalidParameterError), closing(Spool(path, "default")) as spool:
        assert not len(spool)


def test_a_file_alone_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("")
    (tmp_path / "spool").symlink_to(tmp_path / "victim")
    with pytest.raises(InvalidParameterError, match="planted"):
        Spool(tmp_path / "spool", "default")


def modes(path: Path) -> dict[str, str]:
    return {each.name: f"{stat.S_IMODE(each.stat().st_mode):o}" for each in path.iterdir()}


@pytest.mark.usefixtures("everyone_may_read")
def test_only_the_owner_may_read_a_spool_in_any_directory(tmp_path: Path) -> None:
    """The names of counters may be secret, and a token is as good as the add."""
    path = tmp_path / "spool"
    path.mkdir(mode=0o755)
    spool = Spool(path, "default")
    spool.put({"secret": 1})
    found = modes(path)
    spool.close()
    assert {"default-lock", "default.0", "default.0-lock", "default.0-wal"} <= found.keys()
    assert set(found.values()) == {"600"}, found


@pytest.mark.usefixtures("everyone_may_read")
def test_a_spool_that_others_could_read_is_its_owners_alone_after_it_was_opened(
    tmp_path: Path,
) -> None:
    """One of an older client, which a crash left a log of."""
    path, dead = tmp_path / "spool", tmp_path / "dead"
    spool = Spool(dead, "default")
    spool.put({"a": 1})
    shutil.copytree(dead, path)
    spool.close()
    for each in path.iterdir():
        each.chmod(0o664)
    path.chmod(0o755)
    again = Spool(path, "default")
    found = modes(path)
    assert dict(again.unsent()) == {"a": 1}
    again.close()
    assert set(found.values()) == {"600"}, found


def test_two_buffers_never_share_a_spool_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "spool").touch()
    spool = Spool(tmp_path / "spool", "default")
    with pytest.raises(SpoolBusyError, match=r"move the file there as default\.0"):
        Spool(tmp_path / "spool", "default")
    spool.put({"a": 1})
    spool.close()
    (tmp_path / "spool").rename(tmp_path / "file")
    (tmp_path / "spool").mkdir()
    (tmp_path / "file").rename(tmp_path / "spool" / "default.0")
    assert unsent(tmp_path / "spool") == {"a": 1}


def test_a_spool_that_an_older_client_has_is_busy(tmp_path: Path) -> None:
    """It locks the database alone."""
    path = tmp_path / "spool"
    with closing(sqlite3.connect(path, isolation_level=None)) as older:
        older.execute("PRAGMA locking_mode = EXCLUSIVE")
        older.execute("BEGIN EXCLUSIVE")
        with pytest.raises(SpoolBusyError):
            Spool(path, "default")


def test_a_spool_that_is_a_file_belongs_to_one_namespace(tmp_path: Path) -> None:
    (tmp_path / "spool").touch()
    Spool(tmp_path / "spool", "default").close()
    with pytest.raises(ClosedError, match="default"):
        Spool(tmp_path / "spool", "other")


def test_namespaces_share_a_directory_and_nothing_in_it(tmp_path: Path) -> None:
    with opened(tmp_path, "a-1") as spool:
        spool.put({"c": 1})
    for namespace, expected in (("a", {}), ("a-1", {"c": 1})):
        with opened(tmp_path, namespace) as spool:
            assert dict(spool.unsent()) == expected


def test_each_buffer_has_a_slot_and_sends_the_adds_of_dead_ones(tmp_path: Path) -> None:
    """Regression: a second buffer could not open the spool. Slots are reused."""
    path = tmp_path / "spool"
    first = [Spool(path, "default") for _ in range(3)]
    for number, each in enumerate(first):
        each.put({"a": 10**number})
    for each in first:
        each.close()
    found = Counter[str]()
    with closing(Spool(path, "default")) as last:
        while piece := last.seal():
            found.update({each.counter: each.delta for each in piece})
            last.finish()
        assert last.begun == last.finished == 3
    assert found == {"a": 111}
    assert sorted(each.name for each in path.glob("default.?")) == [
        f"default.{number}" for number in range(3)
    ]
    assert path.stat().st_mode & 0o777 == 0o700


def test_an_empty_spool_looks_for_slots_of_dead_buffers(tmp_path: Path) -> None:
    path, now_s = tmp_path / "spool", [1_000.0]
    with closing(Spool(path, "default", lambda: now_s[0])) as alive:
        other = Spool(path, "default")
        other.put({"a": 1})
        now_s[0] += ADOPT_EVERY_S
        assert alive.seal() == []
        other.close()
        assert alive.seal() == []
        now_s[0] += ADOPT_EVERY_S
        assert [(each.counter, each.delta) for each in alive.seal()] == [("a", 1)]
        assert (alive.begun, alive.finished) == (1, 0)


def test_a_slot_that_cannot_be_read_ends_no_buffer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "spool"
    path.mkdir()
    (path / "default.0").write_bytes(b"no database" * 1_000)
    with closing(Spool(path, "default")) as spool:
        spool.put({"a": 1})
        assert dict(spool.unsent()) == {"a": 1}
    assert "default.0 of a spool is skipped" in caplog.text


def test_a_spool_without_a_free_slot_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counter_client.spool.SLOTS_MAX", 2)
    with (
        closing(Spool(tmp_path, "default")),
        closing(Spool(tmp_path, "default")),
        pytest.raises(SpoolBusyError, match="all 2 slots"),
    ):
        Spool(tmp_path, "default")


def test_an_empty_slot_is_used_again(tmp_path: Path) -> None:
    """Regression: each start made another one, and none was left after 256."""
    for _ in range(3):
        Spool(tmp_path, "default").close()
    assert [each.name for each in tmp_path.glob("default.?")] == ["default.0"]


def test_a_slot_of_an_older_client_gets_its_sum(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "default.0")) as old:
        old.executescript(f"{_SCHEMA} PRAGMA user_version = 1")
        with old:
            old.execute("INSERT INTO owner VALUES ('default')")
            old.execute("INSERT INTO totals VALUES ('a', '7')")
    for _ in range(2):
        assert unsent(tmp_path) == {"a": 7}


def test_a_slot_that_lost_its_database_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with closing(Spool(tmp_path, "default")) as spool:
            spool.put({"a": 1})
            assert spool.unsent() == {"a": 1}
        (tmp_path / spool._own.path.name).unlink()
    assert "default.0 is damaged: it ends with transaction 0" in caplog.text
    assert spool._own.path.name == "default.1"


LIVES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["open", "add", "send", "die"])))


@settings(max_examples=60)
@given(LIVES, st.data())
def test_each_add_is_counted_once_by_buffers_that_share_a_spool(
    steps: list[tuple[int, str]], data: st.DataObject
) -> None:
    """They come, add, send and die in any order; the last one sends the rest."""
    ledger = drawing(data, most=20)
    script = forever(ledger)
    expected = Counter[str]()
    living: dict[int, Spool] = {}

    def send(spool: Spool, effects: int | None) -> bool:
        if piece := spool.seal():
            steps = Delivery(CALLS, piece, spool.renew).for_ever(script.policy())
            if effects is None:
                script.run(steps)
            else:
                crash_in(steps, ledger, effects)
            if all(each.result is not None for each in piece):
                spool.finish()
        return bool(piece)

    with TemporaryDirectory(dir=MEMORY) as place:
        for number, (who, what) in enumerate(steps):
            if what == "open" and who not in living:
                living[who] = Spool(Path(place) / "spool", "default")
            elif what == "die" and who in living:
                living.pop(who).close()
            elif what == "add" and who in living:
                living[who].put({"a": number, f"b{who}": 1})
                expected.update({"a": number, f"b{who}": 1})
            elif what == "send" and who in living:
                send(living[who], number % 7)
        for each in living.values():
            each.close()
        last = Spool(Path(place) / "spool", "default")
        while send(last, None):
            pass
        last.close()
    assert +ledger.counts == +expected


def test_a_database_of_another_program_is_no_spool(tmp_path: Path) -> None:
    """Regression: with the version of a spool it was an error of SQLite."""
    path = tmp_path / "spool"
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 1")
    with pytest.raises(ClosedError, match="no such table"):
        Spool(path, "default")


def test_a_sync_has_on_disk_what_was_open_when_the_sending_ended(tmp_path: Path) -> None:
    """Regression: it returned, and the last adds before it were only in memory."""
    policy = Script([]).policy()
    merging = Merging(CALLS, policy, Limits(1.0, 10), tmp_path / "spool")
    merging.begin()
    merging.open["a"] = 1
    merging.fail(ClosedError("the client is closed"))
    merging.backlog.put(merging.drain())
    merging.backlog.close()
    assert unsent(tmp_path / "spool") == {"a": 1}


def test_a_failed_write_is_repeated_with_the_next(tmp_path: Path) -> None:
    """A put that failed must not look durable to the one that follows."""
    with opened(tmp_path) as spool:
        for adds in ({"a": 1}, {}):
            with full(spool):
                spool.put(dict(adds))
        spool.put({})
    assert unsent(tmp_path / "spool") == {"a": 1}


class FullDisk:
    """A connection to a disk that is full now and then: after each of *gaps* statements."""

    def __init__(self, db: sqlite3.Connection, gaps: Iterator[int]) -> None:
        self._db = db
        self._gaps = gaps
        self._left = next(gaps, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, *given: Any) -> sqlite3.Cursor:
        self._take_room()
        return self._db.execute(*given)

    def executemany(self, *given: Any) -> sqlite3.Cursor:
        self._take_room()
        return self._db.executemany(*given)

    def _take_room(self) -> None:
        if self._left == 0:
            self._left = next(self._gaps, None)
            raise sqlite3.OperationalError("database or disk is full")
        if self._left is not None:
            self._left -= 1


STEPS = st.one_of(ADDS, st.integers(0, 6))


@settings(max_examples=80)
@given(st.lists(st.lists(STEPS, max_size=6), max_size=5), st.data())
def test_an_acknowledged_put_survives_a_full_disk_at_any_statement(
    lives: list[list[dict[str, int] | int]], data: st.DataObject
) -> None:
    """Each life puts or sends. Returned puts count; a failed step moves nothing."""
    gaps = iter(data.draw(st.lists(st.integers(0, 9), max_size=30)))
    ledger = drawing(data, most=20)
    script = forever(ledger)
    expected = Counter[str]()
    with TemporaryDirectory(dir=MEMORY) as place:
        path = Path(place) / "spool"
        for life in lives:
            spool = Spool(path, "default")
            disk: Any = FullDisk(spool._own._db, gaps)
            spool._own._db = disk
            unsaved = Counter[str]()
            last = spool.seal() if spool.unfinished() else None
            for step in life:
                try:
                    if isinstance(step, dict):
                        unsaved.update(step)
                        spool.put(dict(step))
                        expected.update(unsaved)
                        unsaved.clear()
                    elif piece := spool.seal():
                        steps = Delivery(CALLS, piece, spool.renew).for_ever(script.policy())
                        if piece is not last:
                            # A new one: it holds all that was put.
                            expected.update(unsaved)
                            unsaved.clear()
                        last = piece
                        crash_in(steps, ledger, step)
                        if all(each.result is not None for each in piece):
                            spool.finish()
                except StoreUnavailableError:
                    continue
            spool.close()
        send_all(path, script)
    assert ledger.counts == expected


def test_a_batch_that_failed_to_be_written_stays_in_the_totals(tmp_path: Path) -> None:
    """Regression: its totals left memory before the failed write, and were overwritten on disk."""
    with opened(tmp_path) as spool:
        spool.put({"a": 5})
        with full(spool):
            spool.seal()
        spool.put({"a": 1})
    assert unsent(tmp_path / "spool") == {"a": 6}


def test_a_put_is_on_disk_whole_or_not_at_all(tmp_path: Path) -> None:
    """At whichever statement the disk is full."""
    kept: list[int] = []
    while not kept or kept[-1] == 1:
        path = tmp_path / f"{len(kept)}"
        spool = Spool(path, "default")
        spool.put({"a": 1})
        disk: Any = FullDisk(spool._own._db, iter([len(kept)]))
        spool._own._db = disk
        with suppress(StoreUnavailableError):
            spool.put({"a": 2})
        took_room = disk._left is not None
        spool.close()
        kept.append(unsent(path)["a"])
        assert kept[-1] == (3 if took_room else 1)
    assert len(kept) > 3


def test_rejected_adds_are_kept_when_the_disk_is_full(tmp_path: Path) -> None:
    """Regression: a finish with a failed write dropped the batch and its rejected adds."""
    with opened(tmp_path) as spool:
        spool.put({"a": 5})
        [item] = spool.seal()
        item.result = ClosedError("refused")
        with full(spool):
            spool.finish()
        assert [(each.counter, each.delta) for each in spool.refused()] == [("a", 5)]


#: Adds one by one; every other step finds the disk full. Prints its progress, and dies.
FULL_AND_KILLED = """
import os, resource, signal, sys
from counter_client.spool import _SCHEMA, ADOPT_EVERY_S, Spool
from counter_client.errors import InvalidParameterError, StoreUnavailableError

def have_room(is_there):
    most = resource.RLIM_INFINITY if is_there else 30_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

spool = Spool(sys.argv[1], "default")
added = synced = failed = 0
for number in range(600):
    have_room(number % 2 == 0)
    try:
        added += 1
        spool.put({f"c{number % 40}": 1})
        synced = added
        have_room(number % 3 == 0)
        if number == 500:
            spool.seal()
        elif number % 5 == 0 and (piece := spool.seal()):
            have_room(number % 7 == 0)
            spool.finish()
            added -= sum(each.delta for each in piece)
            synced = added
    except StoreUnavailableError:
        failed += 1
print(synced, failed, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("child_processes")
def test_a_kill_after_a_disk_was_full_leaves_what_was_synced(tmp_path: Path) -> None:
    """With a real limit on the size of a file."""
    done = run_python("-c", FULL_AND_KILLED, tmp_path / "spool")
    assert (done.returncode, done.stderr) == (-9, "")
    synced, failed = map(int, done.stdout.split())
    with opened(tmp_path) as spool:
        left = sum(spool.unsent().values()) + sum(each.delta for each in spool.unfinished())
    assert left == synced
    assert failed > 100


def test_adds_of_an_earlier_process_count_as_held(tmp_path: Path) -> None:
    """So it is sent at once, and takes its part of the room."""
    with opened(tmp_path) as left:
        left.put({"a": 1, "b": 2})
    merging = Merging(Calls("default"), Script([]).policy(), Limits(1.0, 3), tmp_path / "spool")
    merging.begin()
    assert merging.held == 2
    merging.backlog.close()


def test_a_new_directory_of_a_spool_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = os.fsync, []

    def noted(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").resolve())
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    Spool(tmp_path / "spool", "default").close()
    assert tmp_path.resolve() in synced
