"""Make a release: set the version wherever it is written, date the changelog, build and check what
is uploaded. The upload itself is left to the maintainer."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
#: A released version, or one that is being worked on (PEP 440; npm writes it as semver.org has it).
_VERSION: Final = r"\d+\.\d+\.\d+(?:\.dev0|-dev\.0)?"
#: Where the version is written: a file, and a pattern of what is right before it there.
_PLACES: Final = (
    ("counter/__init__.py", '__version__ = "'),
    ("clients/python/counter_client/__init__.py", '__version__ = "'),
    ("clients/typescript/package.json", '"version": "'),
    ("clients/typescript/package-lock.json", r'"distributed-counter-client",\s+"version": "'),
    ("compose.yaml", "image: distributed-counter:"),
    ("deploy/kubernetes/base/kustomization.yaml", "newTag: "),
    ("Dockerfile", 'image.version="'),
    ("docs/how-to/deploy.md", "distributed-counter:"),
    ("docs/how-to/back-up-and-restore.md", "made by version "),
    ("docs/how-to/upgrade.md", "the page of version "),
    # The newest entry.
    ("CHANGELOG.md", r"\A(?s:.*?)\n## \["),
)


def versions(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield each place where the version is written, and what is written there."""
    for path, before in _PLACES:
        text = (root / path).read_text(encoding="utf-8")
        for each in re.findall(f"{before}({_VERSION})", text) or ["none"]:
            yield path, each.replace("-dev.", ".dev")


def set_version(old: str, new: str, root: Path = ROOT) -> None:
    """Write *new* wherever *old* is the version. In the changelog this dates the newest entry; if
    *new* is worked on, it begins one."""
    for path, before in _PLACES:
        written = new.replace(".dev", "-dev.") if path.endswith(".json") else new
        file = root / path
        text = file.read_text(encoding="utf-8")
        if path != "CHANGELOG.md":
            text = re.sub(f"({before}){_VERSION}", rf"\g<1>{written}", text)
        elif "dev" in new:
            text = text.replace(f"## [{old}]", f"## [{new}] - unreleased\n\n## [{old}]", 1)
        else:
            dated = f"## [{new}] - {datetime.now(UTC):%Y-%m-%d}"
            text = text.replace(f"## [{old}] - unreleased", dated, 1)
        file.write_text(text, encoding="utf-8")


def _run(*command: str) -> None:
    print(f"$ {' '.join(command)}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    """``scripts/release VERSION``. It may be run again after a step that failed."""
    [new] = sys.argv[1:] or [""]
    if not re.fullmatch(r"\d+\.\d+\.\d+(?:\.dev0)?", new):
        sys.exit(f"scripts/release: {new[:40]!r} is no version such as 0.2.0 or 0.3.0.dev0")
    if _git("status", "--porcelain"):
        sys.exit("scripts/release: there are changes, or new files, that are not committed")
    tags = (f"v{new}", f"clients/go/v{new}")
    if there := _git("tag", "--list", *tags):
        sys.exit(f"scripts/release: {new} is released already: {', '.join(there.split())}")
    [old, *others] = {version for _, version in versions()}
    if others:
        sys.exit(f"scripts/release: there is more than one version: {old}, {', '.join(others)}")
    if old != new:
        if ("dev" in old) is ("dev" in new):
            sys.exit(f"scripts/release: {old} comes first: the changelog has no entry for {new}")
        set_version(old, new)
        _run("git", "commit", "--all", "--message", f"Version {new}")
    if "dev" in new:
        return
    _run("scripts/test")
    _run("scripts/check")
    for package in (ROOT / "dist").glob("*.tgz"):
        package.unlink()
    _run("scripts/package")
    _run("npm", "pack", "--pack-destination", "dist", "./clients/typescript")
    for tag in tags:
        _run("git", "tag", "--annotate", "--message", f"Version {new}", tag)
    print(f"Nothing is uploaded yet. To do so:\n  git push origin HEAD {' '.join(tags)}")
    print("  twine upload dist/*.whl\n  npm publish dist/*.tgz")


if __name__ == "__main__":
    main()
