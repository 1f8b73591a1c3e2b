"""What colocated functions and the methods of colocated classes have in common: options and derivatives."""

import abc
from collections.abc import Callable
from typing import Any, Self, Unpack

from partjit.checks import require_callable, require_flag
from partjit.colocated.ir.custom_derivatives import Derivatives
from partjit.colocated.options import CallOptions, Options, takes_options

__all__ = ["Colocated"]


class Colocated(abc.ABC):
    """A colocated function, or a method of a colocated class.

    Attributes:
        options: what is known about its calls.
    """

    options: Options
    _name: str

    @abc.abstractmethod
    def _with_options(self, options: Options) -> Self: ...

    @abc.abstractmethod
    def _set_derivatives(self, derivatives: Derivatives | None) -> None: ...

    @takes_options
    def specialize(
        self,
        in_specs: Any = None,
        out_specs_fn: Callable[..., Any] | None = None,
        devices: Any = None,
        **options: Unpack[CallOptions],
    ) -> Self:
        """The same function, with more known about its calls. Each item can be given once, in any order.

        Args:
            in_specs: `(args, kwargs)` with a `jax.ShapeDtypeStruct` for each array. A sharding left open may be any.
            out_specs_fn: called with the ShapeDtypeStructs of the arguments, gives `out_specs`; once per kind of
                arguments, in the calling thread.
            devices: devices or a mesh: the function runs on their hosts. Needed if there are no array arguments.
            out_specs: a tree of ShapeDtypeStructs like the result. A sharding left open is a replicated one. Once the
                results are known, calls return before the function has run. None says nothing; that a function
                returns None is said by `out_specs_fn=lambda *args: None`.
            mode: "inline" runs it in the caller; "stream" on a thread; "auto", the default, on a thread until it was
                measured to be cheaper than that, ten times in a row. A function that waits for what its caller does
                after the call must say "stream".
            stream: the name of a stream, or a stream, instead of the calling thread's.
            pure: whether a call does nothing but compute its results. In a program, one that nobody needs is left out,
                and equal ones are made once.
            layout: "global", the default, calls the function with the arrays; "per_shard" once for each device with a
                `jax.Shard` (`data`, `index`, `device`, `replica_id`) for each array, to return shards of its results,
                which the shardings in `out_specs` assemble.
            run_ahead: up to so many calls are made before they are asked for; for functions without arguments.
            vmap_method: what `jax.vmap` makes of a call with batched arguments, as for `jax.pure_callback`.
                "sequential" calls the function once for each example, in order; it is the default, except for a `pure`
                function, which has none. The others call it once, with batched arrays, and it returns its results with
                the batch at axis 0 as well: "expand_dims" gives arguments that are not batched an axis of size 1 there,
                "broadcast_all" repeats them. `in_specs` and `out_specs` are those of a call that is not batched.

        Raises:
            ValueError: an item was given before or is none of its possible values.
            TypeError: an item is of a wrong type.

        Example:
            >>> from partjit.colocated import colocated_python
            >>> spec = jax.ShapeDtypeStruct((8,), jax.numpy.float32)
            >>> double = colocated_python(lambda x: 2 * x).specialize(out_specs=spec, stream="io")
            >>> double(jax.numpy.ones(8)).sum()
            Array(16., dtype=float32)
        """
        more = {"in_specs": in_specs, "out_specs_fn": out_specs_fn, "devices": devices, **options}
        return self._with_options(self.options.adding(f"{self._name}.specialize", **more))

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
