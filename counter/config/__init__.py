"""Read settings, parse their values, and check that they fit each other."""
