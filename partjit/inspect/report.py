"""The report on a partitioned program: why a value is sharded so, differences, and the forms in which it is shown."""

import dataclasses
import json
import os
from collections.abc import Sequence

from jax.core import ShapedArray

from partjit.checks import items_of, require, require_flag, require_integer, require_path, require_text
from partjit.inspect.annotated import AnnotatedValue
from partjit.inspect.asked_pool import processors
from partjit.inspect.contents import Contents
from partjit.inspect.difference import Difference, difference
from partjit.inspect.page.page import page_of
from partjit.inspect.report_data import Data, as_data
from partjit.inspect.scope_report import ScopeReport, find_scope
from partjit.inspect.suggested import QUESTIONS, SpecSuggestion, suggested_for
from partjit.inspect.what_if import WhatIf
from partjit.inspect.why.why import Why, why
from partjit.mesh import has_explicit_axes

__all__ = ["Report"]

_MOST_INDENT = 100


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Report(Contents):
    """The report on a partitioned program; see `explain`. Its attributes are those of `Contents`."""

    def why(self, value: str | AnnotatedValue) -> Why:
        """Why a value is sharded as it is: for each axis the argument or constraint that it comes from.

        Args:
            value: a name in `jaxpr`; the path of an argument or a result, such as `params['w']`; the gradient of an
                argument, as `params['w'] gradient`; a line, as `model.py:12`; or a value.

        Raises:
            ValueNotFoundError: there is no such value; the message lists similar ones. It is a LookupError.
            TypeError: `value` is neither, or is no array.

        Example:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> from partjit import Mesh, P, pjit
            >>> from partjit.inspect import explain
            >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
            >>> fun = pjit(lambda x: jnp.sin(x).sum(0), in_shardings=P("data"))
            >>> explain(fun, np.ones((8, 4), np.float32), mesh=mesh).why("b")
            b:f32[8,4] P('data', None)   ... in <lambda>
              'data' shards dimension 0: from argument x with spec P('data')
                     through sin (...)
              dimension 1 is unsharded: no spec propagates 'model' to it

        Source: the origins that Shardy's propagation reports in its debugging mode.
        """
        require("Report.why", "value", value, str | AnnotatedValue, "the name, path or line of a value, or a value")
        return why(self.whole, value)

    def find(self, module: str) -> ScopeReport:
        """What belongs to a module: its parameters, values, collectives and findings.

        Args:
            module: a path of scopes or of keys of parameters, or consecutive parts of one, as `Block_3/Dense_0`; `*`
                stands for any characters of a part.

        Raises:
            ValueNotFoundError: there is no such module; the message lists similar ones. It is a LookupError.
            TypeError: `module` is no text.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from partjit.inspect import explain
            >>> def fun(params, x):
            ...     with jax.named_scope("Block_0"):
            ...         return jnp.tanh(x @ params["Block_0"]["w"])
            >>> found = explain(fun, {"Block_0": {"w": jnp.ones((4, 4))}}, jnp.ones((2, 4))).find("Block_0")
            >>> [value.path for value in found.parameters], [one.primitive for one in found.equations]
            (["params['Block_0']['w']"], ['dot_general', 'tanh'])
        """
        return find_scope(self, require_text("Report.find", "module", module, "the path of a module"))

    def diff(self, other: "Report") -> Difference:
        """The difference to another report, of the same function with other specs or on another mesh.

        Raises:
            TypeError: `other` is no report.

        Example:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> from partjit import Mesh, P, pjit
            >>> from partjit.inspect import explain
            >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
            >>> def report(spec):
            ...     fun = pjit(lambda x: jnp.sin(x).sum(0), in_shardings=spec)
            ...     return explain(fun, np.ones((8, 4), np.float32), mesh=mesh)
            >>> report(P("data")).diff(report(P(None, "data"))).collectives
            (('all-reduce', ('data',), 1, 0),)
        """
        return difference(self, require("Report.diff", "other", other, Report, "a report, as explain makes one"))

    def what_if(self, *, isolated: bool = True) -> WhatIf:
        """The program of the report, to be asked what it costs with other specs: `report.what_if().widget()`.

        Args:
            isolated: whether another process answers; see `WhatIf`.

        Raises:
            TypeError: `isolated` is no flag.
            ValueError: the mesh has axes of type Explicit.

        Example:
            >>> import jax.numpy as jnp, numpy as np, jax
            >>> from partjit import Mesh, P, pjit
            >>> from partjit.inspect import explain
            >>> from partjit.inspect.what_if import Question
            >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
            >>> report = explain(pjit(lambda x: x.sum(0), in_shardings=P("data")), np.ones((8, 4)), mesh=mesh)
            >>> engine = report.what_if(isolated=False)
            >>> engine.ask(Question({"x": P(None, "data")})).bytes_sent, report.collectives.bytes_per_step
            (0, 24.0)
        """
        return WhatIf.of_unit(self.whole.unit, self.donated_to_whole, isolated=isolated)

    def suggest(
        self, most: int = 5, *, questions: int = QUESTIONS, workers: int | None = None, isolated: bool = True
    ) -> tuple[SpecSuggestion, ...]:
        """The other specs of single arguments with which the program sends less or needs less memory, the best first.

        As `WhatIf.suggest`, of a program that was traced and lowered for the report. One with colocated calls is asked
        about as one program.

        Args:
            most: how many there are at most.
            questions: how many changes are tried, those of most bytes first; that bounds the time.
            workers: the number of processes that are asked, by default as many as this process may use processors.
            isolated: whether other processes are asked, which a failed check of the partitioner ends.

        Raises:
            TypeError, ValueError: an argument is wrong; or the mesh has axes of type Explicit, where specs are types.

        Example:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> from partjit import Mesh, P, pjit
            >>> from partjit.inspect import explain
            >>> mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
            >>> layer = pjit(lambda x, w: jnp.tanh(x @ w), in_shardings=(P("data"), P("model")))
            >>> report = explain(layer, np.ones((64, 128), np.float32), np.ones((128, 256), np.float32), mesh=mesh)
            >>> report.suggest(isolated=False)[0].spec
            P(None, 'model')
        """
        most = require_integer("Report.suggest", "most", most, 1)
        questions = require_integer("Report.suggest", "questions", questions, 1)
        count = processors() if workers is None else require_integer("Report.suggest", "workers", workers, 1)
        isolated = require_flag("Report.suggest", "isolated", isolated)
        types = (aval for aval in self.whole.unit.jaxpr.in_avals if isinstance(aval, ShapedArray))
        if any(has_explicit_axes(aval.sharding.mesh) for aval in types):
            raise ValueError(
                f"Report.suggest: {self.name} is on a mesh with axes of type Explicit, where specs are part of the "
                "types of values: with other specs it is another program. Give a mesh whose axes are Auto"
            )
        return suggested_for(self.whole, self.donated_to_whole, questions, most, count if isolated else 0)

    def to_html(self, path: str | os.PathLike[str] | None = None, *, suggestions: Sequence[SpecSuggestion] = ()) -> str:
        """The report as a self-contained page, which is written to `path` if that is given.

        It says why each value is sharded as it is, for which the partitioner is asked once, as by `why`; and the
        `suggestions` that are given, as `suggest` returns them.

        Raises:
            TypeError: `path` is no path, or a suggestion is none.
            OSError: it cannot be written.
        """
        if path is not None:
            require_path("Report.to_html", "path", path)
        expected = "suggestions, as Report.suggest returns them"
        given = items_of("Report.to_html", "suggestions", suggestions, expected)
        for one in given:
            require("Report.to_html", "suggestions", one, SpecSuggestion, expected)
        page = page_of(self, has_reasons=True, suggestions=given)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(page)
        return page

    def as_data(self) -> Data:
        """The report as plain data; `partjit.inspect.report_data.as_data` documents its keys."""
        return as_data(self)

    def to_json(self, indent: int | None = None) -> str:
        """`as_data` as JSON. Raises TypeError or ValueError if `indent` is no number of spaces."""
        indent = None if indent is None else require_integer("Report.to_json", "indent", indent, 0, _MOST_INDENT)
        return json.dumps(self.as_data(), indent=indent, allow_nan=False)

    def _repr_html_(self) -> str:
        return page_of(self, is_whole=False)
