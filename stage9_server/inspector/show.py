"""The page in a notebook: `show(trace)` in a cell's last line."""

import html
import json
from pathlib import Path

from stage9_server.inspector.trace import Trace

PAGE = Path(__file__).with_name("page.html")


class Page:
    """What a notebook displays."""

    def __init__(self, source: str, height: int):
        self.source, self.height = source, height

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self.height}px;border:1px solid #8884;border-radius:8px"
        return f'<iframe srcdoc="{html.escape(self.source)}" style="{style}"></iframe>'


def show(trace: Trace, height: int = 760) -> Page:
    """The steps so far, to play. The engine goes on being watched.

    trace = Trace(engine)
    engine.generate(prompts, params)
    show(trace)
    """
    trace.record()
    text = json.dumps(trace.dump().decode()).replace("</", "<\\/")  # no end of the script inside it
    script = f"<script>inspector.open({text})</script></body>"
    return Page(PAGE.read_text().replace("</body>", script, 1), height)
