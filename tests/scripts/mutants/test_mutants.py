"""Planted faults: what is changed and what is not, which tests are chosen, and a run from end to end."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutants.__main__ import equivalents, main
from scripts.mutants.operators import mutants_of
from scripts.mutants.running import Run, choose_tests
from scripts.mutants.tests_of import TESTS

ROOT = Path(__file__).parents[3]
SOURCE = '''"""A docstring with 1 < 2."""
from math import floor

LIMIT: int = 3


def clamp(value: int = 0, /) -> int:
    """Between 0 and LIMIT."""
    if value < 0 and not LIMIT is None:
        raise ValueError(f"{value + 1} is below {0}")
    logger.info("clamped %d", value + 1)
    return min(value, LIMIT, key=floor)


class Counter:
    def count(self):
        self.total += 2
        self.seen[0] = True
        self.notify()
        return False
'''


def _mutants(tmp_path, source=SOURCE, name="a.py"):
    (tmp_path / name).write_text(source)
    return mutants_of(tmp_path, name)


def _tree(source: str) -> str:
    """Without the parentheses."""
    return ast.dump(ast.parse(source))


def test_what_is_changed(tmp_path):
    changed = [_tree(mutant.applied(SOURCE)) for mutant in _mutants(tmp_path)]
    for before, after in [
        ("LIMIT: int = 3", "LIMIT: int = 4"),
        ("int = 0, /", "int = 1, /"),
        ("if value < 0 and not LIMIT is None:", "if True:"),
        ("if value < 0 and not LIMIT is None:", "if False:"),
        ("value < 0 and not LIMIT is None", "(value < 0 or (not LIMIT is None))"),
        ("value < 0 and", "(value <= 0) and"),
        ("value < 0 and", "value < 1 and"),
        ("not LIMIT is None", "(LIMIT is None)"),
        ("not LIMIT is None", "not (LIMIT is not None)"),
        ("return min(value, LIMIT, key=floor)", "return None"),
        ("min(value, LIMIT, key=floor)", "max(value, LIMIT, key=floor)"),
        ("min(value, LIMIT, key=floor)", "min(value, LIMIT)"),
        ("self.total += 2", "self.total -= 2"),
        ("self.total += 2", "self.total += 3"),
        ("self.total += 2", "pass"),
        ("self.seen[0] = True", "self.seen[0] = False"),
        ("self.seen[0] = True", "self.seen[1] = True"),
        ("self.seen[0] = True", "pass"),
        ("self.notify()", "pass"),
        ("return False", "return True"),
    ]:
        wanted = _tree(SOURCE.replace(before, after))
        assert wanted in changed, after
    assert len(changed) == 20  # and nothing else: no docstring, message, annotation or import


def test_a_key_outlives_a_shift_of_lines(tmp_path):
    keys = [mutant.key for mutant in _mutants(tmp_path)]
    assert len(set(keys)) == len(keys)
    shifted = [mutant.key for mutant in _mutants(tmp_path, "\n# more\n" + SOURCE)]
    assert shifted == keys
    assert "a.py::Counter.count: self.total += {2 => 3}" in keys
    twice = _mutants(tmp_path, "def f(x):\n    if x:\n        x.a()\n    x.a()\n")
    assert [m.key for m in twice if m.operator == "deleted"] == [
        "a.py::f: {x.a() => pass}",
        "a.py::f: {x.a() => pass} (no. 2)",
    ]


def test_tests_of_the_changed_line_are_chosen_quick_files_first(tmp_path, monkeypatch):
    mutant = next(m for m in _mutants(tmp_path) if m.shown == "self.total += {2 => 3}")
    monkeypatch.setitem(TESTS, "a.py", ["slow.py", "quick.py", "fixture.py"])

    def test(seconds: float, *lines: int, **others) -> dict:
        new = {"seconds": seconds, "outcome": "passed", "opaque": False, "setup": {}}
        return new | {"lines": {"a.py": list(lines)}} | others

    baseline = {
        "slow.py": {"slow.py::a": test(9, 17), "slow.py::b": test(3, 17)},
        "quick.py": {
            "quick.py::other_line": test(1, 18),
            "quick.py::opaque": test(2, opaque=True),
            "quick.py::failing": test(1, 17, outcome="failed"),
        },
        "fixture.py": {
            "fixture.py::first": test(1, setup={"a.py": [17]}),
            "fixture.py::second": test(0.5),
        },
    }
    asked = Run(ROOT, tmp_path / "out", 10.0, all_tests=False, baseline=baseline)
    names, seconds = choose_tests(asked, mutant)
    assert names == ["fixture.py::second", "fixture.py::first", "quick.py::opaque", "slow.py::b"]
    assert seconds == pytest.approx(6.5)
    asked.all_tests = True
    assert "quick.py::other_line" in choose_tests(asked, mutant)[0]


def test_files_of_the_table_exist():
    for source, tests in TESTS.items():
        for file in [source, *tests]:
            assert (ROOT / file).is_file(), file


def test_equivalents_are_mutants_of_the_tree():
    keys = {mutant.key for file in TESTS for mutant in mutants_of(ROOT, file)}
    for key, reason in equivalents().items():
        assert key in keys, f"no mutant of today: {key}"
        assert reason, key


_PROGRAM = """
import sys
from pathlib import Path
from scripts.mutants import running, testing
from scripts.mutants.operators import mutants_of
running.import_the_rest = lambda root: None
testing.PRELOADED.clear()
running.TESTS.clear()
running.TESTS["titan_sparse/a.py"] = ["tests/test_a.py"]
root = Path(sys.argv[1])
asked = running.Run(root, root / "out.jsonl", 60.0, all_tests=False)
found = [m for m in mutants_of(root, "titan_sparse/a.py") if m.operator in ("arithmetic", "constant")]
running.run(asked, found, 2, 60.0)
"""
_TESTED = """
def half(x):
    if x > 100:
        return None
    return x // 2


def unused(x):
    return x + y
"""
_TESTS = """
from titan_sparse.a import half


def test_half():
    assert half(5) == 2


def test_that_fails_anyway():
    assert False
"""


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path, capsys, monkeypatch):
    for name, text in [("titan_sparse/a.py", _TESTED), ("tests/test_a.py", _TESTS)]:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).with_name("__init__.py").write_text("")
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "failed: ['tests/test_a.py::test_that_fails_anyway']" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert records[0]["kind"] == "baseline"
    outcomes = {record["key"].partition("::")[2]: record for record in records[1:]}
    killed = outcomes["half: return {x // 2 => (x / 2)}"]
    assert killed["outcome"] == "killed" and killed["by"] == "tests/test_a.py::test_half"
    assert outcomes["half: if x > {100 => 101}:"]["outcome"] == "survived"
    assert outcomes["unused: return {x + y => (x - y)}"]["outcome"] == "untested"
    # The copies are gone, and the tree is as it was.
    assert (tmp_path / "titan_sparse/a.py").read_text() == _TESTED

    monkeypatch.setattr("scripts.mutants.__main__.ROOT", tmp_path)
    assert main(["report", str(tmp_path / "out.jsonl")]) == 1
    assert "half: if x > {100 => 101}:" in capsys.readouterr().out
