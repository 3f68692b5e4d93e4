"""The lab as its reader meets it: copies, what `check` says, what is asked before work is lost, bugs to find."""

import ast
from pathlib import Path

import pytest

from common.lab import Copy, main
from common.lab_tasks import blank_body, body, body_range, find_function, lessons, with_body

ROOT = Path(__file__).resolve().parents[2]
TASKS = {task.id: task for task in lessons(ROOT)[5].tasks}


def files(folder: Path) -> dict[str, str]:
    """All sources of the engine and its tests, by their name below the folder."""
    found = [file for top in ("common", "stage*", "tests") for file in folder.glob(f"{top}/**/*.py")]
    return {file.relative_to(folder).as_posix(): file.read_text() for file in found}


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A working copy of chapter 5."""
    monkeypatch.setenv("LANG", "C")
    assert main(["start", "5", "--dir", str(tmp_path / "copy")]) == 0
    return tmp_path / "copy"


def write(copy: Path, task_id: str, change=lambda text: text) -> None:
    """The reference's bodies of a task, changed."""
    task = TASKS[task_id]
    for name in task.functions:
        file = copy / task.file
        file.write_text(with_body(file.read_text(), name, change(body((ROOT / task.file).read_text(), name))))


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


def test_check_goes_to_the_first_failure_and_says_what_it_is_about(copy, capsys):
    write(copy, "5.1")
    write(copy, "5.2", lambda text: text.replace("len(self.table_idx) * self.pages_for(self.reserve)", "0"))
    assert main(["check", "5", "--dir", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "✓ 5.1" in said and "✗ 5.2" in said and "5.3" not in said
    assert "every running request keeps some head room" in said
    assert "called:   has_room(9): 10 free, 2 requests run" in said
    assert "came:     True" in said and "expected: False" in said
    assert "stage5_paged/cache.py:" in said and "stage5_paged/README.md:" in said and "hint 5.2" in said
    assert [Copy(copy).state(TASKS[i]) for i in TASKS] == ["green", "written", "blank", "blank"]
    write(copy, "5.1", lambda text: text + "        # another thought\n")
    assert Copy(copy).state(TASKS["5.1"]) == "written", "changed since it passed"


def test_a_syntax_error_is_a_place_and_a_line(copy, capsys):
    write(copy, "5.2", lambda text: "        return (\n")
    assert main(["check", "5", "--dir", str(copy)]) == 1
    assert "stage5_paged/cache.py:" in (said := capsys.readouterr().out) and "SyntaxError" in said


def test_work_is_not_overwritten_unless_the_reader_says_so(copy, capsys, monkeypatch):
    write(copy, "5.4")
    work = files(copy)
    for answer in ("n", "", EOFError):

        def asked(question, answer=answer):
            assert "1 tasks" in question
            if answer is EOFError:
                raise EOFError
            return answer

        monkeypatch.setattr("builtins.input", asked)
        assert main(["start", "5", "--dir", str(copy)]) == 1
        assert files(copy) == work
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert main(["start", "5", "--dir", str(copy)]) == 0
    assert files(copy) != work


def test_nothing_of_the_readers_is_written_to(copy, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear")
    before = files(ROOT)
    for folder in (ROOT, ROOT / "lab", ROOT.parent, tmp_path / "mine"):
        assert main(["start", "5", "--dir", str(folder)]) == 2
    assert main(["start", "7", "--dir", str(copy)]) == 2, "a copy of another chapter"
    assert main(["bug", "5", "--dir", str(copy)]) == 2, "where the reader writes"
    assert files(ROOT) == before and not (ROOT / "lab").exists() and not (ROOT / ".lab").exists()
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear"
    assert "choose another --dir" in capsys.readouterr().out


@pytest.mark.parametrize("number", range(1, 10))
def test_a_bug_is_one_change_in_one_file(number, tmp_path, capsys):
    folder = tmp_path / "bug"
    assert main(["bug", str(number), "--dir", str(folder)]) == 0
    assert "pytest -x tests/" in capsys.readouterr().out
    here, there = files(ROOT), files(folder)
    assert len([file for file in here if here[file] != there[file]]) == 1
    assert main(["bug", str(number), "--reveal", "--dir", str(folder)]) == 0
    assert "+++ right" in capsys.readouterr().out


def test_hints_get_plainer_and_show_is_the_difference(copy, capsys):
    said = []
    for _ in range(4):
        assert main(["hint", "5.2", "--dir", str(copy)]) == 0
        said.append("".join(capsys.readouterr().out.split()))
    wanted = ["".join(text.split()) for text in TASKS["5.2"].hints["en"]]
    assert [text in part for text, part in zip([*wanted, wanted[2]], said, strict=True)] == [True] * 4
    assert main(["hint", "5.2", "1", "--lang", "zh", "--dir", str(copy)]) == 0
    assert "可能不够的有两样" in capsys.readouterr().out
    assert main(["show", "5.2", "--dir", str(copy)]) == 0
    assert "+        head_room = " in capsys.readouterr().out
    write(copy, "5.2")
    assert main(["show", "5.2", "--dir", str(copy)]) == 0
    assert "word for word" in capsys.readouterr().out


def test_a_wrong_command_is_answered_with_a_sentence(tmp_path, capsys):
    for command in (["hint", "5.9"], ["start", "12"], ["check", "5", "--dir", str(tmp_path)]):
        assert main(command) == 2
        assert "there " in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "5.4" in capsys.readouterr().out
