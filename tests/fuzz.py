"""Calling what is public with one argument that is wrong, and judging how that is refused."""

import dataclasses
import dis
import itertools
import pathlib
import random
import signal
import warnings
from collections.abc import Iterator
from types import TracebackType

import partjit
from tests.bad_values import BAD_VALUES, FORMS, Bad, HostileError, nested
from tests.surface import TARGETS, Target

__all__ = ["Case", "Verdict", "all_cases", "cases", "judge"]

PACKAGE = str(pathlib.Path(partjit.__file__).parent)
_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Case:
    """A target, the argument that is replaced, and by what."""

    target: Target
    argument: str
    bad: Bad

    def __str__(self) -> str:
        return f"{self.target.name}: {self.argument} = {self.bad.name}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        kind: "refused" by partjit, with a message that names the argument; "taken", which is right for this argument;
            "own": the bad object raised an error of its own; "fault" otherwise.
        why: what is wrong, of a fault.
    """

    kind: str
    why: str = ""


class _HangError(BaseException):
    """A call took too long."""


def cases(generator: random.Random, count: int) -> Iterator[Case]:
    """So many cases, which go round the arguments of all targets."""
    arguments = _arguments()
    for i in range(count):
        target, argument = arguments[i % len(arguments)]
        bad = generator.choice(BAD_VALUES)
        if generator.random() < 0.2:
            bad = nested(bad, generator.choice(FORMS))
        yield Case(target, argument, bad)


def all_cases(generator: random.Random) -> list[Case]:
    """Every argument of every target with every value, by itself and nested, in any order."""
    values = [*BAD_VALUES, *itertools.starmap(nested, itertools.product(BAD_VALUES, FORMS))]
    found = [Case(target, argument, bad) for target, argument in _arguments() for bad in values]
    generator.shuffle(found)
    return found


def _arguments() -> list[tuple[Target, str]]:
    return [(target, argument) for target in TARGETS for argument in target.base()]


def judge(case: Case) -> Verdict:
    """Makes the call of a case."""
    target, argument = case.target, case.argument
    arguments = target.base()
    arguments[argument] = case.bad.make()
    allowed = target.allows(argument, case.bad.kinds | {"everything"})
    try:
        with _no_hang(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.call(**arguments)
    except HostileError:
        return Verdict("own")
    except _HangError:
        return Verdict("fault", "it hangs")
    except Exception as error:
        return _verdict_on(error, case)
    except BaseException as error:
        return Verdict("fault", f"it ends in {type(error).__name__}")
    return Verdict("taken") if allowed else Verdict("fault", "it is taken")


def _verdict_on(error: Exception, case: Case) -> Verdict:
    target, argument = case.target, case.argument
    text = str(error)
    if any(part in text for part in target.lets_pass):
        return Verdict("refused")
    last = _last(error.__traceback__)
    where = f"{pathlib.Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
    shown = f"{type(error).__name__}: {text[:300]!r} at {where}"
    if isinstance(error, target.raises) and not isinstance(error, TypeError | ValueError):
        return Verdict("refused")
    if not isinstance(error, (TypeError, ValueError, *target.raises)):
        return Verdict("fault", f"it raises {shown}")
    if not last.tb_frame.f_code.co_filename.startswith(PACKAGE) or not _is_raising(last):
        return Verdict("fault", f"an internal error, {shown}")
    if not any(name in text for name in (argument, *target.named.get(argument, ()))):
        return Verdict("fault", f"the message does not name {argument}: {shown}")
    if len(text) > 3000:
        return Verdict("fault", f"a message of {len(text)} characters: {shown}")
    return Verdict("refused")


def _last(trace: TracebackType | None) -> TracebackType:
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_raising(trace: TracebackType) -> bool:
    """Whether the last thing that a frame did was a `raise` statement."""
    instructions = dis.get_instructions(trace.tb_frame.f_code)
    return any(i.offset == trace.tb_lasti and i.opname in ("RAISE_VARARGS", "RERAISE") for i in instructions)


class _no_hang:
    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._alarm)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    @staticmethod
    def _alarm(*_: object) -> None:
        raise _HangError
