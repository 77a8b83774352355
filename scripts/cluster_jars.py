"""Cassandra's jars, from Maven Central, pinned by version and kept outside of the tree's files."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from scripts.cluster_process import ClusterError

CASSANDRA: Final = "5.0.5"
#: The versions that this Cassandra runs on.
JAVA_VERSIONS: Final = (11, 17)
ROOT: Final = Path(__file__).resolve().parents[1]
_POM: Final = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>counter</groupId>
  <artifactId>cluster</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.cassandra</groupId>
      <artifactId>cassandra-all</artifactId>
      <version>{CASSANDRA}</version>
    </dependency>
  </dependencies>
</project>
"""


def missing() -> str | None:
    """What to install before Cassandra can run here; None where all is there."""
    version = _java_version()
    if version not in JAVA_VERSIONS:
        found = "there is no `java`" if version is None else f"`{java()}` is Java {version}"
        return (
            f"Cassandra {CASSANDRA} needs Java 17, and {found} (Debian, Ubuntu: apt-get install"
            " openjdk-17-jdk-headless); JAVA_HOME names another one"
        )
    if shutil.which("mvn") is None and not _is_complete(folder()):
        return (
            f"Cassandra's jars come by Maven, and there is no `mvn` (Debian, Ubuntu: apt-get"
            f" install maven); COUNTER_JARS names a folder that has them for {CASSANDRA} already"
        )
    return None


def java() -> str:
    """The command: that of ``$JAVA_HOME``, else the first of the path."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def _java_version() -> int | None:
    """17 for Java 17; None where there is none."""
    try:
        said = subprocess.run([java(), "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r'version "(\d+)', said.stderr)
    return int(found[1]) if found else None


def folder() -> Path:
    """Where the jars are kept: ``$COUNTER_JARS``, else an ignored folder of the tree."""
    given = os.environ.get("COUNTER_JARS")
    return Path(given).resolve() if given else ROOT / ".cluster" / f"jars-{CASSANDRA}"


def fetch() -> Path:
    """The folder with the jars, filled at the first call. Raises ClusterError."""
    kept = folder()
    if problem := missing():
        raise ClusterError(problem)
    if _is_complete(kept):
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with (kept.parent / f"{kept.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_complete(kept):
            _download(kept)
    return kept


def _is_complete(kept: Path) -> bool:
    return (kept / f"cassandra-all-{CASSANDRA}.jar").is_file()


def _download(kept: Path) -> None:
    """Fill the folder in one step: an interrupted download leaves none that looks complete."""
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="jars-") as name:
        pom = Path(name) / "pom.xml"
        pom.write_text(_POM, encoding="utf-8")
        jars = Path(name) / "lib"
        done = subprocess.run(
            [
                *("mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"),
                *("-DincludeScope=runtime", f"-DoutputDirectory={jars}"),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not _is_complete(jars):
            said = (done.stdout + done.stderr).strip()
            raise ClusterError(f"Maven could not fetch Cassandra {CASSANDRA}:\n{said[-2_000:]}")
        shutil.rmtree(kept, ignore_errors=True)
        jars.rename(kept)
