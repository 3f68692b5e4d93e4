"""The rules of the house, read off the syntax trees: who imports whom, how deep classes go, what a stage holds."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = sorted(path.name for path in ROOT.glob("stage[1-9]_*") if path.is_dir())
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for top in ("common", *STAGES)
    for path in sorted((ROOT / top).rglob("*.py"))
}
STAGE_NAMES = [
    *("stage1_naive", "stage2_req", "stage3_kvcache", "stage4_batch", "stage5_paged"),
    *("stage6_cudagraph", "stage7_radix", "stage8_tp", "stage9_server"),
]
TOP_LEVEL = {
    *(
        "README.md",
        "README.zh.md",
        "requirements.txt",
        "requirements-gpu.txt",
        "pyproject.toml",
        "LICENSE",
        ".gitignore",
    ),
    *(".ci", "common", "tests", *STAGE_NAMES),
}


def imports(source: str) -> list[str]:
    """Names of all modules that the source imports, also inside functions; a relative import begins with a dot."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def stage_number(name: str) -> int:
    """3 for "stage3_kvcache.cache", 0 for what belongs to no stage."""
    match = re.match(r"stage(\d)_", name)
    return int(match[1]) if match else 0


def forbidden_imports(path: str, source: str) -> list[str]:
    own = stage_number(path)
    return [name for name in imports(source) if name.startswith((".", "tests")) or stage_number(name) > own]


def stage_flags(source: str) -> list[str]:
    """Identifiers that name a stage or ask for one (Triton's num_stages don't), and strings, other than docstrings, that name one."""
    found, tree = [], ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        found += [
            value
            for field in ("id", "attr", "arg", "name")
            if isinstance(value := getattr(node, field, None), str) and re.search(r"stage(_?\d|$)", value)
        ]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found += re.findall(r"\bstage_?\d\w*", node.value)
    return found


def deep_classes(sources: dict[str, str]) -> list[str]:
    """Classes whose base, a class of the project, has itself a class of the project as its base."""
    bases = {}
    for path, source in sources.items():
        module, tree = path.removesuffix(".py").replace("/", "."), ast.parse(source)
        known = {}  # how this file calls things -> module.Name
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                known |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                known[node.name] = f"{module}.{node.name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named = [ast.unparse(base).split("[")[0].rpartition(".") for base in node.bases]
                bases[f"{module}.{node.name}"] = [
                    f"{known.get(prefix, prefix)}.{name}" if prefix else known.get(name, name)
                    for prefix, _, name in named
                ]
    return [
        name
        for name, parents in bases.items()
        if any(grand in bases for parent in parents if parent in bases for grand in bases[parent])
    ]


def mutable_globals(source: str) -> list[str]:
    """Lower-case names at module level that are given a list, a dict, a set or another container."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = node.value
            made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in (
                "list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict",
            )  # fmt: skip
            if made or isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [ast.unparse(target) for target in targets]
                found += [name for name in names if name != name.upper() and not name.startswith("__")]
        elif isinstance(node, ast.Global):
            found += node.names
    return found


def test_the_checks_find_what_they_look_for():
    assert forbidden_imports("stage2_req/a.py", "def f():\n    from stage3_kvcache.cache import X") == [
        "stage3_kvcache.cache"
    ]
    assert forbidden_imports("common/a.py", "import stage1_naive.generate as g") == ["stage1_naive.generate"]
    assert forbidden_imports("stage2_req/a.py", "from .b import c\nfrom . import d") == [".b", "."]
    assert (
        forbidden_imports("stage2_req/a.py", "from stage1_naive.generate import g\nfrom common.config import x") == []
    )
    assert stage_flags('def f(stage):\n    """stage 3"""\n    return stage == "stage3"') == ["stage", "stage", "stage3"]
    sources = {
        "common/a.py": "class A: pass\nclass B(A): pass",
        "stage2_req/b.py": "from common import a as z\nclass C(z.B): pass",
    }
    assert deep_classes(sources) == ["stage2_req.b.C"]
    assert deep_classes({"a.py": "class A(dict): pass\nclass B(A, Generic[T]): pass"}) == []
    assert mutable_globals("a = []\nB = {}\nc: dict = dict()\nd = (1, 2)\n__all__ = []") == ["a", "c"]


@pytest.mark.parametrize("path", SOURCES)
def test_imports(path):
    assert forbidden_imports(path, SOURCES[path]) == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.startswith("common/")])
def test_common_has_no_stage_flag(path):
    assert stage_flags(SOURCES[path]) == []


def test_one_level_of_subclassing():
    assert deep_classes(SOURCES) == []


@pytest.mark.parametrize("path", SOURCES)
def test_no_mutable_state_in_a_module(path):
    assert mutable_globals(SOURCES[path]) == []
    assert not [node for node in ast.walk(ast.parse(SOURCES[path])) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("path", SOURCES)
def test_nothing_waits_to_be_implemented(path):
    """The lab writes such lines, into a reader's working copy."""
    raised = [node for node in ast.walk(ast.parse(SOURCES[path])) if isinstance(node, ast.Name | ast.Attribute)]
    assert [name for name in map(ast.unparse, raised) if "NotImplemented" in name] == []


@pytest.mark.parametrize("path", [path for path, source in SOURCES.items() if source.strip()])
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(SOURCES[path]))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_folder(stage):
    builds = 1 < stage_number(stage) < 9  # 9 serves 8's engine
    needed = ["README.md", "run.py", "__init__.py"] + ["build.py"] * builds
    assert [name for name in needed if not (ROOT / stage / name).is_file()] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.endswith("/build.py")])
def test_a_build_is_short(path):
    assert len(SOURCES[path].splitlines()) <= 40
    assert "def build_engine(config: EngineConfig)" in SOURCES[path]
    assert "# NEW" in SOURCES[path]


def test_stages_have_the_names_of_the_design():
    assert STAGE_NAMES[: len(STAGES)] == STAGES


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-gpu.txt"])
def test_requirements_are_pinned(name):
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    assert [line for line in lines if line and not re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.+!]+( *;.*)?", line)] == []


def test_the_top_level_holds_nothing_else():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} - TOP_LEVEL == set()
