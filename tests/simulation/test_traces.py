"""Histories against the model: allowed and forbidden ones."""

import subprocess
from dataclasses import replace

import pytest

from counter.config.settings import Settings
from counter.limits import SECOND
from counter.storage.memory import DEFAULT_DATASET
from counter.types import Era, Namespace
from tests.simulation.draw import draw
from tests.simulation.history import Changed, History, Item, Sent
from tests.simulation.model import CLIENTS, TABLE, Automaton, automata, parse, why_not
from tests.simulation.observed import limit_at
from tests.simulation.plan import Change
from tests.simulation.reported import COVERED, untrue
from tests.simulation.requests import START_US

_ROOT = TABLE.parents[1]

FORBIDDEN = {
    "both outcomes": "asked late closed void hidden pending recount reported-void reported-applied",
    "decided twice": "asked marked sent landed late closed applied void",
    "void, and not hidden": "asked late closed void reported-void",
    "landed after its decision, and not hidden": (
        "asked marked sent late closed void landed reported-void"
    ),
    "hidden, and shown again": "asked marked sent late closed void hidden shown-again",
    "void, and counted": (
        "asked late closed passed void hidden pending recount reported-void counted"
    ),
    "acknowledged, and not counted": (
        "asked marked sent landed reported-applied late closed passed not-counted"
    ),
    "acknowledged before it landed": "asked marked sent reported-applied",
    "acknowledged although it landed in a closed window": (
        "asked marked sent late closed landed reported-applied"
    ),
    "sent before its mark": "asked sent",
    "sent when it was late": "asked marked late sent",
    "sent and never asked for": "sent",
    "decided in an open window": "asked late void",
    "decided applied, and never seen": "asked marked sent late closed applied",
    "void without a recount for readers": "asked late closed void hidden reported-void",
    "void without a recount for the worker": "asked late closed void hidden pending reported-void",
    "passed too early": "asked marked sent landed passed",
    "counted, and never landed": "asked marked sent late closed passed counted",
}
#: By rule: a history that the model allows if the rule is broken.
BROKEN = {
    "mark-before-event": "asked sent landed reported-applied",
    "second-age-check": "asked marked late sent",
    "deadline": "asked marked sent late closed landed reported-applied",
    "wait-until-closed": "asked late void",
    "tombstone-on-void": "asked marked sent late closed void landed reported-void",
    "tombstone-stays": "asked marked sent late closed void hidden shown-again",
    "recount-for-readers": "asked late closed void hidden reported-void",
    "recount-for-worker": "asked late closed void hidden pending reported-void",
    "write-timeout-in-closing": "asked late passed",
}


#: Over PostgreSQL.
FORBIDDEN_FENCED = {
    "stored after its window was passed": "asked late closed fenced passed stored",
    "stored and void": "asked closed open stored void",
    "void and stored": "asked closed open void stored",
    "asked late, and stored": "late asked stored",
    "applied, and never stored": "asked late closed open applied",
    "void without an open decision": "asked late closed void",
    "decided in an open window": "asked late open",
    "passed without the fence": "asked late closed passed",
    "acknowledged before it is stored": "asked reported-applied",
    "both outcomes": "asked closed open void reported-void reported-applied",
    "void, and counted": "asked closed open void reported-void counted",
    "acknowledged, and not counted": "asked stored reported-applied not-counted",
}
#: By rule: a history that the model allows if the rule is broken.
BROKEN_FENCED = {
    "lock-before-clock": "asked closed fenced passed stored",
    "lock-until-commit": "asked closed fenced passed stored",
    "fence-waits": "asked closed fenced passed stored",
    "fence-moves": "asked late closed passed",
    "fence-in-append": "closed fenced asked stored",
    "open-first": "asked late closed void",
    "open-refused": "asked closed open void stored",
    "decision-waits": "asked closed open void stored",
    "look-again": "asked closed open stored void",
}


@pytest.mark.usefixtures("child_processes")
def test_the_table_matches_the_model() -> None:
    """The automaton of atomic adds takes minutes: ``scripts/long`` compares it, too."""
    found = printed("--quick")
    assert found == {name: automata()[name] for name in found}
    assert {*found} == {"single", "fence"}


