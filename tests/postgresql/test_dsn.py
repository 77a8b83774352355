"""The parts of a DSN; no server is asked. A message has no part of the password."""

import pytest

from counter.errors import StartupError
from counter.storage.postgresql.hosts import Hosts

_ESCAPED = "%2F.*%3A.*%40"


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("postgresql://u:S3/cret@h/db", _ESCAPED),
        ("postgresql://u:5432/S3cret@h/db", _ESCAPED),
        ("postgresql://u:S3?cret@h/db", _ESCAPED),
        ("postgresql://u:5432?S3cret@h/db", _ESCAPED),
        ("postgresql://u:S3#cret@h/db", _ESCAPED),
        ("postgresql://u:p@S3cret@h/db", _ESCAPED),
        ("postgresql://u:p@S3/cret@h/db", _ESCAPED),
        ("postgresql://u:S3\uff0fcret@h/db", _ESCAPED),
        ("postgresql://u:S3\uff20cret@h/db", _ESCAPED),
        ("postgresql://u:S3\u2100cret@h/db", _ESCAPED),
        ("postgresql://u:S3[cret@h/db", _ESCAPED),
        ("postgresql://u:S3[cret]@h/db", _ESCAPED),
        ("postgresql://u:S3]cret@h/db", _ESCAPED),
        ("postgresql://u:p@h/db?password=S3&cret", "without a value"),
        ("postgresql:u:S3cret@h/db", "begin with postgresql://"),
        ("u:S3cret@h/db", "begin with postgresql://"),
        ("S3cret@h:5432/db", "begin with postgresql://"),
        ("user=u password=S3cret host=::1", "begin with postgresql://"),
        ("mysql://u:S3cret@h/db", "'mysql:'"),
    ],
)
def test_no_part_of_a_password_is_shown(dsn: str, said: str) -> None:
    with pytest.raises(StartupError, match=said) as refused:
        Hosts(dsn)
    error = refused.value
    assert "S3" not in str(error)
    assert "cret" not in str(error)
    assert error.__suppress_context__ or error.__context__ is None, "a traceback would show it"


@pytest.mark.parametrize(
    ("query", "ignored"),
    [
        ("sslmode=require&channel_binding=require", ["channel_binding"]),
        (
            "connect_timeout=10&keepalives=1&gssencmode=disable&application_name=x",
            ["connect_timeout", "gssencmode", "keepalives"],
        ),
        ("target_session_attrs=read-write&options=-c%20geqo%3Doff", []),
    ],
)
def test_parameters_without_effect_are_dropped_and_named(query: str, ignored: list[str]) -> None:
    hosts = Hosts(f"postgresql://u:p@one,two:5433/db?{query}")
    assert hosts.ignored == ignored
    for host, dsn in hosts._hosts:
        assert dsn.startswith(f"postgresql://u:p@{host}/db?")
        assert not any(name in dsn for name in ignored)
        for each in query.split("&"):
            assert (each in dsn) != (each.partition("=")[0] in ignored)


@pytest.mark.parametrize("demanded", ["gssencmode=require", "requirepeer=postgres"])
def test_parameters_that_demand_protection_are_never_ignored(demanded: str) -> None:
    """The server refuses the parameter by its name."""
    hosts = Hosts(f"postgresql://u:p@h/db?{demanded}")
    assert hosts.ignored == []
    [(_, dsn)] = hosts._hosts
    assert demanded in dsn
