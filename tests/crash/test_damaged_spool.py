"""A disk that damages a client's spool: the spool is refused, or what it holds is right.

Each case copies a slot, as a process that was killed or stopped left it, and damages one of its
files. ``DAMAGE_SEED`` repeats a run, and ``DAMAGES`` sets the number of cases.
"""

import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from counter_client.delivery import Item
from counter_client.errors import StoreUnavailableError
from counter_client.failures import ClosedError
from counter_client.spool import Slot, Spool
from counter_client.tokens import Token
from tests.support.damage import ALL, flip_used
from tests.support.seeds import seed_of

DAMAGES = int(os.environ.get("DAMAGES", "120"))
FILES = ("default.0", "default.0-wal", "default.0-commits")

#: Counter, delta, token.
Sealed = tuple[str, int, Token]


@dataclass(frozen=True)
class Disk:
    """A slot at one moment, an earlier one of it, and its adds."""

    at: Path
    earlier: Path
    totals: dict[str, int]
    piece: list[Sealed]


def sealed(items: list[Item]) -> list[Sealed]:
    return [(each.counter, each.delta, each.token) for each in items]


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for name in FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    return target


def filled(place: Path, draw: random.Random) -> list[Disk]:
    """Put, send and finish in three lives; return the slot at some moments."""
    disks: list[Disk] = []
    earlier = place / "new"
    earlier.mkdir()

    def note(slot: Slot) -> None:
        nonlocal earlier
        at = copied(place / "spool", place / f"moment-{len(disks)}")
        disks.append(Disk(at, earlier, dict(slot._totals), sealed(slot._piece)))
        earlier = at

    for _ in range(3):
        spool = Spool(place / "spool", "default")
        slot = spool._own
        # So the log is copied into the file sometimes.
        slot._db.execute("PRAGMA wal_autocheckpoint = 20")
        for _ in range(draw.randint(10, 30)):
            names = draw.sample(range(300), draw.randint(1, 40))
            spool.put({f"counter {name}": draw.randint(-(2**40), 2**66) for name in names})
            if draw.random() < 0.3:
                piece = spool.seal()
                note(slot)
                if draw.random() < 0.5:
                    renewed = [(each, Token.new()) for each in piece[:5]]
                    spool.renew(renewed)
                    for each, token in renewed:
                        each.token = token
                    note(slot)
                spool.finish()
            elif draw.random() < 0.3:
                note(slot)
        spool.close()
        note(slot)
    return disks


def outcome_of(disk: Disk, path: Path) -> str:
    try:
        spool = Spool(path / "default.0", "default")
    except ClosedError:
        return "refused"
    except Exception as error:
        return f"SILENT {error!r}"
    try:
        slot = spool._own
        if slot._totals != disk.totals or sealed(slot._piece) != disk.piece:
            return "SILENT"
        found: Counter[str] = Counter()
        while piece := spool.seal():
            found.update({each.counter: 0 for each in piece})
            for each in piece:
                found[each.counter] += each.delta
            spool.finish()
    except StoreUnavailableError:
        return "an error"
    finally:
        spool.close()
    expected = Counter(disk.totals)
    for counter, delta, _ in disk.piece:
        expected[counter] += delta
    again = Spool(path / "default.0", "default")
    left = len(again)
    again.close()
    return "harmless" if found == expected and not left else "SILENT"


def test_no_damage_changes_what_a_spool_holds_in_silence(fast_dir: Path) -> None:
    draw = random.Random(seed_of("DAMAGE_SEED"))
    disks = filled(fast_dir, draw)
    outcomes: Counter[tuple[str, str]] = Counter()
    silent = []
    for number in range(DAMAGES):
        disk = draw.choice(disks)
        file = draw.choice([each.name for each in disk.at.iterdir() if each.stat().st_size])
        damage = draw.choice((*ALL, flip_used, flip_used, flip_used))
        at = copied(disk.at, fast_dir / f"case-{number}")
        body = bytearray((at / file).read_bytes())
        earlier = (disk.earlier / file).read_bytes() if (disk.earlier / file).exists() else b""
        what = damage(draw, body, earlier)
        (at / file).write_bytes(body)
        outcome = outcome_of(disk, at)
        outcomes[file, outcome] += 1
        if outcome.startswith("SILENT"):
            silent.append((number, disk.at.name, file, damage.__name__, what))
        shutil.rmtree(at)
    for (file, outcome), count in sorted(outcomes.items()):
        print(f"{file:18} {outcome:10} {count:6}")
    assert not silent
    assert outcomes["default.0", "harmless"] < DAMAGES
