"""Host and device in time, without and with overlap: python stage6_cudagraph/figures/draw.py"""

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


FIGURES = {"overlap": overlap}

if __name__ == "__main__":
    write(__file__, FIGURES)
