"""What a hostile or broken world asks for: key and host names, sizes, slow and half-closed clients, endless templates, workers
that die.

Without this room (`--no-guard`, the null forms) the server answers every well-behaved client just the same; any other can stop
it, fill its memory, or read it from a foreign web page, and a worker that dies ends it.
"""
