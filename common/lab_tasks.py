"""The lab's tasks: which functions of which file a reader writes anew, and how a body leaves a file and comes back.

Tasks are described in the `tasks.toml` beside each chapter. All of this works on text and syntax trees; nothing of the
engine is imported.
"""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("en", "zh")
CHAPTERS = {"en": "README.md", "zh": "README.zh.md"}


@dataclass(frozen=True)
class Task:
    """One or a few functions that belong together. What a reader reads is there in every language."""

    id: str  # "5.2"
    file: str  # below the root
    functions: tuple[str, ...]  # with their class: "PageAllocator.alloc"
    title: dict[str, str]
    explained: dict[str, str]  # words of the chapter: they stand in the line that explains it, and nowhere else
    hints: dict[str, list[str]]  # what to think of, the idea, nearly the code
    needs: tuple[str, ...] = ()  # earlier tasks of the chapter that its tests can't do without

    @property
    def number(self) -> int:
        """Of its chapter."""
        return int(self.id.partition(".")[0])

    @property
    def tests(self) -> str:
        """The class of its tests, in the chapter's file below tests/lab."""
        return f"Test_{self.id.replace('.', '_')}"


@dataclass(frozen=True)
class Lesson:
    """The tasks of one chapter, in order."""

    number: int
    folder: str
    tasks: tuple[Task, ...]
    conformance: tuple[str, ...]  # pytest's arguments for the test that the whole chapter has to pass

    @property
    def tests(self) -> str:
        return f"tests/lab/test_{self.folder.partition('_')[0]}.py"

    @property
    def files(self) -> list[str]:
        return sorted({task.file for task in self.tasks})


def lessons(root: Path) -> dict[int, Lesson]:
    """Chapter number -> its tasks. Raises TypeError, KeyError or TOMLDecodeError for a file that is not in order."""
    found = {}
    for file in sorted(root.glob("stage*/tasks.toml")):
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        tasks = [{"needs": []} | task for task in content["task"]]
        tasks = tuple(
            Task(**task | {"functions": tuple(task["functions"]), "needs": tuple(task["needs"])}) for task in tasks
        )
        number = tasks[0].number
        found[number] = Lesson(number, file.parent.name, tasks, tuple(content["conformance"]))
    return found


def find_function(source: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Raises LookupError if there is no such function."""

    def visit(node: ast.AST, outer: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and outer + child.name == name:
                yield child
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{outer}{child.name}.")

    for function in visit(ast.parse(source), ""):
        return function
    raise LookupError(f"there is no function {name}")


def body_range(source: str, name: str) -> tuple[int, int]:
    """First line of a function's body and the line after its last one, from 0. The docstring is not of the body, comments are."""
    function, lines = find_function(source, name), source.splitlines()
    has_docstring = ast.get_docstring(function) is not None
    last = function.body[-1].end_lineno
    if has_docstring:
        first = function.body[0].end_lineno
    else:
        first = function.body[0].lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
    inside = " " * (function.col_offset + 1)
    while last < len(lines) and lines[last].startswith(inside) and lines[last].lstrip().startswith("#"):
        last += 1
    return first, last


def body(source: str, name: str) -> str:
    """A function's body as it stands there, without its docstring."""
    first, last = body_range(source, name)
    return "".join(source.splitlines(keepends=True)[first:last])


def with_body(source: str, name: str, new: str) -> str:
    """The source with another body; `new` has the indentation of its place, and a line's end."""
    first, last = body_range(source, name)
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:first], new, *lines[last:]])


def is_generator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            stack += ast.iter_child_nodes(node)
    return False


def blank_body(source: str, name: str, task_id: str) -> str:
    """What stands in place of a body that is to be written."""
    function = find_function(source, name)
    indent = " " * (function.col_offset + 4)
    lines = [f'{indent}raise NotImplementedError("lab {task_id}: {name}")\n']
    if is_generator(function):
        lines.append(f"{indent}yield  # a function with a yield in it is a generator\n")
    return "".join(lines)


def blanked(source: str, task: Task) -> str:
    """The source of the task's file without the bodies of its functions; signatures and docstrings stay."""
    for name in task.functions:
        source = with_body(source, name, blank_body(source, name, task.id))
    return source


def line_of(text: str, words: str) -> int:
    """Number of the line, from 1, in which the words stand. Raises LookupError unless there is exactly one."""
    found = [number for number, line in enumerate(text.splitlines(), 1) if words in line]
    if len(found) != 1:
        raise LookupError(f"{words!r} stands in {len(found)} lines")
    return found[0]
