"""The tree in four moments: python stage7_radix/figures/draw.py"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.draw import Drawing, write

WIDTH = 205  # of a frame
# title; nodes: x and y in the frame, text, holders, kind; the node below which each one hangs is the last with a smaller y
FRAMES = (
    (
        ("1  insert\nA has ended", "1  插入\nA 已结束"),
        ((20, 60, "You are a helpful\nassistant. What\nis a cloud?", 0, "plain"),),
        (),
    ),
    (
        ("2  split\nB goes on differently", "2  拆分\nB 的后半不同"),
        ((20, 60, "You are a helpful\nassistant.", 0, "green"), (4, 170, "What is\na cloud?", 0, "plain"), (104, 170, "Why is\nthe sky", 0, "blue")),
        ((0, 1), (0, 2)),
    ),
    (
        ("3  lock\nB runs", "3  锁定\nB 在运行"),
        ((20, 60, "You are a helpful\nassistant.", 1, "orange"), (4, 170, "What is\na cloud?", 0, "plain"), (104, 170, "Why is\nthe sky", 1, "orange")),
        ((0, 1), (0, 2)),
    ),
    (
        ("4  evict\na page is wanted", "4  淘汰\n需要一页"),
        ((20, 60, "You are a helpful\nassistant.", 1, "orange"), (4, 170, "What is\na cloud?", 0, "empty"), (104, 170, "Why is\nthe sky", 1, "orange")),
        ((0, 2),),
    ),
)  # fmt: skip


def tree(lang: int) -> Drawing:
    """Insert, split, lock, evict."""
    d = Drawing(830, 280)
    for frame, (title, nodes, edges) in enumerate(FRAMES):
        left = 5 + WIDTH * frame
        d.text(left + 4, 24, title[lang], "start", weight=600)
        for above, below in edges:
            (x, y), (u, v) = ((nodes[i][0], nodes[i][1]) for i in (above, below))
            d.arrow((left + x + 80, y + 70), (left + u + 46, v))
        for x, y, text, holders, kind in nodes:
            width = 160 if y < 100 else 92
            d.box(left + x, y, width, 70, text, kind)
            name = ("1 holder" if holders else "no holder", "1 个持有者" if holders else "没有持有者")[lang]
            d.text(left + x + width / 2, y + 82 if y > 100 else y - 8, name, size=11)
    return d


FIGURES = {"tree": tree}

if __name__ == "__main__":
    write(__file__, FIGURES)
