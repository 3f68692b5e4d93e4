"""A client for any OpenAI-compatible server: a chat in the terminal, and a benchmark.

python -m stage9_server.client chat --system "Be brief."
python -m stage9_server.client bench --dataset shared_prefix --rate 4
"""

import argparse
import asyncio
import os
import sys

import numpy as np
from openai import APIError, OpenAI

from common import cli, report, workload
from common.config import UserError, check_range
from stage9_server import load
from stage9_server.cli import KEY_VARIABLE

DATASETS = ("offline", "shared_prefix", "multi_turn")
WORDS = ("time", "way", "year", "work", "day", "world", "life", "hand", "part", "child", "eye", "place", "week", "case")
HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    shared.add_argument("--model", help="its name there (default: the first one that the server lists)")
    shared.add_argument("--api-key", help=f"(default: the environment's {KEY_VARIABLE})")
    shared.add_argument("--temperature", type=float, default=0.6, help="(default: %(default)s)")
    commands = parser.add_subparsers(required=True, metavar="chat | bench")
    add = commands.add_parser("chat", parents=[shared], help=HELP)
    add.add_argument("--system", help="what the model is told before the conversation")
    add.add_argument("--max-tokens", type=int, help="of one answer (default: as many as fit)")
    add.set_defaults(command=chat)
    add = commands.add_parser("bench", parents=[shared], help="latency and throughput under a load")
    add.add_argument("--dataset", choices=DATASETS, default="offline", help="(default: %(default)s)")
    add.add_argument("--scale", type=float, default=1.0, help="of its lengths (default: 1)")
    add.add_argument("--requests", type=int, help="only the first N, or N conversations (default: all)")
    how = add.add_mutually_exclusive_group()
    how.add_argument("--rate", type=float, help="requests per second, Poisson arrivals (default: all at once)")
    how.add_argument("--concurrency", type=int, help="requests at the same time (default: all)")
    add.add_argument("--ttft-limit", type=float, metavar="MS", help="a good request has its first token by then")
    add.add_argument("--itl-limit", type=float, metavar="MS", help="and needs at most this for a token, in the mean")
    add.add_argument("--save", action="store_true", help="write the record and the plot to results/")
    add.set_defaults(command=bench)
    args = parser.parse_args()
    check_range("--temperature", args.temperature, 0, 2)
    load.Server(args.url)  # is it an address at all?
    args.url = args.url.rstrip("/").removesuffix("/v1")  # which other clients want there
    args.api_key = args.api_key or os.environ.get(KEY_VARIABLE) or "none"
    try:
        vars(args).pop("command")(args, OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key))
    except APIError as error:
        raise UserError(f"the server at {args.url} says: {error.message}") from error


def find_model(client: OpenAI, name: str | None):
    models = {model.id: model for model in client.models.list().data}
    if name is not None and name not in models:
        raise UserError(f"the server has no model {name!r}; it has {', '.join(models)}")
    return models[name or next(iter(models))]


# --- chat -------------------------------------------------------------------------------------------------------


def chat(args: argparse.Namespace, client: OpenAI) -> None:
    model = find_model(client, args.model).id
    start = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(start)
    report.say(f"{model} at {args.url}. {HELP}.")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(start)
        elif text.startswith("/"):
            report.say(HELP)
        elif text:
            question = {"role": "user", "content": text}
            if answer := tell(client, model, [*messages, question], args):
                messages += [question, {"role": "assistant", "content": answer}]


def tell(client: OpenAI, model: str, messages: list[dict], args: argparse.Namespace) -> str:
    """Print the answer as it comes, and return it, or what there was of it at Ctrl-C or at an error."""
    answer = ""
    try:
        with client.chat.completions.create(
            model=model, messages=messages, temperature=args.temperature, max_tokens=args.max_tokens, stream=True
        ) as stream:
            for chunk in stream:
                for choice in chunk.choices:
                    piece = choice.delta.content or ""
                    answer += piece
                    print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except APIError as error:
        print(f"error: {error.message}", end="", file=sys.stderr)
    print()
    return answer


# --- bench ------------------------------------------------------------------------------------------------------


