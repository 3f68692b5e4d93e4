"""Host and device in time, and a batch in the static buffers: python stage6_cudagraph/figures/draw.py"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.draw import Drawing, write

LEFT, UNIT, LANE = 96, 51, 32
NAMES = {"S": ("schedule", "schedule"), "L": ("launch", "launch"), "C": ("collect", "collect")}
KINDS = {"S": "blue", "L": "green", "C": "orange"}
# begin in units of time, and what the host does with which step; the device's steps, with their begin
WITHOUT = (
    ((0, "S1"), (1, "L1"), (5, "C1"), (6, "S2"), (7, "L2"), (11, "C2"), (12, "S3"), (13, "L3")),
    ((2, 1), (8, 2)),
)
WITH = (
    (*((0, "S1"), (1, "L1"), (2, "S2"), (3, "L2"), (5, "C1"), (6, "S3"), (7, "L3")), (8, "C2"), (9, "S4"), (10, "L4"), (11, "C3")),
    ((2, 1), (5, 2), (8, 3), (11, 4)),
)  # fmt: skip


def overlap(lang: int) -> Drawing:
    d = Drawing(830, 330)
    for i, (letter, names) in enumerate(NAMES.items()):
        d.box(LEFT + 130 * i, 12, 16, 16, kind=KINDS[letter])
        d.text(LEFT + 22 + 130 * i, 20, names[lang], "start")
    d.box(LEFT + 390, 12, 16, 16, kind="purple")
    d.text(LEFT + 412, 20, ("the device computes a step", "设备计算一步")[lang], "start")
    lanes(d, 50, ("Without overlap", "没有 overlap")[lang], WITHOUT, lang)
    lanes(d, 180, ("With overlap", "有 overlap")[lang], WITH, lang)
    d.arrow((LEFT + 7.5 * UNIT, 290), (LEFT + 7.5 * UNIT, 272))
    d.arrow((LEFT + 10 * UNIT, 290), (LEFT + 10 * UNIT, 272))
    late = (
        ("step 2 draws an eos", "第 2 步采样到 eos"),
        ("the host learns it in C2, after L3: step 3 computes a stray token, C3 drops it", "主机在 C2 才知道，L3 已经发出：第 3 步多算一个 token，C3 把它丢掉"),
    )  # fmt: skip
    d.text(LEFT + 7.4 * UNIT, 300, late[0][lang], "end", 11)
    d.text(LEFT + 14 * UNIT, 318, late[1][lang], "end", 11)
    return d


def lanes(d: Drawing, y: float, title: str, work: tuple, lang: int) -> None:
    host, device = work
    d.text(LEFT, y, title, "start", weight=600)
    d.text(LEFT - 8, y + 32, ("host", "主机")[lang], "end")
    d.text(LEFT - 8, y + 72, ("device", "设备")[lang], "end")
    for at, name in host:
        d.box(LEFT + UNIT * at, y + 16, UNIT - 2, LANE, name, KINDS[name[0]])
    for at, step in device:
        d.box(LEFT + UNIT * at, y + 56, 3 * UNIT - 2, LANE, str(step), "purple")


TWIN = (  # field, and what three requests and the padding have there
    ("input_ids", ("-1", "-1", "312", "0")),
    ("positions", ("41", "17", "9", "0")),
    ("table_idx", ("0", "3", "1", "-1")),
    ("inv_temperature", ("1.25", "1.25", "0", "0")),
    ("noise keys", ("…", "…", "…", "0")),
)


def twin(lang: int) -> Drawing:
    """Three requests in the graph that was captured for four."""
    d = Drawing(830, 270)
    d.text(330, 20, ("host: one array", "主机：一个数组")[lang], weight=600)
    d.text(720, 20, ("device: the graph of size 4", "设备：大小为 4 的 graph")[lang], weight=600)
    for column, head in enumerate(("A", "B", "C", ("padding", "padding")[lang])):
        d.text(210 + 80 * column, 46, head)
    for row, (field, values) in enumerate(TWIN):
        y = 60 + 34 * row
        d.text(160, y + 14, field, "end")
        for column, value in enumerate(values):
            d.box(172 + 80 * column, y, 76, 28, value, "blue" if column < 3 else "empty")
        for column in range(4):
            d.box(640 + 40 * column, y, 38, 28, kind="green" if column < 3 else "empty")
    d.arrow((500, 140), (632, 140))
    d.text(566, 126, ("one upload", "一次上传")[lang], size=12)
    below = (
        "-1: the host has not seen that token; the graph looks it up on the device. Padding writes into a page of its own.",
        "-1：这个 token 主机还没见过，由 graph 在设备上查到。padding 写进它自己的一页。",
    )
    d.text(20, 252, below[lang], "start", 12)
    return d


FIGURES = {"overlap": overlap, "twin": twin}

if __name__ == "__main__":
    write(__file__, FIGURES)
