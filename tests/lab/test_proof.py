"""The lab's own tests are held to account: without a task's bodies all of its tests fail and no other task's do, plausible
mistakes are noticed, and solutions unlike the reference pass.

Bodies are exchanged in the running process, by a function's code object, so that all of it takes seconds.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from common.lab_tasks import CHAPTERS, LANGUAGES, Task, blanked, find_function, lessons, line_of, with_body
from tests.lab.otherwise import OTHERWISE
from tests.lab.wrong import WRONG

ROOT = Path(__file__).resolve().parents[2]
LESSONS = lessons(ROOT)
TASKS = {task.id: task for lesson in LESSONS.values() for task in lesson.tasks}
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def function_of(task: Task, name: str) -> FunctionType:
    """The function itself, without the property or the decorator around it."""
    found = importlib.import_module(task.file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return inspect.unwrap(found)


def code_of(source: str, name: str) -> CodeType:
    stack = [compile(source, name, "exec", dont_inherit=True)]
    while stack:
        code = stack.pop()
        if code.co_qualname == name:
            return code
        stack += [const for const in code.co_consts if isinstance(const, CodeType)]
    raise LookupError(name)


@contextlib.contextmanager
def exchanged(task: Task, source: str) -> Iterator[None]:
    """The task's functions as they are in `source`, instead of as they are in its file."""
    functions = {name: function_of(task, name) for name in task.functions}
    codes = {name: function.__code__ for name, function in functions.items()}
    try:
        for name, function in functions.items():
            function.__code__ = code_of(source, name)
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = codes[name]


def failures(task: Task) -> dict[str, str]:
    """Test -> what it says, of all tests of the task; an empty text: it passed."""
    module = importlib.import_module(LESSONS[task.number].tests.removesuffix(".py").replace("/", "."))
    cases, found = getattr(module, task.tests)(), {}
    for name in [name for name in vars(type(cases)) if name.startswith("test_")]:
        found[name] = ""
        try:
            getattr(cases, name)()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def source_of(task: Task) -> str:
    return (ROOT / task.file).read_text()


@every_task
def test_a_task_without_its_body_fails_all_of_its_tests_and_no_others(task):
    with exchanged(task, blanked(source_of(task), task)):
        assert 3 <= len(own := failures(task)) <= 6
        assert [name for name, text in own.items() if not text] == []
        others = [other for other in LESSONS[task.number].tasks if other != task]
        needed_by = [other.id for other in others if any(failures(other).values())]
    assert needed_by == [other.id for other in others if task.id in other.needs]
    assert all(other.id > task.id for other in others if task.id in other.needs), "a task needs a later one"
    assert not any(failures(task).values())  # the reference is back


@every_task
def test_plausible_mistakes_are_noticed(task):
    mistakes = [wrong for wrong in WRONG if wrong.task == task.id]
    assert len(mistakes) >= 2
    for wrong in mistakes:
        source = source_of(task)
        assert source.count(wrong.line) == 1, wrong
        with exchanged(task, source.replace(wrong.line, wrong.broken)):
            assert any(failures(task).values()), wrong.what


@pytest.mark.parametrize(("name", "bodies"), OTHERWISE.items(), ids=OTHERWISE)
def test_another_way_that_works_passes(name, bodies):
    task = TASKS[name.partition(" ")[0]]
    source = source_of(task)
    for name, body in bodies.items():
        source = with_body(source, name, body)
    with exchanged(task, source):
        assert {name: text for name, text in failures(task).items() if text} == {}


@every_task
def test_a_task_is_described(task):
    lesson = LESSONS[task.number]
    for name in task.functions:
        assert not find_function(source_of(task), name).name.startswith("__init__")
    for language in LANGUAGES:
        assert task.title[language] and len(task.hints[language]) == 3
        assert line_of((ROOT / lesson.folder / CHAPTERS[language]).read_text(), task.explained[language])
        assert f"lab start {task.number}" in (ROOT / lesson.folder / CHAPTERS[language]).read_text()


def test_every_chapter_has_tasks():
    assert [*LESSONS] == [*range(1, 10)]
    assert not {wrong.task for wrong in WRONG} - TASKS.keys()
    assert {name.partition(" ")[0] for name in OTHERWISE} == TASKS.keys()
