"""Rules about the package as a whole: where private names of jax may appear, how modules depend on each other, what an
import does, and what is documented."""

import ast
import doctest
import graphlib
import inspect
import os
import pathlib
import subprocess
import sys

import pytest

import partjit

PACKAGE = pathlib.Path(partjit.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}
TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in MODULES}
every_module = pytest.mark.parametrize("name", sorted(TREES))


def dotted(node):
    """`a.b.c` of an attribute chain on a name, or the empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def mentions(tree):
    """Every dotted name a module imports, reads as an attribute or spells in a string that is no docstring."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def imports(tree):
    """(imported module or name, whether it stands at the top level) of each absolute import."""
    # What may be missing is imported in a `try`.
    top = {id(node) for outer in tree.body for node in (outer.body if isinstance(outer, ast.Try) else [outer])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", id(node) in top) for alias in node.names)


@every_module
def test_private_names_of_jax_appear_in_the_compat_module_only(name):
    private = [mention for mention in mentions(TREES[name]) if "jax._src" in mention or "jaxlib" in mention]
    assert not private or name.split(".")[1:2] == ["_compat"], private


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "import jax\njax._src.core.x",
        "import importlib\nimportlib.import_module('jax._src.core')",
    ],
)
def test_the_search_for_private_names_sees_every_way_to_reach_them(source):
    assert any("jax._src" in mention for mention in mentions(ast.parse(source)))


@every_module
def test_no_module_needs_what_is_installed_for_tests_or_pictures_only(name):
    extras = {"hypothesis", "matplotlib", "pytest", "rich"}
    if name.startswith("partjit.testing"):  # an extra of its own, which nothing else imports
        extras.remove("hypothesis")
    assert not {imported.split(".")[0] for imported, _ in imports(TREES[name])} & extras


@every_module
def test_imports_stand_at_the_top_of_a_module(name):
    assert [imported for imported, at_top in imports(TREES[name]) if not at_top] == []


@every_module
def test_no_module_imports_from_a_star(name):
    assert not [imported for imported, _ in imports(TREES[name]) if imported.endswith(".*")]


def dependencies(name):
    """The modules of the package that a module imports."""
    found = set()
    for imported, _ in imports(TREES[name]):
        if imported in NAMES:
            found.add(imported)
        elif imported.rpartition(".")[0] in NAMES:
            found.add(imported.rpartition(".")[0])
    # `from partjit import x` runs the package's own module, which is what re-exports everything: a module names the
    # submodule it wants, and then that is what it depends on.
    return found - {name}


def test_no_module_inside_imports_the_package_itself():
    assert [name for name in TREES if name != "partjit" and "partjit" in dependencies(name)] == []


def test_the_modules_depend_on_each_other_without_cycles():
    graph = {name: dependencies(name) for name in TREES}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(order) == NAMES
    for window in ("partjit.testing", "partjit.timeline", "partjit.display"):
        inside = {name for name in NAMES if name.startswith(window)}
        # The package's own module re-exports.
        assert not any(dependencies(name) & inside for name in NAMES - inside - {"partjit"}), (
            f"nothing imports {window}"
        )
    reading = {name for name in NAMES if name.startswith(("partjit.inspect", "partjit.command", "partjit.__main__"))}
    assert not any(dependencies(name) & reading for name in NAMES - reading - {"partjit"})
    drawing = {name for name in NAMES if name.startswith("partjit.render")}
    assert not any(dependencies(name) - drawing for name in drawing)
    assert order.index("partjit._compat") < order.index("partjit.api")


@pytest.mark.parametrize("name", sorted(NAMES - {"partjit._compat"}))  # which is one place by its very purpose
def test_a_module_is_under_400_lines(name):
    path = PACKAGE.parent.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400, f"{name}: split it along its ideas"


@every_module
def test_a_module_says_what_it_is_for(name):
    assert ast.get_docstring(TREES[name])


def run(program):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, env=env, check=False
    )


