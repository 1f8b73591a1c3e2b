"""`make soak` runs every test that tries more there: it finds them by their markers, which this finds missing."""

import ast
import functools
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SELECTED = ("pytest.mark.soak", "pytest.mark.system", "given(", "hypothesis.given(")
"""Decorators of tests that are in `make soak`, or in no run that has a profile."""

Place = tuple[str, str]
"""The dotted name of a module of tests, and what is defined in it."""


class Definitions:
    """What the modules of tests define, and from where they import, as syntax.

    Attributes:
        nodes: by place, what is evaluated there.
        imported: by the place where a name is used, the place where it is defined.
    """

    def __init__(self, sources: dict[str, str]) -> None:
        self.nodes: dict[Place, list[ast.AST]] = {}
        self.imported: dict[Place, Place] = {}
        for module, source in sources.items():
            for node in ast.parse(source).body:
                self._add(module, node)

    def _add(self, module: str, node: ast.stmt) -> None:
        match node:
            case ast.ImportFrom():
                for alias in node.names:
                    self.imported[module, alias.asname or alias.name] = (node.module or "", alias.name)
            case ast.FunctionDef() | ast.ClassDef():
                self.nodes.setdefault((module, node.name), []).append(node)
            case ast.Assign() | ast.AnnAssign() if node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)):
                    self.nodes.setdefault((module, name), []).append(node.value)

    def depends_on_the_profile(self, place: Place) -> bool:
        """Whether anything that is used here, or by what is used here, reads which profile it is."""
        seen, rest = set(), [place]
        while rest:
            place = rest.pop()
            place = self.imported.get(place, place)
            if place in seen:
                continue
            seen.add(place)
            for node in self.nodes.get(place, ()):
                if any(_reads_the_profile(each) for each in ast.walk(node)):
                    return True
                rest += self._used(place[0], node)
        return False

    def _used(self, module: str, node: ast.AST) -> Iterator[Place]:
        for each in ast.walk(node):
            match each:
                case ast.Name(id=name) | ast.arg(arg=name):  # an argument of a test is a fixture
                    yield module, name
                case ast.Attribute(value=ast.Name(id=of), attr=name) if (module, of) in self.imported:
                    yield ".".join(self.imported[module, of]), name


def _reads_the_profile(node: ast.AST) -> bool:
    return (isinstance(node, ast.Constant) and node.value == "PARTJIT_PROFILE") or (
        isinstance(node, ast.Attribute) and ast.unparse(node) == "settings().max_examples"
    )


def unmarked(sources: dict[str, str]) -> list[str]:
    """The tests that depend on the profile, and that `make soak` does not select."""
    definitions = Definitions(sources)
    found = []
    for (module, name), nodes in definitions.nodes.items():
        if not name.startswith("test_") or not isinstance(nodes[-1], ast.FunctionDef):
            continue
        marks = [ast.unparse(each) for each in nodes[-1].decorator_list]
        marks += [ast.unparse(each) for each in definitions.nodes.get((module, "pytestmark"), ())]
        if any(text in mark for text in SELECTED for mark in marks):
            continue
        if definitions.depends_on_the_profile((module, name)):
            found.append(f"{module}.{name}")
    return sorted(found)


@functools.cache
def sources_of_the_tests():
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not {"system", "project"} & {*path.parts}]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8") for path in paths}


def test_a_test_that_tries_more_in_soak_has_its_marker():
    assert unmarked(sources_of_the_tests()) == []


EFFORT = "import os\nEVERYTHING = os.environ.get('PARTJIT_PROFILE') == 'soak'\ndef sample(cases): return EVERYTHING"


@pytest.mark.parametrize(
    "source",
    [
        "from tests.effort import sample\ndef test_it():\n    for case in sample([1]): pass",
        "from tests.effort import sample as some\nCASES = some([1])\ndef test_it():\n    use(CASES)",
        "from tests.effort import EVERYTHING\n@mark(3 if EVERYTHING else 1)\ndef test_it(): pass",
        "from tests import effort\ndef cases(): return effort.EVERYTHING\ndef test_it():\n    cases()",
        "from tests.effort import sample\n@fixture\ndef run(): sample([1])\ndef test_it(run): pass",
        "drawn = settings(max_examples=settings().max_examples // 5)\ndef test_it():\n    drawn(law)()",
    ],
)
def test_each_way_to_depend_on_the_profile_is_found(source):
    assert unmarked({"tests.effort": EFFORT, "tests.a": source}) == ["tests.a.test_it"]
    marked = source.replace("def test_it", "@pytest.mark.soak\ndef test_it")
    assert unmarked({"tests.effort": EFFORT, "tests.a": marked}) == []
    assert unmarked({"tests.effort": EFFORT, "tests.a": "pytestmark = pytest.mark.soak\n" + source}) == []
    assert unmarked({"tests.effort": EFFORT, "tests.a": "def test_it(): pass"}) == []
