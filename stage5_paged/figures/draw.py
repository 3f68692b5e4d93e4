"""A page table, and fixed regions beside pages: python stage5_paged/figures/draw.py"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.draw import Drawing, write

SLOTS, SLOT, LEFT = 64, 12, 30
REGION, PAGE = 16, 4  # slots
KINDS = ("blue", "green", "orange", "purple")
TOKENS = (5, 12, 3, 7, 14, 6)  # of the requests A to F
PAGES = "ABBACBDDEEEEFF.."  # whose page each one is; "." is free


def memory(lang: int) -> Drawing:
    """The same 64 slots twice: a region for each request, or pages wherever there are some."""
    d = Drawing(830, 300)
    titles = (
        (
            "Fixed regions of 16 slots: A to D run, E and F wait, 37 of 64 slots are reserved for nobody's token",
            "固定区域，每个 16 个 slot：A 到 D 在运行，E 和 F 在等，64 个 slot 里有 37 个没有装任何 token",
        ),
        (
            "Pages of 4 slots: A to F run, two pages are free, 9 slots are empty in pages that are in use",
            "每页 4 个 slot：A 到 F 都在运行，还有两页空闲，用着的页里空了 9 个 slot",
        ),
    )
    d.text(LEFT, 24, titles[0][lang], "start", weight=600)
    for region in range(SLOTS // REGION):
        slots(d, 50, region * REGION, REGION, TOKENS[region], KINDS[region])
        d.text(LEFT + SLOT * REGION * (region + 0.5), 96, "ABCD"[region])
    d.text(LEFT, 160, titles[1][lang], "start", weight=600)
    left = dict(zip("ABCDEF", TOKENS, strict=True))
    for page, owner in enumerate(PAGES):
        used = min(PAGE, left.get(owner, 0))
        left[owner] = left.get(owner, 0) - used
        slots(d, 186, page * PAGE, PAGE, used, KINDS["ABCDEF".find(owner) % len(KINDS)])
        d.text(LEFT + SLOT * PAGE * (page + 0.5), 232, owner if owner != "." else "")
        d.text(LEFT + SLOT * PAGE * (page + 0.5), 252, str(page), size=10)
    d.text(LEFT, 280, ("below: whose page it is, and its number", "下方：页属于谁，页号是多少")[lang], "start", 11)
    return d


def slots(d: Drawing, y: float, first: int, count: int, used: int, kind: str) -> None:
    x = LEFT + SLOT * first
    for i in range(count):
        d.box(x + SLOT * i, y, SLOT - 2, 28, kind=kind if i < used else "plain")
    d.box(x - 2, y - 4, SLOT * count - 1, 36, kind="empty")


OWNERS = {7: 0, 3: 0, 9: 0, 0: 1, 4: 1}  # page -> index in the page table
TABLE = ((("A: 11 tokens", "A：11 个 token"), (7, 3, 9)), (("B: 5 tokens", "B：5 个 token"), (0, 4)))


def table(lang: int) -> Drawing:
    """The page table of two requests, and where their pages of four slots lie in the pool."""
    d = Drawing(830, 250)
    d.text(20, 20, ("page table", "页表")[lang], "start", weight=600)
    d.text(20, 134, ("KV pool: pages of 4 slots", "KV pool：每页 4 个 slot")[lang], "start", weight=600)
    for row, (name, pages) in enumerate(TABLE):
        left = 20 + 430 * row
        d.text(left, 60, f"table_idx {row}\n{name[lang]}", "start")
        for i, page in enumerate(pages):
            d.box(left + 130 + 52 * i, 44, 48, 32, str(page), KINDS[row])
            d.arrow((left + 154 + 52 * i, 76), (57 + 79 * page, 184))
    for page in range(10):
        kind = KINDS[OWNERS[page]] if page in OWNERS else "empty"
        d.box(20 + 79 * page, 186, 75, 32, str(page), kind)
        d.text(57 + 79 * page, 232, f"{4 * page} – {4 * page + 3}", size=11)
    return d


FIGURES = {"memory": memory, "table": table}

if __name__ == "__main__":
    write(__file__, FIGURES)