def printed(*arguments: str) -> dict[str, Automaton]:
    """The output of ``./scripts/prove --traces``."""
    command = [str(_ROOT / "scripts" / "prove"), "--traces", *arguments]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(parse(text))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("single", "asked marked sent landed reported-applied late closed passed counted"),
        ("single", "asked marked sent late closed passed landed void hidden pending recount"),
        ("single", "asked marked sent late closed landed passed applied pending recount counted"),
        ("single", "late closed asked void hidden pending recount reported-void not-counted"),
        ("single", "asked marked sent late closed passed not-counted"),
        ("fence", "asked stored reported-applied late closed fenced passed counted"),
        ("fence", "closed late asked open fenced passed void reported-void not-counted"),
        ("fence", "closed asked open stored applied reported-applied late fenced passed counted"),
        ("fence", "asked late closed fenced stored passed reported-applied counted"),
        ("atomic", "asked marked sent landed reported-applied late closed passed counted"),
        ("atomic", "asked marked sent late closed void hidden pending recount passed not-counted"),
        ("atomic", "asked marked sent late closed applied landed pending recount passed counted"),
    ],
)
def test_traces_of_the_protocol_are_allowed(name: str, word: str) -> None:
    assert why_not(automata()[name], word.split()) == ""


def test_an_atomic_add_is_decided_before_its_window_is_passed() -> None:
    word = ["asked", "marked", "sent", "late", "closed", "passed"]
    assert why_not(automata()["atomic"], word)
    assert why_not(automata()["single"], word) == ""


@pytest.mark.parametrize(
    ("name", "what", "word"),
    [
        *(("single", what, word) for what, word in FORBIDDEN.items()),
        *(("fence", what, word) for what, word in FORBIDDEN_FENCED.items()),
    ],
)
def test_traces_that_break_a_promise_are_not_allowed(name: str, what: str, word: str) -> None:
    *before, _ = word.split()
    assert why_not(automata()[name], word.split()), what
    assert why_not(automata()[name], before) == ""


@pytest.mark.parametrize(
    ("name", "rule", "word"),
    [
        *(("single", rule, word) for rule, word in BROKEN.items()),
        *(("fence", rule, word) for rule, word in BROKEN_FENCED.items()),
    ],
)
@pytest.mark.usefixtures("child_processes")
def test_a_broken_rule_allows_forbidden_traces(name: str, rule: str, word: str) -> None:
    assert why_not(automata()[name], word.split())
    assert why_not(printed("--quick", "--break", rule)[name], word.split()) == ""


@pytest.mark.parametrize("name", ["single", "atomic", "fence"])
@pytest.mark.parametrize(
    ("word", "is_allowed"),
    [
        ("asked reported-applied late closed counted", True),
        ("asked late closed reported-void not-counted", True),
        ("asked late reported-void", False),
        ("reported-applied", False),
        ("asked reported-applied late closed reported-void", False),
        ("asked late closed reported-void counted", False),
        ("late asked reported-applied", False),
        ("late closed asked reported-applied", False),
    ],
)
def test_for_a_real_store_only_client_observations_are_compared(
    name: str, word: str, is_allowed: bool
) -> None:
    assert (why_not(automata()[name], word.split(), CLIENTS) == "") == is_allowed


def test_client_observations_are_compared() -> None:
    seed = 1
    config = draw(seed).config
    early = Change(0, 1, "add", config.namespaces[0][0], (("c", 1),), 1, 0, None, ())
    changed = Changed(early, START_US, requests=[Sent(START_US, 0)])
    item = Item(changed, "c", 1, START_US, void_us=START_US + 1)
    changed.items.append(item)
    problems, compared = untrue(config, History([changed]), (), START_US)
    assert compared == {COVERED: 1}
    assert [each.partition("allow ")[2][:13] for each in problems] == ["reported-void"]
    item.void_us = START_US + config.lag_us + 2 * config.window_us
    assert untrue(config, History([changed]), (), START_US)[0] == []


@pytest.mark.parametrize(("old_us", "new_us"), [(SECOND, 5 * SECOND), (5 * SECOND, SECOND)])
def test_an_accept_limit_that_was_only_announced_leaves_the_one_before(
    old_us: int, new_us: int
) -> None:
    """Regression: windows closed by one limit before adds were late by the other."""
    settings = replace(Settings().default_namespace(), accept_limit_us=old_us)
    eras = (Era(0, old_us),)
    namespace = Namespace(1, "one", settings, eras, DEFAULT_DATASET, START_US, 1)
    announced = namespace.announced(new_us, START_US)
    assert limit_at(announced, START_US) == limit_at(announced, START_US - 1) == old_us
    # Of two changes for one slice, the first one was set.
    third = namespace.changed(replace(settings, accept_limit_us=3 * SECOND), START_US)
    assert limit_at(third.announced(new_us, START_US), START_US) == 3 * SECOND
    # By the next change, for later slices.
    changed = announced.announced(new_us, START_US + SECOND)
    changed = changed.changed(replace(settings, accept_limit_us=new_us), START_US + SECOND)
    assert limit_at(changed, START_US) == old_us
    assert limit_at(changed, START_US + SECOND) == new_us
