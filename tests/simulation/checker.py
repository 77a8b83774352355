"""The independent checker: it knows clients' requests and answers, and no line of the service.

A count says which adds it holds, for each has a digit of its own. So of every read it is asked:
does it hold what must be in it, nothing that must not, and nothing twice? Clears leave a choice:
which was the last one in it. One choice that explains the count is enough.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counter.clock import to_rfc3339
from counter.limits import TIME_MAX_US
from tests.simulation.history import Changed, History, Item, Seen, expiring
from tests.simulation.plan import BASE, DIGITS_MAX, Config


@dataclass(frozen=True, slots=True)
class Need:
    """Whether an item must be in a count, and whether it may."""

    must: bool
    may: bool


def check(config: Config, history: History, final: Sequence[Seen]) -> list[str]:
    """Return the problems. *final* are reads of the very end."""
    found = list(history.surprises)
    for changed in history.changes:
        found += _contradictions(changed)
    counters = _Counters(config, history)
    found += counters.settled(final)
    found += counters.misplaced(history)
    for seen in history.reads:
        found += counters.explain(seen)
    for first, second in expiring(history):
        if second.items[0].conflict_us is not None and _is_forgotten(config, first, second):
            found.append(f"change {second.plan.number} is a conflict under a forgotten key")
    return found


def _is_forgotten(config: Config, first: Changed, second: Changed) -> bool | None:
    """Whether the key of *first* had expired when *second* used it; None if unsure."""
    (before,), (sent,) = first.requests, second.requests
    doubt_us, ttl_us = 2 * config.skew_us, config.key_ttl_us
    if before.status and sent.sent_us > (before.answered_us or 0) + ttl_us + doubt_us:
        return True
    latest_us = max(before.answered_us or 0, sent.answered_us or 0)
    if before.status and sent.status and latest_us < before.sent_us + ttl_us - doubt_us:
        return False
    return None


def _contradictions(changed: Changed) -> Iterator[str]:
    """Answers about one token that cannot all be true."""
    number = changed.plan.number
    for item in changed.items:
        if item.applied_us is not None and item.void_us is not None:
            yield f"change {number} got both outcomes, that it counts and that it never will"
        if len(item.was_counted) > 1:
            yield f"change {number}: its cancels differ in whether it was counted"
        if False in item.was_counted and item.applied_us is not None:
            yield f"change {number} was reported as counted, and by its cancel as never counted"
        if True in item.was_counted and item.void_us is not None:
            yield f"change {number} was reported as void, and by its cancel as counted"
        if item.reported_new > 1:
            yield f"change {number} was reported as new twice"
    if changed.plan.how == "atomic":
        applied = [item.applied_us is not None for item in changed.items]
        if any(applied) and not all(applied):
            yield f"change {number} was reported as counting in part"


class _Counters:
    """Items by counter, and which of them are one token's."""

    def __init__(self, config: Config, history: History) -> None:
        self._config = config
        self._items: dict[tuple[str, str], list[Item]] = {}
        #: Of each item, by its id(): all items of its token in its counter.
        self._rivals: dict[int, list[Item]] = {}
        #: Changes that may be one add or two.
        self._doubtful: set[int] = set()
        renewed: set[int] = set()
        for first, second in expiring(history):
            forgotten = _is_forgotten(config, first, second)
            if forgotten is None:
                self._doubtful |= {first.plan.number, second.plan.number}
            if forgotten is not False:
                renewed.add(second.plan.number)
        alike: dict[tuple[object, ...], list[Item]] = {}
        for changed in history.changes:
            for item in changed.items:
                key = (changed.plan.namespace, item.counter)
                self._items.setdefault(key, []).append(item)
                # A key that is, or may be, forgotten is another token.
                number = changed.plan.number if changed.plan.number in renewed else 0
                same = alike.setdefault((*_identity(item), number), [])
                same.append(item)
                self._rivals[id(item)] = same
        self._note_seen(history.reads)

    def _note_seen(self, reads: Sequence[Seen]) -> None:
        """An add in an accurate read, while its window is open to everyone, stays there."""
        self._seen_us: dict[int, int] = {}
        if self._config.is_split:
            # Of a write that was not acknowledged, another data center may know nothing.
            return
        skew_us = self._config.skew_us
        for seen in sorted(reads, key=lambda each: each.answered_us):
            if seen.accuracy != "accurate":
                continue
            for item in decode(seen.count, self._of(seen))[0]:
                time_us = item.event_time_us
                if time_us is None or id(item) in self._seen_us:
                    continue
                if item.change.plan.key is not None and seen.sent_us < time_us + skew_us:
                    # What it shows is not this: the key had another time before, under which the
                    # add was void at last.
                    continue
                open_us = time_us + self._config.accept_us - skew_us
                if seen.answered_us < open_us:
                    self._seen_us[id(item)] = seen.answered_us

    def _is_alone(self, item: Item) -> bool:
        """Whether no other item has its token."""
        is_known = item.change.plan.number not in self._doubtful
        return is_known and len(self._rivals[id(item)]) == 1

    def _of(self, seen: Seen) -> list[Item]:
        return self._items.get((seen.namespace, seen.counter), [])

    def settled(self, final: Sequence[Seen]) -> Iterator[str]:
        """Check final reads: every confirmed add counts, and an atomic add counts as a whole."""
        counted: dict[int, bool] = {}
        for seen in final:
            items = self._of(seen)
            clears = [item for item in items if item.delta is None]
            needs = {id(item): self._at_last(item) for item in items}
            why = _unexplained(seen.count, items, needs, self._rivals)
            if why:
                yield f"at last, {_named(seen)}: {why}"
            elif not clears:
                shown = {id(item) for item in decode(seen.count, items)[0]}
                counted |= {id(item): id(item) in shown for item in items}
        for items in self._items.values():
            for item in items:
                changed = item.change
                if changed.plan.how != "atomic" or id(item) not in counted:
                    continue
                if any(counted.get(id(each)) not in (counted[id(item)], None)
                       for each in changed.items):  # fmt: skip
                    yield f"at last, change {changed.plan.number} counts in part"

    def misplaced(self, history: History) -> Iterator[str]:
        """Find deleted counters that are listed at the end, and undeleted ones that are not."""
        for (namespace, counter), items in self._items.items():
            if namespace not in history.listed:
                continue
            deletes = [item for item in items if item.change.plan.how == "delete"]
            if any(item.cancel_us is not None for item in items):
                # A cancelled delete is undone whatever it followed, and what is cancelled may
                # have listed the counter or not.
                continue
            others = [item for item in items if item.change.plan.how != "delete"]
            deleted_us = max(map(_applied_at, deletes), default=-1)
            # A delete that was not acknowledged may be done in part.
            unsure = [item for item in items if item.applied_us is None]
            tried_us = max(map(_time_or_never, [*others, *unsure]), default=-1)
            is_listed = counter in history.listed[namespace]
            if is_listed and deleted_us >= max(tried_us, 0):
                yield f"at last, {counter} of {namespace} is listed, and was deleted"
            last_us = max((_time_or_never(item) for item in deletes), default=-1)
            is_over = not any(item.change.given_up for item in deletes)
            if not is_listed and is_over and max(map(_applied_at, others), default=-1) > last_us:
                yield f"at last, {counter} of {namespace} is not listed"

    def _at_last(self, item: Item) -> Need:
        if item.cancelled_us is not None:
            return Need(False, False)
        if not self._is_alone(item) or item.change.given_up or item.cancel_us is not None:
            return Need(False, item.void_us is None)
        applied = item.applied_us is not None
        return Need(applied, applied or (item.void_us is None and item.conflict_us is not None))

    def explain(self, seen: Seen) -> Iterator[str]:
        """Return the problems of one read."""
        items = self._of(seen)
        needs = {id(item): self._need(item, seen) for item in items}
        why = _unexplained(seen.count, items, needs, self._rivals)
        if why:
            yield f"{_named(seen)}: {why}"
        staleness_us = seen.plan.staleness_us
        if staleness_us is not None:
            # A reader's clock may be off, by as much as clocks are set in these runs.
            config = self._config
            off_us = max(3 * config.skew_us, config.offsets_us[seen.plan.api], config.wrong_us)
            oldest_us = seen.sent_us - staleness_us - off_us
            if seen.as_of_us < oldest_us:
                yield f"{_named(seen)} is staler than was asked for"

    def _need(self, item: Item, seen: Seen) -> Need:
        time_us, first_us = item.event_time_us, item.change.first_us
        if first_us is None or first_us > seen.answered_us:
            return Need(False, False)
        if item.void_us is not None:
            return Need(False, self._may_be_glimpsed(item, item.void_us, seen))
        if item.cancelled_us is not None and item.cancelled_us < seen.sent_us:
            # A count that was cached before says so by its instant.
            is_older = seen.as_of_us <= item.cancelled_us + self._config.skew_us
            return Need(False, seen.accuracy != "accurate" and is_older)
        if item.cancel_us is not None and item.cancel_us < seen.answered_us:
            return Need(False, True)
        alone = self._is_alone(item)
        if seen.accuracy == "accurate":
            known_us = min(
                item.applied_us or seen.sent_us, self._seen_us.get(id(item), seen.sent_us)
            )
            return Need((alone and known_us < seen.sent_us) or seen.own is item, True)
        if time_us is None:
            return Need(False, True)
        if time_us > seen.as_of_us:
            return Need(False, False)
        must = id(item) in self._seen_us
        if item.applied_us is not None:
            latest_us = time_us + self._config.accept_us - self._config.skew_us
            must = must or item.applied_us < latest_us or item.applied_us <= seen.as_of_us
        return Need(alone and must, True)

    def _may_be_glimpsed(self, item: Item, void_us: int, seen: Seen) -> bool:
        """Whether a read may show a void write: one that landed after its window was closed."""
        config = self._config
        if item.event_time_us is None or seen.sent_us > void_us:
            return False
        end_us = item.event_time_us - item.event_time_us % config.window_us + config.window_us
        return seen.answered_us > end_us + config.accept_us + config.write_timeout_us


