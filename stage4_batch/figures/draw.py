"""When the tokens came, from the record: python stage4_batch/figures/draw.py"""

import json
import sys
from itertools import accumulate
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.draw import Drawing, write

RECORD = Path(__file__).resolve().parents[1] / "results" / "cpu.json"
LEFT, SECOND, SECONDS = 150, 80, 8  # pixels, pixels, of the axis
NAMES = (("whole", "整段送入"), ("with a budget\nof 128", "预算 128"))


def gaps(lang: int) -> Drawing:
    """A mark for each token of a running request, on the time since the long prompt arrived, and its own first token."""
    d = Drawing(830, 210)
    legend = (
        ("blue", ("a token of a request that is running", "运行中请求的一个 token")),
        ("orange", ("the newcomer's first token", "新请求的第一个 token")),
    )
    for i, (kind, label) in enumerate(legend):
        d.box(LEFT + 300 * i, 12, 8, 20, kind=kind)
        d.text(LEFT + 16 + 300 * i, 22, label[lang], "start")
    for row, (name, run) in enumerate(zip(NAMES, json.loads(RECORD.read_text())["gaps"]["runs"].values(), strict=True)):
        y = 56 + 56 * row
        d.text(LEFT - 14, y + 18, name[lang], "end")
        d.line((LEFT, y + 18), (LEFT + SECOND * SECONDS, y + 18))
        for at in accumulate(run["ms"]):
            d.box(round(LEFT + SECOND * at / 1e3 - 1.5, 1), y + 4, 3, 28, kind="blue")
        d.box(round(LEFT + SECOND * run["first_token_s"] - 4, 1), y - 4, 8, 44, kind="orange")
    d.arrow((LEFT, 172), (LEFT + SECOND * SECONDS + 20, 172))
    for second in range(SECONDS + 1):
        d.text(LEFT + SECOND * second, 188, str(second), size=11)
    d.text(LEFT + SECOND * SECONDS + 26, 172, ("s", "秒")[lang], "start", 11)
    return d


FIGURES = {"gaps": gaps}

if __name__ == "__main__":
    write(__file__, FIGURES)
