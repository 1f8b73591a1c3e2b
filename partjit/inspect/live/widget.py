"""The widget: the fields of `partjit.inspect.live.answers`, and their state in the page of a notebook.

anywidget is optional, so the class is made when the first widget is.
"""

import functools
import importlib
import importlib.resources
from collections.abc import Mapping
from typing import Any

from partjit.checks import wrong_type
from partjit.inspect.live.answers import Asked, Fields
from partjit.render.theme import PALETTE, STYLESHEET, ink_on

__all__ = ["what_if_widget"]


def what_if_widget(asked: Asked) -> Any:
    """A widget of questions to a program; see `partjit.inspect.what_if.WhatIf.widget`.

    Raises:
        ImportError: anywidget is missing.
    """
    try:
        make = _widget_class()
    except ModuleNotFoundError as error:
        raise ImportError(
            'WhatIf.widget needs anywidget, which is missing; run: pip install "partjit[notebooks]"'
        ) from error
    return make(Fields(asked))


@functools.cache
def _widget_class() -> Any:
    anywidget = importlib.import_module("anywidget")
    traitlets = importlib.import_module("traitlets")

    class WhatIfWidget(anywidget.AnyWidget):
        """The specs of a program as fields, beside what it costs with them.

        Attributes:
            program: the program and its rows.
            specs: the texts of the fields that were changed, by the names of arguments and results; `*` in a name that
                is set here stands for any characters of a key.
            follow: whether the state of an optimizer and the results that belong to an argument follow it.
            answer: what the program costs then; see `partjit.inspect.live.answers.Fields.answer`.
            question: the same as a `Question`, for `WhatIf.ask`.
        """

        _esm = _file("what_if.js")
        _css = _style()
        program = traitlets.Dict(read_only=True).tag(sync=True)
        specs = traitlets.Dict().tag(sync=True)
        follow = traitlets.Bool(True).tag(sync=True)
        answer = traitlets.Dict(read_only=True).tag(sync=True)

        def __init__(self, fields: Fields) -> None:
            self._fields = fields
            self._answers = 0
            self._last: object = None
            super().__init__()
            self.set_trait("program", fields.program)
            self._ask()

        @property
        def question(self) -> Any:
            """The question that the fields ask. Raises what is wrong with them."""
            return self._fields.question(self._fields.texts(self.specs), self.follow)

        @traitlets.validate("specs")
        def _checked(self, proposal: Any) -> Mapping[str, str]:
            for name, text in proposal["value"].items():
                if not isinstance(name, str) or not isinstance(text, str):
                    raise wrong_type("WhatIfWidget", f"specs[{name!r}]", text, "a text such as \"P('data')\"")
            return self._fields.texts(proposal["value"])

        @traitlets.observe("specs", "follow")
        def _changed(self, _: object) -> None:
            self._ask()

        def _ask(self) -> None:
            """Answers, once for several changes that come together."""
            asked = dict(self.specs), self.follow
            if asked != self._last:
                self._last = asked
                self._answers += 1
                answer = self._fields.answer(*asked)
                self.set_trait("answer", {**answer, "number": self._answers, "of": asked[0]})

    return WhatIfWidget


def _file(name: str) -> str:
    return importlib.resources.files("partjit.inspect.live").joinpath(name).read_text(encoding="utf-8")


def _style() -> str:
    colors = (f".pj-what-if .pj-x{k}{{background:{color};color:{ink_on(color)}}}" for k, color in enumerate(PALETTE))
    return "".join([STYLESHEET, _file("what_if.css"), *colors])
