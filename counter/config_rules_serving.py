"""How the settings of serving must fit each other."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counter.config import Settings


def serving_problems(settings: Settings) -> Iterator[str]:
    """What is wrong with them."""
    if settings.https_cert is None:
        for name in ("https_key", "https_client_ca"):
            if getattr(settings, name) is not None:
                yield f"{name} is set and https_cert is not: give both, or neither for plain HTTP"
    elif settings.https_key is None:
        yield "https_cert is set and https_key is not: give --https-key"
    if settings.https_key is None and settings.https_key_password_file is not None:
        yield "https_key_password_file is set and https_key is not: give both or neither"


def serving_warnings(settings: Settings) -> Iterator[str]:
    """What is allowed and often a mistake."""
    for name in ("https_key", "https_key_password_file"):
        path = getattr(settings, name)
        if path is not None and path.stat().st_mode & stat.S_IROTH:
            yield f"{name} {path} can be read by every user of this machine: chmod o-r {path}"
    plain = [each for each in settings.cors_origins if each.startswith("http://")]
    if plain and settings.https_cert is not None:
        yield (
            f"cors_origins has {plain[0]}: what such a page sends and shows, anyone on its way can"
            " change; use https://"
        )
