"""``python -m counter``."""

from counter.cli import main

main()
