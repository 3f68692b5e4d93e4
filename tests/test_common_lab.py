"""The lab as its reader meets it: copies, what `check` says, what is asked before work is lost, bugs to find."""

import ast
from pathlib import Path

import pytest

from common.lab import Copy, known_bugs, main
from common.lab_tasks import blank_body, body, body_range, find_function, lessons, with_body

ROOT = Path(__file__).resolve().parents[1]
LESSONS = lessons(ROOT)
TASKS = {task.id: task for task in LESSONS[5].tasks}


def files(folder: Path) -> dict[str, str]:
    """All sources of the engine and its tests, by their name below the folder."""
    found = [file for top in ("common", "stage*", "tests") for file in folder.glob(f"{top}/**/*.py")]
    return {file.relative_to(folder).as_posix(): file.read_text() for file in found}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A working copy of chapter 5, made once, and its sources as they were then."""
    folder = tmp_path_factory.mktemp("lab") / "copy"
    assert main(["start", "5", "--dir", str(folder)]) == 0
    return folder, files(folder)


@pytest.fixture
def copy(made, monkeypatch) -> Path:
    """The working copy, blank."""
    monkeypatch.setenv("LANG", "C")
    folder, blank = made
    for task in TASKS.values():
        (folder / task.file).write_text(blank[task.file])
    Copy(folder).note(green={}, hints={})
    return folder


def write(copy: Path, task_id: str, change=lambda text: text) -> None:
    """The reference's bodies of a task, changed."""
    task = TASKS[task_id]
    for name in task.functions:
        file = copy / task.file
        file.write_text(with_body(file.read_text(), name, change(body((ROOT / task.file).read_text(), name))))


def said(capsys, *command: str, status: int) -> str:
    """What it says, and it ends with that status."""
    capsys.readouterr()
    assert main([*map(str, command)]) == status
    return capsys.readouterr().out


def test_the_bodies_of_the_tasks_are_blank_and_everything_else_is_there(copy):
    here, there = files(ROOT), files(copy)
    assert here.keys() == there.keys()
    changed = {task.file for task in TASKS.values()}
    assert {file for file in here if here[file] != there[file]} == changed
    for task in TASKS.values():
        for name in task.functions:
            assert body(there[task.file], name) == blank_body(there[task.file], name, task.id)
            ours, theirs = find_function(here[task.file], name), find_function(there[task.file], name)
            assert ast.get_docstring(ours) == ast.get_docstring(theirs)
            assert ast.unparse(ours.args) == ast.unparse(theirs.args)
    for task in TASKS.values():
        write(copy, task.id)
    assert files(copy) == here, "with the reference's bodies it is the repository again"


def test_a_body_has_its_comments_and_not_its_docstring():
    source = 'class A:\n    def f(self):\n        """Doc."""\n        # why\n        return 1\n        # end\n\n    def g(self):\n        # first\n        yield 2\n'
    assert body(source, "A.f") == "        # why\n        return 1\n        # end\n"
    assert body(source, "A.g") == "        # first\n        yield 2\n"
    assert body_range(source, "A.f") == (3, 6)
    blank = blank_body(source, "A.g", "1.1")
    scope = {}
    exec(with_body(source, "A.g", blank), scope)
    with pytest.raises(NotImplementedError, match=r"lab 1\.1"):
        next(scope["A"]().g())  # still a generator
    with pytest.raises(LookupError):
        body(source, "A.h")


def test_check_goes_to_the_first_failure_and_says_what_it_is_about(copy, capsys, monkeypatch):
    monkeypatch.chdir(copy.parent)
    write(copy, "5.1")
    wrong = "len(self.table_idx) * self.pages_for(self.reserve)"
    write(copy, "5.2", lambda text: text.replace(wrong, '0; print("the table:", self.table_idx)'))
    text = said(capsys, "check", 5, "--dir", copy, status=1)
    assert "✓ 5.1" in text and "✗ 5.2" in text and "5.3" not in text
    assert "every running request keeps some head room" in text
    assert "called:   has_room(9): 10 free, 2 requests run" in text
    assert "came:     True" in text and "expected: False" in text
    assert "the table: {" in text, "what a learner prints is shown"
    assert " copy/stage5_paged/cache.py:" in text and " copy/stage5_paged/README.md:" in text and "hint 5.2" in text
    assert [Copy(copy).state(TASKS[i]) for i in TASKS] == ["green", "written", "blank", "blank"]
    write(copy, "5.1", lambda text: text + "        # another thought\n")
    assert Copy(copy).state(TASKS["5.1"]) == "written", "changed since it passed"


