"""Programmatic dependent launch: a kernel may start while the one before it is still ending, and waits inside.

On Hopper GPUs that hides most of a launch's latency, which at small batches is most of a kernel's time. The rule that
makes it safe: every kernel launched this way waits (gdc_wait) before it touches anything that another kernel wrote.
"""

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def pdl(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that has a PDL parameter."""
    return (
        {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}
    )  # the interpreter knows no launch_pdl


@triton.jit
def wait_for_the_kernel_before():
    gdc_wait()
    gdc_launch_dependents()
