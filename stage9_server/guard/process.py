"""How a worker's process begins and ends. Without it a worker that dies says nothing, and one whose server was killed stays."""

import ctypes
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import zmq

from common.cli import leave
from common.config import UserError
from stage9_server.ipc import API, ORPHANED, Settings, push_socket, send
from stage9_server.messages import Failed

PR_SET_PDEATHSIG = 1


def run_worker(main: Callable[[Settings], None]) -> None:
    """A worker's process, `python -m stage9_server.NAME_worker SETTINGS`, from the beginning to its end."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    if settings.guard:
        run_guarded(main, settings)
    else:
        main(settings)


def run_guarded(main: Callable[[Settings], None], settings: Settings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the API server ends a worker, or its death does
    signal.signal(signal.SIGTERM, end_once)
    signal.signal(signal.SIGHUP, end_once)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    sys.unraisablehook, status = partial(end_all_the_same, settings), 0
    try:
        if os.getppid() != settings.parent:  # it has gone before we could ask for the signal
            sys.exit(ORPHANED)
        with last_words(settings):
            main(settings)
    except SystemExit as end:
        status = end.code
    end_process(settings, status)


def end_process(settings: Settings, status: int) -> None:
    if status == ORPHANED:  # no other process is left to do it
        shutil.rmtree(settings.folder, ignore_errors=True)
    leave(status)


def end_all_the_same(settings: Settings, lost) -> None:
    """A signal may come where Python lets no exception out, for example at the end of an import."""
    if isinstance(lost.exc_value, SystemExit):
        end_process(settings, lost.exc_value.code)
    sys.__unraisablehook__(lost)


def end_once(number: int, _frame) -> None:
    """What has to be cleaned up on the way out is not interrupted again: of a process that dies each thread sends a SIGHUP."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(ORPHANED if number == signal.SIGHUP else 0)


@contextmanager
def last_words(settings: Settings) -> Iterator[None]:
    """An error is sent to the API server and ends the process: with status 2 if it is the user's, else with 1."""
    try:
        yield
    except Exception as error:
        status, text = 2, str(error)
        if not isinstance(error, UserError):
            traceback.print_exc()
            status, text = 1, f"{type(error).__name__}: {error}"
        context = zmq.Context()
        with push_socket(context, settings.folder, API) as socket:
            send(socket, Failed([], status, text, settings.name))
        context.term()
        leave(status)
