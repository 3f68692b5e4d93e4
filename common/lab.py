"""The lab: write the engine yourself, function by function, against small tests.

    python -m common.lab start 5     # a working copy beside the repository, without the bodies of chapter 5's tasks
    python -m common.lab check 5     # the tasks in order: green, or what the first failure is about
    python -m common.lab hint 5.2    # three levels: hint 5.2 1, 2, 3
    python -m common.lab show 5.2    # the reference, as a diff from yours
    python -m common.lab bug 5       # another copy, complete, with one wrong line that you are to find
    python -m common.lab status      # all chapters

It reads and writes files and runs pytest; it imports nothing of the engine. The reader's own checkout is never written
to: everything happens in a working copy, which has a folder `.lab` with the reference and with what was green.
"""

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from common.lab_tasks import (
    CHAPTERS,
    LANGUAGES,
    Lesson,
    Task,
    blank_body,
    blanked,
    body,
    find_function,
    lessons,
    line_of,
)
from common.report import say, table

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "common",
    "stage*",
    "tests",
    "*.md",
    "*.toml",
    "*.txt",
)  # of the repository: what an engine and its tests need
MUTATIONS = ("tests/mutations.py", "tests/lab/wrong.py")  # lists of lines and what breaks them
TIME_LIMIT = 120  # seconds for the tests of a chapter's tasks; each has its own, much shorter limit
LONG = 1200  # seconds for the conformance test and the milestone
PRINTED = 20  # the last lines that a failing test printed

SAYS = {  # key -> (English, Chinese)
    "asks": ("{0} has changes of yours; start again and lose them?", "{0} 里有你改过的内容；重新开始会丢掉它们，继续吗？"),
    "bug": (
        "One line of {0} is wrong in {1}. This fails now:",
        "{1} 中，{0} 有一行是错的。下面这条命令现在会失败：",
    ),
    "bug_end": ("Find the line and mend it. To give up:", "找到这一行，把它改对。想看答案："),
    "called": ("called:", "调用："),
    "came": ("came:", "得到："),
    "chapter": ("read", "参见"),
    "columns": ("task / what you write / file / state", "任务 / 写什么 / 文件 / 状态"),
    "conformance": ("All tasks are green. The conformance test of this chapter:", "所有任务都通过了。接下来运行本章的一致性测试："),
    "done": ("Chapter {0} is yours.", "第 {0} 章是你自己写的了。"),
    "expected": ("expected:", "应为："),
    "failed": ("This does not hold yet: {0}", "这一条还不成立：{0}"),
    "hint_end": ("{0} of 3", "第 {0} 级，共 3 级"),
    "kept": ("Nothing was changed.", "什么都没有改动。"),
    "milestone": ("And its milestone, with your code:", "再用你的代码运行本章的里程碑："),
    "not_yet": ("{0} is not written yet", "{0} 还没有写"),
    "plainer": ("plainer:", "更具体的提示："),
    "printed": ("it printed", "它打印了"),
    "same": ("Yours is the reference, word for word.", "你写的和参考实现一字不差。"),
    "started": ("{0} tasks wait in {1}. Open that folder in your editor, then:", "{1} 里有 {0} 个任务等你来写。用编辑器打开这个目录，然后运行："),
    "stuck": ("stuck?", "卡住了？"),
    "where": ("where", "位置"),
    "yes_no": (" [y/N] ", " [y/N] "),
}  # fmt: skip
MARKS = {"blank": ("blank", "空白"), "written": ("written", "已写"), "green": ("✓ green", "✓ 通过")}


class LabError(Exception):
    """A sentence for the reader."""


def line(text: str) -> None:
    """As it is, so that a command or a path can be copied; `say` breaks lines."""
    print(text, flush=True)


@dataclass(frozen=True)
class Voice:
    """What the lab says, in the reader's language."""

    language: str

    def __call__(self, key: str, *values) -> str:
        return SAYS[key][LANGUAGES.index(self.language)].format(*values)

    def mark(self, state: str) -> str:
        return MARKS[state][LANGUAGES.index(self.language)]


