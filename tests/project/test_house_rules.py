"""The package as a whole: what its source may do, what an import does, what is public and documented."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import partjit
from partjit._jax.versions import SUPPORTED, supported_release
from partjit.records import QUICK
from tests.project import house_rules
from tests.project.house_rules import Module

PACKAGE = pathlib.Path(partjit.__file__).parent

SOUND = '"""Sound."""\n'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import jax._src.core", "jax._src.core is private"),
        ("from jax._src import core", "jax._src.core is private"),
        ("from jax import _src", "jax._src is private"),
        ("import jaxlib.xla_client", "jaxlib.xla_client is private"),
        ("import jax\njax._src.core.x", "is private"),
        ("import importlib\nimportlib.import_module('jax._src.core')", "jax._src.core is private"),
        ("import pytest", "pytest is installed for tests"),
        ("from hypothesis import given", "hypothesis.given is installed for tests"),
        ("from . import spec", "import ..spec by its absolute name"),
        ("from os.path import *", "import names, not everything"),
        ("def f():\n    import os", "import it at the top"),
        ("\n" * 400, "lines are too many"),
        ("from partjit import pjit", "name the submodule"),
        ("from partjit.inspect import explain", "no stage depends on a reader"),
        ("import partjit.testing.laws", "no stage depends on a reader"),
        ("import partjit.c", "imports itself through partjit."),
    ],
)
def test_every_rule_finds_what_breaks_it(source, message):
    others = [Module(f"partjit{name}", SOUND) for name in ("", ".inspect", ".inspect.explain", ".testing.laws")]
    in_a_circle = Module("partjit.c", SOUND + "import partjit.a")
    found = [*house_rules.violations([*others, in_a_circle, Module("partjit.a", SOUND + source)])]
    assert found
    for name, _, text in found:
        assert name in ("partjit.a", "partjit.c")
        assert message in text


def test_a_module_without_a_docstring_is_found():
    assert [text for *_, text in house_rules.violations([Module("partjit.a", "x = 1")])] == [
        "the module needs a docstring that says what it is for"
    ]


def test_drawing_that_knows_of_a_stage_is_found():
    drawing = Module("partjit.render.svg", SOUND + "import partjit.spec")
    (found,) = house_rules.violations([Module("partjit.spec", SOUND), drawing])
    assert found[:2] == ("partjit.render.svg", 2)


def test_exceptions_to_rules_are_these():
    allowed = [
        Module("partjit._jax.jaxprs", SOUND + "import jax._src.core"),
        Module("partjit.testing.laws", SOUND + "import hypothesis"),
        Module("partjit.a", SOUND + "try:\n    import os\nexcept ImportError:\n    pass"),
        Module("partjit.b", SOUND + "if TYPE_CHECKING:\n    import networkx\nelse:\n    networkx = 0"),
        Module("partjit", SOUND + "import partjit.testing.laws"),
    ]
    assert [*house_rules.violations(allowed)] == []


def run(program):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, env=env, check=False
    )


def test_importing_all_of_partjit_starts_no_backend_and_changes_no_setting_of_jax():
    # The number of virtual devices, the platform and the distributed client can be set until a backend exists.
    ran = run(
        "import jax\n"
        "before = dict(jax.config.values)\n"
        "from partjit import *\n"
        "from jax._src import xla_bridge\n"
        "assert colocated.PendingArray and inspect.Report\n"
        "assert dict(jax.config.values) == before\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3 and xla_bridge.backends_are_initialized()\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_importing_partjit_imports_nothing_that_a_program_without_calls_does_without():
    ran = run(
        "import sys, partjit\n"
        "assert 'jax' not in sys.modules\n"
        "import jax\n"
        "jax.jit(abs)(-3.0)\n"
        "before = {*sys.modules}\n"
        "from partjit import Mesh, P, events, pjit, with_sharding_constraint\n"
        "double = pjit(lambda x: 2 * x)\n"
        "assert double(3.0) == 6\n"
        "double.trace(3.0)\n"
        "others = 'hypothesis pytest rich networkx cloudpickle partjit.plan partjit.colocated partjit.inspect "
        "partjit.render.markup partjit.recording partjit.testing partjit.command'.split()\n"
        "found = ({*others} - before) & {*sys.modules}\n"
        "assert not found, found\n"
        "partjit.colocated, partjit.inspect\n"  # become attributes when they are read
        "assert partjit.colocated is sys.modules['partjit.colocated'] and 'inspect' in vars(partjit)\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_what_type_checkers_see_of_the_package_is_what_it_has():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: f"{node.module}:{alias.name}" for node in imports for alias in node.names}
    modules = {name: f"partjit.{name}:" for name, origin in seen.items() if origin.startswith("partjit:")}
    assert {**seen, **modules, "P": "jax.sharding:PartitionSpec"} == partjit._origins
    assert {*dir(partjit)} >= {*partjit._origins, "__version__"}
    with pytest.raises(AttributeError, match="module 'partjit' has no attribute 'pjitt'"):
        partjit.pjitt  # noqa: B018


VERSIONS = {
    False: ["0.4.38", "0.9.9", "0.10.1", "0.11.0", "0.11.2", "0.13.0", "0.13.0rc1", "0.13", "0.20.0", "1.0.0"],
    True: ["0.10.2", "0.10.3", "0.12.0", "0.12.0.1", "0.12.1.dev20261101", "0.12.9+cuda12"],
}


@pytest.mark.parametrize("version", VERSIONS[False])
def test_a_jax_outside_the_range_is_refused_with_what_to_install(version):
    with pytest.raises(ImportError, match=re.escape(f"found jax {version}: pip install 'jax>=0.10.2,!=0.11.*,<0.13'")):
        supported_release(version)


@pytest.mark.parametrize("version", VERSIONS[True])
def test_a_jax_inside_the_range_is_accepted(version):
    supported_release(version)


def test_pip_installs_what_is_accepted():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {f"jax{SUPPORTED}", f"jaxlib{SUPPORTED}"} <= {*project["dependencies"]}


def test_importing_partjit_beside_another_jax_says_so_in_one_line():
    ran = run(
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '0.9.9' if name == 'jax' else real(name)\n"
        "import partjit\n"
    )
    assert ran.returncode == 1
    assert ran.stderr.rstrip().splitlines()[-1].startswith("ImportError: partjit needs jax>=0.10.2,!=0.11.*,<0.13")


def test_the_tests_that_mutants_are_to_die_in_are_there():
    root = PACKAGE.parent
    targets = tomllib.loads((root / "mutation" / "targets.toml").read_text(encoding="utf-8"))["target"]
    named = {name for target in targets for name in (*target["near"], *target["wide"])}
    assert {name for name in named if not (root / name).exists()} == set()


def test_data_is_frozen():
    # Plans, specs and recordings are shared between threads and kept as keys: nobody may change them.
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if name == "partjit.__main__":
            continue
        for public, value in vars(importlib.import_module(name)).items():
            is_ours = isinstance(value, type) and value.__module__.startswith(
                "partjit"
            )  # others are imported for annotations
            if is_ours and dataclasses.is_dataclass(value) and not public.startswith("_"):
                assert value.__dataclass_params__.frozen or value in QUICK, value  # which pyright keeps frozen


def is_constant(value):
    return not callable(value) and not inspect.ismodule(value)


PUBLIC = {name: getattr(partjit, name) for name in dir(partjit) if not name.startswith("_")}
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
        "JournalError",
        "Mesh",
        "MeshChangedError",
        "MissingMeshError",
        "OtherProcessError",
        "P",
        "ParsedPartitionSpec",
        "PartitionSpec",
        "Plan",
        "ProgramsDifferError",
        "AUTO",
        "MemoryLimitError",
        "SearchOptions",
        "estimate_time",
        "search_specs",
        "export_spans",
        "gather_timelines",
        "merge_timelines",
        "ReshardWarning",
        "ShardingError",
        "SpecSync",
        "UnrepresentableShardingError",
        "parse_op_sharding",
        "to_op_sharding",
        "UNSPECIFIED",
        "WorkerDiedError",
        "pjit",
        "progress",
        "record",
        "replay",
        "reshard_policy",
        "results_so_far",
        "from_process_local",
        "to_process_local",
        "set_mesh",
        "spec_table",
        "specs_like",
        "with_sharding_constraint",
    }


def test_the_public_names_of_colocated_are_these():
    names = {name for name, value in vars(partjit.colocated).items() if not name.startswith("_")}
    assert {name for name in names if not inspect.ismodule(vars(partjit.colocated)[name])} == {
        "CacheInfo",
        "ColocatedFunction",
        "Journal",
        "JournaledCall",
        "PendingArray",
        "Stream",
        "colocated_cpu_devices",
        "colocated_python",
        "colocated_python_class",
        "deserialize",
        "idempotency_key",
        "journal",
        "mesh_coordinates",
        "serialize",
        "stream",
        "wait",
    }


@pytest.mark.parametrize(
    "name",
    [
        "colocated_python",
        "colocated_python_class",
        "idempotency_key",
        "journal",
        "mesh_coordinates",
        "stream",
        "wait",
        "serialize",
    ],
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
