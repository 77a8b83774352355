"""The responses about each add, as letters of the model: see proof/README.md."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Final
from uuid import UUID

from counter.limits import MILLISECOND, TIME_MAX_US
from counter.windows import window_of
from tests.simulation.checker import decode
from tests.simulation.history import Changed, History, Item, Seen
from tests.simulation.model import CLIENTS, automata, why_not
from tests.simulation.plan import Config

#: How exactly a process knows that its clock is within the bound.
_DOUBT_US: Final = 10 * MILLISECOND
#: After whatever else is observed at the same instant.
LAST: Final = 2**62
COVERED: Final = "compared"
#: At least this share of all items is compared with the model in a run of MANY seeds, ...
COVERED_MIN: Final = 0.6
#: ... and in one of fewer, which may draw many keys, recounts and new namespaces.
COVERED_FEW_MIN: Final = 0.5
OLDER: Final = "it is older than its namespace"
RIVAL: Final = "another payload has its token"
#: (counter, time, nonce, item number) in a namespace, as events have it.
Identity = tuple[str, int, bytes, int]
#: When each letter was observed, and in which order at that instant.
Letters = dict[str, tuple[int, int]]


def reported_of(item: Item, late_us: int, closed_us: int) -> Letters:
    """The observations of *item* by clients, until its counter is read last: see
    :func:`ages_of`."""
    letters = {
        "asked": (item.change.first_us or 0, -1),
        "late": (late_us + _DOUBT_US, LAST),
        "closed": (closed_us - _DOUBT_US, -1),
    }
    if item.applied_us is not None:
        letters["reported-applied"] = (item.applied_us, LAST)
    if item.void_us is not None:
        letters["reported-void"] = (item.void_us, LAST)
    return letters


def ages_of(
    time_us: int, limit_us: int, config: Config, *, is_fenced: bool = False
) -> tuple[int, int]:
    """When a token of *time_us* is late by every clock, and its window is closed by the first one.

    Adds are accepted, and windows close, by *limit_us*. A clock that is near its bound counts as
    beyond it. With *is_fenced* only the clock of PostgreSQL decides, and the model's windows close
    without a margin.
    """
    end_us = window_of(time_us, config.window_us) + config.window_us
    if is_fenced:
        wrong_us = config.wrong_us
        return time_us + limit_us + wrong_us, end_us + limit_us - wrong_us
    closed_us = end_us + limit_us + config.write_timeout_us + config.skew_us
    return time_us + limit_us + config.skew_us, closed_us


def counted_of(
    items_of: Mapping[tuple[str, str], Sequence[Item]], final: Sequence[Seen]
) -> Mapping[int, str]:
    """Whether each item of a counter without clears is in the counts that were read last, by id."""
    shown: defaultdict[tuple[str, str], list[set[int]]] = defaultdict(list)
    for seen in final:
        key = (seen.namespace, seen.counter)
        items = items_of.get(key, ())
        if all(item.delta is not None for item in items):
            shown[key].append({id(item) for item in decode(seen.count, items)[0]})
    letters: dict[int, str] = {}
    for key, counts in shown.items():
        for item in items_of.get(key, ()):
            is_counted = {id(item) in each for each in counts}
            if len(is_counted) == 1:
                letters[id(item)] = "counted" if is_counted.pop() else "not-counted"
    return letters


def items_of(history: History) -> Mapping[tuple[str, str], Sequence[Item]]:
    """The items of each counter."""
    found: defaultdict[tuple[str, str], list[Item]] = defaultdict(list)
    for changed in history.changes:
        for item in changed.items:
            found[changed.plan.namespace, item.counter].append(item)
    return found


def untrue(
    config: Config,
    history: History,
    final: Sequence[Seen],
    created_us: int,
    *,
    is_fenced: bool = False,
    stored: Callable[[str, Identity], Letters] | None = None,
    limit_at: Callable[[int], int] | None = None,
) -> tuple[list[str], Counter[str]]:
    """What was observed and the model does not allow, and how many items were compared.

    All namespaces existed at *created_us*. With *is_fenced* the model is that of PostgreSQL, whose
    clock decides. *stored* are the letters that are observed of an item of a namespace in the
    store. Without it only clients are observed, and the store's clock is theirs. *limit_at* is the
    accept limit of a token's time, if it is not the one of the settings.
    """
    problems: list[str] = []
    compared: Counter[str] = Counter()
    earliest_us = created_us - config.accept_us - 2 * config.skew_us
    last = counted_of(items_of(history), final)
    identities = [
        (item, (item.counter, changed.token_us, *name))
        for changed in history.changes
        for item, name in zip(changed.items, names_of(changed), strict=True)
    ]
    payloads = Counter((item.change.plan.namespace, of) for item, of in identities)
    for item, identity in identities:
        namespace, token_us = item.change.plan.namespace, item.change.token_us
        why = why_not_compared(item.change)
        if not why and token_us < earliest_us:
            why = OLDER
        if not why and payloads[namespace, identity] > 1:
            why = RIVAL
        compared[why or COVERED] += 1
        if why:
            continue
        limit_us = config.accept_us if limit_at is None else limit_at(token_us)
        letters = reported_of(item, *ages_of(token_us, limit_us, config, is_fenced=is_fenced))
        if stored is not None:
            letters |= stored(namespace, identity)
        if id(item) in last:
            letters[last[id(item)]] = (TIME_MAX_US, LAST)
        automaton = "fence" if is_fenced else automaton_of(item)
        problems += problems_of(item, letters, automaton, CLIENTS if stored is None else None)
    return problems, compared


def why_not_compared(changed: Changed) -> str:
    """Why the model does not have a change, whatever its namespace is; nothing if it does."""
    if changed.plan.key is not None:
        return "it has an arbitrary key"
    if changed.plan.is_cancelled:
        return "it is cancelled"
    if changed.plan.at_most is not None:
        return "it has a bound"
    return "" if changed.requests else "it was never sent"


def automaton_of(item: Item) -> str:
    """The automaton of an item over a store without transactions."""
    return "atomic" if item.change.plan.how == "atomic" else "single"


def problems_of(
    item: Item, letters: Letters, automaton: str, shown: Set[str] | None = None
) -> Iterator[str]:
    """Observations of *item* that *automaton* forbids."""
    plan = item.change.plan
    word = sorted(letters, key=lambda each: letters[each])
    if why := why_not(automata()[automaton], word, shown):
        yield f"change {plan.number} of {plan.namespace}/{item.counter}: {why}"


def names_of(changed: Changed) -> Iterator[tuple[bytes, int]]:
    """For each item, the nonce of its token, and its number in an atomic add."""
    plan = changed.plan
    for place, item in enumerate(changed.items):
        nonce, number = plan.nonce, 0
        if plan.how == "batch":
            nonce = plan.nonce * 1_000 + place
        elif plan.how == "atomic":
            number = 1 + sum(each.counter == item.counter for each in changed.items[:place])
        yield UUID(int=nonce + 1).bytes, number
