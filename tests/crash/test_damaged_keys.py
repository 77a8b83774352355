"""A disk that damages the file of the API keys: it is refused, or each key has its rights.

``DAMAGE_SEED`` repeats a run, and ``DAMAGES`` sets the number of cases.
"""

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

from counter.api_keys import ApiKey, Scope
from counter.errors import StoreUnavailableError
from counter.storage.sqlite import SqliteKeys
from tests.support.damage import ALL, flip_used
from tests.support.keys import made
from tests.support.seeds import seed_of
from tests.support.times import START_US

DAMAGES = int(os.environ.get("DAMAGES", "120"))


async def filled(directory: Path, draw: random.Random) -> list[tuple[bytes, list[ApiKey]]]:
    """Create, revoke, forget and use keys; return the file and its keys after each change."""
    store = SqliteKeys(directory)
    moments = []
    for number in range(40):
        before = list(await store.api_keys())
        if number > 20 and number % 2:
            key = draw.choice(before)
            await store.change_api_key(key, replace(key, revoked_at_us=START_US + number))
        elif number > 20 and number % 4 == 0:
            await store.forget_api_key(draw.choice(before))
        else:
            key, _ = made(draw.choice([*Scope]), "videos", expires_at_us=START_US + number)
            await store.create_api_key(key)
        await store.note_api_key_uses([(each.id, START_US + number) for each in before[:3]])
        body = (directory / "keys.sqlite3").read_bytes()
        moments.append((body, list(await store.api_keys())))
    return moments


async def test_no_damage_gives_a_key_other_rights_in_silence(fast_dir: Path) -> None:
    """Excepted is a file that is whole, of an earlier moment: a disk that lost all of a change."""
    draw = random.Random(seed_of("DAMAGE_SEED"))
    moments = await filled(fast_dir / "keys", draw)
    (fast_dir / "damaged").mkdir()
    outcomes: Counter[str] = Counter()
    silent = []
    for number in range(DAMAGES):
        at = draw.randrange(1, len(moments))
        earlier, (intact, expected) = moments[draw.randrange(at)][0], moments[at]
        damage = draw.choice((*ALL, flip_used, flip_used, flip_used))
        body = bytearray(intact)
        what = damage(draw, body, earlier)
        (fast_dir / "damaged/keys.sqlite3").write_bytes(body)
        try:
            found = list(await SqliteKeys(fast_dir / "damaged").api_keys())
        except StoreUnavailableError:
            outcome = "refused"
        else:
            outcome = "harmless" if found == expected else "SILENT"
            if body.rstrip(b"\0") == earlier.rstrip(b"\0"):
                outcome = "older"
        outcomes[outcome] += 1
        if outcome == "SILENT":
            silent.append((number, at, damage.__name__, what))
    print(dict(outcomes))
    assert not silent
    assert outcomes["refused"]