@dataclass(frozen=True)
class Copy:
    """A working copy: a folder with a repository in it, and `.lab` beside that."""

    folder: Path

    @property
    def exists(self) -> bool:
        return self.notes_file.is_file()

    @property
    def notes_file(self) -> Path:
        return self.folder / ".lab" / "notes.json"

    @property
    def notes(self) -> dict:
        """number, kind, origin (the repository it was copied from), made (its fingerprint then), green (task -> digest of
        its bodies), hints (task -> level), bug."""
        return json.loads(self.notes_file.read_text(encoding="utf-8"))

    def note(self, **changes) -> None:
        notes = (self.notes if self.exists else {}) | changes
        self.notes_file.parent.mkdir(exist_ok=True)
        self.notes_file.write_text(json.dumps(notes, indent=1, ensure_ascii=False), encoding="utf-8")

    def fingerprint(self) -> str:
        """Of all that a reader writes in."""
        kinds = [f"{top}/**/*.{kind}" for top in ("common", "stage*", "tests") for kind in ("py", "ipynb")]
        files = sorted(file for kind in kinds for file in self.folder.glob(kind))
        return digest([file.read_text(encoding="utf-8") for file in files])

    def shown(self, file: str) -> str:
        """The file's path from where the reader's shell is."""
        return os.path.relpath(self.folder / file)

    def reference(self, file: str) -> str:
        return (self.folder / ".lab" / "reference" / file).read_text(encoding="utf-8")

    def source(self, file: str) -> str:
        return (self.folder / file).read_text(encoding="utf-8")

    def state(self, task: Task) -> str:
        """blank, written, or green: written and unchanged since it passed."""
        try:
            source = self.source(task.file)
            bodies = [body(source, name) for name in task.functions]
            waiting = [blank_body(source, name, task.id) for name in task.functions]
        except (OSError, SyntaxError, LookupError):
            return "written"  # and broken: `check` says how
        if bodies == waiting:
            return "blank"
        return "green" if self.notes["green"].get(task.id) == digest(bodies) else "written"


def digest(bodies: list[str]) -> str:
    return hashlib.sha256("\n".join(bodies).encode()).hexdigest()[:16]


def origin() -> Path:
    """The repository that copies are made of: this one, or the one that this is a copy of."""
    here = Copy(ROOT)
    return Path(here.notes["origin"]) if here.exists else ROOT


def copy_of(number: int, folder: Path | None, kind: str = "lab") -> Copy:
    """The working copy of a chapter: the given folder, this one if it is such a copy, or the usual place beside the repository."""
    here = Copy(ROOT)
    if folder:
        return Copy(folder.resolve())
    if here.exists and (here.notes["number"], here.notes["kind"]) == (number, kind):
        return here
    return Copy(origin().parent / f"{origin().name}-{kind}{number}")


def existing(copy: Copy, number: int) -> Copy:
    """Raises LabError unless the copy is there, and of this chapter."""
    if not copy.exists:
        raise LabError(
            f"there is no working copy in {copy.folder}; name its place with --dir, or make one:\n"
            f"python -m common.lab start {number}"
        )
    if copy.notes["number"] != number:
        raise LabError(f"{copy.folder} is a working copy of chapter {copy.notes['number']}, not of {number}")
    return copy


def make_copy(copy: Copy, lesson: Lesson, kind: str) -> None:
    """The repository, complete, into a new folder. Raises LabError where that would write into something of the reader's."""
    source, target = origin(), copy.folder
    if not source.is_dir():
        raise LabError(f"the repository that this is a copy of is no longer in {source}")
    if target == source or source in target.parents or target in source.parents:
        raise LabError(f"{target} and the repository lie one inside the other; choose another --dir")
    if copy.exists:  # asked for; the folder itself stays, for a shell may be in it
        for item in target.iterdir():
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LabError(f"{target} is not empty, and no working copy of the lab; choose another --dir")
    target.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED:
        for item in sorted(source.glob(pattern)):
            if item.is_dir():
                ignored = shutil.ignore_patterns(".*", "__pycache__")
                shutil.copytree(item, target / item.name, ignore=ignored)
            else:
                shutil.copy2(item, target / item.name)
    for file in lesson.files:
        kept = target / ".lab" / "reference" / file
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / file, kept)
    copy.note(number=lesson.number, origin=str(source), kind=kind, green={}, made=copy.fingerprint())


