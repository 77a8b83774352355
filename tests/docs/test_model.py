"""The tables of the model in docs/guarantees.md have its rules and its scenarios, each once."""

import re

from tests.support.server import ROOT

_PAGE = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
#: The tables that are the output of scripts/prove, up to the next heading.
PAGE = _PAGE.partition("<!-- the tables are the output of scripts/prove -->")[2].partition("\n#")[0]
SOURCES = ROOT / "proof/src"


def test_the_page_has_every_rule_of_the_model() -> None:
    rules = re.findall(r'^    \w+, ("[\w-]+", ".*");$', (SOURCES / "rules.rs").read_text(), re.M)
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (?:\d+|none: .*?) \| [\w, ]+ \|$", PAGE, re.M)
    assert sorted(f'"{name}", "{broken}"' for name, broken in rows) == sorted(rules)


def test_the_page_has_every_scenario_of_the_model() -> None:
    names = (
        "log/scenarios",
        "keys",
        "names",
        "eras",
        "generations",
        "bounds/mod",
        "holds/scenarios",
    )
    sources = [SOURCES / f"{name}.rs" for name in names]
    scenarios = re.findall(r'name: "(.*?)"', "".join(each.read_text() for each in sources))
    rows = re.findall(r"^\| ([\w, ]+) \| [\d,]+ \| \d+ \| [\d.]+ \|$", PAGE, re.M)
    alone = ("late slice", "cache", "fence", "fence, cancel", "fence, two cancels")
    assert sorted(rows) == sorted([*scenarios, *alone])


def test_the_page_describes_every_letter_of_the_model() -> None:
    letters = re.findall(
        r'^    \("([\w-]+)", "(.*?)"\),$', (SOURCES / "log/traces.rs").read_text(), re.M
    )
    page = (ROOT / "proof/README.md").read_text(encoding="utf-8")
    described = page.partition("\n## Histories against the model\n")[2]
    assert re.findall(r"^\| `([\w-]+)` \| (.*) \|$", described, re.M)[: len(letters)] == letters