def test_code_that_can_not_be_read_is_a_place_and_a_line(copy, capsys):
    write(copy, "5.2", lambda text: "        return (\n")
    text = said(capsys, "check", 5, "--dir", copy, status=1)
    assert "stage5_paged/cache.py:" in text and "SyntaxError" in text
    file = copy / TASKS["5.1"].file
    file.write_text(file.read_text().replace("def alloc(", "def allocate("))
    assert "It was: def alloc(self, n: int)" in said(capsys, "check", 5, "--dir", copy, status=2)


def test_work_is_not_overwritten_unless_the_reader_says_so(copy, capsys, monkeypatch):
    file = copy / TASKS["5.4"].file
    file.write_text(file.read_text() + "\n\ndef of_my_own():\n    pass\n")  # though every task is blank
    work = files(copy)
    for answer in ("n", "", EOFError, KeyboardInterrupt):

        def asked(question, answer=answer):
            assert "changes of yours" in question
            if isinstance(answer, type):
                raise answer
            return answer

        monkeypatch.setattr("builtins.input", asked)
        assert main(["start", "5", "--dir", str(copy)]) == (130 if answer is KeyboardInterrupt else 1)
        assert files(copy) == work
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert main(["start", "5", "--dir", str(copy)]) == 0
    assert files(copy) != work


def test_nothing_of_the_readers_is_written_to(copy, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear")
    before = files(ROOT)
    for folder in (ROOT, ROOT / "lab", ROOT.parent, tmp_path / "mine", "/proc/nowhere"):
        assert main(["start", "5", "--dir", str(folder)]) == 2
    assert main(["start", "7", "--dir", str(copy)]) == 2, "a copy of another chapter"
    assert main(["bug", "5", "--dir", str(copy)]) == 2, "where the reader writes"
    assert files(ROOT) == before and not (ROOT / "lab").exists() and not (ROOT / ".lab").exists()
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear"
    assert "choose another --dir" in capsys.readouterr().out


def test_a_bug_is_one_change_in_one_file(tmp_path, capsys):
    for lesson in LESSONS.values():
        assert len(known_bugs(ROOT, lesson)) >= 2 * len(lesson.tasks)
    folder = tmp_path / "bug"
    assert "\npython -m pytest -x tests/" in said(capsys, "bug", 5, "--dir", folder, status=0)
    here, there = files(ROOT), files(folder)
    assert len([file for file in here if here[file] != there[file]]) == 1
    assert "+++ right" in said(capsys, "bug", 5, "--reveal", "--dir", folder, status=0)


def test_hints_get_plainer_and_show_is_the_difference(copy, capsys):
    heard = ["".join(said(capsys, "hint", "5.2", "--dir", copy, status=0).split()) for _ in range(4)]
    wanted = ["".join(text.split()) for text in TASKS["5.2"].hints["en"]]
    assert [text in part for text, part in zip([*wanted, wanted[2]], heard, strict=True)] == [True] * 4
    assert ["hint5.22" in heard[0], "hint5.23" in heard[1], "plainer" in heard[2]] == [True, True, False]
    assert "可能不够的有两样" in said(capsys, "hint", "5.2", 1, "--lang", "zh", "--dir", copy, status=0)
    assert "+        head_room = " in said(capsys, "show", "5.2", "--dir", copy, status=0)
    write(copy, "5.2")
    assert "word for word" in said(capsys, "show", "5.2", "--dir", copy, status=0)


def test_a_wrong_command_is_answered_with_a_sentence(tmp_path, capsys):
    for command in (["hint", "5.9"], ["start", "12"], ["check", "5", "--dir", str(tmp_path)]):
        assert "there " in said(capsys, *command, status=2)
    assert "5.4" in said(capsys, "status", status=0)
