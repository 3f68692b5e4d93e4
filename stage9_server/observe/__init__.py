"""To watch the server: metrics, logs, request ids. Without this room it would serve as well, and nobody would know how."""
