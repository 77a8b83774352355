"""Cassandra's own tool for operators, on a node of a cluster that runs here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from scripts.cluster_jars import fetch, java
from scripts.cluster_process import ClusterError, ServerProcess
from scripts.cluster_servers import MODULE_FLAGS, QUICK_FLAGS
from scripts.service_process import HOST, free_ports

_TIMEOUT_S: Final = 300.0


def nodetool(node: ServerProcess, *arguments: str) -> str:
    """Return the output of ``nodetool`` with *arguments*. Raises ClusterError if it fails.

    A node has no port for it, so one is opened meanwhile.
    """
    (port,) = free_ports(1)
    opened = f"jmxremote.host={HOST} jmxremote.authenticate=false jmxremote.ssl=false"
    ports = f"jmxremote.port={port} jmxremote.rmi.port={port}"
    _jcmd(node, "ManagementAgent.start", *ports.split(), *opened.split())
    try:
        tool = "org.apache.cassandra.tools.NodeTool"
        # It writes a history to the home directory.
        home = f"-Duser.home={node.log.parent}"
        command = [java(), *QUICK_FLAGS, home, *MODULE_FLAGS, "-cp", f"{fetch()}/*", tool]
        return _run([*command, "-h", HOST, "-p", str(port), *arguments])
    finally:
        _jcmd(node, "ManagementAgent.stop")


def _jcmd(node: ServerProcess, *command: str) -> None:
    found = shutil.which(java())
    if found is None:
        raise ClusterError("there is no java")
    _run([str(Path(found).resolve().parent / "jcmd"), str(node.pid()), *command])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{Path(command[0]).name} failed: {error}") from error
    if done.returncode != 0:
        said = f"{done.stdout}{done.stderr}".strip()[-1_000:]
        raise ClusterError(f"{' '.join(command[-4:])} ended with {done.returncode}: {said}")
    return done.stdout
