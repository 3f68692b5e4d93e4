"""The naive loop, and the map of the whole: python stage1_naive/figures/draw.py"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.draw import Drawing, write

PARTS = (  # of the scheduler's process: what it is, and the stages that build it
    ("Scheduler", "2 · 4 · 5"), ("CacheManager", "2 · 3 · 4 · 5 · 7"), ("Attention", "2 · 3 · 4 · 6"),
    ("Runner", "2 · 6"), ("Sampler", "2 · 8"), ("Engine", "2 · 6 · 8"),
)  # fmt: skip
LAYERS = (
    ("blue", ("algorithm: 1 to 3\nprefill, decode, KV cache", "算法层：1 到 3\nprefill、decode、KV cache")),
    (
        "green",
        ("scheduling: 4 to 8\nbatch, pages, graphs, prefixes, ranks", "调度层：4 到 8\nbatch、分页、graph、前缀、rank"),
    ),
    ("orange", ("architecture: 9\nfour kinds of process, ZMQ", "架构层：9\n4 类进程，ZMQ")),
)


def system(lang: int) -> Drawing:
    """Four kinds of process with the stages in their boxes, and the three layers."""
    d = Drawing(830, 400)
    stage, model = ("stage", "model and kernels: common/"), ("阶段", "模型与 kernel：common/")
    word, models = (stage, model)[lang]
    d.box(10, 150, 100, 50, ("client", "客户端")[lang], "empty")
    d.box(160, 130, 130, 90, f"API server\n{word} 9", "orange")
    d.box(340, 20, 130, 60, f"tokenizer\n{word} 9", "orange")
    d.box(340, 260, 130, 60, f"detokenizer\n{word} 9", "orange")
    d.box(520, 20, 300, 300, kind="orange")
    d.text(670, 42, ("scheduler process · stage 9", "scheduler 进程 · 阶段 9")[lang], weight=600)
    for i, (name, stages) in enumerate(PARTS):
        kind = "blue" if name == "Attention" else "green"
        d.box(535 + 140 * (i % 2), 62 + 66 * (i // 2), 130, 56, f"{name}\n{stages}", kind)
    d.box(535, 262, 270, 44, f"{models}\n{word} 1", "blue")
    d.arrow((110, 165), (160, 165))
    d.arrow((160, 187), (110, 187))
    d.text(135, 152, "HTTP", size=11)
    d.text(135, 202, "SSE", size=11)
    d.arrow((225, 130), (225, 50), (340, 50))
    d.text(282, 40, ("text", "文本")[lang], size=11)
    d.arrow((470, 50), (520, 50))
    d.text(495, 40, "ids", size=11)
    d.arrow((520, 290), (470, 290))
    d.text(495, 280, "ids", size=11)
    d.arrow((340, 290), (225, 290), (225, 220))
    d.text(282, 280, ("text", "文本")[lang], size=11)
    for i, (kind, label) in enumerate(LAYERS):
        d.box(10 + 275 * i, 340, 260, 50, label[lang], kind)
    return d


LOOP = (
    ("blue", ("ids of the\nwhole text:\nS positions", "整段文本的 id：\nS 个位置")),
    ("plain", ("model, every layer:\nhidden states\n[S, hidden_size]", "模型，逐层：\n隐藏状态\n[S, hidden_size]")),
    ("plain", ("head: logits\n[1, vocab_size]", "head：logits\n[1, vocab_size]")),
    ("green", ("one new\ntoken", "一个新\ntoken")),
)
ARROWS = (("", ""), ("keep the last row,\ndrop S - 1", "只留最后一行，\n扔掉 S - 1 行"), ("argmax", "argmax"))


def loop(lang: int) -> Drawing:
    """The whole text through the model, for every token."""
    d = Drawing(830, 170)
    for i, (kind, label) in enumerate(LOOP):
        d.box(10 + 225 * i, 20, 135, 80, label[lang], kind)
    for i, label in enumerate(ARROWS):
        d.arrow((145 + 225 * i, 60), (235 + 225 * i, 60))
        d.text(190 + 225 * i, 36, label[lang], size=10)
    d.arrow((752, 100), (752, 135), (77, 135), (77, 100))
    d.text(415, 150, ("append it: S grows by 1", "接到末尾：S 加 1")[lang], size=12)
    return d


FIGURES = {"loop": loop, "map": system}

if __name__ == "__main__":
    write(__file__, FIGURES)
