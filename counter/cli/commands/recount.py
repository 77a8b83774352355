"""Run ``counter recount``, which has a counter recounted."""

from __future__ import annotations

from typing import Annotated

from counter.cli.client import DEFAULT_SERVICE, ServiceFlags, exit_codes, open_client
from counter.cli.terminal import Json, flag, print_answer
from counter.quantities import plural


def recount(
    counter: Annotated[str, flag("The counter's name")],
    flags: ServiceFlags = DEFAULT_SERVICE,
    *,
    json: Json = False,
) -> None:
    """Recount a counter from its events; see ``counter recount --help``."""
    with exit_codes(flags), open_client(flags) as client:
        windows = client.recount(counter)
        text = f"nothing of {counter!r} is rolled up: its count is the sum of its events already"
        if windows:
            text = (
                f"{plural(windows, 'window')} of {counter!r} will be recounted from the events,"
                " when the current window is closed"
            )
        print_answer(text, {"counter": counter, "windows": windows}, json=json)
