"""The jars of a Java program, from Maven Central, pinned by version and kept out of the tree."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.cluster_process import ClusterError

CASSANDRA: Final = "5.0.5"
ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Jars:
    """The jars of one program.

    *artifacts* are ``group:artifact:version``, the program's own first. ``$variable`` names a
    folder that has them already; without it they are kept in an ignored folder of the tree.
    """

    server: str
    version: str
    artifacts: tuple[str, ...]
    #: The versions of Java that it runs on.
    java_versions: tuple[int, ...]
    variable: str
    kept_in: str

    def missing(self) -> str | None:
        """Return the packages to install before the server can run; None if nothing is missing."""
        version = _java_version()
        if version not in self.java_versions:
            found = "there is no `java`" if version is None else f"`{java()}` is Java {version}"
            return (
                f"{self.server} {self.version} needs Java 17, and {found} (Debian, Ubuntu: apt-get"
                " install openjdk-17-jdk-headless); JAVA_HOME names another one"
            )
        if shutil.which("mvn") is None and not self._is_complete(self.folder()):
            return (
                f"{self.server}'s jars come by Maven, and there is no `mvn` (Debian, Ubuntu:"
                f" apt-get install maven); {self.variable} names a folder that has them for"
                f" {self.version} already"
            )
        return None

    def folder(self) -> Path:
        """The folder of the jars."""
        given = os.environ.get(self.variable)
        return Path(given).resolve() if given else ROOT / ".cluster" / self.kept_in

    @property
    def jar(self) -> str:
        """The name of the program's own jar."""
        _, artifact, version = self.artifacts[0].split(":")
        return f"{artifact}-{version}.jar"

    def fetch(self) -> Path:
        """The folder with the jars, filled at the first call. Raises ClusterError."""
        kept = self.folder()
        if problem := self.missing():
            raise ClusterError(problem)
        if self._is_complete(kept):
            return kept
        kept.parent.mkdir(parents=True, exist_ok=True)
        with (kept.parent / f"{kept.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._is_complete(kept):
                self._download(kept)
        return kept

    def _is_complete(self, kept: Path) -> bool:
        return (kept / self.jar).is_file()

    def _download(self, kept: Path) -> None:
        """Fill the folder in one step: an interrupted download leaves none that looks complete."""
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix="jars-") as name:
            pom = Path(name) / "pom.xml"
            pom.write_text(_pom(self.artifacts), encoding="utf-8")
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
            if done.returncode or not self._is_complete(jars):
                said = (done.stdout + done.stderr).strip()
                raise ClusterError(
                    f"Maven could not fetch {self.server} {self.version}:\n{said[-2_000:]}"
                )
            shutil.rmtree(kept, ignore_errors=True)
            jars.rename(kept)


_CASSANDRA: Final = Jars(
    server="Cassandra",
    version=CASSANDRA,
    artifacts=(f"org.apache.cassandra:cassandra-all:{CASSANDRA}",),
    java_versions=(11, 17),
    variable="COUNTER_JARS",
    kept_in=f"jars-{CASSANDRA}",
)
#: Its jar has all that it needs.
OPENAPI_GENERATOR: Final = Jars(
    server="OpenAPI Generator",
    version="7.25.0",
    artifacts=("org.openapitools:openapi-generator-cli:7.25.0",),
    java_versions=(11, 17, 21, 25),
    variable="OPENAPI_GENERATOR_JARS",
    kept_in="openapi-generator-7.25.0",
)
#: Amazon's local engine.
DYNAMODB: Final = Jars(
    server="DynamoDB",
    version="2.6.1",
    artifacts=("com.amazonaws:DynamoDBLocal:2.6.1",),
    java_versions=(17, 21, 25),
    variable="DYNAMODB_JARS",
    kept_in="dynamodb-2.6.1",
)


def missing() -> str | None:
    """Return the packages to install before Cassandra can run; None if nothing is missing."""
    return _CASSANDRA.missing()


def fetch() -> Path:
    """The folder with Cassandra's jars, filled at the first call. Raises ClusterError."""
    return _CASSANDRA.fetch()


def java() -> str:
    """The command: that of ``$JAVA_HOME``, else the first of the path."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def _java_version() -> int | None:
    """Return 17 for Java 17; None if there is no Java."""
    try:
        said = subprocess.run([java(), "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r'version "(\d+)', said.stderr)
    return int(found[1]) if found else None


def _pom(artifacts: tuple[str, ...]) -> str:
    """A project that depends on *artifacts* and nothing else."""
    wanted = "".join(
        f"    <dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version></dependency>\n"
        for group, artifact, version in (each.split(":") for each in artifacts)
    )
    return f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>counter</groupId>
  <artifactId>cluster</artifactId>
  <version>1</version>
  <dependencies>
{wanted}  </dependencies>
</project>
"""
