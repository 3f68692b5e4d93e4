"""The real processes, and what becomes of requests when one of them is killed, when clients leave, and when the server is
told to stop. No process, socket or shared memory may be left behind.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import aclosing
from pathlib import Path

import httpx
import msgspec
import pytest

from common import cli
from common.config import EngineConfig, UserError
from common.tokenizer import load_tokenizer
from stage7_radix.params import RequestParams
from stage9_server import launch, local_server
from stage9_server.cli import parser
from stage9_server.guard import restarts
from stage9_server.guard.restarts import RestartingHub as Hub
from stage9_server.guard.restarts import Supervisor
from stage9_server.hub import RequestFailed
from stage9_server.ipc import API, DETOKENIZER, ORPHANED, SCHEDULER, Settings, push_socket, send
from stage9_server.messages import Piece, Ready, TextOptions, Tokenize
from stage9_server.workers import WorkerFailed

PATIENCE = 100  # seconds after which a test that waits for something fails


class Stack:
    """Hub and workers without the HTTP part, in an event loop in a thread."""

    def __init__(self, *flags: str):
        self.folder = tempfile.mkdtemp(prefix="t-")
        self.args = parser("").parse_args(flags)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.do(self.open())

    async def open(self) -> None:
        self.hub = Hub(self.folder, self.args.tokenizers)
        self.supervisor = Supervisor(self.hub, self.folder, cli.config(self.args), self.args.max_queue)
        self.tasks = [
            asyncio.ensure_future(task) for task in (self.hub.run(), *map(self.supervisor.keep, self.hub.names))
        ]
        await self.supervisor.all_up()

    def do(self, coroutine, wait: bool = True):
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, PATIENCE), self.loop)
        return future.result(PATIENCE) if wait else future

    def close(self) -> None:
        self.do(self.shut())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        shutil.rmtree(self.folder)

    async def shut(self) -> None:
        await self.supervisor.stop()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.hub.close()

    def pid(self, name: str) -> int:
        return self.supervisor.processes[name].pid

    def signal(self, name: str, number: int) -> None:
        os.kill(self.pid(name), number)

    async def until(self, condition) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def up(self, name: str) -> None:
        await self.until(lambda: name in self.hub.up)

    async def idle(self):
        """The scheduler's numbers, once they say that nothing runs; they come when it becomes idle, or a second later."""
        self.hub.stats = None
        await self.until(lambda: self.hub.stats and not self.hub.stats.running and not self.hub.stats.waiting)
        return self.hub.stats


@pytest.fixture(scope="module")
def stack(text_checkpoint):
    flags = {
        "model": str(text_checkpoint.path),
        "device": "cpu",
        "dtype": "float32",
        "page_size": 16,
        "kv_tokens": 4096,
    }
    flags |= {"tokenizers": 2, "max_running": 16}
    result = Stack(*(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()))
    yield result
    result.close()


def ask(hub: Hub, text: str = "hi", n: int = 1, stop: tuple = (), **params) -> Tokenize:
    params = RequestParams(**{"max_tokens": 8, "ignore_eos": True} | params)
    return Tokenize(
        hub.new_uids(n),
        text=text,
        params=params,
        max_tokens=params.max_tokens,
        max_len=hub.info["max_len"],
        options=TextOptions(list(stop), continues=True),
    )


async def collect(hub: Hub, call: Tokenize, pieces: list[Piece]) -> None:
    async with aclosing(hub.stream([call])) as stream:
        async for new in stream:
            pieces += new


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


class Load:
    """Endless answers under way."""

    def __init__(self, hub: Hub, n: int):
        self.pieces = [[] for _ in range(n)]
        calls = [ask(hub, f"load {i}", max_tokens=400, temperature=1.0) for i in range(n)]
        self.tasks = [asyncio.ensure_future(collect(hub, *pair)) for pair in zip(calls, self.pieces, strict=True)]

    async def flowing(self) -> "Load":
        while not all(sum(len(piece.token_ids) for piece in pieces) > 2 for pieces in self.pieces):
            assert not any(task.done() for task in self.tasks)
            await asyncio.sleep(0.005)
        return self

    async def errors(self) -> list:
        return await asyncio.gather(*self.tasks, return_exceptions=True)


