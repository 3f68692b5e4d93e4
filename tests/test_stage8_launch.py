"""Ranks as processes: both ways to start them, two jobs at once, and how a job ends.

The jobs are this file, started as a script.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import cli
from common.config import EngineConfig, UserError
from stage2_req.params import SamplingParams
from stage7_radix.build import build_engine as build_stage7
from stage8_tp import run
from stage8_tp.build import build_rank
from stage8_tp.launch import run_job, run_ranks
from stage8_tp.ranks import Alone, Ranks
from tests.conftest import Checkpoint
from tests.test_stage6 import KeepLogits
from tests.test_stage8 import CASES, LONGEST, random_history, state

ROOT = Path(__file__).resolve().parents[1]
TINY = ("--model", "dummy:tiny", "--device", "cpu", "--max-tokens", "8")
RUN = "stage8_tp/run.py"


# --- the jobs ---------------------------------------------------------------------------------------------------


def history(settings: dict, ranks: Ranks | Alone) -> None:
    """Random histories on rank 0, for each configuration; at their end the ranks compare what they have come to."""
    fake = SimpleNamespace(config=SimpleNamespace(vocab_size=settings["vocab_size"]))
    checkpoint, texts = Checkpoint(Path(settings["configs"][0]["model"]), fake), {}
    if ranks.rank == 0:
        params = [SamplingParams(max_tokens=LONGEST, **kind) for _, kind in CASES.values()]
        prompts = [checkpoint.prompt(length) for length, _ in CASES.values()]
        whole = build_stage7(checkpoint.config()).generate(prompts, params)
        texts = {case: req.output_ids for case, req in zip(CASES, whole, strict=True)}
    for config in settings["configs"]:
        engine = build_rank(EngineConfig(**config), ranks)
        engine.cache.reserve = 1
        if ranks.rank == 0:
            for seed in range(settings["histories"]):
                random_history(engine, checkpoint, texts, random.Random(seed), 16)
            engine.close()
        else:
            engine.follow()
        mine = json.dumps(state(engine), default=str).encode() + bytes(9999)  # too long for one message
        assert ranks.broadcast_bytes(mine) == mine
        if ranks.rank == 0:
            print(json.dumps({"retracted": engine.stats().retracted, "hits": engine.stats().hit_tokens}))


def forever(settings: dict, ranks: Ranks | Alone) -> None:
    """What ranks do all day, without a model: sum, or wait for a message of rank 0."""
    (Path(settings["folder"]) / str(ranks.rank)).write_text(str(os.getpid()))
    if settings.get("fails") and ranks.rank:
        raise KeyError("rank 1 has a bad day")
    if settings.get("idle"):
        time.sleep(1000) if ranks.rank == 0 else ranks.broadcast_bytes()
    while True:
        ranks.all_reduce(torch.ones(100))


def late(settings: dict, ranks: Ranks | Alone) -> None:
    """Rank 1 is done last, and must still find rank 0."""
    ((pid,), _) = ranks.all_gather_ints([os.getpid()])
    if ranks.rank:
        time.sleep(1)
        assert is_alive(pid)


def ends(settings: dict, ranks: Ranks | Alone) -> None:
    """Each rank ends with its code: a status, the negative number of a signal, or None: it would go on, and so would a
    process that it has started."""
    code = settings["codes"][ranks.rank]
    if code is None:
        sleeper = subprocess.Popen(["sleep", "1000"])
        (Path(settings["folder"]) / str(ranks.rank)).write_text(f"{os.getpid()} {sleeper.pid}")
        time.sleep(1000)
    while len(list(Path(settings["folder"]).iterdir())) < settings["codes"].count(None):
        time.sleep(0.05)
    if code < 0:
        os.kill(os.getpid(), -code)
    elif code:
        os._exit(code)


def logits(settings: dict, ranks: Ranks | Alone) -> None:
    """Of two ranks, eager and from graphs, against those of one rank: the same text (forced by a bias), step by step."""
    seen, replays = {}, 0

    def keep(name: str, runner) -> None:
        eager, kept = getattr(runner, "eager", runner), seen.setdefault(name, [])
        eager.sampler = KeepLogits(eager.sampler, kept)

    shape = {"device": "cuda", "kv_tokens": 4096, "max_running": 8, "max_model_len": 256}
    config = EngineConfig("dummy:qwen3-0.6b", **shape)
    prompts = [[i + 1] * (10 + 9 * i) for i in range(5)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={100 + i: 100.0}) for i in range(5)]
    if ranks.rank == 0:
        whole = build_stage7(config)
        keep("whole", whole.runner)
        whole.generate(prompts, params)
        del whole
    ranks.barrier()
    for graph in (False, True):
        engine = build_rank(replace(config, graph=graph, tp=ranks.world), ranks)
        if ranks.rank:
            engine.follow()
            continue
        keep(f"graph {graph}", engine.runner)
        reqs = engine.generate(prompts, params)
        assert [set(req.output_ids) for req in reqs] == [{100 + i} for i in range(5)]
        replays += getattr(engine.runner, "num_replays", 0)
        engine.close()
    if ranks.rank == 0:
        want = seen.pop("whole")
        for got in seen.values():
            assert len(got) == len(want)
            for a, b in zip(got, want, strict=True):
                assert torch.cosine_similarity(a, b).min() > 0.999
        print(replays)


def job(name: str, **settings) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.test_stage8_launch", name, json.dumps(settings)]
    return start(command)


def start(command: list[str]) -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


# --- to the end -------------------------------------------------------------------------------------------------


def test_both_ways_to_start_at_once():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", RUN]
    for status, out, err in map(finish, [start([*way, *TINY]) for way in (torchrun, [sys.executable, RUN])]):
        assert status == 0, err
        assert out.count("same tokens on 2 ranks as on 1: yes") == 1


def test_one_rank_needs_no_other(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", [RUN, "--tp", "1", *TINY])
    run.main()
    assert "same tokens on 1 ranks as on 1: yes" in capsys.readouterr().out


def histories(llama, number: int, *changes: dict) -> list[dict]:
    """So many with each of these configurations, in one job: what they have counted."""
    config = {"model": str(llama.path), "device": "cpu", "dtype": "float32", "tp": 2, "kv_tokens": 64}
    config |= {"page_size": 4, "max_batch_tokens": 16, "max_running": 5, "max_model_len": 64, "graph": True}
    configs = [config | change for change in changes]
    status, out, err = finish(job("history", configs=configs, vocab_size=llama.vocab_size, histories=number))
    assert status == 0, err
    counts = [json.loads(line) for line in out.splitlines()]
    assert len(counts) == len(changes)
    return counts


def test_histories_over_gloo(tiny_checkpoint):
    (counts,) = histories(tiny_checkpoint("llama"), 1, {})
    assert counts["retracted"] and counts["hits"]


# --- before it --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running_jobs(tmp_path_factory):
    """name -> (launcher, pid of rank 0, pid of rank 1): jobs that run at the same time."""
    kinds = {"rank 0": {}, "launcher": {"idle": True}, "Ctrl-C": {}}
    folders = {name: tmp_path_factory.mktemp("job") for name in kinds}
    launchers = {name: job("forever", folder=str(folders[name]), **kinds[name]) for name in kinds}
    limit, up = time.monotonic() + 120, {}
    while len(up) < len(kinds):
        assert time.monotonic() < limit
        for name, folder in folders.items():
            files = [folder / "0", folder / "1"]
            if all(file.is_file() and file.read_text() for file in files):
                up[name] = (launchers[name], *(int(file.read_text()) for file in files))
        time.sleep(0.1)
    yield up
    for launcher, *pids in up.values():
        for pid in (launcher.pid, *pids):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


@pytest.mark.parametrize(("victim", "status", "message"), [
    ("rank 0", 137, "rank 0 was killed by signal 9; the job ends"),
    ("launcher", -9, ""),
    ("Ctrl-C", 130, "interrupted\n"),
])  # fmt: skip
def test_no_process_is_left(running_jobs, victim, status, message):
    launcher, *ranks = running_jobs[victim]
    assert all(map(is_alive, (launcher.pid, *ranks)))
    target = ranks[0] if victim == "rank 0" else launcher.pid
    os.kill(target, signal.SIGINT if victim == "Ctrl-C" else signal.SIGKILL)
    _, err = launcher.communicate(timeout=100)
    assert launcher.returncode == status
    limit = time.monotonic() + 100
    while any(map(is_alive, ranks)):
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert message in err
    assert "Traceback" not in err
    if victim == "Ctrl-C":
        assert [line for line in err.splitlines() if not line.startswith("KV pool")] == ["interrupted"]


def test_a_rank_that_fails_says_why(tmp_path):
    status, _, err = finish(job("forever", folder=str(tmp_path), fails=True))
    assert status == 1
    assert "KeyError: 'rank 1 has a bad day' (rank 1)" in err
    assert err.count("Traceback") == 1


def test_no_rank_leaves_before_the_last_is_done():
    status, _, err = finish(job("late"))
    assert status == 0, err


def test_a_mistake_is_one_line():
    status, out, err = finish(start([sys.executable, RUN, "--tp", "3", *TINY]))
    assert (status, out) == (2, "")
    assert err.count("error:") == 1
    assert (
        "error: 4 query heads, 2 KV heads and 128 columns of the MLP can't be divided among 3 ranks; use --tp 1 or 2"
        in err
    )


def test_how_many_ranks_there_can_be():
    with pytest.raises(UserError, match="tp is 0; it must be a number of at least 1"):
        run_ranks(print, 0)


@pytest.mark.parametrize(
    ("codes", "status"), [((0, 0, 0), 0), ((0, 3, None), 3), ((None, None, 7), 7), ((None, -9, 0), 137)]
)
def test_the_status_is_that_of_the_first_rank_that_fails(codes, status, tmp_path, capfd):
    """Those that would go on (None) are ended, with what they have started themselves."""
    assert run_job(partial(ends, {"codes": codes, "folder": str(tmp_path)}), len(codes), "cpu") == status
    assert ("rank 1 was killed by signal 9; the job ends" in capfd.readouterr().err) == (-9 in codes)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 2 * codes.count(None)
    limit = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < limit
        time.sleep(0.05)


# --- on GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("graph", "overlap"), [(False, False), (True, False), (True, True)])
def test_gpu_histories_over_nccl(tiny_checkpoint, graph, overlap):
    """Collectives inside the captured steps; retraction and shared prefixes on the way."""
    common = {"device": "cuda", "graph": graph, "overlap": overlap}
    kinds = [common | {"attn": a, "page_size": size} for a in ("portable", "triton") for size in (1, 16)]
    for counts in histories(tiny_checkpoint("llama"), 3, *kinds):
        assert counts["retracted"] and counts["hits"]


@pytest.mark.gpu
def test_gpu_two_ranks_on_one_gpu(tiny_checkpoint):
    """Over gloo, through the host's memory; eager, for a graph can't capture that."""
    (counts,) = histories(tiny_checkpoint("llama"), 1, {"device": "cuda:0", "graph": None})
    assert counts["hits"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_bfloat16_with_nccl_between_dependent_launches():
    status, out, err = finish(job("logits", configs=[{"device": "cuda"}]))
    assert status == 0, err
    assert int(out) > 0


if __name__ == "__main__":
    work = {"history": history, "forever": forever, "late": late, "logits": logits}[sys.argv[1]]
    arguments = json.loads(sys.argv[2])
    device = arguments.get("configs", [{}])[0].get("device", "cpu")
    cli.run(lambda: run_ranks(partial(work, arguments), 2, device))
