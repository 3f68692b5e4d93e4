"""Records the scenarios that the page plays: real engines, the default model, a few requests each.

python -m stage9_server.inspector.record 5 7    # these; without numbers all that this machine can record

Scenario 6 needs a GPU, for on a CPU the host computes the steps itself and nothing overlaps.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch

from common import cli
from common.config import EngineConfig, UserError
from common.tokenizer import Tokenizer, load_tokenizer
from stage2_req.engine import Engine
from stage2_req.params import SamplingParams
from stage8_tp.build import build_rank
from stage8_tp.launch import run_job
from stage8_tp.ranks import Alone, Ranks
from stage9_server.inspector.reader import parse, replay
from stage9_server.inspector.trace import Trace

FOLDER = Path(__file__).parent / "scenarios"
MODEL = "smollm2-135m"


@dataclass
class Take:
    """One recording of a scenario."""

    name: tuple[str, str]  # English, Chinese
    data: bytes

    def __post_init__(self):
        self.header, self.lines = parse(self.data)

    def first(self, test: Callable[[dict], object], after: int = 0) -> int:
        """Which line passes the test first."""
        return next(i for i, line in enumerate(self.lines) if i >= after and test(line))


@dataclass
class Note:
    """A caption: at this line of this take, look there."""

    take: int
    step: int
    en: str
    zh: str
    uid: int | None = None
    page: int | None = None


@dataclass
class Scenario:
    title: tuple[str, str]
    text: tuple[str, str]
    takes: list[Take] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def write(self, number: str) -> Path:
        """A script, one line per step, which hands all of it to the page."""
        head = {"id": number, "title": both(self.title), "text": both(self.text), "captions": []}
        for note in self.notes:
            entry = {"take": note.take, "step": note.step, "n": self.takes[note.take].lines[note.step]["n"]}
            head["captions"].append(
                entry | {k: v for k, v in vars(note).items() if v is not None and k not in ("take", "step")}
            )
        text = "inspector.scenario(" + json.dumps(head, ensure_ascii=False, separators=(",", ":"))[:-1] + ',"takes":[\n'
        takes = [
            json.dumps({"name": both(take.name)}, ensure_ascii=False, separators=(",", ":"))[:-1]
            + ',"lines":[\n'
            + ",\n".join(line.decode() for line in take.data.splitlines())
            + "\n]}"
            for take in self.takes
        ]
        path = FOLDER / f"{number}.js"
        path.write_text(text + ",\n".join(takes) + "\n]});\n")
        return path


def both(words: tuple[str, str]) -> dict[str, str]:
    return dict(zip(("en", "zh"), words, strict=True))


# --- engines and prompts ----------------------------------------------------------------------------------------------


def build(folder: str, **settings) -> Engine:
    settings = {"model": MODEL, "max_model_len": 1024, "max_running": 8, "max_batch_tokens": 64} | settings
    return importlib.import_module(f"{folder}.build").build_engine(EngineConfig(**settings))


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


def chat(*texts: str, system: str = "") -> list[int]:
    """Token ids of a conversation that the user began: user, assistant, user, ..."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return tokenizer().chat(([{"role": "system", "content": system}] if system else []) + turns)


def decode(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special=False)


def greedy(n: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True, **more)


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def take(name: tuple[str, str], engine: Engine, drive: Callable[[Engine], None], text=decode) -> Take:
    engine.generate([[1] * 8], greedy(2))  # warm
    with Trace(engine, text) as trace:
        drive(engine)
    return Take(name, trace.dump())


# --- the scenarios ------------------------------------------------------------------------------------------------------