def bench(args: argparse.Namespace, client: OpenAI) -> None:
    for name in ("rate", "concurrency", "requests", "ttft_limit", "itl_limit"):
        if (value := getattr(args, name)) is not None:
            check_range(f"--{name.replace('_', '-')}", value, 0, open_low=True)
    check_range("--scale", args.scale, 0, 1, open_low=True)
    model = find_model(client, args.model)
    limits = [np.inf if limit is None else limit / 1e3 for limit in (args.ttft_limit, args.itl_limit)]
    replies = asyncio.run(send(args, model.id, getattr(model, "vocab_size", 10001)))
    summary = load.summarize(replies, *limits)
    errors = sorted({reply.error for reply in replies if reply.error})[:5]
    if summary.failed == summary.requests:
        raise UserError(f"none of the {summary.requests} requests was answered: {'; '.join(errors)}")
    how = f"{args.rate:g} per second" if args.rate else f"{args.concurrency or 'all'} at once"
    show(f"{args.dataset}, {len(replies)} requests, {how}", summary)
    for error in errors:
        report.say(f"error: {error}")
    if args.save:
        data = {"columns": load.COLUMNS, "rows": summary.rows, "summary": facts(summary)}
        args.api_key = None  # not for others to read
        report.save(__file__, f"bench-{args.dataset}", args, data)
        draw(f"bench-{args.dataset}", how, summary)


async def send(args: argparse.Namespace, model: str, vocab_size: int) -> list[load.Reply]:
    def scaled(size: int) -> int:
        return max(1, round(size * args.scale))

    server, when = load.Server(args.url, args.api_key), {"concurrency": args.concurrency, "rate": args.rate}
    if args.dataset == "multi_turn":
        sizes = map(scaled, (256, 64, 64))
        conversations = [
            [{"content": words(item), **exact(item)} for item in turns] for turns in workload.multi_turn(16, 4, *sizes)
        ]
        body = {"model": model, "temperature": args.temperature}
        return await load.converse(server, body, conversations[: args.requests], **when)
    if args.dataset == "shared_prefix":
        items = workload.shared_prefix(8, 16, *map(scaled, (1024, 64, 128)), vocab_size=vocab_size)
    else:
        items = workload.offline(args.scale, vocab_size)
    return await load.offer(server, *completions(model, items[: args.requests], args.temperature), **when)


def completions(model: str, items: list[workload.Item], temperature: float, **more) -> tuple[str, list[dict]]:
    """(path, bodies) of requests of exactly the items' lengths."""
    body = {"model": model, "temperature": temperature} | more
    return "/v1/completions", [body | {"prompt": item.prompt_ids, **exact(item)} for item in items]


def exact(item: workload.Item) -> dict:
    return {"max_tokens": item.max_tokens, "ignore_eos": True}


def words(item: workload.Item) -> str:
    """Text of about the item's length, where there are no token ids to send."""
    return " ".join(WORDS[token % len(WORDS)] for token in item.prompt_ids)


def facts(summary: load.Summary) -> dict[str, float]:
    return {
        "requests": summary.requests,
        "failed": summary.failed,
        "seconds": round(summary.seconds, 2),
        "requests/s": round((summary.requests - summary.failed) / summary.seconds, 2),
        "good requests/s": round(summary.good / summary.seconds, 2),
        "prompt tokens": summary.prompt_tokens,
        "of them cached": summary.cached_tokens,
        "output tokens": summary.output_tokens,
        "output tokens/s": round(summary.throughput, 1),
    }


def show(title: str, summary: load.Summary) -> None:
    report.table(title, load.COLUMNS, summary.rows)
    numbers = facts(summary)
    report.table("", list(numbers), [list(numbers.values())])


def draw(name: str, how: str, summary: load.Summary) -> None:
    with report.plot(__file__, name, f"Latency, {how}", "milliseconds", "share of them that are faster") as axes:
        for label, values in summary.latencies.items():
            if values:
                axes.ecdf([1e3 * value for value in values], label=label)
        axes.set_xscale("log")


if __name__ == "__main__":
    cli.run(main)
