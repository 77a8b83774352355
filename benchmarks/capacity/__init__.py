"""Measure the rates of one process, node and server on this machine: docs/how-to/size-it.md."""
