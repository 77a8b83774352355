"""The core: the five verbs (add, clear, add many, add atomically, get) and what they need."""
