"""Audit the locked packages: with pip-audit if its database can be reached, otherwise offline.

Offline it checks that each package is pinned to one version and hashes, so that it cannot be
replaced, and that ``deploy/advisories.toml`` does not list the version. That list is maintained by
hand and knows less than pip-audit. The last line of the output says which check was run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cyclopts import App
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parents[1]
LOCKS: Final = ("requirements.lock", "requirements-bench.lock", "requirements-dev.lock")
ADVISORIES: Final = ROOT / "deploy" / "advisories.toml"
#: Audited first, to find out whether the database can be reached.
_PROBE: Final = "h11"
_PROBE_TIMEOUT_S: Final = 15
_AUDIT_TIMEOUT_S: Final = 300
_HASH: Final = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Locked:
    """One version in a lock file; *text* is its whole entry."""

    lock: str
    name: str
    version: str
    text: str


@dataclass(frozen=True, slots=True)
class Advisory:
    """A known vulnerability of some versions of a package."""

    package: str
    affected: SpecifierSet
    id: str
    what: str


def locked(lock: str, text: str) -> Iterator[Locked | str]:
    """Yield the entries of *text*, the content of *lock*; a problem, as text, for an entry that is
    not one version with its hashes."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        entry = line.partition(" #")[0].strip()
        if not entry or entry.startswith("#"):
            continue
        wanted = _HASH.sub("", entry).strip()
        try:
            requirement = Requirement(wanted)
        except InvalidRequirement:
            yield f"{lock}: {wanted[:60]!r} is no requirement of a package"
            continue
        pins = list(requirement.specifier)
        if requirement.url or len(pins) != 1 or pins[0].operator != "==" or "*" in pins[0].version:
            yield f"{lock}: {wanted[:60]!r} is not pinned to one version"
        elif not _HASH.search(entry):
            yield f"{lock}: {wanted[:60]!r} has no hash: run scripts/lock"
        else:
            yield Locked(lock, canonicalize_name(requirement.name), pins[0].version, entry)


def advisories(text: str) -> list[Advisory]:
    """Parse *text*, the content of the list."""
    return [
        Advisory(
            canonicalize_name(each["package"]),
            SpecifierSet(each["affected"], prereleases=True),
            each["id"],
            each["what"],
        )
        for each in tomllib.loads(text)["advisory"]
    ]


def known_faults(found: Iterable[Locked], known: Sequence[Advisory]) -> Iterator[str]:
    """Return the advisories that affect a locked version."""
    for each in found:
        for advisory in known:
            if advisory.package == each.name and Version(each.version) in advisory.affected:
                yield (
                    f"{each.lock}: {each.name} {each.version} has {advisory.id}:"
                    f" {advisory.what} (affected: {advisory.affected}); run scripts/lock --upgrade"
                )


def pip_audit(requirements: Path, timeout_s: int) -> Mapping[str, Any] | str:
    """Return pip-audit's report about the file *requirements*, or why there is none."""
    command = [
        *(sys.executable, "-m", "pip_audit", "--requirement", str(requirements)),
        *("--disable-pip", "--require-hashes", "--vulnerability-service", "pypi"),
        *("--format", "json", "--progress-spinner", "off", "--timeout", "5"),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s} s"
    try:
        report: Mapping[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {done.returncode}"
    return report


def no_database(found: Sequence[Locked]) -> str | None:
    """Return why the database cannot be used; None if it can. Audits one package."""
    probe = next(each for each in found if each.name == _PROBE)
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "one.txt"
        one.write_text(probe.text + "\n", encoding="utf-8")
        report = pip_audit(one, _PROBE_TIMEOUT_S)
    if isinstance(report, str):
        return report
    # If the registry is a mirror without the database, a package is skipped, which looks like
    # a clean response.
    skipped = [each["skip_reason"] for each in report["dependencies"] if "skip_reason" in each]
    return skipped[0] if skipped else None


def from_database(lock: str) -> Iterator[str]:
    """Yield the advisories about the versions in *lock*."""
    report = pip_audit(ROOT / lock, _AUDIT_TIMEOUT_S)
    if isinstance(report, str):
        yield f"{lock}: pip-audit failed: {report}"
        return
    for each in report["dependencies"]:
        if "skip_reason" in each:
            yield f"{lock}: {each['name']}: {each['skip_reason']}"
        for fault in each.get("vulns", ()):
            fixed = ", ".join(fault["fix_versions"]) or "no version"
            yield f"{lock}: {each['name']} {each['version']} has {fault['id']}; fixed in {fixed}"


def main(*, offline: bool = False) -> int:
    """Check the locked packages for known vulnerabilities.

    Exit codes: 0 if none is known, 1 if one is, or if something is not pinned.

    Parameters
    ----------
    offline
        Do not use a database.
    """
    entries = [e for lock in LOCKS for e in locked(lock, (ROOT / lock).read_text("utf-8"))]
    problems = [each for each in entries if isinstance(each, str)]
    found = [each for each in entries if isinstance(each, Locked)]
    known = advisories(ADVISORIES.read_text("utf-8"))
    problems += known_faults(found, known)
    # The dev lock contains all of them.
    why = "--offline" if offline else no_database(found)
    if why is None:
        problems += from_database(LOCKS[-1])
        ran = "pip-audit, and the list in deploy/advisories.toml"
    else:
        ran = (
            f"pins, hashes and the {len(known)} advisories in deploy/advisories.toml;"
            f" no database was asked: {why}"
        )
    for each in problems:
        print(each)
    versions = {(each.name, each.version) for each in found}
    print(f"{len(versions)} locked versions, {len(problems)} problems; audited by {ran}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(App(default_command=main, help_format="plaintext", version_flags=())())
