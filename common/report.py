"""What a run shows and keeps: tables in the terminal, JSON records, plots. One style for all."""

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
# Okabe & Ito (2008): told apart by the colour-blind, and on light and dark ground
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# of matplotlib, for every plot; the ground is white and opaque, so that a plot reads the same on a dark page
STYLE = {
    "axes.axisbelow": True,
    "axes.formatter.min_exponent": 4,  # 100, 1000, then 10^4
    "axes.grid": True,
    "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.h_pad": 0.1,  # inches
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.facecolor": "white",
    "figure.figsize": (7, 4.2),
    "font.size": 11,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "savefig.dpi": 144,
}


def say(text: str = "") -> None:
    console.print(text, markup=False)


def heading(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
    """Print rows; numbers to the right."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        number = all(isinstance(row[index], int | float) for row in rows)
        result.add_column(column, justify="right" if number else "left")
    for row in rows:
        result.add_row(*(f"{cell:,}" if isinstance(cell, int | float) else str(cell) for cell in row))
    console.print(result)


def device_name() -> str:
    """Short name of the machine in file names: `cpu`, or the GPU's, such as `h200`."""
    import torch  # here and below: a client of a server can do without

    return torch.cuda.get_device_name().lower().split()[-1] if torch.cuda.is_available() else "cpu"


def machine() -> dict:
    """Where a record was made."""
    import torch

    from common.device import cpu_multiplies_bfloat16

    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            processor = line.split(":")[1].strip()
            break
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_native": torch.cuda.is_available() or cpu_multiplies_bfloat16(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def results_path(script: str, name: str) -> Path:
    """stageN_*/results/NAME beside a script's __file__."""
    return Path(script).resolve().parent / "results" / name


def record_name(name: str = "", devices: int = 1) -> str:
    return f"{device_name()}{f'x{devices}' if devices > 1 else ''}{'-' * bool(name)}{name}.json"


def save(script: str, name: str, args: argparse.Namespace, data: dict, devices: int = 1) -> Path:
    """Write results/<device>[x<devices>][-name].json: machine, flags, data."""
    path = results_path(script, record_name(name, devices))
    path.parent.mkdir(exist_ok=True)
    flags = {key: value for key, value in vars(args).items() if key != "save"}
    path.write_text(json.dumps({"machine": machine(), "flags": flags, **data}, indent=1) + "\n")
    say(f"wrote {path.name}")
    return path


@contextmanager
def plot(script: str, name: str, title: str, x: str, y: str):
    """A figure to draw into; written to results/NAME.png at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(["default", STYLE]):
        figure, axes = pyplot.subplots()
        axes.set(title=title, xlabel=x, ylabel=y)
        yield axes
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        path = results_path(script, f"{name}.png")
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)
        say(f"wrote {path.name}")
