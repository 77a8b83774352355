"""The command ``counter get``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final

from cyclopts import Parameter

from counter.cli import tell
from counter.cli_service import ServiceFlags, ended, opened
from counter.cli_shown import Json, json_line, table
from counter.errors import StartupError
from counter.limits import BATCH_ITEMS_MAX

#: How many counts a request asks for: what a service takes where nothing else is set.
_AT_ONCE: Final = BATCH_ITEMS_MAX


def get(
    *names: Annotated[str, Parameter(help="The counters; after -- if one begins with a dash.")],
    service: ServiceFlags | None = None,
    max_staleness: Annotated[
        str | None, Parameter(help="How old a count may be: 5s; 0s for none [the namespace's].")
    ] = None,
    json: Json = False,
) -> None:
    """Print counts."""
    service = service or ServiceFlags()
    with ended(service), opened(service) as client:
        if not names:
            raise StartupError("NAMES: give the name of a counter, or of several")
        if len(names) == 1:
            counts = [client.get(names[0], max_staleness=max_staleness)]
        else:
            counts = []
            for start in range(0, len(names), _AT_ONCE):
                some = names[start : start + _AT_ONCE]
                counts += client.get_many(some, max_staleness=max_staleness)
        if json:
            for each in counts:
                tell(json_line({"namespace": service.namespace, **asdict(each)}))
        elif len(counts) == 1:
            tell(str(counts[0].count))
        else:
            tell(table(("COUNTER", "COUNT"), [(each.counter, each.count) for each in counts]))
