"""Prometheus's own tool, which judges expositions and rules."""

import shutil
import subprocess

from tests.support.needs import miss


def promtool(*arguments: str, given: str = "") -> str:
    """The output of promtool for *arguments* and input *given*. Raises CalledProcessError."""
    if shutil.which("promtool") is None:
        miss("there is no promtool (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", *arguments],
        check=False,
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        print(done.stdout, done.stderr)
    done.check_returncode()
    return done.stdout
