"""The rules that `defvjp` and `defjvp` give a colocated function.

They work as for `jax.custom_vjp` and `jax.custom_jvp`, because a call with rules is traced as a call of such a
function, whose body is the equation of the call. So jax differentiates and batches them, and saves their residuals.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.source_info_util import SourceInfo

from partjit._jax.sources import traced_at
from partjit._jax.types import PyTree

__all__ = ["Derivatives"]

_ARRAYLIKE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@dataclasses.dataclass(frozen=True, eq=False)
class Derivatives:
    """The rules of one function.

    Attributes:
        kind: the kind of derivative.
        rules: the functions passed to `defvjp` or `defjvp`.
        symbolic_zeros: whether they receive symbolic zeros for what is not differentiated.
    """

    kind: Literal["vjp", "jvp"]
    rules: tuple[Callable[..., PyTree], ...]
    symbolic_zeros: bool

    def call(
        self,
        fun: Callable[[Sequence[PyTree], Mapping[str, PyTree]], PyTree],
        name: str,
        signature: inspect.Signature | None,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        """Calls a function with these derivatives.

        Args:
            fun: called with `args` and `kwargs`.
            name: its name in messages.
            signature: its parameters, if they are known; the rules take all of them by position.
            args, kwargs: the arguments.

        Raises:
            TypeError: keyword arguments have no position, or a default value cannot be passed to a rule.
        """

        def primal(*positional: PyTree) -> PyTree:
            # Defaults are left to the function itself: on its host they need not be arrays.
            given = {key: positional[[*signature.parameters].index(key)] for key in names} if signature else {}
            with traced_at(site):
                return fun(positional[:count], given)

        count, names = len(args), [*kwargs]  # equations refer to `primal`, which keeps no tracers
        site = source_info_util.current()
        primal.__name__ = primal.__qualname__ = name
        if signature is not None:
            vars(primal)["__signature__"] = signature  # from which jax takes positions and defaults
            self._check_defaults(name, signature, args, kwargs)
        # A rule that is a colocated function has no line in the user's code.
        rules = [rule if inspect.isfunction(rule) else _standing_at(site, rule) for rule in self.rules]
        if self.kind == "vjp":
            custom = jax.custom_vjp(primal)
            custom.defvjp(*rules, symbolic_zeros=self.symbolic_zeros)
        else:
            custom = jax.custom_jvp(primal)
            custom.defjvp(*rules, symbolic_zeros=self.symbolic_zeros)
        return custom(*args, **kwargs)

    def _check_defaults(
        self, name: str, signature: inspect.Signature, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> None:
        given = signature.bind(*args, **kwargs).arguments
        for key, parameter in signature.parameters.items():
            default = parameter.default
            if key in given or default is parameter.empty:
                continue
            if not all(isinstance(leaf, _ARRAYLIKE) for leaf in jax.tree.leaves(default)):
                raise TypeError(
                    f"the rules of def{self.kind} take all arguments of {name} by position, and {key}, which was not "
                    f"given, is {default!r} then, which is not an array: bind it, as with functools.partial, "
                    "instead of taking it as an argument"
                )


def _standing_at(site: SourceInfo, rule: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def rule_there(*args: PyTree) -> PyTree:
        with traced_at(site):
            return rule(*args)

    return rule_there
