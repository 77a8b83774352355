"""Run the background rollup: turn the event log's dirty windows into checkpoints."""
