"""Every metric: clean, documented, and the only ones that alerts and dashboard ask for."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from api.http.responses import metrics_head
from tests.deploy.expositions import everything, families_of
from tests.deploy.test_alerts import ALERTS, HOME
from tests.support.promtool import promtool
from tests.support.server import ROOT
from tests.test_security_docs import anchors

DASHBOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in (ROOT / "deploy/grafana").glob("*.json")
}
#: The one of the service itself; "counts" is that of the counters.
SERVICE = DASHBOARDS["counter"]
#: A row of docs/metrics.md: name, type, labels.
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
#: Prometheus itself makes it of each scrape.
_OF_PROMETHEUS = {"up"}
_NAME = re.compile(r"\b(?:counter|process)_\w+|\bup\b")
of_each_dashboard = pytest.mark.parametrize("name", DASHBOARDS)


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> str:
    return everything(tmp_path_factory.mktemp("exposed"))


@pytest.fixture(scope="module")
def families(exposed: str) -> dict[str, SimpleNamespace]:
    return families_of(exposed)


def queries(board: Mapping[str, Any]) -> list[str]:
    """All that a dashboard asks Prometheus for, with its variables filled in."""
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    for each in board["templating"]["list"]:
        found += re.findall(r"label_values\((.*), \w+\)", each.get("definition", ""))
    filled = {"$__rate_interval": "5m", "$job": "counter.*"}
    filled |= dict.fromkeys(("$route", "$namespace", "$counter"), ".*")
    for name, value in filled.items():
        found = [expression.replace(name, value) for expression in found]
    return found


def names_in(expression: str) -> set[str]:
    """The metrics of *expression*, without quoted text."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    plain = re.sub(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)", "", plain)
    return set(_NAME.findall(plain))


def test_promtool_accepts_every_metric(exposed: str) -> None:
    parts = re.split(r"(?=# HELP )", exposed)
    once = {part.split()[2]: part for part in parts if part}
    promtool("check", "metrics", given="".join(once.values()))


@pytest.mark.usefixtures("child_processes")
def test_a_metric_that_is_named_badly_is_reported() -> None:
    with pytest.raises(Exception, match="promtool"):
        promtool("check", "metrics", given="# TYPE seconds counter\nseconds 1\n")


def test_each_is_documented_as_it_is_and_nothing_else_is(
    families: dict[str, SimpleNamespace],
) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in _ROW.findall(text)
    }
    shown = {name: (each.kind, each.labels) for name, each in families.items()}
    assert documented == shown


@pytest.mark.parametrize("alert", ALERTS)
def test_alerts_use_existing_metrics(alert: str, families: dict[str, SimpleNamespace]) -> None:
    there = {name for each in families.values() for name in each.samples}
    asked = names_in(ALERTS[alert]["expr"])
    assert asked
    assert asked <= there | _OF_PROMETHEUS


def test_the_dashboard_uses_existing_metrics(families: dict[str, SimpleNamespace]) -> None:
    there = {name for each in families.values() for name in each.samples}
    for query in queries(SERVICE):
        asked = names_in(query)
        assert asked, query
        assert asked <= there | _OF_PROMETHEUS, query


def test_the_dashboard_of_counts_uses_exposed_counts() -> None:
    there = set(re.findall(r"^# TYPE (\w+)", metrics_head("shop", 0), re.MULTILINE))
    asked = [names_in(each) for each in queries(DASHBOARDS["counts"])]
    assert all(asked)
    assert set().union(*asked) == there


def test_the_dashboard_shows_every_family(families: dict[str, SimpleNamespace]) -> None:
    """Except families without a meaning of their own."""
    asked = set().union(*map(names_in, queries(SERVICE)))
    unseen = {name for name, each in families.items() if not each.samples & asked}
    assert unseen == {
        "counter_audit_failures_total",
        "counter_audit_rounds_total",
        "process_max_fds",
        "process_start_time_seconds",
        "process_virtual_memory_bytes",
    }


@of_each_dashboard
@pytest.mark.usefixtures("child_processes")
def test_prometheus_can_read_each_query_of_a_dashboard(name: str, tmp_path: Path) -> None:
    found = queries(DASHBOARDS[name])
    rules = [{"record": f"query:{n}", "expr": each} for n, each in enumerate(found)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


@of_each_dashboard
def test_a_dashboard_works_with_any_data_source(name: str) -> None:
    """It is asked for when the dashboard is imported, and named nowhere else."""
    board = DASHBOARDS[name]
    first = board["templating"]["list"][0]
    assert (first["name"], first["type"], first["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    panels = [each for each in board["panels"] if each["type"] != "row"]
    sources = [each["datasource"] for each in panels]
    sources += [target["datasource"] for each in panels for target in each["targets"]]
    assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in sources)
    idents = [each["id"] for each in board["panels"]]
    assert len(idents) == len(set(idents))


@of_each_dashboard
def test_each_panel_says_what_is_shown_what_is_normal_and_what_to_do_if_not(name: str) -> None:
    for panel in DASHBOARDS[name]["panels"]:
        if panel["type"] != "row":
            assert re.fullmatch(
                r"[^.]+\. Normally [^.]+\. (If|For|Above) .+\.", panel["description"]
            ), panel


def test_each_alert_is_named_by_a_panel_that_shows_its_cause() -> None:
    text = " ".join(each.get("description", "") for each in SERVICE["panels"])
    assert set(re.findall(r"\bCounter[A-Z]\w+", text)) == set(ALERTS)


@of_each_dashboard
def test_the_links_of_a_dashboard_open(name: str) -> None:
    for link in DASHBOARDS[name]["links"]:
        path, _, anchor = link["url"].removeprefix(f"{HOME}/").partition("#")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not anchor or anchor in anchors(text), link["url"]


def test_the_dashboard_has_a_row_for_each_part() -> None:
    rows = [each["title"] for each in SERVICE["panels"] if each["type"] == "row"]
    for name in ("Traffic", "Adds by outcome", "Latency", "Write path", "Rollup", "Clock", "Audit"):
        assert name in rows
