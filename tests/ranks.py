"""Ranks as threads of one process: a parallel engine to step and to look into, without starting anything."""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from common.config import EngineConfig
from stage8_tp.build import build_rank
from stage8_tp.engine import TPEngine


class Meeting:
    """Where `world` threads exchange what they have."""

    def __init__(self, world: int):
        self.barrier, self.things = threading.Barrier(world), [None] * world

    def exchange(self, rank: int, thing) -> list:
        """Every rank's thing, in the order of the ranks. BrokenBarrierError once one of the threads has failed."""
        self.things[rank] = thing
        self.barrier.wait()
        things = list(self.things)
        self.barrier.wait()
        return things


class ThreadRanks:
    """The interface of stage8_tp.ranks.Ranks; results are the same on all ranks to the last bit."""

    staged = False

    def __init__(self, rank: int, world: int, meeting: Meeting):
        self.rank, self.world, self.meeting, self.device = rank, world, meeting, torch.device("cpu")

    def exchange(self, thing) -> list:
        return self.meeting.exchange(self.rank, thing)

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(sum(self.exchange(x.clone())))

    def all_gather(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return torch.stack(self.exchange(x.clone()))

    def broadcast(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(self.exchange(x.clone())[0])

    def broadcast_bytes(self, message: bytes = b"") -> bytes:
        return self.exchange(message)[0]

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        return self.exchange(numbers)


def on_ranks(world: int, work: Callable[[ThreadRanks], object]) -> list:
    """work(ranks) in `world` threads at once; returns what they return. The first failure is raised here."""
    meeting, results, errors = Meeting(world), [None] * world, []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = work(ThreadRanks(rank, world, meeting))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def start_ranks(
    config: EngineConfig, world: int, change: Callable[[TPEngine], object] = lambda engine: None, *sampler
) -> tuple[list[TPEngine], list[threading.Thread]]:
    """The engines of all ranks, and the threads in which all but the first follow. `change` is applied to each."""
    engines = on_ranks(world, lambda ranks: build_rank(config, ranks, *sampler))
    for engine in engines:
        change(engine)
    threads = [threading.Thread(target=follow, args=[engine], daemon=True) for engine in engines[1:]]
    for thread in threads:
        thread.start()
    return engines, threads


def follow(engine: TPEngine) -> None:
    """Until rank 0 closes, or is gone; its memory must be in order after every step."""
    torch.set_num_threads(1)
    step = engine.engine.step

    def checked() -> list:
        outputs = step()
        engine.cache.check_integrity()
        return outputs

    engine.engine.step = checked
    try:
        with suppress(threading.BrokenBarrierError):
            engine.follow()
    except BaseException:
        engine.ranks.meeting.barrier.abort()  # rank 0 must not wait for ever
        raise


def build_ranks(
    config: EngineConfig, world: int, change: Callable[[TPEngine], object] = lambda engine: None, *sampler
) -> TPEngine:
    """Rank 0's engine; the others follow until it is gone."""
    engines, _ = start_ranks(config, world, change, *sampler)
    weakref.finalize(engines[0], engines[0].ranks.meeting.barrier.abort)
    return engines[0]
