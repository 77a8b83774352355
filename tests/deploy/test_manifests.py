"""The systemd unit and the Kubernetes manifests, read by their own tools and by what they promise.

kubernetes-schema.json has the definitions that these manifests use, without their descriptions, of
the OpenAPI document of k8s.io/cli-runtime v0.31.3 (Apache-2.0); no other field is allowed.
"""

import configparser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from counter import __version__
from counter.config.settings import Settings, settings_model
from counter.config.store_kinds import store_names
from counter.durations import parse_duration
from counter.limits import DRAIN_TIMEOUT_US, SECOND
from counter.telemetry.incidents import PING_S
from tests.support.needs import miss
from tests.support.server import ROOT

UNIT = ROOT / "deploy" / "systemd" / "counter@.service"
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
MANIFESTS: list[dict[str, Any]] = [
    each
    for file in KUSTOMIZATION["resources"]
    for each in yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))
]
#: The newest that the Go of Debian 12 builds.
KUSTOMIZE = "v4.5.7"
PODS = {
    each["metadata"]["name"]: each["spec"]["template"]
    for each in MANIFESTS
    if "template" in each["spec"]
}
#: systemd rates a unit from 0 to 10; OK is 4 at most.
EXPOSURE_MAX = 1.6
SCHEMA = json.loads((Path(__file__).parent / "kubernetes-schema.json").read_text(encoding="utf-8"))


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in MANIFESTS if each["kind"] == kind}


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    [found] = pod["spec"]["containers"]
    return dict(found)


def environment_of(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container_of(pod).get("env", [])}


def systemd_analyze(*words: str | Path) -> str:
    if shutil.which("systemd-analyze") is None:
        miss("there is no systemd-analyze (Debian: apt-get install systemd)")
    done = subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stderr + done.stdout


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


@pytest.mark.usefixtures("child_processes")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """Each line, with a program that exists here."""
    text = UNIT.read_text(encoding="utf-8")
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("/opt/counter/bin/counter", str(shutil.which("true"))))
    assert systemd_analyze("verify", "--man=no", copy) == ""


@pytest.mark.usefixtures("child_processes")
def test_systemd_rates_the_unit_as_hardened() -> None:
    rated = systemd_analyze("security", "--offline=true", "--no-pager", UNIT)
    [exposure] = re.findall(r"Overall exposure level for \S+: (\S+)", rated)
    assert float(exposure) <= EXPOSURE_MAX


def test_the_unit_waits_for_the_service_to_end() -> None:
    stop = float(unit()["Service"]["TimeoutStopSec"]) * SECOND
    assert stop > Settings.model_fields["shutdown_delay"].default + 2 * DRAIN_TIMEOUT_US


def test_the_unit_sets_only_settings() -> None:
    known = {f"COUNTER_{name.upper()}" for name in settings_model().model_fields}
    assert set(re.findall(r"^Environment=(\w+)=", UNIT.read_text(), re.MULTILINE)) <= known


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}"
)
def test_kubernetes_reads_each_manifest(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, SCHEMA, cls=jsonschema.Draft202012Validator)


def test_the_schema_refuses_invalid_manifests() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    wrong = named("Deployment")["counter-api"] | {"spec": {"replica": 3}}
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(wrong, SCHEMA, cls=jsonschema.Draft202012Validator)


def test_kustomize_is_given_every_file() -> None:
    files = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])
    assert KUSTOMIZATION["images"] == [{"name": "distributed-counter", "newTag": __version__}]
    assert {container_of(pod)["image"] for pod in PODS.values()} == {"distributed-counter"}


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


# The gate leaves it out by this name.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("child_processes")
def test_kustomize_builds_the_manifests() -> None:
    """It adds the name as a label, and the tag; selectors stay as they are."""
    done = subprocess.run(
        [kustomize(), "build", FOLDER], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    built = {
        (each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)
    }
    for each in built.values():
        jsonschema.validate(each, SCHEMA, cls=jsonschema.Draft202012Validator)
        assert each["metadata"].pop("labels") == {"app.kubernetes.io/name": "counter"}
    given = {(each["kind"], each["metadata"]["name"]): each for each in MANIFESTS}
    tagged = json.dumps(list(given.values())).replace(
        '"image": "distributed-counter"', f'"image": "distributed-counter:{__version__}"'
    )
    assert built == dict(zip(given, json.loads(tagged), strict=True))


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_no_rights(name: str) -> None:
    spec, container = PODS[name]["spec"], container_of(PODS[name])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001  # the image's
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert "limits" in container["resources"]


@pytest.mark.parametrize("name", PODS)
def test_the_environment_of_a_pod_has_only_settings(name: str) -> None:
    """And no service's variables are among them: COUNTER_PORT would be rejected."""
    assert PODS[name]["spec"]["enableServiceLinks"] is False
    environment = environment_of(PODS[name])
    if environment["COUNTER_STORE"] not in store_names():
        pytest.skip("its store is not installed")
    known = {f"COUNTER_{field.upper()}" for field in settings_model().model_fields}
    assert set(environment) <= known
    given: dict[str, Any] = {
        key.removeprefix("COUNTER_").lower(): value for key, value in environment.items()
    }
    settings_model()(**given | {"dsn": "postgresql://db1/counter"})


@pytest.mark.parametrize("name", ["counter-api", "counter-rollup"])
def test_a_pod_is_probed_and_has_time_to_end(name: str) -> None:
    pod, container = PODS[name], container_of(PODS[name])
    paths = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("liveness", "readiness")}
    assert paths == {
        "liveness": {"path": "/healthz", "port": "http"},
        "readiness": {"path": "/readyz", "port": "http"},
    }
    # A shorter check would not learn the fault.
    assert container["readinessProbe"]["timeoutSeconds"] > PING_S + 1
    delay = parse_duration(environment_of(pod).get("COUNTER_SHUTDOWN_DELAY", "0s"))
    if name == "counter-api":
        probe = container["readinessProbe"]
        assert delay >= 2 * probe["periodSeconds"] * probe["failureThreshold"] * SECOND
    grace = pod["spec"]["terminationGracePeriodSeconds"] * SECOND
    assert grace > delay + 2 * DRAIN_TIMEOUT_US


def test_selectors_match_the_pods() -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}
    for name, each in named("Deployment").items():
        assert each["spec"]["selector"]["matchLabels"] == labels[name]
        assert each["spec"]["replicas"] > 1
        budget = named("PodDisruptionBudget")[name]["spec"]
        assert budget == {"maxUnavailable": 1, "selector": {"matchLabels": labels[name]}}
    assert named("Service")["counter"]["spec"]["selector"] == labels["counter-api"]
    [by_policy] = named("NetworkPolicy")["counter"]["spec"]["podSelector"]["matchExpressions"]
    components = {each["app.kubernetes.io/component"] for each in labels.values()}
    assert set(by_policy["values"]) == components - {"schema"}


def test_only_the_schema_job_has_the_owners_password() -> None:
    secrets = {
        name: [each["secretRef"]["name"] for each in container_of(pod)["envFrom"]]
        for name, pod in PODS.items()
    }
    assert secrets.pop("counter-schema") == ["counter-owner"]
    assert set(map(tuple, secrets.values())) == {("counter",)}
    assert container_of(PODS["counter-schema"])["args"] == ["schema", "apply"]
