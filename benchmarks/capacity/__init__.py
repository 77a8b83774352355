"""What one process, node or server does a second on this machine, for ``counter plan``."""
