"""Starts the ranks of a job on this host, and ends all of them when one fails. torchrun does so over several hosts.

A rank is the same command once more, with RANK and the like in its environment, as torchrun has it. The launcher does
what torchrun's agent does: it keeps the store where the ranks find each other, on a port that the system chose, and
watches. Ranks never outlive it, however it ends.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist

from common.cli import leave
from common.config import UserError, check_range
from stage8_tp.ranks import Alone, Ranks, join

GRACE = 2  # seconds for which a rank that only suffers from another's failure keeps quiet


def run_ranks(work: Callable[[Ranks | Alone], None], tp: int | None, device: str = "auto") -> None:
    """Call work(ranks) in `tp` processes; None: in as many as torchrun has started, or else in two.

    A rank's process ends with it; the one that the user started runs the job and exits with its status.
    """
    if tp is not None:
        check_range("tp", tp, 1)
    if "RANK" in os.environ:
        be_a_rank(work, tp or int(os.environ["WORLD_SIZE"]), device)
    elif tp == 1:
        work(join(1, device))
    else:
        job = Job([sys.executable, *sys.orig_argv[1:]], tp or 2)
        try:
            status = job.wait()
        finally:
            job.kill()
        leave(status)


# --- in a rank --------------------------------------------------------------------------------------------------


def be_a_rank(work: Callable[[Ranks | Alone], None], world: int, device: str) -> None:
    """The rest of the process's life. Only rank 0 prints; the others speak up when they fail."""
    rank = int(os.environ["RANK"])
    if leash := os.environ.get("RANK_LEASH"):
        threading.Thread(target=die_with_launcher, args=[int(leash)], daemon=True).start()
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    try:
        ranks = join(world, device)
        work(ranks)
        ranks.barrier()  # and no destroy_process_group: it waits for ever where a recorded graph still knows of a group
        sys.stdout.flush()
        status = 0
    except BaseException as error:
        sys.stdout.flush()
        status, text = describe(error)
        if "by peer" in text or (rank and status == 2):  # one has died and says why, or all have the same to say
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


def die_with_launcher(leash: int) -> None:
    """The other end of this pipe is the launcher's alone: it closes when that ends."""
    os.read(leash, 1)
    os.killpg(0, signal.SIGKILL)


# --- in the launcher --------------------------------------------------------------------------------------------


class Job:
    """The ranks of one command: their processes, the store where they meet, and the pipe that ties them to this process."""

    def __init__(self, command: Sequence[str], world: int):
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
        leash, self.leash = os.pipe()
        threads = max(1, (os.cpu_count() or 1) // world)
        env = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        env |= os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, not in rank 0
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "RANK_LEASH": str(leash),
        }
        self.processes = [
            subprocess.Popen(
                command,
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                pass_fds=[leash],
                start_new_session=True,  # Ctrl-C in the terminal is for the launcher
            )
            for rank in range(world)
        ]
        os.close(leash)

    def wait(self) -> int:
        """Until all ranks are done, or one has failed; returns the job's exit status."""
        while True:
            statuses = [process.poll() for process in self.processes]
            for rank, status in enumerate(statuses):
                if status:
                    if status < 0:
                        print(f"rank {rank} was killed by signal {-status}; the job ends", file=sys.stderr)
                    return status if status > 0 else 128 - status
            if None not in statuses:
                return 0
            time.sleep(0.05)

    def kill(self) -> None:
        """Whoever is left, and what they have started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
