"""How much there is to read: the files that one decode step passes through, and the lines of code of the engine.

python -m tests.test_size    # both as tables
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from common.config import EngineConfig
from stage2_req.params import SamplingParams
from stage5_paged.build import build_engine as build_stage5
from stage6_cudagraph.build import build_engine as build_stage6

ROOT = Path(__file__).resolve().parents[1]
INSTRUMENTS = {  # they measure and show; no request passes through them
    *(
        "run",
        "load",
        "report",
        "profiling",
        "trace",
        "lab",
        "lab_tasks",
        "ladder",
        "client",
        "meter",
        "show",
        "toy",
        "workload",
        "cli",
        "local_server",
        "check_clients",
        "peers",
        "draw",
        "byte_tokenizer",
    )
}
AIMS = {"engine": 2300, "kernels": 950, "server": 800}  # of the server: its ground floor
FOLDERS = {ROOT / "common", *ROOT.glob("stage*")}
MODEL = ("common/model.py", "common/kernels/")  # what the device computes


def walk(engine, outside: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """file -> functions, in the order in which one decode step passes through them; without the model and its kernels,
    and without what is called inside functions named `outside`."""
    for i in range(3):
        engine.add([i + 1] * 20, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(6):
        engine.step()
    seen: dict[str, list[str]] = {}
    depth = 0  # how many calls deep inside something that is left out

    def profile(frame, event, _):
        nonlocal depth
        code = frame.f_code
        file = Path(code.co_filename)
        name = file.relative_to(ROOT).as_posix() if file.parent in FOLDERS else ""
        skipped = name.startswith(MODEL) or code.co_qualname in outside
        if event == "call":
            if depth or skipped:
                depth += 1
            elif name and not code.co_name.startswith("<"):
                functions = seen.setdefault(name, [])
                if code.co_qualname not in functions:
                    functions.append(code.co_qualname)
        elif event == "return" and depth:
            depth -= 1

    sys.setprofile(profile)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return seen


def decode_step(stage: int) -> dict[str, list[str]]:
    config = EngineConfig("dummy:tiny", "cpu", "float32", max_model_len=256)
    if stage == 5:
        return walk(build_stage5(config))
    # A GPU replays the captured function as one call; here that function itself is called.
    return walk(
        build_stage6(EngineConfig("dummy:tiny", "cpu", "float32", max_model_len=256, graph=True)),
        ("DecodeGraphs.captured_step",),
    )


@pytest.mark.parametrize("stage", [5, 6])
def test_a_decode_step_passes_few_files(stage):
    assert len(decode_step(stage)) <= 9


def code_lines(source: str) -> int:
    """Without blank lines, comments and docstrings."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def sizes() -> Counter:
    found = Counter()
    for file in ROOT.glob("*/**/*.py"):
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith(("common/", "stage")):
            continue
        if file.stem in INSTRUMENTS or file.stem.startswith("bench_") or file.parent.name == "inspector":
            part = "instruments"
        elif name.startswith("common/kernels/"):
            part = "kernels"
        else:
            folder = file.parent.name
            part = (
                "engine"
                if not name.startswith("stage9")
                else "server"
                if folder == "stage9_server"
                else f"server: {folder}"
            )
        found[part] += code_lines(file.read_text())
    return found


def test_the_servers_ground_floor_is_readable_in_one_sitting():
    assert sizes()["server"] <= AIMS["server"]


def test_code_lines():
    assert (
        code_lines('"""Doc\nstring"""\n\nx = 1  # why\n# no\ndef f():\n    """Doc"""\n    return (\n        x\n    )\n')
        == 5
    )


if __name__ == "__main__":
    for stage in (5, 6):
        print(f"one decode step of stage {stage}")
        for file, functions in decode_step(stage).items():
            print(f"  {file}: {', '.join(functions)}")
    for part, lines in sizes().items():
        print(f"{part}: {lines:,} lines" + (f", aim {AIMS[part]:,}" if part in AIMS else ""))