def frame() -> Scenario:
    """Stage 2: requests one after the other."""

    def drive(engine: Engine) -> None:
        for question, n in (("What is a cloud?", 12), ("Why is the sky blue?", 16), ("What is rust?", 8)):
            engine.add(chat(question), greedy(n))
        finish(engine)

    result = Scenario(
        ("The frame: one request after another", "框架：请求一个接一个"),
        (
            "Three requests in stage 2's engine, first come, first served. Nothing is kept, so every step computes every position of its request again: the grid of the batch grows by one cell per step.",
            "三个请求进入阶段 2 的引擎，先来先服务。什么也不缓存，所以每一步都把该请求的所有位置重算一遍：批次网格每步多一格。",
        ),
        [take(("stage 2", "阶段 2"), build("stage2_req"), drive)],
    )
    lines = result.takes[0]
    second = lines.first(lambda line: line.get("ends"))
    uid = lines.lines[second]["ends"][0][0]
    result.notes = [
        Note(
            0,
            0,
            "The first request computes its whole prompt. The two others wait: a batch is one request here.",
            "第一个请求计算整个提示。另外两个在等待：这里一个批次只有一个请求。",
            uid,
        ),
        Note(
            0,
            second - 1,
            "Its last step computes the prompt and every token so far, to get one more. cached_len is still 0.",
            "它的最后一步把提示和所有已生成的 token 重算一遍，只为多得一个。cached_len 仍是 0。",
            uid,
        ),
        Note(
            0,
            second + 1,
            "It is done, and the next one starts. Its time to the first token was mostly waiting.",
            "它结束了，下一个开始。后者的首 token 时间主要花在等待上。",
            uid + 1,
        ),
    ]
    return result


def cached() -> Scenario:
    """Stages 1 and 3: the same answer without and with a cache."""

    def drive(engine: Engine) -> None:
        engine.generate([chat("What is gravity?")], greedy(40))

    result = Scenario(
        ("Naive against cached", "朴素对比缓存"),
        (
            "One prompt, 40 tokens, twice. Naive: every step computes all positions (stage 1's loop, seen through stage 2's engine). Cached: the keys and values stay, and a step computes one position.",
            "同一个提示，生成 40 个 token，两种做法。朴素：每步计算所有位置（阶段 1 的循环，用阶段 2 的引擎来看）。缓存：K 和 V 留下来，每步只算一个位置。",
        ),
        [
            take(("naive (1, 2)", "朴素（1、2）"), build("stage2_req"), drive),
            take(("cached (3)", "缓存（3）"), build("stage3_kvcache"), drive),
        ],
    )
    uid, last = result.takes[0].lines[0]["new"][0][0], len(result.takes[0].lines) - 2
    result.notes = [
        Note(
            0,
            last,
            "Naive, near the end: the grid is full. All of these positions were computed in the step before as well.",
            "朴素，接近结尾：网格是满的。这些位置在上一步都已经算过。",
            uid,
        ),
        Note(
            1,
            0,
            "Cached, the first step: the prompt is computed once (prefill). Only this step looks like the naive one.",
            "缓存，第一步：提示只算一次（prefill）。只有这一步和朴素的一样。",
            uid,
        ),
        Note(
            1,
            last,
            "Cached, the same token: one cell. cached_len has followed device_len all the way; extend_len is 1.",
            "缓存，同一个 token：只有一格。cached_len 一直跟着 device_len，extend_len 为 1。",
            uid,
        ),
    ]
    return result


