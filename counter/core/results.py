"""Define the credentials and results of adds.

What one add can come to, and its name in each place that has one. *Guarded* is what the cache has
recorded about a token, *Written* what the store did with the event, *Outcome* the decision about a
late token. The tally is that of the metrics; ``replayed``, or a problem's code, is in the response,
and a CloudEvent's outcome is the tally's of its adds, or ``ignored`` if no rule matches its type.

===========================  ==========  ==========  =======  ============  ===================
what happened                Guarded     Written     Outcome  tally         response
===========================  ==========  ==========  =======  ============  ===================
counted now                  NEW         NEW                  original      false
counted before               SAME        REPLAYED             replayed      true
counted, now or before       UNVERIFIED  UNVERIFIED           unverified    null
token of another payload     OTHER       CONFLICT             conflict      token_conflict
late; counted before                     LATE        APPLIED  late_applied  true
late; never counted                      LATE        VOID     voided        token_too_old
cancelled                                LATE        CANCEL*  cancelled     token_cancelled
refused because of a bound           BOUND_*     APPLIED  bound_reached bound_reached
best-effort counter changed                                   best_effort   null
nothing was written                                           refused       the refusal's code
not known; ask again                                          unknown       the failure's code
===========================  ==========  ==========  =======  ============  ===================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from counter.types import Token, Written

#: A token, an arbitrary key that identifies one, or nothing.
Credential = Token | str | None

#: The ``replayed`` field of the answer to an acknowledged event.
REPLAYED: Final[Mapping[Written, bool | None]] = {
    Written.NEW: False,
    Written.REPLAYED: True,
    Written.UNVERIFIED: None,
}


class Add(NamedTuple):
    """One add of a batch; a bounded one has the *terms* of :mod:`counter.bounds`."""

    counter: str
    delta: int
    credential: Credential
    terms: bytes | None = None


class Item(NamedTuple):
    """One item of an atomic add."""

    counter: str
    delta: int
    terms: bytes | None = None


Items = Sequence[Item | tuple[str, int]]


class Keyed(NamedTuple):
    """The items of an atomic add under a key that is arbitrary text, within a *scope* of keys."""

    scope: str
    key: str
    items: Items


class Added(NamedTuple):
    """An acknowledged add. ``replayed`` is None if the store cannot distinguish it from a new
    one."""

    counter: str
    delta: int
    event_time_us: int
    replayed: bool | None


class Cancelled(NamedTuple):
    """A token that is cancelled, and whether it was counted before."""

    event_time_us: int
    was_counted: bool
