"""Stage 9: the whole server at work. Real processes, the official client, 32 streams at once, a client that leaves, a clean end."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from openai import OpenAI

from common import cli, report
from common.config import UserError
from stage9_server import load, local_server

GROUPS, STREAMS, MAX_TOKENS, SINGLE = 4, 32, 32, 5
TEACHERS = ("a geographer", "a physicist", "a musician", "a cook")
RULES = "Answer in one short sentence. Use plain words. Be kind, be correct, and do not repeat the question. " * 6
TOPICS = ("rain", "salt", "time", "light", "silence", "heat", "rivers", "sleep")
SHOWN = (
    *("prompt_tokens_total", "cached_tokens_total", "generation_tokens_total", "steps_total", "computed_tokens_total"),
    *("num_retracted_requests_total", "cache_hit_rate"),
)


def main() -> None:
    parser = cli.parser(__doc__, *(flag for flag in local_server.ENGINE_FLAGS if flag not in cli.COMMON))
    args = parser.parse_args()
    report.heading("Four kinds of process")
    start = time.perf_counter()
    with local_server.running(*local_server.as_flags(args), "--port", "0") as server:
        data = {"seconds to start": round(time.perf_counter() - start, 1)}
        for line in server.lines:
            report.say(line)
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
        chat(client, args.model)
        before = local_server.metrics(server.url)
        data["rows"] = streams(server.url, args.model, data)
        data["disconnect"] = disconnect(client, args.model, server.url)
        after = local_server.metrics(server.url)
        rows = [[name, before[f"sglang:{name}"], after[f"sglang:{name}"]] for name in SHOWN]
        data["metrics"] = [[name, *(round(v, 3) if v % 1 else int(v) for v in values)] for name, *values in rows]
        report.table("/metrics", ["", "before the streams", "after"], data["metrics"])
        stopping = time.perf_counter()
    data["stop"] = stopped(server, time.perf_counter() - stopping)
    if args.save:
        report.save(__file__, "", args, {"columns": ["", *load.COLUMNS], **data})


def chat(client: OpenAI, model: str) -> None:
    report.heading("The official openai client")
    ask = {"model": model, "temperature": 0, "max_tokens": 24}
    question = [{"role": "user", "content": "What is gravity? Answer in one sentence."}]
    answer = client.chat.completions.create(messages=question, **ask)
    text, usage = answer.choices[0].message.content, answer.usage
    report.say(f"at once: {text}")
    report.say(f"         {usage.prompt_tokens} + {usage.completion_tokens} tokens, {answer.choices[0].finish_reason}")
    pieces = client.chat.completions.create(messages=question, stream=True, **ask)
    deltas = [choice.delta.content or "" for chunk in pieces for choice in chunk.choices]
    report.say(f"streamed: {'|'.join(filter(None, deltas))}")
    if "".join(deltas) != text:
        raise UserError("the stream and the whole answer differ; that is a mistake of the server")


def streams(url: str, model: str, data: dict) -> list:
    each = f"{GROUPS} system prompts, {STREAMS // GROUPS} questions on each"
    report.heading(f"{SINGLE} streams one by one, then {STREAMS} at once: {each}")
    server, rows = load.Server(url), []
    for name, count, options in (("one by one", SINGLE, {"concurrency": 1}), (f"{STREAMS} at once", STREAMS, {})):
        bodies = [question(model, i) for i in range(count)]
        summary = load.summarize(asyncio.run(load.offer(server, "/v1/chat/completions", bodies, **options)))
        if summary.failed:
            raise UserError(f"{summary.failed} of {count} streams failed; the server's output above says why")
        rows += [[name, *row] for row in summary.rows if row[0] in ("TTFT", "ITL")]
        data[name] = {
            "output tokens": summary.output_tokens,
            "output tokens/s": round(summary.throughput, 1),
            "prompt tokens": summary.prompt_tokens,
            "of them cached, %": round(100 * summary.cached_tokens / summary.prompt_tokens, 1),
        }
    report.table("Latency", ["streams", *load.COLUMNS], rows)
    facts = [[name, *data[name].values()] for name in ("one by one", f"{STREAMS} at once")]
    report.table("Throughput", ["streams", *data["one by one"]], facts)
    return rows


def question(model: str, i: int) -> dict:
    system = f"You are {TEACHERS[i % GROUPS]}. {RULES}"
    text = f"What does {TOPICS[i // GROUPS % len(TOPICS)]} mean to you?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0.6, "ignore_eos": True}


def disconnect(client: OpenAI, model: str, url: str) -> list:
    report.heading("A client leaves in the middle of its answer")
    ask = {"model": model, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    story = [{"role": "user", "content": "Tell me a story."}]
    stream = client.chat.completions.create(messages=story, stream=True, **ask)
    until = time.perf_counter() + 3  # the scheduler reports once a second
    for _ in stream:
        if (during := local_server.metrics(url))["sglang:num_running_reqs"] or time.perf_counter() > until:
            break
    stream.close()
    left = time.perf_counter()
    while (after := local_server.metrics(url))["sglang:num_running_reqs"] and time.perf_counter() < left + 10:
        time.sleep(0.005)
    milliseconds = round(1e3 * (time.perf_counter() - left))
    names = ("num_running_reqs", "pages_free", "pages")
    rows = [
        [when, *(int(values[f"sglang:{name}"]) for name in names)]
        for when, values in (("during", during), (f"{milliseconds} ms after", after))
    ]
    report.table("", ["", *names], rows)
    if rows[1][1:] != [0, rows[1][3], rows[1][3]]:
        raise UserError("pages were lost; that is a mistake of the server")
    return rows


def stopped(server: local_server.Running, seconds: float) -> dict:
    pids = [int(pid) for line in server.lines for pid in re.findall(r"process (\d+)", line)]
    alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    result = {"seconds": round(seconds, 2), "exit status": server.process.returncode, "processes left": len(alive)}
    report.table("SIGTERM", list(result), [list(result.values())])
    return result


if __name__ == "__main__":
    cli.run(main)
