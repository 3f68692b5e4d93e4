"""Texts that follow a grammar: which tokens may come next. Without it every token may."""

MAX_GRAMMAR = 64 * 1024  # characters
# Of a JSON schema. A weak model would put blanks until its tokens are used up.
JSON_RULES = {"x-guidance": {"whitespace_pattern": r"[ \n]{1,16}"}}
