"""The services of compose.yaml over Cassandra."""

from tests.deploy.test_compose import OURS, SERVICES


def test_over_cassandra_it_has_two_of_each_process() -> None:
    own = [each for each in OURS.values() if each["profiles"] == ["cassandra"]]
    assert len([each for each in own if each["command"] == ["serve"]]) == 2
    rollups = [each for each in own if each["command"] == ["rollup"]]
    assert sum(each["deploy"]["replicas"] for each in rollups) == 2
    assert {"cassandra", "memcached"} <= SERVICES.keys()
