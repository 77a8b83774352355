"""Run ``python -m rollup``: the same as ``counter rollup``, with the same flags."""

import sys

from counter.cli.app import app

app(["rollup", *sys.argv[1:]])
