"""What a widget shows for the texts in its fields: what the program costs then, beside what it costs now."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from jax.sharding import Mesh

from partjit.inspect.asked_process import WhatIfError
from partjit.inspect.leaves import Leaf
from partjit.inspect.live.rows import axes_of, expanded, followers, program_data
from partjit.inspect.live.spec_field import spec_in, text_of
from partjit.inspect.questions import Answer, Question
from partjit.render.numbers import shown_bytes, shown_flops

__all__ = ["Asked", "Fields"]

_ERRORS = (TypeError, ValueError, LookupError, WhatIfError)


class Asked(Protocol):
    """What is asked: a `partjit.inspect.what_if.WhatIf`."""

    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    mesh: Mesh
    name: str

    def check(self, question: Question) -> None:
        """Raises what `ask` raises for a question that is wrong."""
        ...

    def ask(self, question: Question) -> Answer:
        """The answer to a question."""
        ...


class Fields:
    """A program with a field for the spec of each argument and result.

    Args:
        asked: the program.

    Attributes:
        program: the program as plain data; see `partjit.inspect.live.rows.program_data`.
    """

    def __init__(self, asked: Asked) -> None:
        """Asks what the program costs as it is."""
        self._asked = asked
        self._now = asked.ask(Question())
        self._arguments = {leaf.name: leaf for leaf in asked.arguments}
        self._results = {leaf.name: leaf for leaf in asked.results}
        self._followers = followers(asked.arguments, asked.results)
        self._before = {**self._now.arguments, **self._now.results}
        self.program = program_data(asked.name, asked.mesh, asked.arguments, asked.results, self._before)

    def texts(self, given: Mapping[str, str]) -> dict[str, str]:
        """The texts by the names of arguments and results, of which `given` may have several by one pattern."""
        return expanded(given, [*self._arguments, *self._results])

    def question(self, texts: Mapping[str, str], follow: bool) -> Question:
        """The question that the texts of fields ask.

        Args:
            texts: the texts, by the names of arguments and results.
            follow: whether the state of an optimizer and the results that belong to an argument follow it.

        Raises:
            TypeError, ValueError: a text is no spec, or a spec does not fit, in the words of `pjit`.
            ValueNotFoundError: there is no such argument or result.
        """
        specs = {name: spec_in(name, text) for name, text in texts.items()}
        results = {name: spec for name, spec in specs.items() if name in self._results}
        arguments = {name: spec for name, spec in specs.items() if name not in results}
        # Of arrays that are alike one is enough to say what is wrong.
        distinct = {(self._shape(name), texts[name]): name for name in reversed([*texts])}
        self._asked.check(
            Question(
                {name: specs[name] for name in distinct.values() if name in arguments},
                {name: specs[name] for name in distinct.values() if name in results},
            )
        )
        for name, spec in [*arguments.items()] if follow else ():
            together, returned = self._followers[name]
            arguments.update((other, spec) for other in together if other not in specs)
            # As many results as arguments are one of each, in order.
            of = together if len(together) == len(returned) else (name,) * len(returned)
            results.update(
                (result, spec)
                for own, result in zip(of, returned, strict=True)
                if result not in specs and (own == name or own not in specs)
            )
        return Question(arguments, results)

    def answer(self, texts: Mapping[str, str], follow: bool = True) -> dict[str, Any]:
        """What the program costs with these texts, as plain data.

        Returns:
            A dict with the keys below, or with `error` (the text of what is wrong) and `wrong` (the names of the fields
            that are), where there is no answer.

            * seconds: from the texts to the answer.
            * totals, by_axes, collectives: rows of what is measured, its value now and then, and the change: "less",
              "more" or "same".
            * specs: rows of the arrays that are sharded otherwise: name, spec now, spec then.
            * axes: for each of these, the axes of each dimension.
            * unknown: what the figures leave out.
            * python: the question, in Python.
        """
        start = time.perf_counter()
        try:
            question = self.question(texts, follow)
            then = self._asked.ask(question)
        except _ERRORS as error:
            return {"error": _message(error), "wrong": self._wrong(texts, follow)}
        after = {**then.arguments, **then.results}
        changed = [name for name, spec in after.items() if spec != self._before[name]]
        return {
            "error": "",
            "wrong": [],
            "totals": _totals(self._now, then),
            "by_axes": _by_axes(self._now, then),
            "collectives": _by_kind(self._now, then),
            "specs": [[name, text_of(self._before[name]), text_of(after[name])] for name in changed],
            "axes": {name: axes_of(after[name]) for name in changed},
            "unknown": [*then.unknown],
            "python": _python(question),
            "seconds": time.perf_counter() - start,
        }

    def _shape(self, name: str) -> object:
        leaf = self._arguments.get(name) or self._results.get(name)
        return name if leaf is None else leaf.shape

    def _wrong(self, texts: Mapping[str, str], follow: bool) -> list[str]:
        """The fields that are wrong by themselves."""
        found = []
        for name, text in texts.items():
            try:
                self.question({name: text}, follow)
            except _ERRORS:
                found.append(name)
        return found


def _message(error: Exception) -> str:
    """The text of an error; that of a KeyError has quotes around it."""
    return str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)


def _totals(now: Answer, then: Answer) -> list[list[str]]:
    rows = []
    shown = (
        ("bytes a device sends", shown_bytes, (now.bytes_sent, then.bytes_sent)),
        ("the same, at most", shown_bytes, (now.bytes_sent_at_most, then.bytes_sent_at_most)),
        ("peak memory of a device", shown_bytes, (now.peak_memory, then.peak_memory)),
        ("of it arguments", shown_bytes, (now.argument_bytes, then.argument_bytes)),
        ("FLOPs of a device", shown_flops, (now.flops, then.flops)),
        ("bytes it reads and writes", shown_bytes, (now.memory_traffic, then.memory_traffic)),
    )
    for label, show, (a, b) in shown:
        if label != "the same, at most" or a != now.bytes_sent or b != then.bytes_sent:
            rows.append([label, show(a), show(b), _change(a, b)])
    return rows


def _by_axes(now: Answer, then: Answer) -> list[list[str]]:
    every = dict.fromkeys((*now.bytes_by_axes, *then.bytes_by_axes))
    sent = [(axes, now.bytes_by_axes.get(axes, 0.0), then.bytes_by_axes.get(axes, 0.0)) for axes in every]
    sent.sort(key=lambda row: -max(row[1:]))
    return [[", ".join(axes) or "parts of axes", shown_bytes(a), shown_bytes(b), _change(a, b)] for axes, a, b in sent]


def _by_kind(now: Answer, then: Answer) -> list[list[str]]:
    a, b = now.collectives.counts, then.collectives.counts
    return [
        [f"{kind} over {', '.join(axes) or 'parts of axes'}", str(before), str(after), _change(before, after)]
        for (kind, axes), before, after in sorted(
            ((key, a[key], b[key]) for key in {*a, *b}), key=lambda row: (-row[2], row[0])
        )
    ]


def _change(now: float, then: float) -> str:
    return "same" if now == then else "less" if then < now else "more"


def _python(question: Question) -> str:
    def shown(specs: Mapping[str, object]) -> str:
        lines: Iterable[str] = (f"    {name!r}: {_spec_in_python(spec)},\n" for name, spec in specs.items())
        return "{\n" + "".join(lines) + "}" if specs else "{}"

    parts: Sequence[str] = [f"arguments={shown(question.arguments)}", f"results={shown(question.results)}"]
    return f"Question({', '.join(parts)})"


def _spec_in_python(spec: object) -> str:
    text = text_of(spec)
    return f"partjit.{text}" if text == "UNSPECIFIED" else text