async def works(hub: Hub) -> None:
    pieces = []
    await collect(hub, ask(hub), pieces)
    assert sum(len(piece.token_ids) for piece in pieces) == 8
    assert [piece.finish_reason for piece in pieces][-1] == "length"
    assert pieces[0].prompt_tokens == 3


def test_an_answer_is_the_decoded_tokens_of_the_engine(stack, text_checkpoint):
    from stage8_tp.build import build_engine

    tokenizer = load_tokenizer(str(text_checkpoint.path))
    params = RequestParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=5)
    (req,) = build_engine(text_checkpoint.config()).generate([tokenizer.encode("hello")], params)
    pieces, stopped, expected = [], [], tokenizer.decode(req.output_ids)
    stack.do(collect(stack.hub, ask(stack.hub, "hello", max_tokens=60, temperature=1.0, seed=5), pieces))
    assert text_of(pieces) == expected
    stop = expected[20:23]
    stack.do(collect(stack.hub, ask(stack.hub, "hello", max_tokens=60, temperature=1.0, seed=5, stop=[stop]), stopped))
    assert text_of(stopped) == expected[: expected.index(stop)]
    assert stopped[-1].finish_reason == "stop"


def test_500_requests_with_random_aborts(stack):
    """Every client that stays gets a whole answer, and in the end all pages are free."""
    rng = random.Random(1)

    async def client(hub: Hub, call: Tokenize, leave_after: int | None) -> str:
        pieces, seen = [], 0
        async with aclosing(hub.stream([call])) as stream:
            async for new in stream:
                pieces += new
                seen += 1
                if leave_after is not None and seen > leave_after:
                    return "left"
        for uid in call.uids:
            mine = [piece for piece in pieces if piece.uid == uid]
            assert [piece.finish_reason for piece in mine].count(None) == len(mine) - 1
            if mine[-1].finish_reason == "length":
                assert sum(len(piece.token_ids) for piece in mine) == call.max_tokens
            assert not any(stop in text_of(mine) for stop in call.options.stop)
        return "whole"

    async def run(hub: Hub) -> list[str]:
        tasks, sequences = [], 0
        while sequences < 500:
            n = rng.choice([1, 1, 1, 4])
            call = ask(
                hub,
                "x" * rng.choice([0, 1, 40, 150]) + str(rng.random()),
                n,
                rng.choice([(), ("e",), ("\ufffd", "th")]),
                max_tokens=rng.randint(1, 12),
                temperature=rng.choice([0.0, 1.5]),
                presence_penalty=rng.choice([0, 0, 0, 1]),
                ignore_eos=rng.random() < 0.5,
            )
            tasks.append(asyncio.ensure_future(client(hub, call, rng.choice([None, None, 0, 3]))))
            if rng.random() < 0.1:  # before anything has come
                tasks[-1].cancel() if rng.random() < 0.5 else asyncio.get_running_loop().call_later(
                    0.01, tasks[-1].cancel
                )
            if rng.random() < 0.3:
                await asyncio.sleep(0.005)
            sequences += n
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = stack.do(run(stack.hub))
    cancelled = [result for result in results if isinstance(result, asyncio.CancelledError)]
    assert results.count("whole") + results.count("left") + len(cancelled) == len(results)
    assert results.count("whole") > 100 and results.count("left") > 20
    stats = stack.do(stack.idle())
    assert stats.free_pages == stats.num_pages == 256
    assert not stack.hub.sequences


