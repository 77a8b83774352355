"""Kustomize builds the service's manifests.

Building Kustomize itself takes half a minute of CPU or more, so ``--changed-since`` leaves these
tests out where no manifest was changed.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from counter import __version__
from counter.limits import TRICKLE_WRITES
from tests.deploy.test_manifests import ADAPTED, BASE, COMMON, FOLDER, SCHEMA, container_of
from tests.support.needs import miss
from tests.support.server import ROOT

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("child_processes")]

#: The newest that the Go of Debian 12 builds.
KUSTOMIZE = "v4.5.7"


def kustomize() -> Path:
    """Return the program, which Go builds at the first call: half a minute of CPU."""
    program = ROOT / ".cluster" / f"kustomize-{KUSTOMIZE}" / "kustomize"
    if program.exists():
        return program
    if shutil.which("go") is None:
        miss("there is no Go (Debian: apt-get install golang-go)")
    done = subprocess.run(
        ["go", "install", f"sigs.k8s.io/kustomize/kustomize/v4@{KUSTOMIZE}"],
        env=os.environ | {"GOBIN": str(program.parent), "GOTOOLCHAIN": "local", "GOFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        miss(f"Go cannot install kustomize: {done.stderr}")
    return program


def built(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what kustomize makes of *folder*, by kind and name."""
    done = subprocess.run(
        [kustomize(), "build", folder], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = list(yaml.safe_load_all(done.stdout))
    for each in found:
        jsonschema.validate(each, SCHEMA, cls=jsonschema.Draft202012Validator)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_kustomize_builds_the_service_over_postgresql() -> None:
    """It adds the name as a label, the tag and the ConfigMap; selectors stay as they are."""
    found = built(FOLDER / "postgresql")
    [config] = [key for key in found if key[0] == "ConfigMap"]
    assert found[config]["data"] == COMMON
    assert all(
        each["metadata"]["labels"].pop("app.kubernetes.io/name") == "counter"
        for each in found.values()
    )
    del found[config]
    given = {
        (each["kind"], each["metadata"]["name"]): each
        for file in BASE["resources"]
        for each in yaml.safe_load_all((FOLDER / "base" / file).read_text(encoding="utf-8"))
    }
    for each in given.values():
        each["metadata"].setdefault("labels", {})
    text = json.dumps(list(given.values()))
    text = text.replace('"distributed-counter"', f'"distributed-counter:{__version__}"')
    text = text.replace(
        '{"configMapRef": {"name": "counter"', f'{{"configMapRef": {{"name": "{config[1]}"'
    )
    assert found == dict(zip(given, json.loads(text), strict=True))


def test_kustomize_builds_the_example(tmp_path: Path) -> None:
    """With the settings, the host name, the image and each component that it names."""
    found = built(FOLDER / "example")
    assert {each["metadata"]["namespace"] for each in found.values()} == {"counter"}
    [settings] = [each["data"] for key, each in found.items() if key[0] == "ConfigMap"]
    assert settings == COMMON | {"COUNTER_ADDS_PER_S": "2000"}
    ingress = found["Ingress", "counter"]["spec"]
    assert [each["host"] for each in ingress["rules"]] == ["counts.example"]
    assert ingress["tls"] == [{"hosts": ["counts.example"], "secretName": "counter-tls"}]
    api = found["Deployment", "counter-api"]
    image = f"registry.example/distributed-counter:{__version__}"
    assert container_of(api["spec"]["template"])["image"] == image
    assert "replicas" not in api["spec"]
    assert ("ServiceMonitor", "counter") in found
    # The other way to scale.
    tree = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, tree)
    path = tree / "example" / "kustomization.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("components/autoscaling", "components/autoscaling-by-adds"))
    metrics = built(path.parent)["HorizontalPodAutoscaler", "counter-api"]["spec"]["metrics"]
    assert [each["type"] for each in metrics] == ["Resource", "Pods"]
    assert metrics[1]["pods"]["metric"] == {"name": ADAPTED["name"]["as"]}
    assert 2 * int(metrics[1]["pods"]["target"]["averageValue"]) == TRICKLE_WRITES