def chunked() -> Scenario:
    """Stage 4: what a long prompt does to the others."""
    long = chat("Summarize: " + "The river carries water from the mountains to the sea and feeds the fields. " * 24)

    def drive(engine: Engine) -> None:
        for question in ("What is a cloud?", "What is a river?", "What is rust?"):
            engine.add(chat(question), greedy(30))
        for _ in range(8):
            engine.step()
        engine.add(long, greedy(8))
        finish(engine)

    settings = {"max_running": 4}
    result = Scenario(
        ("A long prompt arrives", "长提示到来"),
        (
            f"Three requests are decoding when a prompt of {len(long)} tokens arrives. Whole: the budget takes all of it, and the three wait for one long step. Chunked: the budget is 64, and the prompt goes through beside them.",
            f"三个请求正在解码，这时来了一个 {len(long)} 个 token 的提示。整段：预算放得下它，三个请求要等一个很长的步。分块：预算是 64，提示在它们旁边一块块通过。",
        ),
        [
            take(
                ("whole, budget 1024", "整段，预算 1024"),
                build("stage4_batch", **settings, max_batch_tokens=1024),
                drive,
            ),
            take(
                ("chunked, budget 64", "分块，预算 64"), build("stage4_batch", **settings, max_batch_tokens=64), drive
            ),
        ],
    )

    def is_long(line: dict) -> bool:
        return any(n > 40 for _, start, n in line.get("batch", {}).get("chunks", ()) if start or n > 200)

    whole = result.takes[0].first(is_long)
    uid = result.takes[0].lines[whole]["batch"]["chunks"][0][0]
    after = result.takes[1].first(lambda line: any(c[0] == uid for c in line.get("batch", {}).get("chunks", ())))
    end = result.takes[1].first(lambda line: not line.get("batch", {}).get("chunks"), after)
    result.notes = [
        Note(
            0,
            whole,
            "Whole: three decodes share a step with the whole prompt. Look at the timeline: nobody gets a token until it is over.",
            "整段：三个解码和整个提示在同一步里。看时间线：这一步结束之前谁都得不到 token。",
            uid,
        ),
        Note(
            1,
            after + 1,
            "Chunked: three cells for the decodes, the rest of the budget for the prompt. The red line is the budget.",
            "分块：三格给解码，预算的其余部分给提示。红线就是预算。",
            uid,
        ),
        Note(
            1,
            end - 1,
            "The last chunk. Only this step samples a token for the long prompt; all the while the others went on.",
            "最后一块。只有这一步才为长提示采样 token；其间其他请求一直在前进。",
            uid,
        ),
    ]
    return result


def tight() -> Scenario:
    """Stage 5: pages run out."""

    def drive(engine: Engine) -> None:
        for thing in ("a cloud", "a river", "the moon", "a magnet", "an echo", "rust"):
            engine.add(chat(f"What is {thing}?"), greedy(28))
        finish(engine)

    engine = build("stage5_paged", max_model_len=128, page_size=4, kv_tokens=160)
    result = Scenario(
        ("A tight pool", "内存紧张"),
        (
            "Forty pages of four tokens, and six requests that each need up to seventeen. They are let in by what they need now; when the pages run out, the youngest gives its own back, waits, and computes them again.",
            "四十个页，每页四个 token；六个请求，每个最多要十七页。按当下所需放行；页用完时，最年轻的交还自己的页，等待，然后重新计算。",
        ),
        [take(("stage 5", "阶段 5"), engine, drive)],
    )
    one = result.takes[0]
    full = one.first(lambda line: line.get("retracted"))
    uid = one.lines[full]["retracted"][0]
    *_, before = replay(one.lines[:full])  # one state, which ends as that before the line
    page = before.rows[uid][-1]
    again = one.first(lambda line: any(c[0] == uid for c in line.get("batch", {}).get("chunks", ())), full)
    result.notes = [
        Note(
            0,
            full - 1,
            f"The last step before the pages run out. Watch page {page}: it is the last one of request {uid}.",
            f"页用完之前的最后一步。注意第 {page} 页：它是请求 {uid} 的最后一页。",
            uid,
            page,
        ),
        Note(
            0,
            full,
            f"Retraction: request {uid} is the youngest, so its pages are free again and page {page} has changed hands or is free. Its tokens stay with it.",
            f"抢占：请求 {uid} 最年轻，它的页空出来了，第 {page} 页已空闲或换了主人。它的 token 还在。",
            uid,
            page,
        ),
        Note(
            0,
            again,
            f"Request {uid} is back. It computes its prompt and its own earlier tokens in one chunk, and goes on with the same text.",
            f"请求 {uid} 回来了。它把提示和自己先前的 token 一块算完，接着写同样的文字。",
            uid,
        ),
    ]
    return result


