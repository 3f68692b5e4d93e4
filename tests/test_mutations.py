"""The list of mutations keeps up with the code: lines, tests and the table in README.md."""

import pytest

from tests.mutations import MUTATIONS, ROOT, table


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_line_and_test_are_there(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.line) == 1
    file, name = mutation.test.split("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def test_the_table_is_in_the_readme():
    assert table() in (ROOT / "tests" / "README.md").read_text()
