"""The drawn figures are what their programs draw, in both languages, and each page shows the one in its own."""

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from common.draw import LANGUAGES, pictures

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("stage*/figures/draw.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parents[1].name)
def test_the_files_are_what_is_drawn(script, monkeypatch):
    monkeypatch.setattr("sys.path", ["", *sys.path])  # whose first entry the program replaces
    spec = importlib.util.spec_from_file_location("figures", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = pictures(str(script), module.FIGURES)
    assert sorted(drawn) == sorted(script.parent.glob("*.svg"))
    for path, svg in drawn.items():
        assert path.read_text(encoding="utf-8") == svg
        ElementTree.fromstring(svg)
        language = "README.zh.md" if path.stem.endswith(LANGUAGES[1]) else "README.md"
        assert f"](figures/{path.name})" in (script.parents[1] / language).read_text(encoding="utf-8")
