"""A distributed counter service with event-sourced dedup: the core and its adapters."""
