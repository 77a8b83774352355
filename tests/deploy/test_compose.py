"""compose.yaml and the Dockerfile, read by the Compose schema and by what they must promise.

compose-spec.json is the schema of github.com/compose-spec/compose-go v2.16.2 (Apache-2.0).
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

from api.server.sockets import check_exposure
from counter.config.settings import settings_model
from counter.config.store_kinds import store_names
from counter.telemetry.incidents import PING_S
from scripts.cluster_jars import CASSANDRA
from tests.support.server import ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: each for name, each in SERVICES.items() if "build" in each}
#: Those whose store is installed.
INSTALLED = [name for name, each in OURS.items() if each["profiles"][0] in store_names()]
PROFILES = ("postgresql", "cassandra")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
#: A tag that names a version: nothing moves under a deployment. One of PostgreSQL has two parts.
PINNED = re.compile(
    r"([\w./-]+:\d+\.\d+\.\d+[\w.-]*|postgres:\d+\.\d+-[\w.-]+)(@sha256:[0-9a-f]{64})?"
)


def test_compose_reads_it() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(COMPOSE, schema, cls=jsonschema.Draft202012Validator)


def test_the_schema_refuses_invalid_compose_files() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text(encoding="utf-8"))
    wrong = {"services": {"api": {"image": "x", "prots": []}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_is_whole(profile: str) -> None:
    own = {name: each for name, each in SERVICES.items() if each["profiles"] == [profile]}
    commands = [" ".join(each["command"]) for each in own.values() if "build" in each]
    assert {"serve", "rollup", "schema apply"} == set(commands)
    assert profile in own
    assert all(set(each.get("depends_on", ())) <= own.keys() for each in own.values())
    taken = [port for each in own.values() for port in each.get("ports", ())]
    assert len(taken) == len(set(taken))


def test_each_service_is_of_one_profile() -> None:
    """One without a profile would start with any of them."""
    assert {tuple(each["profiles"]) for each in SERVICES.values()} == {(p,) for p in PROFILES}


def test_every_name_refers_to_something_defined() -> None:
    for name, each in SERVICES.items():
        for other, how in each.get("depends_on", {}).items():
            assert other in SERVICES, name
            once = SERVICES[other]["command"] == ["schema", "apply"] if other in OURS else False
            expected = "service_completed_successfully" if once else "service_healthy"
            assert how["condition"] == expected, f"{name} after {other}"
        for volume in each.get("volumes", ()):
            assert volume.partition(":")[0] in COMPOSE["volumes"], name


@pytest.mark.parametrize("name", [*SERVICES, *(each for each in COMPOSE if each.startswith("x-"))])
def test_a_comment_says_what_each_service_is_for(name: str) -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    assert re.search(rf"^ *#.*\n *{name}:", text, re.MULTILINE)


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_is_pinned_and_may_do_little(name: str) -> None:
    each = SERVICES[name]
    assert PINNED.fullmatch(each["image"])
    assert each["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in each["security_opt"]
    uid, gid = map(int, each["user"].split(":"))
    assert uid
    assert gid
    if name != "cassandra":
        assert each["read_only"]
        assert each["tmpfs"][0] == "/tmp"
    if name in OURS:
        assert each["mem_limit"] == "1g"
        assert each["pids_limit"] == 256
    if each.get("environment", {}).get("COUNTER_INSECURE") == "true":
        assert all(port.startswith("127.0.0.1:") for port in each["ports"]), "anyone may ask"


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_that_stays_has_a_health_check(name: str) -> None:
    each = SERVICES[name]
    if each.get("healthcheck", {}).get("disable"):
        assert each["command"] == ["schema", "apply"]
        assert each["restart"].startswith("on-failure")
    elif name in OURS:
        [waits_s] = re.findall(r"HEALTHCHECK.*\n.*/readyz', timeout=(\d+)", DOCKERFILE)
        assert int(waits_s) > PING_S + 1
    else:
        assert each["healthcheck"]["test"]


@pytest.mark.parametrize("name", INSTALLED)
def test_its_settings_are_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = OURS[name]["environment"]
    for variable, value in given.items():
        assert variable.removeprefix("COUNTER_").lower() in settings_model().model_fields
        monkeypatch.setenv(variable, value)
    settings = settings_model()()
    assert [settings.store] == OURS[name]["profiles"]
    hosts = [host for host, _ in settings.cache_servers()]
    if redis := settings.redis_server():
        hosts.append(redis[1].partition(":")[0])
    hosts += filter(None, given.get("COUNTER_CONTACT_POINTS", "").split(","))
    if "COUNTER_DSN" in given:
        server = urlsplit(given["COUNTER_DSN"])
        own = SERVICES["postgresql"]["environment"]
        assert (server.username, server.password) == (
            own["POSTGRES_USER"],
            own["POSTGRES_PASSWORD"],
        )
        hosts.append(str(server.hostname))
    assert set(hosts) <= SERVICES.keys()
    grace_s = int(OURS[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s * 1_000_000 > settings.shutdown_delay + 2 * settings.drain_timeout
    # The target of the image's health check.
    listens = settings.metrics_port if OURS[name]["command"] == ["rollup"] else settings.port
    assert f"127.0.0.1:{listens}/readyz" in DOCKERFILE


@pytest.mark.parametrize("name", INSTALLED)
def test_each_service_listens_on_allowed_addresses(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image listens on all addresses, so a service must say why that is well."""
    host = re.search(r"COUNTER_HOST=(\S+)", DOCKERFILE)
    assert host is not None
    monkeypatch.setenv("COUNTER_HOST", host[1])
    for variable, value in OURS[name]["environment"].items():
        monkeypatch.setenv(variable, value)
    listener = Mock(getsockname=lambda: (host[1], 8080))
    if OURS[name]["command"] == ["serve"]:
        check_exposure(settings_model()(), [listener], keys=False)
    else:
        assert not settings_model()().insecure, "it does not listen, or shows numbers alone"


def test_cassandra_is_the_version_that_the_tests_run() -> None:
    assert SERVICES["cassandra"]["image"] == f"cassandra:{CASSANDRA}"


@pytest.mark.parametrize(
    "driver", ["asyncpg", "cassandra-driver", "pymemcache", "redis", "hiredis"]
)
def test_the_image_has_the_driver_of_each_store(driver: str) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert re.search(rf"^{driver}==", lock, re.MULTILINE)


def test_the_image_is_pinned_locked_and_not_root() -> None:
    base = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert base is not None
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base[1])
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${BASE}"}
    fetching = re.findall(r"\bpip (?:\S+ \S+ )?(?:download|install|wheel) (.*)", DOCKERFILE)
    assert len(fetching) == 3
    hashed = "--require-hashes --only-binary :all: --dest /wheels -r requirements.lock"
    assert all(each == hashed or "--no-index" in each for each in fetching)
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user is not None
    assert {f"{user[1]}:{user[2]}"} == {each["user"] for each in OURS.values()}


def test_by_default_the_image_has_all_extras_of_the_service() -> None:
    """Those are locked, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    given = re.search(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert given is not None
    assert given[1].split(",") == sorted(project["optional-dependencies"].keys() - {"testing"})
    script = (ROOT / "scripts" / "lock").read_text(encoding="utf-8")
    assert f"for each in {given[1].replace(',', ' ')}; do" in script


def test_the_image_is_made_of_what_is_there_and_let_in() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert sources == let_in
    assert all((ROOT / source).exists() for source in sources)
