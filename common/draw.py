"""The pages' diagrams as SVG, in both languages: boxes, arrows and text that follow the reader's light or dark theme.

Each stage's figures/draw.py says what is in them, and writes them anew when it is run.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

LANGUAGES = ("", ".zh")  # in the files' names, by number: English, Chinese
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'Noto Sans CJK SC', 'PingFang SC', sans-serif"
LIGHT = {  # kind -> fill, stroke
    "plain": ("#f6f8fa", "#8c959f"),
    "blue": ("#ddf4ff", "#0969da"),
    "green": ("#dafbe1", "#1a7f37"),
    "orange": ("#fff1e5", "#bc4c00"),
    "purple": ("#fbefff", "#8250df"),
    "empty": ("none", "#8c959f"),
}
DARK = {
    "plain": ("#21262d", "#8b949e"),
    "blue": ("#0c2d6b", "#58a6ff"),
    "green": ("#0f3d1c", "#3fb950"),
    "orange": ("#4d2d00", "#f0883e"),
    "purple": ("#3c1e70", "#bc8cff"),
    "empty": ("none", "#8b949e"),
}


class Drawing:
    """Sizes in pixels, from the top left corner. A line break in a label begins a new line."""

    def __init__(self, width: int, height: int):
        self.width, self.height, self.shapes = width, height, []

    def box(self, x: float, y: float, width: float, height: float, label: str = "", kind: str = "plain") -> None:
        """`kind` is a colour of the tables above; "empty" has a dashed border."""
        self.shapes.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
        if label:
            self.text(x + width / 2, y + height / 2, label)

    def text(self, x: float, y: float, label: str, anchor: str = "middle", size: int = 13, weight: int = 400) -> None:
        """Centred on y."""
        lines = label.split("\n")
        for i, line in enumerate(lines):
            at = y + (i - (len(lines) - 1) / 2) * size * 1.3 + size * 0.36
            style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
            self.shapes.append(f'<text x="{x:g}" y="{at:g}" {style}>{escape(line)}</text>')

    def line(self, *points: tuple[float, float], end: str = "") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(f'<polyline class="line" points="{path}"{end}/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points; its head is at the last one."""
        self.line(*points, end=' marker-end="url(#head)"')

    def svg(self) -> str:
        def rules(colors: dict[str, tuple[str, str]], ink: str) -> str:
            boxes = [f".{kind}{{fill:{fill};stroke:{stroke}}}" for kind, (fill, stroke) in colors.items()]
            return "".join([*boxes, f"text{{fill:{ink}}}.line{{stroke:{ink}}}.head{{fill:{ink}}}"])

        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        style = f"text{{font-family:{FONT}}}.line{{fill:none}}.empty{{stroke-dasharray:4 3}}{rules(LIGHT, '#1f2328')}"
        style += f"@media (prefers-color-scheme:dark){{{rules(DARK, '#e6edf3')}}}"
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        head += '<path class="head" d="M0,0 8,4 0,8z"/></marker>'
        top = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style><defs>{head}</defs>'
        return "\n".join([top, *self.shapes, "</svg>\n"])


def pictures(script: str, figures: dict[str, Callable[[int], Drawing]]) -> dict[Path, str]:
    """File -> SVG, of the figures by name; each is drawn with the number of a language."""
    folder = Path(script).resolve().parent
    named = [
        (folder / f"{name}{suffix}.svg", draw, i)
        for name, draw in figures.items()
        for i, suffix in enumerate(LANGUAGES)
    ]
    return {path: draw(i).svg() for path, draw, i in named}


def write(script: str, figures: dict[str, Callable[[int], Drawing]]) -> None:
    """All of them into the folder of the script, which gives its __file__."""
    for path, svg in pictures(script, figures).items():
        path.write_text(svg, encoding="utf-8")
