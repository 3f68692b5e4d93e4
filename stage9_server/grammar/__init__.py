"""Texts that follow a grammar: which tokens may come next. Without it every token may."""

MAX_GRAMMAR = 64 * 1024  # characters
