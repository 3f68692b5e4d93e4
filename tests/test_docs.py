"""The chapters: every link leads somewhere, both languages say the same, and measured numbers come from a record.

A link to a line has one name in backticks as its text, of a function, class, method or constant of that file:
[`Engine.launch`](engine.py#L123). `python -m tests.test_docs` moves such links to where the names have gone.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cli import flag_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("stage*/*.md"), *ROOT.glob("stage*/*/*.md")])
CHAPTERS = sorted(page.parent for page in PAGES if page.name == "README.zh.md" and page.parent.parent == ROOT)
BOTH = [page for page in PAGES if page.parent != ROOT and not page.name.endswith(".zh.md")]  # each has its .zh.md
SECTIONS = [
    *("The question", "A picture", "Predict first", "Read the code", "Run it", "What you should see"),
    *("Questions", "Write it yourself", "In the real SGLang", "What the next stage fixes"),
]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
LINE_LINK = re.compile(r"\[`([\w.]+)`\]\(([^)#\s]+)#L\d+\)")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
FLAGS = re.compile(r"^\| `--.*`.*\|.*\|.*\|.*\|$", flags=re.M)
PIECE = 64  # the most numbers in a part of a record that one row of a table may come from


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def links(text: str) -> list[tuple[str, str]]:
    """(text, target) of every link and picture that points into the repository."""
    return [link for link in LINK.findall(without_code(text)) if "://" not in link[1]]


def numbers(text: str) -> list[str]:
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def measured(text: str) -> set[str]:
    """Numbers with a decimal point or of three digits and more: no language writes these as words."""
    return {n for n in numbers(LINK.sub(r"\1", without_code(text))) if "." in n or len(n) > 2}


def bare(code: str) -> str:
    """Its lines without indentation, and without the comments at their ends, which a chapter may put differently."""
    lines = [line.partition("  # ")[0].strip() for line in code.splitlines()]
    return "\n".join(["", *filter(None, lines), ""])


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ .*$", without_code(text), flags=re.M)


def section(text: str, title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)[1]


def rows(text: str) -> list[str]:
    """The rows of all tables, without their heads."""
    tables = re.findall(r"(?:^\|.*\n)+", without_code(text), flags=re.M)
    return [row for table in tables for row in table.splitlines()[2:]]


def definitions(source: str) -> dict[str, int]:
    """Line of every class, function, method and constant, by its name with those around it: Engine.launch."""
    found = {}

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[outer + child.name] = child.lineno
                visit(child, f"{outer}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not isinstance(node, ast.FunctionDef):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names = [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                found.update({outer + n.id: child.lineno for n in names})

    visit(ast.parse(source), "")
    return found


def repaired(text: str, folder: Path) -> str:
    """The text with every link to a line pointing to where the name that it shows is defined."""

    def move(match: re.Match) -> str:
        wanted, path = match.groups()
        known = definitions((folder / path).read_text())
        lines = [line for full, line in known.items() if f".{full}".endswith(f".{wanted}")]
        assert len(lines) == 1, (
            f"{path} has {len(lines)} definitions of {wanted}; write Class.method if there are several"
        )
        return f"[`{wanted}`]({path}#L{lines[0]})"

    return LINE_LINK.sub(move, text)


def with_flags(text: str) -> str:
    """The README with the table of flags as the code has it."""
    table = "\n".join(flag_table()) + "\n"
    return re.sub(r"(?:^\| `--.*`.* \|.*\|.*\|\n){5,}", lambda _: table, text, flags=re.M)


def flat(value) -> list[float]:
    """All numbers in a record, those in strings and names of fields too."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [number for item in value for number in flat(item)]
    if isinstance(value, str):
        return [float(number) for number in numbers(value)]
    return [] if value is None else [float(value)]


def pieces(value) -> Iterator[list[float]]:
    """The numbers of each list and dict of a record that is no longer than a table."""
    if isinstance(value, dict | list):
        if len(found := flat(value)) <= PIECE:
            yield found
        for item in value.values() if isinstance(value, dict) else value:
            yield from pieces(item)


def unrecorded(row: str, records: list[list[float]]) -> bool:
    """Is there no piece of a record that has every number of the row, to the digits that the row shows?"""

    def has(piece: list[float], number: str) -> bool:
        half = 0.5001 * 10.0 ** -len(number.partition(".")[2])
        shown = [*piece, *(value / 1e9 for value in piece if value > 1e9)]  # bytes a second are shown as GB/s
        return any(abs(value - float(number)) <= half for value in shown)

    return not any(all(has(piece, number) for number in numbers(row)) for piece in records)


