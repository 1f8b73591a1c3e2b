"""Runs tests on changed copies of the repository."""

import collections
import dataclasses
import enum
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import cosmic_ray.testing
from cosmic_ray.mutating import use_mutation
from cosmic_ray.work_item import TestOutcome

from mutation.mutants import Mutant, operators
from mutation.targets import Equivalent, Target, target_of

NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".hypothesis", "*_cache", "dist", "build")


class Outcome(enum.Enum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    EQUIVALENT = "equivalent"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A mutant, what became of it, and the time that took in seconds."""

    mutant: Mutant
    outcome: Outcome
    seconds: float


class Copy:
    """A copy of the repository in a temporary folder, whose tests import the package from there.

    Args:
        root: the repository. It is never changed, so that others can go on with it.
    """

    def __init__(self, root: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="partjit-mutants-", ignore_cleanup_errors=True)
        self.root = Path(self._folder.name) / "tree"
        shutil.copytree(root, self.root, ignore=NOT_COPIED)
        self._needed: dict[tuple[str, ...], float] = {}
        os.environ["PYTHONPATH"] = str(self.root)
        os.chdir(self.root)

    def close(self) -> None:
        """Removes the copy."""
        os.chdir("/")
        self._folder.cleanup()

    def judge(self, mutant: Mutant, target: Target) -> Verdict:
        """Runs the tests of a mutant, the near ones first.

        Raises:
            RuntimeError: the tests fail without the change, so that they can say nothing about it.
        """
        start = time.monotonic()
        for first, tests in (([mutant.path], target.near), ([], target.wide)):
            limit = self._limit(tests)
            with use_mutation(self.root / mutant.path, operators()[mutant.operator](), mutant.occurrence):
                outcome, output = cosmic_ray.testing.run_tests(_command([*first, *tests]), limit)
            if output == "timeout":
                # Whoever was killed while it kept a compiled program left half of one to the next.
                shutil.rmtree(self.root / ".jax_cache", ignore_errors=True)
                return Verdict(mutant, Outcome.TIMED_OUT, time.monotonic() - start)
            if outcome is not TestOutcome.SURVIVED:
                return Verdict(mutant, Outcome.KILLED, time.monotonic() - start)
        return Verdict(mutant, Outcome.SURVIVED, time.monotonic() - start)

    def _limit(self, tests: tuple[str, ...]) -> float:
        """The time after which tests hang: a multiple of what they need without a change, measured once."""
        if tests not in self._needed:
            start = time.monotonic()
            outcome, output = cosmic_ray.testing.run_tests(_command(tests), timeout=3600)
            if outcome is not TestOutcome.SURVIVED:
                raise RuntimeError(f"these tests fail without a change: {' '.join(tests)}\n{output[-4000:]}")
            self._needed[tests] = time.monotonic() - start
        return 60 + 4 * self._needed[tests]


def judged(
    copy: Copy, sampled: Sequence[Mutant], targets: Sequence[Target], equivalents: Sequence[Equivalent], until: float
) -> Iterator[Verdict]:
    """The verdicts on mutants, until the clock (`time.monotonic`) says `until`.

    The modules take turns, so that a run that is cut short has seen something of each.
    """
    for mutant in _in_turn(sampled):
        if time.monotonic() > until:
            return
        if any(equivalent.is_of(mutant) for equivalent in equivalents):
            yield Verdict(mutant, Outcome.EQUIVALENT, 0.0)
        else:
            yield copy.judge(mutant, target_of(mutant.path, targets))


def _in_turn(sampled: Sequence[Mutant]) -> list[Mutant]:
    earlier: collections.Counter[str] = collections.Counter()
    rounds = []
    for mutant in sampled:
        rounds.append(earlier[mutant.path])
        earlier[mutant.path] += 1
    return [mutant for _, mutant in sorted(zip(rounds, sampled, strict=True), key=lambda pair: pair[0])]


def _command(tests: Sequence[str]) -> str:
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", "-m", "not system"]  # as `make test` does
    return shlex.join([sys.executable, "-m", "pytest", *options, *tests])