def _identity(item: Item) -> tuple[object, ...]:
    """Equal for all items of one token in one counter."""
    plan = item.change.plan
    place = 0
    for earlier in item.change.items:
        if earlier is item:
            break
        place += plan.how == "batch" or earlier.counter == item.counter
    kind = plan.how if plan.how in ("batch", "atomic") else "single"
    token = (plan.key, plan.how) if plan.key is not None else (plan.nonce, item.change.token_us)
    return (plan.namespace, item.counter, kind, *token, place)


def decode(count: int, items: Sequence[Item]) -> tuple[list[Item], list[Item], int]:
    """Which adds are in *count*, which more than once, and the rest."""
    once: list[Item] = []
    twice: list[Item] = []
    adds = [(_digit(item.delta), item) for item in items if item.delta is not None]
    for digit, item in sorted(adds, key=lambda pair: pair[0]):
        delta = item.delta or 0
        unit = BASE**digit
        times = (count // unit) % BASE if delta > 0 else (-count // unit) % BASE
        if digit == DIGITS_MAX:
            times = count // unit
        if times:
            (once if times == 1 else twice).append(item)
            count -= times * delta
    return once, twice, count


def _digit(delta: int) -> int:
    """The lowest digit of a delta."""
    return ((abs(delta) & -abs(delta)).bit_length() - 1) // 2


def _unexplained(
    count: int, items: Sequence[Item], needs: dict[int, Need], rivals: dict[int, list[Item]]
) -> str:
    """Why *count* is impossible; empty if it is possible."""
    once, twice, rest = decode(count, items)
    if twice:
        return f"changes {_numbers(twice)} count more than once"
    if rest:
        return f"{rest} is left over beside changes {_numbers(once)}"
    wrong = [item for item in once if not needs[id(item)].may]
    if wrong:
        return f"changes {_numbers(wrong)} count and must not"
    shown = {id(item) for item in once}
    for item in once:
        same = [each for each in rivals[id(item)] if id(each) in shown]
        if len(same) > 1:
            return f"changes {_numbers(same)} are one token and count both"
    clears = [item for item in items if item.delta is None and needs[id(item)].may]
    why = ""
    for last in (None, *clears):
        reason = _with_last_clear(last, items, needs, shown)
        if not reason:
            return ""
        why = why or reason
    return why


def _with_last_clear(
    last: Item | None, items: Sequence[Item], needs: dict[int, Need], shown: set[int]
) -> str:
    """Why *shown* cannot be the adds after the clear *last*."""
    cleared_us = -1
    if last is not None:
        if last.event_time_us is None:
            # Its time is unknown: it explains whatever is missing.
            return ""
        cleared_us = last.event_time_us
    for item in items:
        time_us, need = item.event_time_us, needs[id(item)]
        after = time_us is None or time_us > cleared_us
        if item.delta is None:
            if need.must and after and item is not last:
                return f"change {item.change.plan.number} (a clear) is missing"
        elif id(item) in shown and not after:
            return f"change {item.change.plan.number} counts in spite of a clear"
        elif need.must and after and id(item) not in shown and time_us is not None:
            return f"change {item.change.plan.number} is missing"
    return ""


def _numbers(items: Sequence[Item]) -> str:
    return ", ".join(str(item.change.plan.number) for item in items)


def _named(seen: Seen) -> str:
    return (
        f"{seen.accuracy} read of {seen.namespace}/{seen.counter} on api-{seen.plan.api}, asked"
        f" {to_rfc3339(seen.sent_us)[11:]}, as of {to_rfc3339(seen.as_of_us)[11:]}"
    )


def _applied_at(item: Item) -> int:
    """The time of an item that was confirmed; -1 for another."""
    return item.event_time_us or 0 if item.applied_us is not None else -1


def _time_or_never(item: Item) -> int:
    """The time of an item, later than all if it is unknown."""
    return TIME_MAX_US if item.event_time_us is None else item.event_time_us
