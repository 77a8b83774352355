"""Metrics, logs, traces and incidents of a process."""