def test_the_checks_find_what_they_look_for(tmp_path):
    (tmp_path / "a.py").write_text(
        "X, Y = 1, 2\nclass A:\n    z: int = 3\n    def f(self):\n        q = 1\ndef f(): pass\n"
    )
    text = "[`A`](a.py#L9) [`A.f`](a.py#L1) [`X`](a.py#L7) [`z`](a.py#L3)"
    assert repaired(text, tmp_path) == "[`A`](a.py#L2) [`A.f`](a.py#L4) [`X`](a.py#L1) [`z`](a.py#L3)"
    for wanted in ("f", "q"):  # defined twice; a local variable
        with pytest.raises(AssertionError, match="definitions"):
            repaired(f"[`{wanted}`](a.py#L1)", tmp_path)
    page = "# T\n```\n# no\n| 9 |\n```\n## A\n| h 7 |\n|---|\n| 1,103 x, 0.8 % |\n\n[a 12.5](b.md#L123)\n## B\n"
    assert headings(page) == ["# T", "## A", "## B"]
    assert rows(section(page, "A")) == ["| 1,103 x, 0.8 % |"]
    assert measured(page) == {"1103", "0.8", "12.5"}
    record = [*pieces({"rows": [["pages of 16", 27.26, 8.5], [3, 14]]})]
    assert not unrecorded("| pages of 16 | 27.3 | 8 |", record)
    assert unrecorded("| 16 | 27.2 |", record)
    assert unrecorded("| 16 | 15 |", record)
    assert not unrecorded("| 1,314 GB/s |", [[1313.8e9]])
    assert unrecorded("| 1,314 GB/s |", [[1313.4e9]])
    assert unrecorded("| 64 |", [*pieces([[64.0] * PIECE, 1.0])][2:])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_summary_is_html(page):
    """Markdown is not looked for in it: backticks would be seen."""
    assert [s for s in re.findall("<summary>.*</summary>", page.read_text()) if "`" in s or "**" in s] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page):
    text = page.read_text()
    targets = [target for _, target in links(text)]
    assert [target for target in targets if not (page.parent / target.partition("#")[0]).exists()] == []
    assert len(LINE_LINK.findall(text)) == sum("#L" in target for target in targets), (
        "its text is one name in backticks"
    )
    assert repaired(text, page.parent) == text, "lines have moved; run: python -m tests.test_docs"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_scripts_exist(page):
    commands = re.findall(r"^python (?:-m )?(\S+)", page.read_text(), flags=re.M)
    files = [command if command.endswith(".py") else command.replace(".", "/") + ".py" for command in commands]
    others = ("pytest.py", "sglang_router/launch_router.py")
    assert [file for file in files if not (ROOT / file).is_file() and file not in others] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=name)
def test_code_is_quoted_word_for_word(page):
    stages = [folder for folder in ROOT.glob("stage*") if folder.name <= page.relative_to(ROOT).parts[0]]
    files = [file for folder in (*stages, ROOT / "common") for file in folder.rglob("*.py")]
    known = [bare(file.read_text()) for file in files]
    quoted = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    assert [code for code in quoted if not any(bare(code) in text for text in known)] == []


@pytest.mark.parametrize("chapter", CHAPTERS, ids=name)
def test_sections(chapter):
    found = [heading[3:] for heading in headings((chapter / "README.md").read_text()) if heading.startswith("## ")]
    wanted = SECTIONS if chapter.name < "stage9" else SECTIONS[:-1]
    assert [title for title in found if title in wanted] == wanted


@pytest.mark.parametrize("page", BOTH, ids=name)
def test_both_languages_say_the_same(page):
    translated = page.with_suffix(".zh.md")
    english, chinese = page.read_text(), translated.read_text()
    assert english.splitlines()[0] == f"English · [中文]({translated.name})"
    assert chinese.splitlines()[0] == f"[English]({page.name}) · 中文"
    for page in (english, chinese):
        assert "TODO" not in page
    levels = [[heading.split()[0] for heading in headings(page)] for page in (english, chinese)]
    assert levels[0] == levels[1]
    in_tables = [Counter(numbers("\n".join(rows(page)))) for page in (english, chinese)]
    assert in_tables[0] == in_tables[1]
    assert measured(english) == measured(chinese)
    for mark in ("```mermaid", "```python", "<details>", "</details>"):
        assert english.count(mark) == chinese.count(mark), mark
    targets = [
        Counter(re.sub(r"\.zh\.(md|png|svg)$", r".\1", target) for _, target in links(page))
        for page in (english, chinese)
    ]
    assert targets[0] == targets[1]


def test_the_flags_of_the_readme():
    """Both tables have the flags and defaults of the code; the English one is made of it."""
    assert with_flags((ROOT / "README.md").read_text()) == (ROOT / "README.md").read_text(), (
        "run: python -m tests.test_docs"
    )
    ours, theirs = ([row.split("|")[1:-1] for row in FLAGS.findall(text)] for text in (
        "\n".join(flag_table()) + "\n", (ROOT / "README.zh.md").read_text()
    ))  # fmt: skip
    assert [re.findall("`[^`]+`", row[0]) for row in theirs] == [re.findall("`[^`]+`", row[0]) for row in ours]
    for (flag, _, *defaults), (_, _, *translated) in zip(ours, theirs, strict=True):
        for here, there in zip(defaults, translated, strict=True):
            assert here.strip() == there.strip() or re.search(r"[\u4e00-\u9fff]", there), flag


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.endswith(".zh.md")], ids=name)
def test_a_chinese_page_links_to_chinese_pages(page):
    targets = [target for _, target in links(page.read_text()) if target.endswith("/README.md")]
    assert [t for t in targets if (page.parent / t).with_name("README.zh.md").exists()] == []


@pytest.mark.parametrize("chapter", CHAPTERS, ids=name)
def test_what_you_should_see_was_seen(chapter):
    records = [piece for file in chapter.glob("results/*.json") for piece in pieces(json.loads(file.read_text()))]
    seen = rows(section((chapter / "README.md").read_text(), "What you should see"))
    assert seen, "no table"
    assert [row for row in seen if unrecorded(row, records)] == []


if __name__ == "__main__":
    for page in PAGES:
        try:
            page.write_text(
                repaired(with_flags(page.read_text()) if page == ROOT / "README.md" else page.read_text(), page.parent)
            )
        except AssertionError as error:
            print(f"{name(page)}: {error}")
