"""The command line: one flag for each setting, and the exit codes."""

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

from counter.cli.app import app
from counter.cli.flags import RollupFlags, ServeFlags, StoreFlags
from counter.config.settings import Settings, dataset_model, settings_model
from counter.durations import format_duration

#: Settings that are no flags: a process list shows those, and tables do not fit on a line.
NO_FLAGS = {"cassandra_password", "dsn", "extra_datasets"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory in which nothing is set."""
    monkeypatch.chdir(tmp_path)


def run(words: Sequence[str]) -> int:
    """The exit code of ``counter`` with *words*."""
    try:
        app(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def names(flags: type) -> set[str]:
    return {each.name for each in fields(flags)}


def test_every_setting_is_a_flag() -> None:
    assert names(ServeFlags) == set(settings_model().model_fields) - NO_FLAGS


def test_dataset_settings_are_flags_of_every_command() -> None:
    """Every process must use the same settings of a dataset."""
    assert set(dataset_model().model_fields) <= names(StoreFlags)
    assert names(StoreFlags) < names(RollupFlags) < names(ServeFlags)


@pytest.mark.parametrize(
    "command", [["serve"], ["rollup"], ["schema", "apply"], ["config", "check"]]
)
def test_help_names_exit_codes(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert "Exit codes: 0" in help_text
    assert "--contact-points" in help_text


def test_the_effective_settings_are_toml_with_their_origins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("counter.toml").write_text('slice = "12h"\n[datasets.videos]\nretention = "30d"\n')
    monkeypatch.setenv("COUNTER_RETENTION", "6d")
    assert run(["config", "check", "--port", "81", "--no-rollup"]) == 0
    text = capsys.readouterr().out
    main = text.partition("[datasets")[0]
    said = {line.split(" = ")[0]: line.split("# ")[-1] for line in main.splitlines()}
    assert said["port"] == "flag --port"
    assert said["rollup"] == "flag --rollup"
    assert said["retention"] == "environment COUNTER_RETENTION"
    assert said["slice"] == "file counter.toml"
    assert said["workers"] == "default"
    read = tomllib.loads(text)
    assert (read["port"], read["rollup"], read["slice"]) == (81, False, "12h")
    assert read["datasets"] == {"videos": {"retention": "30d"}}


def test_the_effective_settings_can_be_read_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--store", "cassandra", "--contact-points", "a,b:9043", "--replication", "dc1:3"]
    run(["config", "check", *flags, "--cache", "memcached://a,b", "--clock-skew-max", "250ms"])
    first = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(first)
    run(["config", "check", "--config", "again.toml"])
    again = capsys.readouterr().out
    assert tomllib.loads(again) == tomllib.loads(first)
    assert "file again.toml" in again


def test_a_password_is_masked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTER_CASSANDRA_PASSWORD", "hush")
    monkeypatch.setenv("COUNTER_CASSANDRA_USERNAME", "me")
    run(["config", "check", "--store", "cassandra", "--contact-points", "a"])
    text = capsys.readouterr().out
    assert 'cassandra_password = "********"' in text
    assert "hush" not in text


def test_wrong_settings_are_all_reported_and_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the bound of a duration was printed in microseconds."""
    for command in (["config", "check"], ["serve"]):
        assert run([*command, "--retention", "1m", "--port", "x"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 2
        assert "counter: retention (flag --retention): it is 1m; it must be from 10m to 365d" in err


def test_sqlite_has_no_schema_to_apply(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "apply"]) == 0
    assert "SQLite needs no schema" in capsys.readouterr().out
    assert list(Path().iterdir()) == []


def test_rolling_up_sqlite_from_outside_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollup"]) == 2
    assert "--store cassandra" in capsys.readouterr().err


def test_a_flag_that_is_not_known_ends_with_2_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--retentoin", "7d"]) == 2
    assert "retention" in "".join(capsys.readouterr())


def test_help_shows_defaults_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    run(["serve", "--help"])
    text = capsys.readouterr().out
    retention = Settings.model_fields["retention"].default
    assert f"[{format_duration(retention)}]" in text


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: it was 0.0.0."""
    run(["--version"])
    assert capsys.readouterr().out.strip() == metadata.version("distributed-counter-server")
