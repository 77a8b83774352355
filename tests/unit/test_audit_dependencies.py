"""The audit of locked packages: refusals with and without a database."""

from collections.abc import Mapping
from typing import Any

import pytest

from scripts import audit_dependencies as audit

HASH = "--hash=sha256:" + "0" * 64


def problems_of(text: str) -> list[str]:
    """The problems of a lock with this content."""
    entries = list(audit.locked("some.lock", text))
    known = audit.advisories(audit.ADVISORIES.read_text("utf-8"))
    found = [each for each in entries if isinstance(each, audit.Locked)]
    return [each for each in entries if isinstance(each, str)] + list(
        audit.known_faults(found, known)
    )


def test_locked_packages_are_pinned_hashed_and_without_advisories() -> None:
    for lock in audit.LOCKS:
        text = (audit.ROOT / lock).read_text("utf-8")
        assert problems_of(text) == []
        assert len(list(audit.locked(lock, text))) > 20


def test_an_advisory_concerns_a_locked_package() -> None:
    """One about anything else would never speak."""
    text = (audit.ROOT / audit.LOCKS[-1]).read_text("utf-8")
    names = {each.name for each in audit.locked("lock", text) if isinstance(each, audit.Locked)}
    known = audit.advisories(audit.ADVISORIES.read_text("utf-8"))
    assert {each.package for each in known} <= names
    assert len({(each.package, each.id) for each in known}) == len(known)


@pytest.mark.parametrize(
    ("line", "response"),
    [
        (f"h11==0.14.0 {HASH}", "h11 0.14.0 has CVE-2025-43859"),
        (f"Starlette==0.49.0 {HASH}", "starlette 0.49.0 has CVE-2025-62727"),
        ("h11==0.16.0", "has no hash: run scripts/lock"),
        (f"h11>=0.16.0 {HASH}", "is not pinned to one version"),
        (f"h11==0.* {HASH}", "is not pinned to one version"),
        (f"h11 @ file:///h11.whl {HASH}", "is not pinned to one version"),
        ("--index-url somewhere", "is no requirement of a package"),
    ],
)
def test_a_planted_fault_is_found(line: str, response: str) -> None:
    (problem,) = problems_of(f"# a comment\n{line}\n    # via httpcore\n")
    assert response in problem


def test_a_lock_of_many_lines_is_read_whole() -> None:
    text = f"h11==0.16.0 ; python_version >= '3.11' \\\n    {HASH} \\\n    {HASH}\n    # via x\n"
    (entry,) = audit.locked("some.lock", text)
    assert isinstance(entry, audit.Locked)
    assert (entry.name, entry.version) == ("h11", "0.16.0")
    assert entry.text.count("--hash=sha256:") == 2


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("no answer within 15 s", "no answer within 15 s"),
        ({"dependencies": [{"name": "h11", "skip_reason": "not found"}]}, "not found"),
        ({"dependencies": [{"name": "h11", "version": "0.16.0", "vulns": []}]}, None),
    ],
)
def test_a_skipped_package_is_not_a_clean_result(
    response: Mapping[str, Any] | str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror has packages and no advisories: pip-audit skips all of them and finds nothing."""
    monkeypatch.setattr(audit, "pip_audit", lambda _file, _timeout_s: response)
    entry = audit.Locked("lock", "h11", "0.16.0", f"h11==0.16.0 {HASH}")
    assert audit.no_database([entry]) == why


def test_known_advisories_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = {"id": "CVE-1", "fix_versions": ["2.0"]}
    response = {"dependencies": [{"name": "h11", "version": "0.16.0", "vulns": [fault]}]}
    monkeypatch.setattr(audit, "pip_audit", lambda _file, _timeout_s: response)
    (problem,) = audit.from_database("requirements-dev.lock")
    assert problem == "requirements-dev.lock: h11 0.16.0 has CVE-1; fixed in 2.0"
