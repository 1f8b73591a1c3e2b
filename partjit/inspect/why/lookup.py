"""Finding a value by its name, its path, its line, or as the gradient of an argument."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import TypeAlias

from partjit.checks import abridged
from partjit.inspect.annotated import AnnotatedEquation, AnnotatedJaxpr, AnnotatedValue
from partjit.inspect.modules import is_within
from partjit.inspect.user_lines import shown_file
from partjit.inspect.why.dataflow import Dataflow
from partjit.inspect.why.gradients import gradient_of, is_backward
from partjit.inspect.why.key_paths import keys_of

__all__ = ["Found", "ValueNotFoundError", "look_up"]

_GRADIENT = re.compile(r"(?i)^\s*(?:(?:the\s+)?grad(?:ient)?\s+(?:of\s+)?(.+?)|(.+?)\s*(?:'s)?\s+grad(?:ient)?)\s*$")
_LINE = re.compile(r"^\s*(.+):(\d+)\s*$")
_HOW = (
    "A value is named by its name in the printed program, by the path of an argument or result such as params['w'] or "
    "result[0]['w'] or a unique suffix of one, as 'gradient of params['w']', by a module such as Block_3/Dense_0, or "
    "by a line such as model.py:12"
)


class ValueNotFoundError(LookupError):
    """A text names no value of a program, or several; the message lists candidates."""


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A value, and a note on what else the text may name; empty in most cases."""

    value: AnnotatedValue
    note: str = ""


def look_up(tree: AnnotatedJaxpr, text: str, result_paths: Sequence[str] = (), flow: Dataflow | None = None) -> Found:
    """The value of a program that a text names.

    Args:
        tree: the program.
        text: the name of the value in the printed program; the path of an argument or result, or a unique suffix of
            one; "gradient of" such a path; a module or a parameter of one, "Block_3/Dense_0"; or a line, "model.py:12".
        result_paths: the paths of the results; needed for those that are arguments or other results as well.
        flow: the dataflow of the program, if it is known.

    Raises:
        ValueNotFoundError: there is none, or there are several.
    """
    finding = _Finding(tree, result_paths, flow)
    if not text.strip():
        raise ValueNotFoundError(f"no value is named by an empty text. {_HOW}")
    found = finding.by_path(text) or finding.by_name(text) or finding.by_end(text)
    if found is None and (match := _GRADIENT.match(text)) is not None:
        found = finding.gradient(match[1] or match[2])
    found = found or finding.by_module(text)
    if found is None and (match := _LINE.match(text)) is not None:
        found = finding.by_line(match[1], int(match[2]))
    if found is None:
        close = difflib.get_close_matches(text.strip(), finding.known, n=3, cutoff=0.5)
        meant = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ValueNotFoundError(f"there is no value {abridged(text.strip())} in the program{meant} {_HOW}")
    return found


