"""The ranks of a job, and all that they send to each other. Owns the process groups.

Two channels: tensors, by NCCL between GPUs and by gloo elsewhere; and control, always by gloo, where a rank may wait for
the next message for as long as it takes.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.config import UserError
from common.device import resolve_device, synchronize

FOREVER = timedelta(days=3650)  # an idle server is no error
FIRST_PART = 4096  # bytes of a control message's first part, its length included; few messages have a second one
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since PyTorch 2.13


class Alone:
    """The null form: one rank, which has everything already."""

    rank, world, staged = 0, 1, False

    def __init__(self, device: torch.device):
        self.device = device

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def broadcast_bytes(self, message: bytes = b"") -> bytes:
        return message

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        return [numbers]

    def barrier(self) -> None:
        pass


class Ranks:
    """One process of several that share a model. Every method is called by all ranks, in the same order."""

    def __init__(self, device: torch.device, has_own_gpu: bool):
        dist.init_process_group("gloo")  # MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE say where the others are
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), device
        self.control = dist.new_group(backend="gloo", timeout=FOREVER)
        nccl = all(own for (own,) in self.all_gather_ints([has_own_gpu]))
        self.tensors = dist.new_group(backend="nccl") if nccl else dist.group.WORLD
        self.staged = device.type == "cuda" and not nccl  # gloo gets copies in the host's memory

    # --- tensors: contiguous, of the same shape on all ranks ---

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        buffer = x.cpu() if self.staged else x
        dist.all_reduce(buffer, group=self.tensors)
        return x.copy_(buffer) if self.staged else x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place."""
        buffer = x.cpu() if self.staged else x
        dist.broadcast(buffer, 0, group=self.tensors)
        return x.copy_(buffer) if self.staged else x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x [N, ...] -> [world, N, ...]"""
        buffer = x.cpu() if self.staged else x
        out = buffer.new_empty((self.world * len(x), *x.shape[1:]))
        gather_single(out, buffer, group=self.tensors)
        return out.view(self.world, *x.shape).to(x.device)

    # --- control ---

    def broadcast_bytes(self, message: bytes = b"") -> bytes:
        """Rank 0's message, on every rank; the others wait for it."""
        room = FIRST_PART - 8
        first = self._broadcast(len(message).to_bytes(8, "little") + message[:room], FIRST_PART)
        size = int.from_bytes(first[:8], "little")
        rest = self._broadcast(message[room:], size - room) if size > room else b""
        return first[8 : 8 + size] + rest

    def _broadcast(self, data: bytes, size: int) -> bytes:
        buffer = bytearray(data.ljust(size, b"\0"))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), 0, group=self.control)
        return bytes(buffer)

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers, as many on each, in the order of the ranks."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        everything = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everything, mine, group=self.control)
        return [numbers.tolist() for numbers in everything]

    def barrier(self) -> None:
        """Returns once every rank is here, with its device's work done."""
        synchronize(self.device)
        self.all_gather_ints([0])


def join(world: int, device: str = "auto") -> Ranks | Alone:
    """This process's place among the ranks, as the environment has it. Raises UserError if there are others than `world`.

    Each rank takes the GPU of its own number on its host; they share one where there are too few, or where `device`
    names one.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world:
        raise UserError(
            f"tp is {world}, but {started} ranks were started; start as many, with torchrun or stage8_tp.launch.run_ranks"
        )
    place = resolve_device(device)
    if world == 1:
        return Alone(place)
    has_own_gpu = False
    if place.type == "cuda":
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        has_own_gpu = ":" not in device and int(os.environ["LOCAL_WORLD_SIZE"]) <= count
        place = place if ":" in device else torch.device("cuda", local % count)
        torch.cuda.set_device(place)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast, which not every machine allows
    return Ranks(place, has_own_gpu)
