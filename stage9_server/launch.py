"""Starts the server, keeps its processes alive, and ends them: python -m stage9_server.launch --model … --port …

The main process is the API server, the only one with a TCP port. It starts the workers, restarts those that die, and
removes all traces in the end.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn
import uvloop
import zmq

from common import cli
from common.config import UserError
from stage9_server.api_server import create_app
from stage9_server.cli import parse
from stage9_server.guard.guard import Guard, Limits, NoGuard
from stage9_server.hub import Hub
from stage9_server.ipc import Settings, freeze_garbage
from stage9_server.observe.logs import configure, throughput_lines

ROOT = Path(__file__).resolve().parents[1]
LOOPBACK = ("localhost", "127.0.0.1", "::1")
STOP_SECONDS = 2.0  # for a worker to end when it is asked to; then it is killed


class WorkerFailed(Exception):
    """A worker can't be kept alive."""


class FetchFailed(Exception):
    """The model can't be had. The process that was to fetch it has said why; `status` is its exit status."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


# --- the workers ---


class Supervisor:
    """Owns the worker processes."""

    def __init__(self, hub: Hub, folder: str, args: argparse.Namespace, guard: Guard | NoGuard):
        self.hub, self.guard, self.stopping = hub, guard, False
        self.settings = {
            "folder": folder,
            "parent": os.getpid(),
            "engine": cli.config(args),
            "max_queue": args.max_queue,
            "guard": guard.on,
        }
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> None:
        """Fetch the model, once for all; then keep every worker alive. Raises what makes no sense to go on with."""
        if not self.settings["engine"].model.startswith("dummy:"):
            await self.fetch(self.settings["engine"].model)
        await asyncio.gather(*map(self.keep, self.hub.workers))

    async def fetch(self, model: str) -> None:
        """In a process of its own: converting a model takes PyTorch, which would stay in this one."""
        process = await self.start("fetch", "common.fetch", model)
        status = await process.wait()
        if not self.stopping:
            del self.processes["fetch"]
            if status:
                raise FetchFailed(status)

    async def spawn(self, name: str) -> asyncio.subprocess.Process:
        settings = Settings(name, self.hub.workers[name].incarnation, **self.settings)
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

    async def keep(self, name: str) -> None:
        """Start a worker, again and again. Raises UserError or WorkerFailed once that makes no sense."""
        kind, peer, was_up = name.split("-")[0], self.hub.workers[name], False
        while True:
            process = await self.spawn(name)
            end = asyncio.ensure_future(process.wait())
            while not peer.up and not end.done():
                await asyncio.wait({end}, timeout=0.02)
            if peer.up:
                was_up = True
                say(f"{name} is ready (process {process.pid})")
            status = await end
            kill_session(process.pid)  # what it has left behind
            if self.stopping:
                return
            self.hub.lost(name)
            await asyncio.sleep(0.1)  # for its Failed message
            failed = self.hub.last_words.pop(name, None)
            words = failed.message if failed else f"it ended with status {status}"
            if not was_up:
                raise UserError(words) if status == 2 else WorkerFailed(f"the {name} could not start: {words}")
            if reason := self.guard.gives_up(kind):
                raise WorkerFailed(f"{reason}: {words}")
            say(f"{name} died ({words}); starting it again")

    async def stop(self) -> None:
        """End all of them: asked first, killed soon after."""
        self.stopping = True
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        with contextlib.suppress(TimeoutError):
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
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def say(text: str) -> None:
    print(text, flush=True)


# --- the server ---


class Server(uvicorn.Server):
    """One that leaves the signals to us, and waits for no client for ever."""

    def __init__(self, config: uvicorn.Config, guard: Guard | NoGuard):
        super().__init__(config)
        self.guard = guard

    async def on_tick(self, counter: int) -> bool:  # ten times a second
        if counter % 10 == 0:
            self.guard.look(self.server_state.connections)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listener(host: str, port: int) -> socket.socket:
    """A socket that has the port but takes no connections yet. Raises UserError."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        result = socket.socket(family, kind, protocol)
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        result.bind(where)
    except (OSError, OverflowError) as error:
        raise UserError(f"can't listen at {host} port {port}: {error}; choose another --host or --port") from error
    return result