def may_overwrite(copy: Copy, voice: Voice) -> bool:
    """Asks, if there is work in the copy that would be lost."""
    if not copy.exists or copy.fingerprint() == copy.notes["made"]:
        return True
    try:
        if input(voice("asks", copy.folder) + voice("yes_no")).strip().lower() in ("y", "yes"):
            return True
    except EOFError:
        pass
    line(voice("kept"))
    return False


# --- the commands ----------------------------------------------------------------------------------------------------


def start(lesson: Lesson, folder: Path | None, voice: Voice) -> int:
    copy = copy_of(lesson.number, folder)
    if copy.exists and copy.notes["number"] != lesson.number:
        raise LabError(f"{copy.folder} is a working copy of chapter {copy.notes['number']}; choose another --dir")
    if not may_overwrite(copy, voice):
        return 1
    make_copy(copy, lesson, "lab")
    for task in lesson.tasks:
        file = copy.folder / task.file
        file.write_text(blanked(file.read_text(encoding="utf-8"), task), encoding="utf-8")
    copy.note(made=copy.fingerprint())
    line(voice("started", len(lesson.tasks), copy.folder))
    line(f"cd {copy.folder}\npython -m common.lab check {lesson.number}")
    return 0


def check(lesson: Lesson, folder: Path | None, quick: bool, voice: Voice) -> int:
    """The tasks up to the first that fails; when all are green the conformance test and the milestone, unless `quick`."""
    copy = existing(copy_of(lesson.number, folder), lesson.number)
    for task in lesson.tasks:
        try:
            for name in task.functions:
                find_function(copy.source(task.file), name)
        except SyntaxError as error:
            line(f"{copy.shown(task.file)}:{error.lineno}: SyntaxError: {error.msg}\n    {(error.text or '').strip()}")
            return 1
        except LookupError:
            was = find_function(copy.reference(task.file), name)
            raise LabError(
                f"{copy.shown(task.file)} has no {name} any more. It was: def {was.name}({ast.unparse(was.args)})"
            ) from None
    passed, failure = run_tests(copy, lesson)
    for task in lesson.tasks:
        source = copy.source(task.file)
        if failure and failure.task == task:
            line(f"✗ {task.id}  {task.title[voice.language]}")
            explain(copy, lesson, failure, voice)
            return 1
        if task.id not in passed:
            raise LabError(f"no test of {task.id} ran; is {lesson.tests} as it was?")
        line(f"✓ {task.id}  {task.title[voice.language]}")
        bodies = digest([body(source, name) for name in task.functions])
        copy.note(green=copy.notes["green"] | {task.id: bodies})
    if quick:
        return 0
    for key, command in (
        ("conformance", ["-m", "pytest", "-x", "-p", "no:cacheprovider", *lesson.conformance]),
        ("milestone", [f"{lesson.folder}/run.py"]),
    ):
        line(voice(key))
        line(f"python {' '.join(command)}")
        try:
            if subprocess.run([sys.executable, *command], cwd=copy.folder, timeout=LONG).returncode:
                return 1
        except subprocess.TimeoutExpired:
            raise LabError(f"it did not end in {LONG} seconds") from None
    line(voice("done", lesson.number))
    return 0


@dataclass(frozen=True)
class Failure:
    """The first test that failed, and what pytest wrote about it."""

    task: Task
    test: str
    message: str
    trace: str
    printed: str


