"""Starts the ranks of a job on this host, and ends all of them when one fails.

torch.multiprocessing starts them. What it leaves open, and this file adds: the job ends with the status and the message
of the rank that failed, and with nothing else on the screen; Ctrl-C is for the job, not for each rank; no rank outlives
its launcher, however that ends (torch.multiprocessing asks the system for a SIGINT then, which a rank that waits in a
collective does not notice).

Ranks on several hosts are started by torchrun, which has its own ways; a rank then finds RANK and the like in its
environment.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, parent_process

import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from common.cli import leave
from common.config import UserError, check_range
from stage8_tp.ranks import Alone, Ranks, join

GRACE = 2  # seconds for which a rank that only suffers from another's failure prints nothing


def run_ranks(work: Callable[[Ranks | Alone], None], tp: int | None, device: str = "auto") -> None:
    """Call work(ranks) in `tp` processes; None: in as many as torchrun has started, or else in two.

    work: a function of a module, or a partial of one, since each process imports it anew. A rank's process ends with
    it; the one that the user started exits with the job's status.
    """
    if tp is not None:
        check_range("tp", tp, 1)
    if "RANK" in os.environ:
        be_a_rank(work, tp or int(os.environ["WORLD_SIZE"]), device)
    elif tp == 1:
        work(join(1, device))
    else:
        leave(run_job(work, tp or 2, device))


# --- in the launcher --------------------------------------------------------------------------------------------


def run_job(work: Callable[[Ranks | Alone], None], world: int, device: str) -> int:
    """Start the ranks and wait until all are done or one has failed; returns the job's exit status. None is left."""
    server = socket.create_server(("127.0.0.1", 0))  # where the ranks find each other, at a port that the system chose
    port = server.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # a line for each rank that it ends
    job = mp.start_processes(start_rank, (work, world, device, port), world, join=False, start_method="spawn")
    try:
        while not job.join():
            pass
        return 0
    except mp.ProcessExitedException as failed:
        status = failed.exit_code
        if status < 0:
            print(f"rank {failed.error_index} was killed by signal {-status}; the job ends", file=sys.stderr)
        return status if status > 0 else 128 - status
    finally:
        for pid in job.pids():  # each leads a group of its own, with what it has started
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        del store


def start_rank(rank: int, work: Callable[[Ranks | Alone], None], world: int, device: str, port: int) -> None:
    """The first function of a rank's process."""
    os.setsid()  # Ctrl-C in the terminal is for the launcher
    threading.Thread(target=die_with_launcher, daemon=True).start()
    # tqdm's own lock is a semaphore of the system, which would be left behind by a process that ends with os._exit.
    tqdm.set_lock(threading.RLock())
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher has the store, not rank 0
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    be_a_rank(work, world, device)


def die_with_launcher() -> None:
    connection.wait([parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


# --- in a rank --------------------------------------------------------------------------------------------------


def be_a_rank(work: Callable[[Ranks | Alone], None], world: int, device: str) -> None:
    """The rest of the process's life. Only rank 0 prints; the others print when they fail."""
    rank = int(os.environ["RANK"])
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    try:
        ranks = join(world, device)
        work(ranks)
        ranks.barrier()  # and no destroy_process_group: it waits for ever where a captured graph still knows of a group
        sys.stdout.flush()
        status = 0
    except BaseException as error:
        sys.stdout.flush()
        status, text = describe(error)
        # Another rank has died and prints why, or all have the same message: rank 0 is heard first.
        if "by peer" in text or (rank and status == 2):
            time.sleep(GRACE)
        print(f"{text.rstrip()} (rank {rank})", file=sys.__stderr__, flush=True)
    os._exit(status)  # threads of the process groups might wait for the others, or for an interpreter that is gone


def describe(error: BaseException) -> tuple[int, str]:
    """(exit status, what to print)"""
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    return 1, "".join(traceback.format_exception(error))