def main() -> None:
    args = parse(__doc__)
    configure(args.log_level)
    with listener(args.host, args.port) as sock:
        try:
            folder = tempfile.mkdtemp(prefix="sglang-zero-")
        except OSError as error:
            raise UserError(f"no folder for temporary files: {error}; set TMPDIR to one that has room") from error
        status = 0
        try:
            uvloop.run(serve(args, folder, sock))
        except WorkerFailed as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        except FetchFailed as error:
            status = error.status
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    cli.leave(status)


async def serve(args: argparse.Namespace, folder: str, sock: socket.socket) -> None:
    """Until a signal comes, or a worker can't be kept alive."""
    try:
        hub = Hub(folder, args.tokenizers)
    except zmq.ZMQError as error:
        raise UserError(f"no sockets in {folder}: {error}; set TMPDIR to a shorter path") from error
    guard = Guard(limits(args, sock)) if args.guard else NoGuard()
    supervisor, asked = Supervisor(hub, folder, args, guard), asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():  # for the second time
            supervisor.kill()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(130)
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
    stop = asyncio.ensure_future(asked.wait())
    tasks = [stop, asyncio.ensure_future(hub.run()), asyncio.ensure_future(supervisor.run())]
    lines = asyncio.ensure_future(throughput_lines(hub))
    try:
        start = asyncio.ensure_future(all_up(hub))
        await asyncio.wait([start, *tasks], return_when=asyncio.FIRST_COMPLETED)
        start.cancel()
        if start.done() and not stop.done():
            await answer(args, hub, guard, sock, tasks)
        for task in tasks:
            if task.done():
                task.result()  # raises what went wrong
    finally:
        await supervisor.stop()
        for task in (*tasks, lines):
            task.cancel()
        await asyncio.gather(*tasks, lines, return_exceptions=True)
        hub.close()


async def all_up(hub: Hub) -> None:
    while not all(worker.up for worker in hub.workers.values()):
        await asyncio.sleep(0.02)


def host_names(host: str, address: str) -> tuple[str, ...]:
    """By which names clients may know a server that listens at this address: any, if others than this machine reach it."""
    return tuple(dict.fromkeys((host.lower(), *LOOPBACK))) if ipaddress.ip_address(address).is_loopback else ()


def limits(args: argparse.Namespace, sock: socket.socket) -> Limits:
    hosts = host_names(args.host, sock.getsockname()[0])
    counts = args.max_concurrent, args.max_logprobs, args.max_body_bytes, args.client_seconds
    return Limits(args.api_key, hosts, *counts)


async def answer(
    args: argparse.Namespace, hub: Hub, guard: Guard | NoGuard, sock: socket.socket, until: list[asyncio.Future]
) -> None:
    """Serve the API until one of the tasks is done; then answer what is open, within limits."""
    app = create_app(hub, args.served_model_name, guard, tuple(args.cors_origin))
    quiet = {"lifespan": "off", "ws": "none", "access_log": False, "log_level": "warning", "log_config": None}
    quiet |= {"http": guard.protocol, "timeout_graceful_shutdown": args.drain_seconds + 1}
    server = Server(uvicorn.Config(app, **quiet), guard)
    freeze_garbage()
    serving = asyncio.ensure_future(server.serve([sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if serving.done() and (error := serving.exception()):
        raise UserError(f"can't listen at {args.host} port {args.port}: {error}; choose another --port") from error
    host, port = sock.getsockname()[:2]
    say(f"{args.served_model_name[0]} is served at http://{f'[{host}]' if ':' in host else host}:{port}")
    await asyncio.wait([serving, *until], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await hub.drain(args.drain_seconds)
    await serving


if __name__ == "__main__":
    cli.run(main)