class _Finding:
    def __init__(self, tree: AnnotatedJaxpr, result_paths: Sequence[str], flow: Dataflow | None) -> None:
        self._tree = tree
        self._flow = flow
        paths = result_paths or [value.path or "" for value in tree.outputs]
        self._results = [(path or "result", value) for path, value in zip(paths, tree.outputs, strict=True)]
        self._paths = [(value.path, value) for value in tree.inputs if value.path] + self._results
        self._keys = [(keys_of(path), path, value) for path, value in self._paths]

    @property
    def known(self) -> list[str]:
        """The distinct paths."""
        return [*dict.fromkeys(path for path, _ in self._paths)]

    def by_path(self, text: str) -> Found | None:
        keys = keys_of(text.strip())
        found = next((value for own, _, value in self._keys if own is not None and own == keys), None)
        if found is None:
            return None
        named = next((value for value in self._tree.values if value.name == text.strip()), None)
        if named is None or named.number == found.number:
            return Found(found)
        return Found(found, f"the printed program has another value of that name, {named}: use 'jaxpr {named.name}'")

    def by_name(self, text: str) -> Found | None:
        name = text.strip().removeprefix("jaxpr ").strip()
        found = next((value for value in self._tree.values if value.name == name and name != "_"), None)
        return None if found is None else Found(found)

    def by_end(self, text: str) -> Found | None:
        keys = keys_of(text.strip())
        if not keys:
            return None
        fitting = [entry for entry in self._keys if entry[0] is not None and entry[0][-len(keys) :] == keys]
        one = _parameters([entry for entry in fitting if entry[2] in self._tree.inputs]) or fitting
        if len({value.number for _, _, value in one}) > 1:
            several = ", ".join(dict.fromkeys(path for _, path, _ in one))
            raise ValueNotFoundError(f"{text.strip()!r} may mean any of {several}: write more of the path")
        if not one:
            return None
        found = one[0][2]
        others = [*dict.fromkeys(path for _, path, value in fitting if value.number != found.number)]
        more = f" and {len(others) - _LISTED} more" if others[_LISTED:] else ""
        have = "has" if len(others) == 1 else "have"
        return Found(found, f"{', '.join(others[:_LISTED])}{more} {have} this suffix as well" if others else "")

    def by_module(self, text: str) -> Found | None:
        """The parameter with these keys, or the last value that is computed in a module."""
        searched = text.strip().strip("/")
        if "/" not in searched:
            return None
        keys = tuple(searched.split("/"))
        of_parameters = [entry for entry in self._keys if entry[0] is not None and entry[0][-len(keys) :] == keys]
        found = _parameters([entry for entry in of_parameters if entry[2] in self._tree.inputs])
        if len(found) == 1:
            return Found(found[0][2])
        there = [equation for equation in self._tree.walk() if is_within(equation.module, searched)]
        made = [equation for equation in there if not equation.bodies] or there
        value = _last_array([equation for equation in made if not is_backward(equation)]) or _last_array(made)
        if value is None:
            return None
        return Found(value, f"{len(made)} equations are in {searched}; this is the result of the last one there")

    def by_line(self, file: str, line: int) -> Found | None:
        there = [
            equation
            for equation in self._tree.walk()
            if equation.site is not None and equation.site[1] == line and _is_file(equation.site[0], file)
        ]
        made = [equation for equation in there if not equation.bodies] or there
        forward = [equation for equation in made if not is_backward(equation)]
        found = _last_array(forward) or _last_array(made)
        if found is None:
            lines = sorted({s[1] for e in self._tree.walk() if (s := e.site) is not None and _is_file(s[0], file)})
            if not lines:
                return None
            near = sorted(sorted(lines, key=lambda other: abs(other - line))[:5])
            raise ValueNotFoundError(
                f"no equation is from line {line} of {file}; the nearest are {', '.join(map(str, near))}"
            )
        others = len(made) - 1
        if not others:
            return Found(found)
        which = "of the forward pass " if forward and len(forward) < len(made) else ""
        return Found(
            found, f"{len(made)} equations are from {file}:{line}; this is the result of the last {which}there"
        )

    def gradient(self, text: str) -> Found:
        flow = self._flow or Dataflow(self._tree)
        arguments = [(keys, path, value) for keys, path, value in self._keys if value in self._tree.inputs and keys]
        keys = keys_of(text.strip()) or ()
        keys = tuple(text.strip().split("/")) if "/" in text and not keys else keys
        fitting = [entry for entry in arguments if entry[0] == keys] or _parameters(
            [entry for entry in arguments if keys and (entry[0] or ())[-len(keys) :] == keys]
        )
        paths = [path for _, path, _ in arguments]
        if not fitting:
            close = difflib.get_close_matches(text.strip(), paths, n=3, cutoff=0.5)
            raise ValueNotFoundError(f"there is no argument {text.strip()}; there are {', '.join(close or paths[:8])}")
        if len(fitting) > 1:
            several = ", ".join(path for _, path, _ in fitting)
            raise ValueNotFoundError(f"{text.strip()!r} may mean any of {several}: write more of the path")
        _, path, argument = fitting[0]
        found = gradient_of(self._tree, flow, argument, self._results)
        if found is None:
            raise ValueNotFoundError(
                f"no gradient of {path} was recognized: no value of a backward pass has the shape "
                f"{argument.aval.shape} and belongs to it. Name the value itself, for instance by its line"
            )
        return Found(found)


_Named: TypeAlias = tuple[tuple[str, ...] | None, str, AnnotatedValue]

_LISTED = 3


def _parameters(fitting: Sequence[_Named]) -> list[_Named]:
    """Of arguments with equal ends of their paths, those that are parameters.

    An optimizer keeps trees of their shape at deeper paths: state[0].mu['w'].
    """
    fewest = min((len(keys or ()) for keys, _, _ in fitting), default=0)
    shortest = [entry for entry in fitting if len(entry[0] or ()) == fewest]
    return [entry for entry in shortest if (entry[0] or ("",))[0] in _PARAMETERS] or shortest


_PARAMETERS = ("params", "parameters", "variables", "weights", "model")


def _is_file(path: str, text: str) -> bool:
    path, text = path.replace("\\", "/"), text.strip().replace("\\", "/").removeprefix("./")
    return path == text or path.endswith(f"/{text}") or shown_file(path) == text


def _last_array(equations: Sequence[AnnotatedEquation]) -> AnnotatedValue | None:
    values = (value for equation in reversed(equations) for value in equation.outputs)
    return next((value for value in values if value.is_array and value.name != "_"), None)
