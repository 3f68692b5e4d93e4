"""What bounds a step, by its number of tokens: python stage3_kvcache/figures/draw.py"""

import sys
from math import log2
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.draw import Drawing, write

READ, MATMUL = 4.4, 790  # of an H200, as measured: TB/s, TFLOP/s in bfloat16
LEFT, BOTTOM, WIDTH, HEIGHT, OCTAVES = 80, 300, 700, 250, 13  # the axes, in powers of two from 1 token on
STEPS = (  # tokens in the step, what it is, and on which side of its point that stands
    (1, ("decode, 1 request", "decode，1 个请求"), "start"),
    (32, ("decode, 32 requests", "decode，32 个请求"), "start"),
    (512, ("a chunk of 512", "512 的分块"), "end"),
    (4096, ("prefill of 4,096", "4,096 个 token 的 prefill"), "end"),
)


def roofline(lang: int) -> Drawing:
    """Reachable TFLOP/s of the weights' products: every weight is two bytes that are read once, and two FLOPs per token."""
    d = Drawing(830, 360)
    d.arrow((LEFT, BOTTOM), (LEFT, 20))
    d.arrow((LEFT, BOTTOM), (LEFT + WIDTH + 20, BOTTOM))
    for power in range(OCTAVES + 1):
        d.text(place(2**power)[0], BOTTOM + 16, f"{2**power:,}", size=10)
    d.text(
        LEFT + WIDTH / 2,
        BOTTOM + 40,
        ("tokens in a step = FLOPs per byte of weights", "一步里的 token 数 = 每读一字节权重所做的 FLOPs")[lang],
    )
    d.text(LEFT + 8, 28, "TFLOP/s", "start")
    for speed in (5, 20, 80, 320):
        d.text(LEFT - 8, place(speed / READ)[1], str(speed), "end", 10)
    ridge = MATMUL / READ
    d.line(place(1), place(ridge), place(2**OCTAVES))
    x, y = place(60)
    d.text(x + 20, y + 4, (f"reading the weights bounds it: {READ} TB/s", f"受限于读权重：{READ} TB/s")[lang], "start")
    d.text(
        place(900)[0],
        place(900)[1] - 16,
        (f"arithmetic bounds it: {MATMUL} TFLOP/s", f"受限于算力：{MATMUL} TFLOP/s")[lang],
    )
    for tokens, label, anchor in STEPS:
        x, y = place(tokens)
        d.box(x - 5, y - 5, 10, 10, kind="blue" if tokens < ridge else "orange")
        d.text(
            x + (12 if tokens > 1 else 34) if anchor == "start" else x + 6,
            y + (20 if tokens > 1 else -8),
            label[lang],
            anchor,
            12,
        )
    return d


def place(tokens: float) -> tuple[float, float]:
    """Where a step with so many tokens lies on the line."""
    speed = min(MATMUL, READ * tokens)
    return LEFT + WIDTH * log2(tokens) / OCTAVES, BOTTOM - HEIGHT * log2(speed / READ) / log2(MATMUL / READ)


FIGURES = {"roofline": roofline}

if __name__ == "__main__":
    write(__file__, FIGURES)