def overlap() -> Scenario:
    """Stage 6, on a GPU: graphs, padding, overlap, and an end that comes late."""
    if not torch.cuda.is_available():
        raise UserError("scenario 6 is recorded on a GPU; run it on a machine that has one")
    settings = {"model": "dummy:qwen3-0.6b", "max_model_len": 512, "kv_tokens": 512, "page_size": 4, "max_running": 16}
    prompts = [[100 + i] * (24 + 9 * i) for i in range(5)]
    params = [greedy(20, temperature=1.0, seed=i + 1) for i in range(len(prompts))]
    text = (
        build("stage6_cudagraph", **settings, graph=False, overlap=False).generate(prompts[:1], params[0])[0].output_ids
    )
    stop = next(token for i, token in enumerate(text) if i >= 10 and token not in text[:i])
    params[0] = replace(params[0], stop_token_ids=frozenset({stop}))

    def drive(engine: Engine) -> None:
        for prompt, wanted in zip(prompts, params, strict=True):
            engine.add(prompt, wanted)
        finish(engine)

    takes = []
    for name, graph, ahead in (
        (("eager", "逐个启动"), False, False),
        (("graphs", "图"), True, False),
        (("graphs and overlap", "图与重叠"), True, True),
    ):
        engine = build("stage6_cudagraph", **settings, graph=graph, overlap=ahead)
        for _ in range(3):
            drive(engine)  # compiled and warm
        takes.append(take(name, engine, drive, text=None))
        del engine
        torch.cuda.empty_cache()
    return graphs_story(takes)


def graphs_story(takes: list[Take]) -> Scenario:
    card = takes[0].header["device_name"]
    step = [line["device"] for line in (take.lines[7] for take in takes)]  # of decodes: number, begin and end
    eager, replayed = (f"{(end - start) / 1000:.1f}" for _, start, end in step[:2])
    result = Scenario(
        ("Graphs and overlap", "CUDA 图与重叠"),
        (
            f"Five requests in the shapes of Qwen3-0.6B on one {card}. Eager: the host launches kernel after kernel, and the device waits. Graphs: one launch per step. Overlap: the host prepares the next step while the device computes this one.",
            f"五个请求，Qwen3-0.6B 的形状，一块 {card}。逐个启动：主机一个个启动 kernel，设备在等。图：每步一次启动。重叠：设备算这一步时，主机准备下一步。",
        ),
        takes,
    )
    late = takes[2].first(lambda line: any(end[2] for end in line.get("ends", ())))
    uid = takes[2].lines[late]["ends"][0][0]
    result.notes = [
        Note(
            0,
            6,
            f"Eager: a step of decodes takes {eager} ms, for the host launches kernel after kernel, and the device, which is busy between the first and the last, mostly waits for the next one.",
            f"逐个启动：一个解码步要 {eager} ms，因为主机一个个启动 kernel；设备从第一个到最后一个都算忙，其实多半在等下一个。",
        ),
        Note(
            1,
            6,
            f"Graphs: the same step is one replay, {replayed} ms. Five decodes are padded to eight: the hatched cells are computed and thrown away.",
            f"图：同一步只是一次重放，{replayed} ms。五个解码填充到八个：斜线格算了就扔。",
        ),
        Note(
            2,
            6,
            "Overlap: while the device works on a step, the host schedules and launches the next. The device's bars touch.",
            "重叠：设备在算一步时，主机调度并启动下一步。设备的条首尾相接。",
        ),
        Note(
            2,
            late,
            f"The late end: request {uid} met its stop token in the step before. The host reads that only now, and the step under way still computes it; that stray token is dropped.",
            f"迟到的结束：请求 {uid} 在上一步就遇到了停止 token。主机现在才读到，而在途的一步还在算它；那个多余的 token 被丢弃。",
            uid,
        ),
    ]
    return result


SYSTEM = "You are a patient teacher. Answer in one short sentence and use plain words."


