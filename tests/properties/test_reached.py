"""docs/guarantees.md says how often the drivers of drawn orders reached rare situations."""

import re
from importlib import import_module
from pathlib import Path

from counter.config.store_kinds import store_names
from tests.properties import test_buffer_threads, test_client, test_sqlite_threads
from tests.properties.seeds import REACHED

_GUARANTEES = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
_DRIVERS = {
    "test_client.py": test_client.SITUATIONS,
    "test_buffer_threads.py": test_buffer_threads.SITUATIONS,
    "test_sqlite_threads.py": test_sqlite_threads.SITUATIONS,
}
#: Of a driver that only one store has: the store, and its tests.
_OF_STORES = {"test_orders.py": ("postgresql", "tests.postgresql.test_orders")}


def test_the_table_has_every_situation_and_none_is_rare() -> None:
    text = _GUARANTEES.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- what the other drivers reached -->")
    table, _, _ = rest.partition("<!-- end of what the other drivers reached -->")
    rows = re.findall(r"^\| `([\w.]+)` \| ([\w ]+) \| (\d+) \|$", table, re.MULTILINE)
    documented = [(driver, situation) for driver, situation, _ in rows]
    drivers = dict(_DRIVERS)
    for name, (store, module) in _OF_STORES.items():
        if store in store_names():
            drivers[name] = import_module(module).SITUATIONS
        else:
            documented = [each for each in documented if each[0] != name]
    assert documented == [(name, each) for name, found in drivers.items() for each in sorted(found)]
    assert [row for row in rows if int(row[2]) < REACHED] == []