def test_a_failing_template_is_one_callers_problem(stack):
    async def run(hub: Hub):
        load = await Load(hub, 2).flowing()
        call = ask(hub)
        call.text, call.messages = None, [{"role": "user", "content": "fail"}]
        with pytest.raises(RequestFailed, match="the template says no") as failed:
            await collect(hub, call, [])
        assert failed.value.status == 400
        assert await load.errors() == [None, None]

    stack.do(run(stack.hub))


def test_leaving_before_the_scheduler_knows_the_request(stack):
    """The abort overtakes its request, which is still with a tokenizer."""

    async def run(hub: Hub):
        before = await stack.idle()
        for name in hub.tokenizers:
            stack.signal(name, signal.SIGSTOP)
        task = asyncio.ensure_future(collect(hub, ask(hub, max_tokens=300), []))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.2)
        for name in hub.tokenizers:
            stack.signal(name, signal.SIGCONT)
        await works(hub)
        after = await stack.idle()
        assert after.output_tokens == before.output_tokens + 8

    stack.do(run(stack.hub))


def test_a_killed_tokenizer_takes_only_its_own_calls_along(stack):
    async def run(hub: Hub):
        load = await Load(hub, 3).flowing()
        for name in hub.tokenizers:
            stack.signal(name, signal.SIGSTOP)
        tasks = [asyncio.ensure_future(collect(hub, ask(hub), [])) for _ in range(2)]  # one each
        await asyncio.sleep(0.1)
        first, second = hub.tokenizers
        stack.signal(first, signal.SIGKILL)
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [(task.exception().status, "tokenizer died" in str(task.exception())) for task in done] == [(500, True)]
        assert len(waiting) == 1
        stack.signal(second, signal.SIGCONT)
        await asyncio.gather(*waiting)
        await works(hub)
        assert await load.errors() == [None] * 3
        await stack.up(first)
        await works(hub)
        assert (await stack.idle()).free_pages == 256

    stack.do(run(stack.hub))


def test_a_killed_detokenizer_is_replaced(stack):
    async def run(hub: Hub):
        load = await Load(hub, 4).flowing()
        stack.signal(DETOKENIZER, signal.SIGKILL)
        errors = await load.errors()
        assert [(error.status, "detokenizer died" in error.message) for error in errors] == [(500, True)] * 4
        task = asyncio.ensure_future(works(hub))  # waits for the new one
        assert (await stack.idle()).free_pages == 256  # the engine has stopped working for those
        await task

    stack.do(run(stack.hub))


def test_a_killed_scheduler_is_replaced_and_knows_nothing_of_the_old_requests(stack):
    async def run(hub: Hub):
        load = await Load(hub, 4).flowing()
        for name in hub.tokenizers:
            stack.signal(name, signal.SIGSTOP)
        stuck = asyncio.ensure_future(collect(hub, ask(hub, max_tokens=300), []))  # will reach the new scheduler
        await asyncio.sleep(0.1)
        stack.signal(SCHEDULER, signal.SIGKILL)
        await stack.until(hub.health)
        assert "scheduler" in hub.health()
        errors = [*await load.errors(), *await asyncio.gather(stuck, return_exceptions=True)]
        assert [(error.status, "scheduler died" in error.message) for error in errors] == [(500, True)] * 5
        with pytest.raises(RequestFailed, match="try again later") as failed:
            await works(hub)
        assert failed.value.status == 503
        for name in hub.tokenizers:
            stack.signal(name, signal.SIGCONT)
        await stack.up(SCHEDULER)
        assert hub.health() is None
        await works(hub)
        stats = await stack.idle()
        assert (stats.output_tokens, stats.free_pages) == (8, 256)

    stack.do(run(stack.hub))


def test_nothing_of_a_dead_worker_counts(stack):
    """A message of another incarnation that says it is ready, and pieces of unknown sequences."""

    async def run(hub: Hub):
        hub.up.discard(DETOKENIZER)
        context = hub.context
        with push_socket(context, stack.folder, API) as socket:
            send(socket, Ready(DETOKENIZER, hub.peers[DETOKENIZER].incarnation - 1))
            await asyncio.sleep(0.2)
            assert DETOKENIZER not in hub.up
            send(socket, Ready(DETOKENIZER, hub.peers[DETOKENIZER].incarnation))
            await stack.up(DETOKENIZER)
        await works(hub)

    stack.do(run(stack.hub))