def shared() -> Scenario:
    """Stage 7: system prompts, conversations, eviction."""

    def drive(engine: Engine) -> None:
        engine.generate([chat("What is a cloud?", system=SYSTEM)], greedy(12))
        for question in ("What is a cloud made of?", "Why is the sky blue?", "Why is the sea salty?"):
            engine.add(chat(question, system=SYSTEM), greedy(12))
        finish(engine)
        said = ["What is rust?"]
        for question in ("How do I stop it?", "Is it poisonous?"):
            req = engine.generate([chat(*said)], greedy(12))[0]
            said += [tokenizer().decode(req.output_ids), question]
        engine.generate([chat(*said)], greedy(12))
        for city in ("Rome", "Oslo", "Lima", "Cairo"):
            engine.add(
                chat(f"Tell me about the history of {city}, its founding, its people and its trade."), greedy(20)
            )
        finish(engine)
        engine.generate([chat("Why do cats purr?", system=SYSTEM)], greedy(8))

    engine = build("stage7_radix", max_model_len=256, page_size=4, kv_tokens=336)
    result = Scenario(
        ("Shared prefixes", "共享前缀"),
        (
            "Four questions under one system prompt, then a conversation of three turns, then four strangers for whom the pool is too small, and at last the system prompt again. Tree and page map show what is kept, shared, and given up.",
            "同一系统提示下的四个问题，然后是三轮对话，再来四个生人，池就不够了，最后又是那个系统提示。从树和页图可以看到什么被保留、共享、放弃。",
        ),
        [take(("stage 7", "阶段 7"), engine, drive)],
    )
    one = result.takes[0]
    split = one.first(lambda line: line.get("hits"))
    turn = one.first(lambda line: line.get("hits") and line["n"] > one.lines[split]["n"] + 20)
    evict = one.first(lambda line: line.get("evicted"))
    last = one.first(lambda line: line.get("hits"), evict) if any(x.get("hits") for x in one.lines[evict:]) else None
    hit = one.lines[split]["hits"][0]
    deep = one.lines[turn]["hits"][0]
    result.notes = [
        Note(
            0,
            split,
            f"The system prompt was here already: request {hit[0]} finds {hit[1]} tokens and computes only its question. The node is split where the questions differ.",
            f"系统提示已经在这里：请求 {hit[0]} 命中 {hit[1]} 个 token，只算自己的问题。节点在问题分岔处被拆开。",
            hit[0],
        ),
        Note(
            0,
            turn,
            f"The conversation goes on: its first turn, question and answer, is in the tree ({deep[1]} tokens). Nothing of it is computed again.",
            f"对话继续：第一轮的问与答都在树里（{deep[1]} 个 token），一点也不重算。",
            deep[0],
        ),
        Note(
            0,
            evict,
            "No page is free, so unlocked leaves are evicted, the least recently used first (the red ghosts). Locked nodes stay.",
            "没有空闲页了，于是淘汰未加锁的叶子，最久未用的先走（红色虚影）。加锁的节点留下。",
        ),
    ]
    if last is not None:
        again = one.lines[last]["hits"][0]
        result.notes.append(
            Note(
                0,
                last,
                f"What is left of the system prompt is found once more: {again[1]} tokens.",
                f"系统提示剩下的部分再次命中：{again[1]} 个 token。",
                again[0],
            )
        )
    return result


def drive_ranks(engine: Engine) -> None:
    for question in ("What is a cloud?", "Why is the sky blue?", "What is rust?"):
        engine.add(chat(question), greedy(14))
    finish(engine)


def record_rank(folder: str, config: EngineConfig, ranks: Ranks | Alone) -> None:
    """On every rank: the same requests, and its own trace of them."""
    engine = build_rank(config, ranks)
    with Trace(engine) as trace:
        if ranks.rank == 0:
            drive_ranks(engine)
            engine.close()
        else:
            engine.follow()
    Path(folder, f"{ranks.rank}.jsonl").write_bytes(trace.dump())


