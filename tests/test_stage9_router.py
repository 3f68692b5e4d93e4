"""Two servers behind SGLang's own router: it learns their model's name, spreads requests, sends equal prefixes to one server,
and goes on when a server dies.
"""

import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from stage9_server import local_server
from tests.test_stage9_api import events

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("sglang_router"), reason="needs sglang-router (Linux)")
FLAGS = ("--model=dummy:tiny", "--device=cpu", "--dtype=float32", "--port=0", "--served-model-name", "tiny", "other")
PATIENCE = 60  # seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def servers():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(local_server.running(*FLAGS)) for _ in range(2)]


@pytest.fixture(scope="module")
def router(servers):
    port, metrics = free_port(), free_port()
    words = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-port", str(metrics), "--policy", "cache_aware", "--log-level", "error"]
    words += ["--cb-failure-threshold", "1", "--worker-urls", *(server.url for server in servers)]
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process, client:
        try:
            until(lambda: len(workers(client)) == 2)
            yield client
        finally:
            process.kill()


def workers(client: httpx.Client) -> list[dict]:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/workers").json()["workers"]
    return []


def until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def served(servers) -> list[float]:
    """Sequences that each of them has answered."""
    return [local_server.metrics(server.url)["sglang:num_requests_total"] for server in servers]


def complete(client: httpx.Client, prompt: str, **fields) -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_router_knows_the_models_name(router):
    assert {worker["model_id"] for worker in workers(router)} == {"tiny"}
    assert "tiny" in [model["id"] for model in router.get("/v1/models").json()["data"]]


def test_every_way_of_asking_goes_through(router):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = router.post("/v1/chat/completions", json=chat, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == "chatcmpl-mine"
    streamed = router.post("/v1/chat/completions", json=chat | {"stream": True})
    assert events(streamed.content)[-1] == "[DONE]"
    assert complete(router, "hi")["usage"]["completion_tokens"] == 4
    params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = router.post("/generate", json={"text": "hi", "sampling_params": params}).json()
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == 5
    streamed = router.post("/generate", json={"text": "hi", "sampling_params": params, "stream": True})
    *parts, done = events(streamed.content)
    assert done == "[DONE]" and json.loads(parts[-1])["text"] == answer["text"]
    assert router.post("/flush_cache").json()["workers_flushed"] == 2


def test_equal_prefixes_go_to_one_server_and_others_are_spread(router, servers):
    before = served(servers)
    starts = [f"{letter * 80}, which these have in common, {letter * 80}" for letter in "abcdefgh"]
    with ThreadPoolExecutor(len(starts)) as pool:  # at the same time, so that one server is busier than the other
        list(pool.map(lambda start: complete(router, start, max_tokens=300), starts))
    until(lambda: sum(served(servers)) == sum(before) + len(starts))
    spread = [after - count for after, count in zip(served(servers), before, strict=True)]
    assert min(spread) >= 2
    for start in starts:
        cached = [complete(router, f"{start}{i}")["usage"]["prompt_tokens_details"]["cached_tokens"] for i in range(2)]
        assert min(cached) > 150, start  # where it went is where the prefix is


def test_a_killed_servers_requests_go_to_the_other(router, servers):
    servers[0].process.send_signal(signal.SIGKILL)
    for i in range(8):
        assert complete(router, f"{i} after the death")["usage"]["completion_tokens"] == 4
    assert servers[1].process.poll() is None
