"""The dashboards are as the schema that Grafana publishes says."""

import copy
import json
import os
from pathlib import Path

import pytest

from tests.clients.programs import run_go
from tests.deploy.test_metrics import DASHBOARDS, SERVICE, of_each_dashboard
from tests.support.needs import miss
from tests.support.server import ROOT

#: A program that checks a dashboard.
GRAFANA_SCHEMA = ROOT / "tests/deploy/grafana_schema"


@pytest.fixture(scope="module")
def grafana_schema(child_processes: None) -> None:
    """Downloads the one module of the program, whose checksum is in go.sum."""
    try:
        run_go("mod", "download", at=GRAFANA_SCHEMA, GOPROXY=os.environ.get("GOPROXY", ""))
    except AssertionError as error:
        miss(f"Grafana's schema cannot be downloaded: {error}")


def accept(path: Path) -> None:
    """Raise AssertionError if Grafana's schema finds a fault in the dashboard in *path*."""
    run_go("run", ".", str(path), at=GRAFANA_SCHEMA)


@of_each_dashboard
@pytest.mark.usefixtures("grafana_schema")
def test_grafanas_schema_accepts_a_dashboard(name: str) -> None:
    types = {each["type"] for each in DASHBOARDS[name]["panels"]}
    assert types <= {"heatmap", "row", "stat", "timeseries"}, "main.go does not check the others"
    accept(ROOT / f"deploy/grafana/{name}.json")


@pytest.mark.usefixtures("grafana_schema")
@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("panels", 1, "options", "colorMood"), "none", "unexpected field 'colorMood'"),
        (("panels", 1, "options", "wideLayout"), "yes", "panels\\[1\\].options.wideLayout"),
        (("panels", 1, "targets", 0, "expression"), "up", "unexpected field 'expression'"),
        (("templating", "list", 1, "multy"), True, "unexpected field 'multy'"),
    ],
    ids=["panel", "type", "query", "variable"],
)
def test_a_fault_of_a_dashboard_is_reported(
    path: tuple[str | int, ...], value: object, fault: str, tmp_path: Path
) -> None:
    board = copy.deepcopy(SERVICE)
    at = board
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    wrong = tmp_path / "board.json"
    wrong.write_text(json.dumps(board), encoding="utf-8")
    with pytest.raises(AssertionError, match=fault):
        accept(wrong)
