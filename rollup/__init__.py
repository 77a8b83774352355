"""The background rollup: turns the event log's dirty windows into checkpoints."""
