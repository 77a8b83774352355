"""The systemd unit and the Kubernetes manifests, read by their own tools and by what they promise.

kubernetes-schema.json has the definitions that these manifests use, without their descriptions, of
the OpenAPI document of k8s.io/cli-runtime v0.31.3, and the ServiceMonitor of
github.com/prometheus-operator/prometheus-operator v0.79.2 (both Apache-2.0). No other field is
allowed.
"""

import configparser
import json
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
from counter.limits import ADD_STREAM_SILENCE_US, DRAIN_TIMEOUT_US, SECOND
from counter.quantities import parse_duration
from counter.telemetry.incidents import PING_S
from tests.support.documents import page
from tests.support.needs import miss
from tests.support.promtool import promtool
from tests.support.server import ROOT

UNIT = ROOT / "deploy" / "systemd" / "counter@.service"
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATIONS: dict[str, dict[str, Any]] = {
    str(path.parent.relative_to(FOLDER)): yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.rglob("kustomization.yaml"))
}
BASE = KUSTOMIZATIONS["base"]
MANIFESTS: list[dict[str, Any]] = [
    each
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.name != "kustomization.yaml"
    for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
#: What all pods have from the ConfigMap.
COMMON = dict(
    literal.split("=", 1)
    for folder in ("base", "postgresql")
    for literal in KUSTOMIZATIONS[folder]["configMapGenerator"][0]["literals"]
)
PODS = {
    each["metadata"]["name"]: each["spec"]["template"]
    for each in MANIFESTS
    if "template" in each["spec"]
}
#: systemd rates a unit from 0 to 10; OK is 4 at most.
EXPOSURE_MAX = 1.6
[ADAPTED] = yaml.safe_load(
    (ROOT / "deploy" / "prometheus" / "adapter.yaml").read_text(encoding="utf-8")
)["rules"]["custom"]
SCHEMA = json.loads((Path(__file__).parent / "kubernetes-schema.json").read_text(encoding="utf-8"))


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in MANIFESTS if each["kind"] == kind}


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    [found] = pod["spec"]["containers"]
    return dict(found)


def environment_of(pod: dict[str, Any]) -> dict[str, str]:
    assert {"configMapRef": {"name": "counter"}} in container_of(pod)["envFrom"]
    return COMMON | {each["name"]: each["value"] for each in container_of(pod).get("env", [])}


def systemd_analyze(*words: str | Path) -> str:
    if shutil.which("systemd-analyze") is None:
        miss("there is no systemd-analyze (Debian: apt-get install systemd)")
    done = subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, timeout=300, check=False
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


@pytest.mark.parametrize(
    "wrong", [{"spec": {"replica": 3}}, {"apiVersion": "extensions/v1beta1"}], ids=str
)
def test_the_schema_refuses_invalid_manifests(wrong: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError, match=r"replica|v1beta1"):
        jsonschema.validate(
            named("Deployment")["counter-api"] | wrong, SCHEMA, cls=jsonschema.Draft202012Validator
        )


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_kustomize_is_given_every_file(folder: str) -> None:
    files = {path.name for path in (FOLDER / folder).glob("*.yaml")} - {"kustomization.yaml"}
    given = KUSTOMIZATIONS[folder].get("resources", [])
    assert files == {each for each in given if each.endswith(".yaml")}


def test_the_base_names_the_image_once() -> None:
    assert BASE["images"] == [{"name": "distributed-counter", "newTag": __version__}]
    assert {container_of(pod)["image"] for pod in PODS.values()} == {"distributed-counter"}


def test_the_example_is_in_the_page() -> None:
    text = (FOLDER / "example" / "kustomization.yaml").read_text(encoding="utf-8")
    assert f"```yaml\n{text}```\n" in page("how-to/deploy.md")


@pytest.mark.usefixtures("child_processes")
def test_the_adapter_sums_the_adds_in_flight_of_a_pod(tmp_path: Path) -> None:
    """As prometheus-adapter fills its template in, run by promtool."""
    name, _, _ = ADAPTED["seriesQuery"].partition("{")
    query = ADAPTED["metricsQuery"].replace("<<.GroupBy>>", "pod")
    asked = query.replace("<<.LabelMatchers>>", 'namespace="counter",pod=~"a|b"')
    seen = {
        'queue="adds",pod="a"': "100 300 200 200",
        'queue="adds",pod="b"': "7 7 7 7",
        'queue="resolutions",pod="a"': "9 9 9 9",
    }
    tests = {
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [
                    {"series": f'{name}{{namespace="counter",{labels}}}', "values": values}
                    for labels, values in seen.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": asked,
                        "eval_time": "90s",
                        "exp_samples": [
                            {"labels": '{pod="a"}', "value": 200},
                            {"labels": '{pod="b"}', "value": 7},
                        ],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump(tests), encoding="utf-8")
    promtool("test", "rules", str(path))


def test_the_autoscaler_waits_for_more_than_one_process_may_use() -> None:
    """Of a core, which is all that the event loop of a process can use."""
    spec = named("HorizontalPodAutoscaler")["counter-api"]["spec"]
    target = spec["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "counter-api")
    assert spec["minReplicas"] == named("Deployment")["counter-api"]["spec"]["replicas"]
    request = container_of(PODS["counter-api"])["resources"]["requests"]["cpu"]
    [metric] = spec["metrics"]
    share = metric["resource"]["target"]["averageUtilization"] / 100
    assert 0.5 < share * int(request.removesuffix("m")) / 1000 < 0.9


def test_prometheus_finds_the_api_and_the_workers() -> None:
    """The jobs are the names of the Services; the alerts expect them to begin so."""
    services = named("Service")
    assert services.keys() == {"counter", "counter-rollup"}
    spec = named("ServiceMonitor")["counter"]["spec"]
    assert spec["selector"]["matchLabels"] == BASE["labels"][0]["pairs"]
    [endpoint] = spec["endpoints"]
    for each in services.values():
        assert [port["name"] for port in each["spec"]["ports"]] == [endpoint["port"]]
    assert services["counter-rollup"]["spec"]["publishNotReadyAddresses"] is True


def test_the_ingress_has_longer_time_outs_than_a_silent_stream() -> None:
    ingress = named("Ingress")["counter"]
    for name in ("proxy-read-timeout", "proxy-send-timeout"):
        given_s = int(ingress["metadata"]["annotations"][f"nginx.ingress.kubernetes.io/{name}"])
        assert given_s * SECOND > ADD_STREAM_SILENCE_US
    [rule] = ingress["spec"]["rules"]
    [path] = rule["http"]["paths"]
    service = path["backend"]["service"]
    assert service["name"] in named("Service")
    assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"]]


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
    for name, pod in (("counter", "counter-api"), ("counter-rollup", "counter-rollup")):
        service = named("Service")[name]
        assert service["spec"]["selector"] == service["metadata"]["labels"] == labels[pod]
    [by_policy] = named("NetworkPolicy")["counter"]["spec"]["podSelector"]["matchExpressions"]
    components = {each["app.kubernetes.io/component"] for each in labels.values()}
    assert set(by_policy["values"]) == components - {"schema"}


def test_only_the_schema_job_has_the_owners_password() -> None:
    secrets = {
        name: [
            each["secretRef"]["name"]
            for each in container_of(pod)["envFrom"]
            if "secretRef" in each
        ]
        for name, pod in PODS.items()
    }
    assert secrets.pop("counter-schema") == ["counter-owner"]
    assert set(map(tuple, secrets.values())) == {("counter",)}
    assert container_of(PODS["counter-schema"])["args"] == ["schema", "apply"]