def run_tests(copy: Copy, lesson: Lesson) -> tuple[set[str], Failure | None]:
    """The ids of tasks whose tests all passed, up to the first failure."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-o", "junit_logging=system-out"]
        try:
            run = subprocess.run(
                [*command, f"--junitxml={report}", lesson.tests],
                cwd=copy.folder,
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        except subprocess.TimeoutExpired as error:
            raise LabError(f"the tests did not end in {TIME_LIMIT} seconds") from error
        if not report.exists():
            raise LabError(f"the tests could not run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    tasks, passed = {task.tests: task for task in lesson.tasks}, set()
    for case in cases:
        task = tasks.get(case.get("classname", "").rpartition(".")[2])
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None and task is None:  # a file of the engine could not be imported
            errors = [text.strip("E \n") for text in problem.text.splitlines() if text.startswith("E ")]
            *_, place = re.findall(r"^(\w\S*:\d+): in ", problem.text, re.MULTILINE) or [lesson.tests]
            raise LabError("\n".join([f"{copy.shown(place)}: it can't be imported", *errors]))
        if problem is not None:
            printed = (case.findtext("system-out") or "").strip().partition("\n")[2]  # below a headline
            groups = re.findall(r"(?:^E .*\n?)+", problem.text, re.MULTILINE)  # the message of each error on the way
            message = "\n".join(text[4:] for text in groups[-1].splitlines())
            return passed - {task.id}, Failure(task, case.get("name"), message, problem.text, printed)
        if task is not None:
            passed.add(task.id)
    return passed, None


def explain(copy: Copy, lesson: Lesson, failure: Failure, voice: Voice) -> None:
    """What was called, what came, what was expected, and which line of the chapter explains it."""
    task, message = failure.task, failure.message
    line(f"  {voice('failed', failure.test.removeprefix('test_').replace('_', ' '))}")
    if message.startswith("NotImplementedError: lab "):
        name = message.rpartition(": ")[2]
        lines = [voice("not_yet", name)]
    else:
        lines = message.removeprefix("AssertionError: ").splitlines()
        for key in ("called", "came", "expected"):
            lines = [re.sub(f"^{SAYS[key][0]}", voice(key), text) for text in lines]
    for text in lines:
        line(f"    {text}")
    if failure.printed:
        line(f"  {voice('printed')}:")
        for text in failure.printed.splitlines()[-PRINTED:]:
            line(f"    {text}")
    source = copy.source(task.file)
    place = find_function(source, task.functions[0]).lineno
    for text in failure.trace.splitlines():  # the last line of theirs that was reached
        file, _, rest = text.partition(":")
        if file == task.file and (number := rest.partition(":")[0]).isdigit():
            place = int(number)
    line(f"  {voice('where')}: {copy.shown(task.file)}:{place} ({', '.join(task.functions)})")
    chapter = f"{lesson.folder}/{CHAPTERS[voice.language]}"
    words = task.explained[voice.language]
    line(f"  {voice('chapter')}: {copy.shown(chapter)}:{line_of(copy.source(chapter), words)} ({words} …)")
    line(f"  {voice('stuck')} python -m common.lab hint {task.id}")


def hint(task: Task, level: int | None, folder: Path | None, voice: Voice) -> int:
    """The given level; or the next one, which the working copy remembers."""
    copy = copy_of(task.number, folder)
    if level is None:
        seen = copy.notes.get("hints", {}) if copy.exists else {}
        level = min(3, seen.get(task.id, 0) + 1)
        if copy.exists:
            copy.note(hints=seen | {task.id: level})
    say(f"{task.id}  {task.title[voice.language]}  ({voice('hint_end', level)})\n")
    say(task.hints[voice.language][level - 1])
    if level < 3:
        line(f"\n{voice('plainer')} python -m common.lab hint {task.id} {level + 1}")
    return 0


def show(task: Task, folder: Path | None, voice: Voice) -> int:
    """How the reference differs; without a working copy, the reference."""
    copy, file = copy_of(task.number, folder), task.file
    theirs = copy.source(file) if copy.exists else ""
    reference = copy.reference(file) if copy.exists else (origin() / file).read_text(encoding="utf-8")
    for name in task.functions:
        new = body(reference, name)
        old = body(theirs, name) if theirs else ""
        line(f"{file}: {name}")
        print((diff(old, new, "yours", "reference") or voice("same")) if theirs else new)
    return 0


def diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """The whole of both, with signs; an empty text if they are the same."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm="", n=len(old))
    return "\n".join(lines)


