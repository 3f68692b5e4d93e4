"""Draws the chapters' pictures of the inspector: each scenario at the step to which the chapter's link leads.

python -m stage9_server.inspector.shots    # needs playwright and Chromium (see tests/README.md)
"""

import argparse
import io
import re
import shutil
from pathlib import Path

from PIL import Image

from common import cli
from common.config import UserError

FOLDER = Path(__file__).parent
STAGES = FOLDER.parents[1]
SIZE = {"width": 1120, "height": 600}
COLOURS = 200  # of the palette: a picture has some tens of KB
STYLE = (
    ".transport { position: static } footer { display: none } .card { box-shadow: none }"  # few colours have no shadows
)


def places() -> dict[str, str]:
    """Chapter -> what its first link to the page says after the #."""
    found = {}
    for chapter in sorted(STAGES.glob("stage*/README.md")):
        if link := re.search(r"inspector/page\.html#(\S+?)\)", chapter.read_text()):
            found[chapter.parent.name[5]] = link[1]
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    chromium = shutil.which("chromium")
    if not chromium:
        raise UserError("there is no Chromium here; apt-get install chromium")
    from playwright.sync_api import sync_playwright  # only this script and the tests need it

    (FOLDER / "shots").mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE)
        for number, place in places().items():
            for language, name in (("en", f"{number}.png"), ("zh", f"{number}.zh.png")):
                page.goto("about:blank")
                page.goto(f"{(FOLDER / 'page.html').as_uri()}#lang={language}&theme=light&{place}")
                page.wait_for_function("inspector.trace && inspector.at >= 0")
                page.wait_for_timeout(1200)  # until nothing moves any more
                page.add_style_tag(content=STYLE)
                data = page.screenshot(full_page=True)
                picture = Image.open(io.BytesIO(data)).convert("RGB")
                picture = picture.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
                picture.save(FOLDER / "shots" / name, optimize=True)
                print(f"shots/{name}: {(FOLDER / 'shots' / name).stat().st_size / 1024:.0f} KB")
        browser.close()


if __name__ == "__main__":
    cli.run(main)
