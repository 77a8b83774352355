"""The commands against a namespace in which no retry is safe."""

import shlex
from collections.abc import Iterator

import pytest

from counter.cli.client import ServiceFlags, report_unfinished
from counter_client import Token, Unfinished
from tests.cli.shell import Shell

pytestmark = pytest.mark.usefixtures("at_service")

NAMESPACE = "best-effort"
HERE = ("--namespace", NAMESPACE)


@pytest.fixture
def shell(shell: Shell) -> Iterator[Shell]:
    shell.said("namespace", "create", NAMESPACE, "--counter-type", "BEST_EFFORT")
    yield shell
    shell.said("namespace", "delete", NAMESPACE, "--yes")


def test_best_effort_adds_are_not_resolved(shell: Shell) -> None:
    """Regression: it was sent again, counted again, and said to be counted once."""
    assert shell.said("add", "x", "5", "--key", "order-1", *HERE) == "x: 5 added"
    assert "BEST_EFFORT: a retry counts again" in shell.err
    unfinished = str(Unfinished("add", NAMESPACE, (("x", 5),), "key:order-1"))
    for words in (["key:order-1", "x", "5", *HERE], [str(Token.new()), "x", *HERE], [unfinished]):
        assert shell.run("token", "resolve", *words) == (1, ""), shlex.join(words)
        assert "nothing was sent" in shell.err
    assert shell.said("get", "x", *HERE) == "5"


def test_once_is_not_promised_of_every_namespace(capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = Unfinished("add", NAMESPACE, (("x", 5),), str(Token.new()))
    report_unfinished(unfinished, ServiceFlags(), why="it is cut")
    assert "but in a BEST_EFFORT namespace" in capsys.readouterr().err