def test_a_worker_that_keeps_dying_is_given_up(monkeypatch):
    monkeypatch.setitem(restarts.RESTARTS, SCHEDULER, 2)
    started = []

    class Dying(Supervisor):
        async def spawn(self, name, incarnation):
            started.append(name)
            self.hub.up.add(name)
            return await asyncio.create_subprocess_exec("false", start_new_session=True)

    async def run(folder):
        hub = Hub(folder, 1)
        try:
            await Dying(hub, folder, EngineConfig(), 1).keep(SCHEDULER)
        finally:
            hub.close()

    folder = tempfile.mkdtemp(prefix="t-")
    with pytest.raises(WorkerFailed, match="scheduler died 3 times"):
        asyncio.run(run(folder))
    shutil.rmtree(folder)
    assert started == [SCHEDULER] * 3


# --- the whole server, as a user starts it ---


def processes() -> dict[int, str]:
    """Command lines of all that runs; with their environment, those that multiprocessing has started."""
    result = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            if b"from multiprocessing" in line:
                line += (entry / "environ").read_bytes()
            result[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return result


class Traces:
    """What a server leaves on the machine while it runs, and must not leave behind. Its temporary files are all in `temp`."""

    def __init__(self, temp: Path):
        self.temp, self.shared = temp, set()

    def processes(self) -> list[int]:
        """The workers; also notes what shared memory they use."""
        pids = [pid for pid, line in processes().items() if str(self.temp) in line]
        for pid in pids:
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                self.shared |= {
                    Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and "deleted" not in line
                }
        return pids

    def gone(self) -> bool:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if not [*self.processes(), *self.temp.rglob("*"), *(path for path in self.shared if path.exists())]:
                return True
            time.sleep(0.05)
        return False


@pytest.fixture
def traces(monkeypatch):
    temp = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("TMPDIR", str(temp))
    yield Traces(temp)
    shutil.rmtree(temp)


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@contextlib.contextmanager
def server(*flags: str):
    common = ("--model", "dummy:tiny", "--device", "cpu", "--dtype", "float32", "--port", "0", "--kv-tokens", "8192")
    with local_server.running(*common, *flags) as result:
        yield result


class Streams:
    """Answers under way over HTTP, read in threads."""

    def __init__(self, url: str, n: int, max_tokens: int = 500):
        self.bodies, self.flowing = [b""] * n, [threading.Event() for _ in range(n)]
        request = {"model": "dummy:tiny", "prompt": "hi", "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        args = [(url, i, request | {"temperature": 1.0}) for i in range(n)]
        self.threads = [threading.Thread(target=self.read, args=arg) for arg in args]
        for thread in self.threads:
            thread.start()
        for event in self.flowing:
            assert event.wait(PATIENCE)

    def read(self, url: str, i: int, request: dict) -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=PATIENCE) as answer,
        ):
            for chunk in answer.iter_bytes():
                self.bodies[i] += chunk
                self.flowing[i].set()

    def join(self) -> list[bytes]:
        for thread in self.threads:
            thread.join(PATIENCE)
        return self.bodies


@linux
def test_stopping_under_load(traces):
    """Who is done in time gets the whole answer, the others an error."""
    with server("--drain-seconds", "1.5", "--max-running", "64") as running:
        folder, *_ = traces.temp.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(traces.processes()) == 3
        short, long = Streams(running.url, 1, max_tokens=20), Streams(running.url, 24, max_tokens=2000)
        running.process.send_signal(signal.SIGINT)
        bodies = long.join()
        assert running.process.wait(PATIENCE) == 0
    assert b"[DONE]" in short.join()[0]
    assert all(b"[DONE]" in body or b"shutting down" in body for body in bodies)
    assert any(b"shutting down" in body for body in bodies)
    assert traces.gone()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
    except httpx.TransportError:  # it takes no more connections
        return False


