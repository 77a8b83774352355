"""The alert rules, judged by promtool: each fires in its cases only."""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.alert_cases import CASES, Case, Series
from tests.support.promtool import promtool
from tests.support.server import ROOT

pytestmark = pytest.mark.usefixtures("child_processes")


RULES = ROOT / "deploy" / "prometheus" / "counter.rules.yaml"
GROUPS = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
#: Where the documentation is; its pages have the paths of their sources.
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"][
    "Homepage"
]
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"]
}


def expected(case: Case) -> dict[str, Any]:
    """The alert of *case* as it fires, with its rule's texts filled in."""
    rule = ALERTS[case.alert]

    def filled(text: str) -> str:
        return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: case.labels[found[1]], text)

    return {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": {name: filled(text) for name, text in rule["annotations"].items()},
    }


def judged() -> Iterator[dict[str, Any]]:
    """All cases, in promtool's form."""

    def one(case: Case, series: Series, alerts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "interval": "1m",
            "name": f"{case.alert} {'fires' if alerts else 'is quiet'}",
            "input_series": [{"series": k, "values": v} for k, v in series.items()],
            "alert_rule_test": [
                {"eval_time": case.at, "alertname": case.alert, "exp_alerts": alerts}
            ],
        }

    for case in CASES:
        yield one(case, case.firing, [expected(case)])
        for quiet in case.quiet:
            yield one(case, quiet, [])


def test_prometheus_reads_the_rules() -> None:
    found = promtool("check", "rules", str(RULES))
    assert f"{len(ALERTS)} rules found" in found


def test_each_alert_fires_in_its_cases_only(tmp_path: Path) -> None:
    assert sorted(case.alert for case in CASES) == sorted(ALERTS)
    assert all(case.quiet for case in CASES)
    path = tmp_path / "tests.yaml"
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": list(judged())}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    promtool("test", "rules", str(path))


def test_a_wrong_case_is_reported(tmp_path: Path) -> None:
    """Else all of the above may say nothing."""
    case = next(case for case in CASES if case.alert == "CounterStoreDown")
    wrong = [each for each in judged() if each["name"] == "CounterStoreDown fires"]
    wrong[0]["input_series"] = [{"series": k, "values": v} for k, v in case.quiet[0].items()]
    path = tmp_path / "tests.yaml"
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": wrong}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError):
        promtool("test", "rules", str(path))


@pytest.mark.parametrize("name", ALERTS)
def test_each_says_how_urgent_it_is_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook_url"] == f"{HOME}/docs/operations.md#{name.lower()}"


def test_each_alert_has_its_section_in_the_runbook_and_no_section_is_left_over() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (Counter\w+)$", text, re.MULTILINE)) == sorted(ALERTS)
