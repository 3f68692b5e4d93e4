"""What the API server and the scheduler send to each other while somebody looks on."""

from msgspec import Struct


class Inspect(Struct, tag=True):
    """API server -> scheduler: somebody looks at the engine's steps, or nobody does any more."""

    on: bool
    text: bool = False  # with what the tokens say
    anew: bool = True  # for somebody who has seen nothing yet


class Inspected(Struct, tag=True):
    """Scheduler -> API server: lines of a trace."""

    header: bytes
    lines: list[bytes]
