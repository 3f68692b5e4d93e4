"""Where a step's time goes: named ranges in a Chrome/Perfetto trace, and a table."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common import report
from common.device import synchronize
from stage2_req.engine import Engine

LABELS = ("schedule", "prepare", "forward", "sample", "update")


def name_ranges(engine: Engine) -> None:
    """Let the profiler see the parts of a step, from outside."""
    for owner, method, label in (
        (engine.scheduler, "schedule", "schedule"),
        (engine, "input_ids", "prepare"),
        (engine.runner, "run", "forward"),
        (engine, "sampler", "sample"),
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


def device_ms(result: profile, steps: int) -> float:
    """Milliseconds a step in which the device did anything; kernels that overlap count once."""
    cuda = torch.autograd.DeviceType.CUDA
    spans = [e.time_range for e in result.events() if e.device_type == cuda and e.name not in LABELS]
    busy, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return busy / steps / 1e3


def show_kernels(result: profile, steps: int, most: int = 12) -> None:
    events = sorted(_on_device(result), key=lambda event: -event.self_device_time_total)[:most]
    rows = [[e.key[:70], round(e.count / steps, 1), round(e.self_device_time_total / steps / 1e3, 3)] for e in events]
    report.table("On the device", ["kernel", "calls a step", "ms a step"], rows)


def _on_device(result: profile) -> list:
    events = result.key_averages()
    return [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and e.key not in LABELS]
