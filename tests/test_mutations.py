"""The list of mutations keeps up with the code: lines, tests and the table in README.md. So does its list of files."""

import re

import pytest

from tests.mutations import MUTATIONS, ROOT, table
from tests.test_docs import section


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_line_and_test_are_there(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.line) == 1
    file, name = mutation.test.split("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def test_the_table_is_in_the_readme():
    assert table() in (ROOT / "tests" / "README.md").read_text()


def test_the_readme_names_every_file():
    listed = re.findall(r"`(\w+\.py)`", section((ROOT / "tests" / "README.md").read_text(), "What each file is for"))
    assert sorted(listed) == sorted(path.name for path in (ROOT / "tests").glob("*.py") if path.name != "__init__.py")