def test_importing_partjit_starts_no_backend():
    # The number of virtual devices, the platform and the distributed client can be set until a backend exists.
    ran = run(
        "import partjit\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "import jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3 and xla_bridge.backends_are_initialized()\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_importing_partjit_changes_no_setting_of_jax():
    ran = run(
        "import jax\nbefore = dict(jax.config.values)\nimport partjit\nassert dict(jax.config.values) == before\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_importing_partjit_imports_nothing_for_tests_or_pictures():
    ran = run(
        "import sys, partjit\n"
        "print([name for name in ('hypothesis', 'matplotlib', 'pytest', 'rich') if name in sys.modules])\n"
    )
    assert ran.stdout.strip() == "[]", ran.stderr


def import_with_jax(version):
    return run(
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        f"metadata.version = lambda name: {version!r} if name == 'jax' else real(name)\n"
        "import partjit\n"
    )


@pytest.mark.parametrize("version", ["0.4.38", "0.9.9", "0.10.1", "0.13.0", "0.13.0rc1", "0.13", "0.20.0", "1.0.0"])
def test_a_jax_outside_the_range_is_refused_in_one_line_that_says_what_to_install(version):
    ran = import_with_jax(version)
    assert ran.returncode == 1
    message = ran.stderr.rstrip().splitlines()[-1]
    assert message.startswith("ImportError: ")
    assert f"found jax {version}" in message
    assert "pip install 'jax>=0.10.2,<0.13'" in message


@pytest.mark.parametrize("version", ["0.10.2", "0.10.3", "0.11.0", "0.12.0.1", "0.12.1.dev20261101", "0.12.9+cuda12"])
def test_a_jax_inside_the_range_is_accepted(version):
    ran = import_with_jax(version)
    assert ran.returncode == 0, ran.stderr


def is_constant(value):
    return not callable(value) and not inspect.ismodule(value)


PUBLIC = {name: value for name, value in vars(partjit).items() if not name.startswith("_") and name not in NAMES}
OWN = sorted(
    name
    for name, value in PUBLIC.items()
    if not inspect.ismodule(value)
    and getattr(value, "__module__", "").startswith("partjit")
    and not is_constant(value)
    and not (isinstance(value, type) and issubclass(value, BaseException))
)


def test_the_public_names_are_these():
    assert {name for name, value in PUBLIC.items() if not inspect.ismodule(value)} == {
        "FROM_ARRAY",
        "FROM_GDA",
        "Mesh",
        "MeshChangedError",
        "MissingMeshError",
        "P",
        "ParsedPartitionSpec",
        "PartitionSpec",
        "Plan",
        "ReshardWarning",
        "ShardingError",
        "SpecSync",
        "UnrepresentableShardingError",
        "parse_op_sharding",
        "to_op_sharding",
        "UNSPECIFIED",
        "pjit",
        "progress",
        "record",
        "reshard_policy",
        "set_mesh",
        "with_sharding_constraint",
    }


def test_the_public_names_of_colocated_are_these():
    names = {name for name, value in vars(partjit.colocated).items() if not name.startswith("_")}
    assert {name for name in names if not inspect.ismodule(vars(partjit.colocated)[name])} == {
        "CacheInfo",
        "ColocatedFunction",
        "PendingArray",
        "Stream",
        "colocated_cpu_devices",
        "colocated_python",
        "colocated_python_class",
        "deserialize",
        "mesh_coordinates",
        "serialize",
        "stream",
        "wait",
    }


@pytest.mark.parametrize(
    "name", ["colocated_python", "colocated_python_class", "mesh_coordinates", "stream", "wait", "serialize"]
)
def test_a_public_function_of_colocated_has_an_example(name):
    text = inspect.getdoc(getattr(partjit.colocated, name))
    assert doctest.DocTestParser().get_examples(text)
    assert "Raises:" in text


@pytest.mark.parametrize("name", OWN)
def test_a_public_name_has_a_docstring_with_an_example_that_pytest_runs(name):
    value = PUBLIC[name]
    text = inspect.getdoc(value)
    assert text
    assert text.splitlines()[0].endswith("."), "the first line is one sentence of purpose"
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"


@pytest.mark.parametrize("name", ["MeshChangedError", "MissingMeshError", "ReshardWarning", "ShardingError"])
def test_an_exception_says_when_it_is_raised(name):
    assert PUBLIC[name].__doc__
    assert PUBLIC[name].__doc__ != (PUBLIC[name].__bases__[0].__doc__)


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()
