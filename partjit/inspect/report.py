"""The report on a partitioned program: why a value is sharded so, differences, and the forms in which it is shown."""

import dataclasses
import json
import os

from partjit.checks import require, require_integer, require_path, require_text
from partjit.inspect.annotated import AnnotatedValue
from partjit.inspect.contents import Contents
from partjit.inspect.difference import Difference, difference
from partjit.inspect.page.page import page_of
from partjit.inspect.report_data import Data, as_data
from partjit.inspect.scope_report import ScopeReport, find_scope
from partjit.inspect.what_if import WhatIf
from partjit.inspect.why.why import Why, why

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
            (0.0, 24.0)
        """
        return WhatIf.of_unit(self.whole.unit, self.donated_to_whole, isolated=isolated)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as a self-contained page, which is written to `path` if that is given.

        It says why each value is sharded as it is, for which the partitioner is asked once, as by `why`.

        Raises:
            TypeError: `path` is no path.
            OSError: it cannot be written.
        """
        if path is not None:
            require_path("Report.to_html", "path", path)
        page = page_of(self, has_reasons=True)
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
