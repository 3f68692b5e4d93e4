"""Starts the server and ends it: python -m stage9_server.launch --model … --port …

The main process is the API server, the only one with a TCP port. It starts the workers, and removes all traces in the end.
"""

import argparse
import asyncio
import socket
import sys

import uvicorn
import uvloop

from common import cli
from stage9_server.cli import listener, parse, private_folder, stop_signal
from stage9_server.guard.connections import Server
from stage9_server.guard.guard import Guard, NoGuard, make_guard
from stage9_server.guard.pauses import freeze_garbage
from stage9_server.hub import Hub
from stage9_server.observe.logs import configure, throughput_lines
from stage9_server.openai_api.app import create_app
from stage9_server.workers import WorkerFailed


def main() -> None:
    args = parse(__doc__)
    configure(args.log_level)
    status = 0
    with listener(args.host, args.port) as sock, private_folder() as folder:
        try:
            uvloop.run(serve(args, folder, sock))
        except WorkerFailed as error:
            status = error.status
            if str(error):
                print(f"error: {error}", file=sys.stderr)
    cli.leave(status)


async def serve(args: argparse.Namespace, folder: str, sock: socket.socket) -> None:
    """Until a signal comes, or a worker can't be kept alive."""
    guard = make_guard(args, sock)
    hub = guard.hub(folder, args.tokenizers)
    workers = guard.workers(hub, folder, cli.config(args), args.max_queue)
    stop = asyncio.ensure_future(stop_signal(workers.kill, folder).wait())
    tasks = [stop, asyncio.ensure_future(hub.run()), asyncio.ensure_future(workers.run())]
    lines = asyncio.ensure_future(throughput_lines(hub))
    try:
        start = asyncio.ensure_future(workers.all_up())
        await asyncio.wait([start, *tasks], return_when=asyncio.FIRST_COMPLETED)
        start.cancel()
        if start.done() and not stop.done():
            await answer(args, hub, guard, sock, tasks)
        for task in tasks:
            if task.done():
                task.result()  # raises what went wrong
    finally:
        await workers.stop()
        for task in (*tasks, lines):
            task.cancel()
        await asyncio.gather(*tasks, lines, return_exceptions=True)
        hub.close()


async def answer(args, hub: Hub, guard: Guard | NoGuard, sock: socket.socket, until: list[asyncio.Future]) -> None:
    """Serve the API until one of the tasks is done; then answer what is open, within limits."""
    app = create_app(hub, args.served_model_name, guard, tuple(args.cors_origin), args.tool_call_parser, args.inspect)
    quiet = {"lifespan": "off", "ws": "none", "access_log": False, "log_level": "warning", "log_config": None}
    quiet |= {"http": guard.protocol, "timeout_graceful_shutdown": args.drain_seconds + 1}
    server = Server(uvicorn.Config(app, **quiet), guard)
    freeze_garbage()
    serving = asyncio.ensure_future(server.serve([sock]))
    sock.listen()  # from here on clients may come, a moment before they are looked at
    host, port = sock.getsockname()[:2]
    print(f"{args.served_model_name[0]} is served at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    await asyncio.wait([serving, *until], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await hub.drain(args.drain_seconds)
    await serving


if __name__ == "__main__":
    cli.run(main)
