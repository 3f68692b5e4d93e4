"""Starts the worker processes and ends them. If one ends by itself, so does the server; guard/restarts.py starts it again."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from common.config import EngineConfig
from stage9_server.hub import Hub
from stage9_server.ipc import Settings

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 2.0  # for a worker to end when it is asked to; then it is killed


class WorkerFailed(Exception):
    """A worker can't be kept alive. `status` is the server's exit status."""

    status = 1


class Workers:
    """Owns the worker processes."""

    guard = False  # passed on to them

    def __init__(self, hub: Hub, folder: str, engine: EngineConfig, max_queue: int):
        self.hub, self.stopping = hub, False
        self.settings = {"folder": folder, "parent": os.getpid(), "engine": engine, "max_queue": max_queue}
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> None:
        """Until one of them ends."""
        ends = {name: asyncio.ensure_future((await self.spawn(name)).wait()) for name in self.hub.names}
        await asyncio.wait(ends.values(), return_when=asyncio.FIRST_COMPLETED)
        if not self.stopping:
            raise WorkerFailed(f"the {next(name for name, end in ends.items() if end.done())} died")

    async def all_up(self) -> None:
        while len(self.hub.up) < len(self.hub.names):
            await asyncio.sleep(0.02)

    async def spawn(self, name: str, incarnation: int = 0) -> asyncio.subprocess.Process:
        settings = Settings(name, incarnation, **self.settings, guard=self.guard)
        module = f"stage9_server.{name.split('-')[0]}_worker"
        return await self.start(name, module, msgspec.json.encode(settings).decode())

    async def start(self, name: str, module: str, argument: str) -> asyncio.subprocess.Process:
        """A session of its own: Ctrl-C passes it by, and so does the end of the terminal."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, argument),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"},
        )
        self.processes[name] = process
        return process

    async def stop(self) -> None:
        """End all of them: asked first, killed soon after."""
        self.stopping = True
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*(process.wait() for process in self.processes.values()))
        self.kill()
        await asyncio.gather(*(process.wait() for process in self.processes.values()))

    def kill(self) -> None:
        self.stopping = True
        for process in self.processes.values():
            kill_session(process.pid)


def kill_session(pid: int) -> None:
    """A worker and whatever it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