def ranks() -> Scenario:
    """Stage 8: two ranks that decide the same."""
    config = EngineConfig(MODEL, "cpu", max_model_len=256, max_batch_tokens=64, page_size=4, kv_tokens=512, tp=2)
    with tempfile.TemporaryDirectory() as folder:
        if status := run_job(partial(record_rank, folder, config), 2, "cpu"):
            raise UserError(f"the ranks ended with status {status}; their output is above")
        takes = [Take((f"rank {i}", f"rank {i}"), Path(folder, f"{i}.jsonl").read_bytes()) for i in range(config.tp)]
    decisions = [
        [{k: v for k, v in line.items() if k not in ("t", "device", "new")} for line in x.lines] for x in takes
    ]
    assert decisions[0] == decisions[1], "the ranks decided differently"
    result = Scenario(
        ("Two ranks, one decision", "两个 rank，同一个决定"),
        (
            "The same three requests, seen on each of two processes that share a model's weights. Nobody tells rank 1 what to schedule: it runs the same scheduler on the same inputs. Change between the ranks at any step; only the times differ.",
            "同样三个请求，从共享一个模型权重的两个进程分别来看。没人告诉 rank 1 该调度什么：它用同样的输入运行同样的调度器。任何一步都可以切换 rank，只有时间不同。",
        ),
        takes,
    )
    result.notes = [
        Note(
            0,
            1,
            "Rank 0: batch, page map and tree of this step.",
            "rank 0：这一步的批次、页图和树。",
        ),
        Note(
            1,
            1,
            "Rank 1, the same step: the same pages for the same requests. Its pages hold the other heads' keys and values.",
            "rank 1，同一步：同样的请求得到同样的页。它的页里是其余 head 的 K 和 V。",
        ),
        Note(
            1,
            len(takes[1].lines) - 3,
            "Near the end: rank 1 has never sampled. Its tokens came from rank 0, on the device, and so its tree is the same too.",
            "接近结尾：rank 1 从未采样，token 来自 rank 0，在设备上广播，所以它的树也一样。",
        ),
    ]
    return result


def leaves() -> Scenario:
    """Stage 9: what the engine does when a client closes its connection."""

    def drive(engine: Engine) -> None:
        uids = [
            engine.add(chat(question), greedy(24))
            for question in ("What is a cloud?", "Why is the sky blue?", "What is rust?", "What is an echo?")
        ]
        for _ in range(9):
            engine.step()
        assert engine.abort(uids[1])
        finish(engine)

    engine = build("stage8_tp", max_model_len=256, page_size=4, kv_tokens=512, max_running=3)
    result = Scenario(
        ("A client leaves", "客户端离开"),
        (
            "Three requests run and a fourth waits. Then the second client closes its connection; the server tells the engine to abort its request. The step under way still computes it, and what it has computed stays in the tree.",
            "三个请求在运行，第四个在等待。第二个客户端断开连接，服务器让引擎中止它的请求。在途的一步还在算它，而它算出的内容留在树里。",
        ),
        [take(("stages 8 and 9", "阶段 8 和 9"), engine, drive)],
    )
    one = result.takes[0]
    left = one.first(lambda line: any(end[1] == "abort" for end in line.get("ends", ())))
    uid = next(end[0] for end in one.lines[left]["ends"] if end[1] == "abort")
    came = one.first(lambda line: any(c[0] == uid + 2 for c in line.get("batch", {}).get("chunks", ())))
    result.notes = [
        Note(
            0,
            left - 1,
            f"Request {uid} is being answered; request {uid + 2} waits, for three is all that may run.",
            f"请求 {uid} 正在被回答；请求 {uid + 2} 在等待，因为最多只能运行三个。",
            uid,
        ),
        Note(
            0,
            left,
            f"The client of request {uid} has gone. Its full pages are the tree's now: cached, held by nobody.",
            f"请求 {uid} 的客户端走了。它的满页归树所有：已缓存，无人持有。",
        ),
        Note(
            0,
            came,
            f"Its place is free, so request {uid + 2} starts in the same step.",
            f"位置空出来了，请求 {uid + 2} 在同一步就开始。",
            uid + 2,
        ),
    ]
    return result


SCENARIOS = {
    "2": frame,
    "3": cached,
    "4": chunked,
    "5": tight,
    "6": overlap,
    "7": shared,
    "8": ranks,
    "9": leaves,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []], help="numbers (default: all)")
    wanted = parser.parse_args(arguments).scenario or [*SCENARIOS]
    FOLDER.mkdir(exist_ok=True)
    for number in wanted:
        if number == "6" and not torch.cuda.is_available() and len(wanted) > 1:
            print("6: skipped, it is recorded on a GPU", file=sys.stderr)
            continue
        path = SCENARIOS[number]().write(number)
        print(f"{path.relative_to(FOLDER.parents[2])}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    cli.run(main)
