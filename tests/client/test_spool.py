"""What is on a client's disk is counted exactly once, wherever the client ends."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counter.client.buffering import Bounds, Merging
from counter.client.calls import Calls
from counter.client.delivery import Delivery
from counter.client.failures import ClosedError
from counter.client.retrying import Do, Effect, Pause, Send, Story
from counter.client.spool import Spool
from counter.errors import StoreUnavailableError
from tests.client.ledger import FAULTS, Ledger
from tests.client.script import Script

CALLS = Calls("default")
ADDS = st.dictionaries(st.sampled_from("abcd"), st.integers(-(2**65), 2**65), max_size=4)


def crash_in(story: Story[None], ledger: Ledger, effects: int) -> None:
    """Do *effects* things that *story* asks for, and never go on."""
    answer = None
    try:
        effect: Effect = next(story)
        for _ in range(effects):
            match effect:
                case Send():
                    answer = ledger.answer(effect)
                case Do():
                    answer = effect.work()
                case Pause():
                    answer = None
            effect = story.send(answer)
    except StopIteration:
        return


@settings(max_examples=60)
@given(st.lists(st.tuples(ADDS, st.integers(0, 6)), max_size=8), st.data())
def test_each_add_is_counted_once_over_any_number_of_crashes(
    lives: list[tuple[dict[str, int], int]], data: st.DataObject
) -> None:
    """Each life of a client puts adds, and ends in the middle of sending."""
    faults = iter(data.draw(st.lists(st.sampled_from(FAULTS), max_size=20)))
    ledger = Ledger(lambda: next(faults, "none"))
    script = Script(iter(lambda: ledger.answer, None))
    expected = Counter[str]()
    with TemporaryDirectory() as place:
        path = Path(place) / "spool"
        for adds, effects in lives:
            spool = Spool(path, "default")
            expected.update(adds)
            spool.put(dict(adds))
            if piece := spool.seal():
                story = Delivery(CALLS, piece, spool.renew).for_ever(script.policy())
                crash_in(story, ledger, effects)
                if all(each.result is not None for each in piece) and data.draw(st.booleans()):
                    spool.finish()
            spool.close()
        spool = Spool(path, "default")
        while piece := spool.seal():
            script.run(Delivery(CALLS, piece, spool.renew).for_ever(script.policy()))
            spool.finish()
        spool.close()
    assert ledger.counts == expected


def test_what_was_never_sent_gets_its_token_when_it_is(tmp_path: Path) -> None:
    """So it does not grow too old on the disk, however long the client is away."""
    spool = Spool(tmp_path / "spool", "default")
    spool.put({"a": 1})
    spool.close()
    again = Spool(tmp_path / "spool", "default")
    assert dict(again.unsent()) == {"a": 1}
    assert again.unfinished() == []
    [item] = again.seal()
    again.close()
    last = Spool(tmp_path / "spool", "default")
    assert [each.token for each in last.unfinished()] == [item.token]
    last.close()


def test_two_buffers_never_share_a_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", "default")
    with pytest.raises(ClosedError, match="file of its own"):
        Spool(tmp_path / "spool", "default")
    spool.close()


def test_a_spool_belongs_to_one_namespace(tmp_path: Path) -> None:
    Spool(tmp_path / "spool", "default").close()
    with pytest.raises(ClosedError, match="default"):
        Spool(tmp_path / "spool", "other")


def test_a_database_of_another_program_is_no_spool(tmp_path: Path) -> None:
    """Regression: with the version of a spool it was an error of SQLite."""
    path = tmp_path / "spool"
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 1")
    with pytest.raises(ClosedError, match="owner"):
        Spool(path, "default")


def test_a_sync_has_on_disk_what_was_open_when_the_sending_ended(tmp_path: Path) -> None:
    """Regression: it returned, and what was added right before that was nowhere but in memory."""
    policy = Script([]).policy()
    merging = Merging(CALLS, policy, Bounds(1.0, 10), tmp_path / "spool")
    merging.open["a"] = 1
    merging.fail(ClosedError("the client is closed"))
    merging.backlog.put(merging.take())
    merging.backlog.close()
    again = Spool(tmp_path / "spool", "default")
    assert dict(again.unsent()) == {"a": 1}
    again.close()


def test_what_the_disk_did_not_take_is_written_with_the_next(tmp_path: Path) -> None:
    """A put that failed must not look durable to the one that follows."""
    spool = Spool(tmp_path / "spool", "default")
    spool._db.execute("PRAGMA query_only = 1")
    for adds in ({"a": 1}, {}):
        with pytest.raises(StoreUnavailableError):
            spool.put(dict(adds))
    spool._db.execute("PRAGMA query_only = 0")
    spool.put({})
    spool.close()
    again = Spool(tmp_path / "spool", "default")
    assert dict(again.unsent()) == {"a": 1}
    again.close()
