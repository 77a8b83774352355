"""Real faults on real servers, judged by the checker of the simulation."""