@linux
def test_a_second_interrupt_ends_it_at_once(traces):
    with server("--drain-seconds", "600") as running:
        streams = Streams(running.url, 16)
        for pid in traces.processes():  # nobody answers any more, so it would wait
            os.kill(pid, signal.SIGSTOP)
        running.process.send_signal(signal.SIGINT)
        while healthy(running.url):  # two that come before the first is looked at count as one
            time.sleep(0.1)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(PATIENCE) == 130
    streams.join()
    assert traces.gone()


@linux
def test_workers_do_not_outlive_the_server(traces):
    """Two ranks: their processes go too."""
    with server("--tp", "2") as running:
        streams = Streams(running.url, 4)
        assert len(traces.processes()) == 3 + 2 + 1  # and multiprocessing's own, which ends with them
        running.process.kill()
        streams.join()
        assert traces.gone()


def test_a_dying_server_may_still_be_the_parent(tmp_path):
    """Its threads die one by one, and each sends a signal: more than one comes, and before the process has gone."""
    folder = tmp_path / "ipc"
    folder.mkdir()
    settings = Settings(DETOKENIZER, 0, str(folder), os.getpid(), EngineConfig(model="dummy:tiny"), 1)
    command = [sys.executable, "-m", "stage9_server.detokenizer_worker", msgspec.json.encode(settings).decode()]
    with subprocess.Popen(command, cwd=local_server.ROOT) as worker:
        while not (folder / DETOKENIZER).exists():
            time.sleep(0.01)
        while worker.poll() is None:
            worker.send_signal(signal.SIGHUP)
    assert worker.returncode == ORPHANED
    assert not folder.exists()


@linux
def test_a_model_that_is_not_there(traces):
    command = [sys.executable, "-m", "stage9_server.launch", "--device", "cpu", "--port", "0", "--model", "/nowhere"]
    done = subprocess.run(command, cwd=local_server.ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model '/nowhere' is unknown") and done.stderr.count("\n") == 1
    assert traces.gone()


@pytest.mark.parametrize(("flags", "says"), [
    (["--page-size", "0"], "page_size is 0"),
    (["--port", "70000"], "--port is 70000"),
    (["--port", "{taken}"], "choose another --host or --port"),
    (["--host", "no such host"], "choose another --host or --port"),
    (["--tokenizers", "0"], "--tokenizers is 0"),
    (["--drain-seconds", "nan"], "--drain-seconds is nan"),
])  # fmt: skip
def test_flags_that_make_no_sense(traces, monkeypatch, flags, says):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(sys, "argv", ["launch", *(flag.format(taken=taken.getsockname()[1]) for flag in flags)])
        with pytest.raises(UserError, match=says):
            launch.main()
    assert not list(traces.temp.iterdir())


@linux
def test_a_server_without_its_guard(traces):
    """It answers those who behave; and the first worker that dies ends it."""
    with server("--no-guard") as running:
        request = {"model": "dummy:tiny", "prompt": "hi", "max_tokens": 3, "temperature": 0}
        whole = httpx.post(f"{running.url}/v1/completions", json=request, timeout=PATIENCE)
        assert whole.json()["usage"]["completion_tokens"] == 3
        assert b"[DONE]" in Streams(running.url, 2, max_tokens=20).join()[1]
        assert httpx.post(f"{running.url}/tokenize", json={"prompt": "hi"}).json()["count"] == 2
        assert httpx.get(f"{running.url}/health", headers={"Host": "evil.example"}).status_code == 200
        os.kill(next(pid for pid in traces.processes() if "detokenizer_worker" in processes()[pid]), signal.SIGKILL)
        assert running.process.wait(PATIENCE) == 1
    assert traces.gone()
