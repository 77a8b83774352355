"""The console: a page for people, and what it needs. It asks the API as any client does."""
