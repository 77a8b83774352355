"""The command line: one flag for each setting, and the exit codes."""

import tomllib
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

from counter.cli.flags import RollupFlags, ServeFlags, StoreFlags
from counter.config.report import is_secret
from counter.config.settings import Settings, dataset_model, settings_model
from counter.quantities import format_duration
from tests.cli.shell import Shell

#: Settings that are no flags: a process list shows those, and tables do not fit on a line.
NO_FLAGS = {"extra_datasets", *filter(is_secret, settings_model().model_fields)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory in which nothing is set."""
    monkeypatch.chdir(tmp_path)


def names(flags: type) -> set[str]:
    return {each.name for each in fields(flags)}


def test_every_setting_is_a_flag() -> None:
    assert names(ServeFlags) == set(settings_model().model_fields) - NO_FLAGS


def test_dataset_settings_are_flags_of_every_command() -> None:
    """Every process must use the same settings of a dataset."""
    assert set(dataset_model().model_fields) <= names(StoreFlags)
    assert names(StoreFlags) < names(RollupFlags) < names(ServeFlags)


def test_the_effective_settings_are_toml_with_their_origins(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("counter.toml").write_text('slice = "12h"\n[datasets.videos]\nretention = "30d"\n')
    monkeypatch.setenv("COUNTER_RETENTION", "6d")
    text = shell.said("config", "check", "--port", "81", "--no-rollup")
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


def test_the_effective_settings_can_be_read_again(shell: Shell, tmp_path: Path) -> None:
    flags = ["--cache", "memcached://a,b", "--clock-skew-max", "250ms", "--hosts", "a,b"]
    first = shell.said("config", "check", *flags)
    (tmp_path / "again.toml").write_text(first)
    again = shell.said("config", "check", "--config", "again.toml")
    assert tomllib.loads(again) == tomllib.loads(first)
    assert "file again.toml" in again


def test_wrong_settings_are_all_reported_and_end_with_2(shell: Shell) -> None:
    """Regression: the bound of a duration was printed in microseconds."""
    for command in (["config", "check"], ["serve"]):
        err = shell.fails(2, *command, "--retention", "1m", "--port", "x")
        assert len(err.splitlines()) == 2
        assert "counter: retention (flag --retention): it is 1m; it must be from 10m to 365d" in err


def test_sqlite_has_no_schema_to_apply(shell: Shell) -> None:
    assert "SQLite needs no schema" in shell.said("schema", "apply")
    assert list(Path().iterdir()) == []


def test_rolling_up_sqlite_from_outside_is_refused(shell: Shell) -> None:
    assert "give another --store" in shell.fails(2, "rollup")


def test_a_flag_that_is_not_known_ends_with_2_too(shell: Shell) -> None:
    assert "retention" in shell.fails(2, "serve", "--retentoin", "7d")


def test_help_shows_defaults_as_they_are(shell: Shell) -> None:
    retention = Settings.model_fields["retention"].default
    assert f"[{format_duration(retention)}]" in shell.said("serve", "--help")


def test_the_version_is_the_packages(shell: Shell) -> None:
    """Regression: it was 0.0.0."""
    assert shell.said("--version") == metadata.version("distributed-counter-server")
