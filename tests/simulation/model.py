"""The observations of an add that the model allows: the automata in proof/traces.txt."""

from collections.abc import Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Final

#: Written by ``./scripts/prove --traces``.
TABLE: Final = Path(__file__).resolve().parents[2] / "proof" / "traces.txt"

#: The states of an automaton: to which state each letter leads. The first one is the initial one.
Automaton = Sequence[Mapping[str, int]]


def parse(text: str) -> Mapping[str, Automaton]:
    """Return the automata of *text* by their names."""
    found: dict[str, list[Mapping[str, int]]] = {}
    for line in text.splitlines():
        if line.endswith(":"):
            states = found.setdefault(line[:-1], [])
        else:
            words = line.split()
            states.append(dict(zip(words[::2], map(int, words[1::2]), strict=True)))
    return found


@cache
def automata() -> Mapping[str, Automaton]:
    """Return the automata of the model with all rules kept."""
    return parse(TABLE.read_text(encoding="utf-8"))


#: Letters that clients see; the rest is seen in the store.
CLIENTS: Final = frozenset(
    ("asked", "late", "closed", "reported-applied", "reported-void", "counted", "not-counted")
)


def why_not(automaton: Automaton, word: Sequence[str], shown: Set[str] | None = None) -> str:
    """Return why *automaton* forbids *word*, or nothing. With *shown*, others may be in between."""
    states = _hidden(automaton, {0}, shown)
    for place, letter in enumerate(word):
        after = {automaton[at][letter] for at in states if letter in automaton[at]}
        if not after:
            before = " ".join(word[:place]) or "nothing"
            allowed = " ".join(sorted({each for at in states for each in automaton[at]}))
            return f"after {before}, the model does not allow {letter}, but only {allowed}"
        states = _hidden(automaton, after, shown)
    return ""


def _hidden(automaton: Automaton, states: set[int], shown: Set[str] | None) -> set[int]:
    """Return *states*, and those that letters that are not shown lead to."""
    if shown is None:
        return states
    found, waiting = set(states), list(states)
    while waiting:
        for letter, to in automaton[waiting.pop()].items():
            if letter not in shown and to not in found:
                found.add(to)
                waiting.append(to)
    return found
