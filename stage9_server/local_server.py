"""A server in a process of its own, for scripts that need one: started with some flags, and stopped in the end."""

import contextlib
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from common.config import UserError
from stage9_server.cli import ENGINE_FLAGS, KEY_VARIABLE

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Running:
    process: subprocess.Popen
    url: str = ""
    lines: list[str] = field(default_factory=list)  # that it has printed


def as_flags(args) -> list[str]:
    """The engine's flags of a script, to start a server with."""
    flags = []
    for name in ENGINE_FLAGS:
        flag, value = name.replace("_", "-"), getattr(args, name, None)
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags


@contextlib.contextmanager
def running(*flags: str, timeout: float = 300.0, stderr=None) -> Iterator[Running]:
    """Start a server with these flags, wait until it answers, and stop it at the end. UserError if it doesn't start.

    A key in the environment is that of the user's own server, not of this one.
    """
    command = [sys.executable, "-m", "stage9_server.launch", *flags]
    env = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    server = Running(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True))
    started = threading.Event()

    def read() -> None:
        for line in server.process.stdout:
            server.lines.append(line.rstrip())
            if " is served at " in line:
                server.url = line.split()[-1]
                started.set()
        started.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not started.wait(timeout) or not server.url:
            raise UserError("the server did not start; its output is above")
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(15)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
        reader.join()
        server.process.stdout.close()


def metrics(url: str) -> dict[str, float]:
    """What the server at this address counts, by name; those with no label but the model's."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {s.name: s.value for family in families for s in family.samples if s.labels.keys() == {"model_name"}}
