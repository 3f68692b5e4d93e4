"""Where a step's time goes: named ranges in a Chrome/Perfetto trace, and a table."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common import report
from common.device import synchronize
from stage2_req.engine import Engine

LABELS = ("schedule", "forward", "update")


def name_ranges(engine: Engine) -> None:
    """Let the profiler see the parts of a step, from outside."""
    for owner, method, label in (
        (engine.scheduler, "schedule", "schedule"),
        (engine.runner, "forward", "forward"),
        (engine.scheduler, "update", "update"),
    ):
        setattr(owner, method, _named(label, getattr(owner, method)))


def _named(label: str, function: Callable) -> Callable:
    def inner(*args):
        with record_function(label):
            return function(*args)

    return inner


def profile_steps(engine: Engine, steps: int, trace: Path | None = None) -> profile:
    """Run some steps under the profiler; writes a trace to open in ui.perfetto.dev."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (engine.device.type == "cuda")
    synchronize(engine.device)
    with profile(activities=activities) as result:
        for _ in range(steps):
            engine.step()
        synchronize(engine.device)
    if trace:
        result.export_chrome_trace(str(trace))
        report.say(f"wrote {trace}; open it in https://ui.perfetto.dev")
    return result


def device_ms(result: profile, steps: int) -> dict[str, float]:
    """Milliseconds per step that each kernel adds to those before it: where two overlap, the time is the earlier one's."""
    cuda = torch.autograd.DeviceType.CUDA
    events = [e for e in result.events() if e.device_type == cuda and e.name not in LABELS]
    added, until = Counter(), 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        span = event.time_range
        added[event.name] += max(0.0, span.end - max(span.start, until)) / steps / 1e3
        until = max(until, span.end)
    return dict(added.most_common())


def show_kernels(result: profile, steps: int, most: int = 12) -> None:
    rows = [[name[:70], round(ms, 3)] for name, ms in device_ms(result, steps).items()][:most]
    report.table("On the device", ["kernel", "ms per step"], rows)
