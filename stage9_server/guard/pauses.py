"""Pauses that every stream would see: those of the garbage collector."""

import gc


def freeze_garbage() -> None:
    """The garbage collector need not look again at what has been loaded: PyTorch alone are half a million objects. And not
    several times per request for cycles, of which there are few.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
