"""Which modules are changed, which tests are to notice, and which mutants were judged to change nothing."""

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path

from mutation.mutants import Mutant

FOLDER = Path(__file__).parent
MODULES = (
    "partjit/spec.py",
    "partjit/validate.py",
    "partjit/mesh.py",
    "partjit/trees.py",
    "partjit/placement.py",
    "partjit/opsharding/*.py",
    "partjit/rules/*.py",
    "partjit/shardy.py",
    *(
        f"partjit/plan/passes/{name}.py"
        for name in ("cut", "donate", "transfers", "control_flow", "rotate", "propagate", "emit", "choose_emitted")
    ),
    *(f"partjit/inspect/{name}.py" for name in ("collectives", "predicted")),
    *(f"partjit/inspect/hlo/{name}.py" for name in ("device_groups", "optimized", "text", "trip_counts")),
    *(
        f"partjit/colocated/runtime/{name}.py"
        for name in (
            *(
                "streams",
                "call",
                "lanes",
                "scheduler",
                "deadlocks",
                "interrupts",
                "run_ahead",
                "history",
                "pending",
                "pins",
            ),
            *("emission", "handed_over", "answering", "numbers"),
        )
    ),
    *(f"partjit/colocated/{name}/*.py" for name in ("agreement", "journaling")),
    "partjit/launch/*.py",
    "partjit/pieces/*.py",
    "partjit/recording/*.py",
    *(f"partjit/colocated/ir/{name}.py" for name in ("autodiff", "batching", "primitive", "emission")),
)
"""What is changed: where a wrong line gives wrong numbers, a wrong sharding or a hang."""


OF_ALL = ("tests/project/test_house_rules.py",)
"""Tests of the package as a whole, which belong to every target."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The tests of some modules.

    Attributes:
        sources: patterns of modules.
        near: tests that are run first.
        wide: tests that are run if the near ones pass.
    """

    sources: tuple[str, ...]
    near: tuple[str, ...]
    wide: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Equivalent:
    """A mutant that somebody has shown to change no behaviour.

    It is found again by its code, not by its line: once the code changes the judgement is stale, which is an error.

    Attributes:
        path: the module.
        function: the function or class it is in.
        before: the changed lines, as `Mutant` has them.
        after: the same lines after the change.
        reason: why nothing changes.
    """

    path: str
    function: str
    before: str
    after: str
    reason: str

    def is_of(self, mutant: Mutant) -> bool:
        """Whether this is the judgement on `mutant`."""
        ours = (self.path, self.function, self.before, self.after)
        return ours == (mutant.path, mutant.function, mutant.before, mutant.after)


def modules(root: Path, only: str) -> list[str]:
    """The modules that are changed, of those that match the pattern `only`."""
    paths = (path.relative_to(root) for pattern in MODULES for path in sorted(root.glob(pattern)))
    return [str(path) for path in paths if path.name != "__init__.py" and path.match(only)]


def target_of(path: str, targets: Sequence[Target]) -> Target:
    """The last target of a module: special ones follow general ones."""
    return [target for target in targets if any(Path(path).match(source) for source in target.sources)][-1]


def read_targets(root: Path) -> list[Target]:
    """The targets in `targets.toml`.

    Raises:
        FileNotFoundError: it names tests that are not there.
    """
    tables = _read("targets.toml", "target")
    targets = [Target(*map(tuple, (table["sources"], table["near"], [*table["wide"], *OF_ALL]))) for table in tables]
    tests = {test for target in targets for test in (*target.near, *target.wide)}
    if missing := sorted(test for test in tests if not (root / test).exists()):
        raise FileNotFoundError(f"mutation/targets.toml names {', '.join(missing)}: say where these tests are now")
    return targets


def read_equivalents() -> list[Equivalent]:
    """The judgements in `equivalent.toml`."""
    return [Equivalent(**table) for table in _read("equivalent.toml", "mutant")]


def _read(name: str, key: str) -> list[dict]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8")).get(key, [])
