"""Settings: where they come from, what their values mean, and how they must fit each other."""
