"""What the user says of the derivatives of a colocated function: `defvjp` and `defjvp`.

They mean what they mean for `jax.custom_vjp` and `jax.custom_jvp`, because a call with rules is traced as the call of
such a function, whose body is the equation of the call. So jax differentiates, batches and saves what the rules do.
"""

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.extend import source_info_util

from partjit._jax.sources import traced_at
from partjit.checks import require_callable, require_flag

__all__ = ["Derivatives", "Differentiable"]

_ARRAYLIKE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@dataclasses.dataclass(frozen=True, eq=False)
class Derivatives:
    """The rules of one function.

    Attributes:
        kind: what they define.
        rules: the functions that `defvjp` or `defjvp` got.
        symbolic_zeros: whether they are told what is not differentiated.
    """

    kind: Literal["vjp", "jvp"]
    rules: tuple[Callable[..., Any], ...]
    symbolic_zeros: bool

    def call(
        self,
        fun: Callable[[Any, Any], Any],
        name: str,
        signature: inspect.Signature | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function that has these derivatives.

        Args:
            fun: called with `args` and `kwargs`.
            name: what it is called in messages.
            signature: its parameters, if they are known; the rules take all of them by position.
            args, kwargs: the arguments.

        Raises:
            TypeError: keyword arguments have no position, or an argument that was not given has a default value that no
                rule can take.
        """

        def primal(*positional: Any) -> Any:
            # What was not given is for the function itself to fill in: on its host a default need not be an array.
            given = {key: positional[[*signature.parameters].index(key)] for key in kwargs} if signature else {}
            with traced_at(site):
                return fun(positional[: len(args)], given)

        site = source_info_util.current()
        primal.__name__ = primal.__qualname__ = name
        if signature is not None:
            vars(primal)["__signature__"] = signature  # by which jax finds positions, and default values
            self._check_defaults(name, signature, args, kwargs)
        custom: Any = jax.custom_vjp(primal) if self.kind == "vjp" else jax.custom_jvp(primal)
        define = custom.defvjp if self.kind == "vjp" else custom.defjvp
        # A rule that is a colocated function has no line of its own in the user's code.
        rules = (rule if inspect.isfunction(rule) else _standing_at(site, rule) for rule in self.rules)
        define(*rules, symbolic_zeros=self.symbolic_zeros)
        return custom(*args, **kwargs)

    def _check_defaults(
        self, name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        given = signature.bind(*args, **kwargs).arguments
        for key, parameter in signature.parameters.items():
            default = parameter.default
            if key in given or default is parameter.empty:
                continue
            if not all(isinstance(leaf, _ARRAYLIKE) for leaf in jax.tree.leaves(default)):
                raise TypeError(
                    f"the rules of def{self.kind} take all arguments of {name} by position, and {key}, which was not "
                    f"given, is {default!r} then, which is no array: have the function know it, as with "
                    "functools.partial, instead of taking it as an argument"
                )


class Differentiable(abc.ABC):
    """What has derivatives: a colocated function, or a method of a colocated class."""

    @abc.abstractmethod
    def _set_derivatives(self, derivatives: Derivatives) -> None: ...

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False) -> None:
        """Says how the calls are differentiated in reverse mode, as `jax.custom_vjp.defvjp` does.

        The rules may compute on the devices, and call colocated functions, this one among them. Copies that
        `specialize` makes afterwards have them as well. What was said before, by `defjvp` too, is replaced.

        Args:
            fwd: takes the arguments, by position, and returns the result and what `bwd` needs.
            bwd: takes what `fwd` kept and the cotangent of the result, and returns a tuple with one cotangent for each
                argument, None for one of zeros.
            symbolic_zeros: whether `fwd` and `bwd` are told what is not differentiated.

        Raises:
            TypeError: a rule is no function.

        Example:
            >>> import numpy as np
            >>> from partjit.colocated import colocated_python
            >>> spec = jax.ShapeDtypeStruct((), jax.numpy.float32)
            >>> sine = colocated_python(lambda x: jax.numpy.asarray(np.sin(x)), out_specs=spec)
            >>> sine.defvjp(lambda x: (sine(x), x), lambda x, ct: (jax.numpy.cos(x) * ct,))
            >>> float(jax.grad(sine)(jax.numpy.float32(0)))
            1.0
        """
        rules = (require_callable("defvjp", "fwd", fwd), require_callable("defvjp", "bwd", bwd))
        symbolic_zeros = require_flag("defvjp", "symbolic_zeros", symbolic_zeros)
        self._set_derivatives(Derivatives("vjp", rules, symbolic_zeros))

    def defjvp(self, jvp: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Says how the calls are differentiated, as `jax.custom_jvp.defjvp` does; for reverse mode as well, if what
        `jvp` does with the tangents is device code.

        Args:
            jvp: takes a tuple of the arguments and one of their tangents, and returns the result and its tangent.
            symbolic_zeros: whether it is told what is not differentiated.

        Returns:
            `jvp`, so that this is a decorator.

        Raises:
            TypeError: the rule is no function.

        Example:
            >>> import numpy as np
            >>> from partjit.colocated import colocated_python
            >>> spec = jax.ShapeDtypeStruct((), jax.numpy.float32)
            >>> sine = colocated_python(lambda x: jax.numpy.asarray(np.sin(x)), out_specs=spec)
            >>> @sine.defjvp
            ... def sine_jvp(primals, tangents):
            ...     return sine(*primals), jax.numpy.cos(*primals) * tangents[0]
            >>> float(jax.grad(sine)(jax.numpy.float32(0)))
            1.0
        """
        symbolic_zeros = require_flag("defjvp", "symbolic_zeros", symbolic_zeros)
        self._set_derivatives(Derivatives("jvp", (require_callable("defjvp", "jvp", jvp),), symbolic_zeros))
        return jvp


def _standing_at(site: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    def rule_there(*args: Any) -> Any:
        with traced_at(site):
            return rule(*args)

    return rule_there
