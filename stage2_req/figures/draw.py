"""The three lengths of a request: python stage2_req/figures/draw.py"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.draw import Drawing, write

WIDTH = 26  # of a token
STEPS = (  # what the step is, cached_len, device_len before it, and how many positions it computes
    (("prefill", "prefill"), 0, 8, 8),
    (("a chunk of the prompt (stage 4)", "prompt 的一个分块（阶段 4）"), 3, 8, 3),
    (("a prefix hit (stage 7)", "命中前缀（阶段 7）"), 6, 8, 2),
    (("decode", "decode"), 9, 10, 1),
    (("after a retraction (stage 5)", "抢占之后（阶段 5）"), 0, 10, 10),
)


def lengths(lang: int) -> Drawing:
    """One bar for each kind of step: kept, computed in this step, later, not yet there."""
    d = Drawing(830, 330)
    legend = (
        ("blue", ("kept: cached_len", "已保留：cached_len")),
        ("green", ("computed in this step", "这一步计算")),
        ("plain", ("in a later step", "留给之后的步")),
        ("empty", ("up to max_device_len", "到 max_device_len 为止")),
    )
    for i, (kind, label) in enumerate(legend):
        d.box(20 + 200 * i, 16, 16, 16, kind=kind)
        d.text(42 + 200 * i, 24, label[lang], "start")
    for row, (name, cached, device, extend) in enumerate(STEPS):
        y = 62 + 52 * row
        d.text(20, y + 13, name[lang], "start")
        for i in range(14):
            kind = "blue" if i < cached else "green" if i < cached + extend else "plain" if i < device else "empty"
            d.box(270 + WIDTH * i, y, WIDTH - 2, 26, kind=kind)
        d.text(650, y + 13, f"extend_len = {device} - {cached} = {device - cached}", "start")
    d.text(270, 322, ("one box is one token of the request", "一格是这个请求的一个 token")[lang], "start", 11)
    return d


FIGURES = {"lengths": lengths}

if __name__ == "__main__":
    write(__file__, FIGURES)