def known_bugs(root: Path, lesson: Lesson) -> list[dict]:
    """The mutations that the repository's tests are known to notice, of this chapter's files; read, not imported."""
    found = []
    for name in MUTATIONS:
        for node in ast.walk(ast.parse((root / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Mutation", "Wrong"):
                what, *rest = map(ast.literal_eval, node.args)
                if ast.unparse(node.func) == "Mutation":
                    file, line, broken, test = rest
                    bug = {"what": what, "file": file, "line": line, "broken": broken, "test": f"tests/{test}"}
                else:
                    task_id, line, broken = rest
                    task = next((task for task in lesson.tasks if task.id == task_id), None)
                    if task is None:
                        continue
                    test = f"{lesson.tests}::{task.tests}"
                    bug = {"what": what, "file": task.file, "line": line, "broken": broken, "test": test}
                if bug["file"].startswith(lesson.folder) and (root / bug["file"]).read_text().count(bug["line"]) == 1:
                    found.append(bug)
    return found


def bug(lesson: Lesson, folder: Path | None, reveal: bool, voice: Voice) -> int:
    """A complete copy with one wrong line, beside the one that the reader works in."""
    copy = copy_of(lesson.number, folder, "bug")
    if reveal:
        found = existing(copy, lesson.number).notes["bug"]
        line(f"{found['file']}: {found['what']}")
        print(diff(found["broken"], found["line"], "wrong", "right"))
        return 0
    if copy.exists and copy.notes["kind"] != "bug":
        raise LabError(f"{copy.folder} is where you write; choose another --dir for the bug")
    if not may_overwrite(copy, voice):
        return 1
    found = random.choice(known_bugs(origin(), lesson))
    make_copy(copy, lesson, "bug")
    file = copy.folder / found["file"]
    file.write_text(file.read_text(encoding="utf-8").replace(found["line"], found["broken"]), encoding="utf-8")
    copy.note(bug=found, made=copy.fingerprint())
    line(voice("bug", lesson.folder, copy.folder))
    line(f"cd {copy.folder}\npython -m pytest -x {found['test']}")
    line(voice("bug_end"))
    line(f"python -m common.lab bug {lesson.number} --reveal")
    return 0


def status(all_lessons: dict[int, Lesson], voice: Voice) -> int:
    rows = []
    for number, lesson in all_lessons.items():
        copy = copy_of(number, None)
        for task in lesson.tasks:
            state = voice.mark(copy.state(task)) if copy.exists else ""
            rows.append((task.id, task.title[voice.language], task.file, state))
    table("", voice("columns").split(" / "), rows)
    return 0


# --- the command line ------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m common.lab", description="Write the engine yourself, against small tests."
    )
    commands = result.add_subparsers(dest="command", required=True)

    def command(name: str, help: str, what: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help)
        if what == "chapter":
            added.add_argument("number", type=int, help="of the chapter, 1 to 9")
        elif what == "task":
            added.add_argument("task", help="such as 5.2")
        if what:
            added.add_argument("--dir", type=Path, help="the working copy; otherwise it lies beside the repository")
        native = "zh" if os.environ.get("LANG", "").startswith("zh") else "en"
        added.add_argument("--lang", choices=LANGUAGES, default=native, help=f"here: {native}")
        return added

    command("start", "make a working copy in which a chapter's tasks are blank", "chapter")
    check = command("check", "run the tests of a chapter's tasks, up to the first that fails", "chapter")
    check.add_argument("--quick", action="store_true", help="leave out the conformance test and the milestone")
    hint = command("hint", "a hint for a task; each time a plainer one", "task")
    hint.add_argument("level", type=int, nargs="?", choices=(1, 2, 3))
    command("show", "how the reference differs from yours", "task")
    bug = command("bug", "make a complete copy with one wrong line, to be found", "chapter")
    bug.add_argument("--reveal", action="store_true", help="show the wrong line")
    command("status", "all chapters: what is blank, written, green")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if all went well, 1 if a task is not done, 2 for a wrong command, 130 for Ctrl-C."""
    args, everything = parser().parse_args(arguments), lessons(ROOT)
    voice = Voice(args.lang)
    try:
        if args.command == "status":
            return status(everything, voice)
        if args.command in ("hint", "show"):
            tasks = {task.id: task for lesson in everything.values() for task in lesson.tasks}
            if args.task not in tasks:
                raise LabError(f"there is no task {args.task}; `status` lists them")
            if args.command == "hint":
                return hint(tasks[args.task], args.level, args.dir, voice)
            return show(tasks[args.task], args.dir, voice)
        if args.number not in everything:
            raise LabError(f"there is no chapter {args.number}; there are {', '.join(map(str, everything))}")
        lesson = everything[args.number]
        if args.command == "start":
            return start(lesson, args.dir, voice)
        if args.command == "check":
            return check(lesson, args.dir, args.quick, voice)
        return bug(lesson, args.dir, args.reveal, voice)
    except (LabError, OSError) as error:
        line(str(error))
        return 2
    except KeyboardInterrupt:
        line("")
        return 130


if __name__ == "__main__":
    sys.exit(main())
