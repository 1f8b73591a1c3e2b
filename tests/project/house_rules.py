"""Rules about the source of the package that no linter knows; `make check` runs them.

    python tests/project/house_rules.py

prints every violation as `file:line: what to do`, and ends with status 1 if there are any. Nothing is imported from the
package, so this takes a second. `test_house_rules.py` shows each rule a source that breaks it.
"""

import ast
import dataclasses
import graphlib
import pathlib
import sys
from collections.abc import Iterator

LONGEST_MODULE = 400
"""Lines. A longer one has more than one idea."""

EXTRAS = {"hypothesis", "pytest", "rich"}
"""Packages that are installed for tests and displays only."""

READERS = (
    ("partjit.testing",),
    ("partjit.recording",),
    (
        *("partjit.inspect", "partjit.search", "partjit.command", "partjit.__main__", "partjit.launch.__main__"),
        "partjit.testing",
    ),
)
"""What reads programs: each group is imported by itself and by the package's own module, which re-exports, alone."""


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of the package.

    Attributes:
        name: its dotted name.
        source: its text.
    """

    name: str
    source: str

    @property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.source)

    def belongs_to(self, *packages: str) -> bool:
        """Whether it is one of these packages, or inside of one."""
        return any(self.name == package or self.name.startswith(package + ".") for package in packages)


Violation = tuple[str, int, str]
"""The name of a module, a line, and what is wrong there."""


def modules_of(package: pathlib.Path) -> list[Module]:
    """The modules in a folder, by name."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path.read_text(encoding="utf-8")))
    return found


def violations(modules: list[Module]) -> Iterator[Violation]:
    """Everything that is wrong with a package."""
    for module in modules:
        for rule in (private_names_of_jax, extras, late_imports, length, purpose):
            yield from ((module.name, line, text) for line, text in rule(module))
    yield from directions(modules)


def private_names_of_jax(module: Module) -> Iterator[tuple[int, str]]:
    """`jax._src` and `jaxlib` appear in one package, where the differences between versions are known."""
    if module.belongs_to("partjit._jax"):
        return
    for line, mention in _mentions(module.tree):
        if "jax._src" in mention or "jaxlib" in mention:
            yield line, f"{mention} is private: export it from a module of partjit._jax and import it from there"


def extras(module: Module) -> Iterator[tuple[int, str]]:
    """What is installed for tests and displays only is not imported."""
    forbidden = EXTRAS - {"hypothesis"} if module.belongs_to("partjit.testing") else EXTRAS
    for line, imported, _ in _imports(module.tree):
        if imported.split(".")[0] in forbidden:
            yield line, f"{imported} is installed for tests or displays only"


def late_imports(module: Module) -> Iterator[tuple[int, str]]:
    """Imports are absolute, name what they want, and come first."""
    for line, imported, is_at_top in _imports(module.tree):
        if imported.startswith("."):
            yield line, f"import {imported} by its absolute name"
        if imported.endswith(".*"):
            yield line, f"{imported}: import names, not everything"
        if not is_at_top:
            yield line, f"{imported} is imported inside of a function or class: import it at the top of the module"


def length(module: Module) -> Iterator[tuple[int, str]]:
    """A module is short."""
    lines = len(module.source.splitlines())
    if lines >= LONGEST_MODULE:
        yield lines, f"{lines} lines are too many (under {LONGEST_MODULE}): split the module along its ideas"


def purpose(module: Module) -> Iterator[tuple[int, str]]:
    """A module says what it is for."""
    if not ast.get_docstring(module.tree):
        yield 1, "the module needs a docstring that says what it is for"


def directions(modules: list[Module]) -> Iterator[Violation]:
    """Data flows one way: modules import from the stages before them."""
    names = {module.name for module in modules}
    graph = {module.name: _dependencies(module, names) for module in modules}
    try:
        graphlib.TopologicalSorter({name: {*found} for name, found in graph.items()}).prepare()
    except graphlib.CycleError as error:
        yield error.args[1][0], 1, "imports itself through " + " <- ".join(error.args[1])
    for module in modules:
        for dependency, line in graph[module.name].items():
            imported = Module(dependency, "")
            if dependency == "partjit" and module.name != "partjit":
                yield module.name, line, "imports from the package itself: name the submodule"
            for group in READERS:
                if imported.belongs_to(*group) and not module.belongs_to(*group) and module.name != "partjit":
                    yield module.name, line, f"imports {dependency}, which reads programs: no stage depends on a reader"
            if module.belongs_to("partjit.render") and not imported.belongs_to("partjit.render"):
                yield module.name, line, f"imports {dependency}: drawing takes plain data and imports nothing of ours"


def _mentions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every dotted name that is imported, read as an attribute, or spelled in a string that is no docstring."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0] if node.body else None, ast.Expr)
        and ast.get_docstring(node, clean=False) is not None
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                yield from ((node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names)
            case ast.Attribute():
                yield node.lineno, _dotted(node)
            case ast.Constant(value=str() as text) if id(node) not in docstrings:
                yield node.lineno, text


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of attributes of a name, or the empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _imports(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """The line, the imported name, and whether it is at the top of the module, of each import."""
    # What may be missing is imported in a `try`; what `partjit.lazy` stands for, for type checkers.
    top = {id(node) for outer in tree.body for node in (outer.body if _is_transparent(outer) else [outer])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}", id(node) in top) for alias in node.names)


def _is_transparent(node: ast.stmt) -> bool:
    """Whether imports in the body of a statement are at the top of the module."""
    return isinstance(node, ast.Try) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def _dependencies(module: Module, names: set[str]) -> dict[str, int]:
    """The modules of the package that a module imports, and on which line."""
    found = {}
    for line, imported, _ in _imports(module.tree):
        for candidate in (imported, imported.rpartition(".")[0]):
            if candidate in names:
                found[candidate] = line
                break
    found.pop(module.name, None)
    return found


def main() -> int:
    """Prints what is wrong with the package beside these tests."""
    package = pathlib.Path(__file__).resolve().parents[2] / "partjit"
    modules = modules_of(package)
    found = [*violations(modules)]
    for name, line, text in found:
        path = package.parent.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        print(f"{path.relative_to(package.parent)}:{line}: {text}")
    print(f"{len(modules)} modules, {len(found)} violations of the house rules")
    return 1 if found or not modules else 0


if __name__ == "__main__":
    sys.exit(main())
