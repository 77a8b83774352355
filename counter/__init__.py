"""A distributed counter service with event-sourced dedup: the core and its adapters."""

__version__ = "0.1.0"
