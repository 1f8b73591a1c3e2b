"""The interface that colocated functions and the methods of colocated classes share: options and derivatives."""

import abc
from collections.abc import Callable
from typing import Self, Unpack

from partjit._jax.types import PyTree
from partjit.checks import require_callable, require_flag
from partjit.colocated.ir.custom_derivatives import Derivatives
from partjit.colocated.options import CallOptions, Devices, Options, takes_options

__all__ = ["Colocated"]


class Colocated(abc.ABC):
    """A colocated function, or a method of a colocated class.

    Attributes:
        options: the options given so far.
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
        in_specs: PyTree = None,
        out_specs_fn: Callable[..., PyTree] | None = None,
        devices: Devices | None = None,
        **options: Unpack[CallOptions],
    ) -> Self:
        """The same function with more options. Each option can be given once, in any order.

        Args:
            in_specs: `(args, kwargs)` with a `jax.ShapeDtypeStruct` for each array; without a sharding, any will do.
                None for an argument that is no array.
            out_specs_fn: computes `out_specs` from the ShapeDtypeStructs of the arguments; called once per kind of
                arguments, in the calling thread.
            devices: devices or a mesh; the function runs on their hosts. Required if there are no array arguments.
            out_specs: a tree of ShapeDtypeStructs like the result. Without a sharding, a result is replicated. With
                known results, calls return before the function has run. None leaves them unknown; of a function that
                returns None, its annotation `-> None` says so, or `out_specs_fn=lambda *args: None`.
            arrays: "jax", the default, calls the function with arrays, "numpy" with NumPy arrays, which are read-only:
                views where one buffer holds the array, else copies made of its shards.
            uses_jax: False promises that the function neither runs jax nor waits for arrays. It is called with NumPy
                arrays, returns NumPy arrays and numbers, and jax raises an error in it. On CPUs executables then call
                it as they run: a program, or a loop in one, is not cut where the devices need what it returns.
            mode: "inline" runs calls in the caller, "stream" on a thread, and "auto", the default, on a thread until
                ten calls in a row have taken less time than that costs. A function that waits for something its caller
                does after the call needs "stream".
            stream: a stream, or the name of one, to use instead of the calling thread's.
            pure: whether a call has no effect but its results. In a program, a pure call with unused results is
                eliminated, and equal pure calls are made once.
            layout: "global", the default, calls the function with the arrays; "per_shard" calls it once per device with
                a `jax.Shard` (`data`, `index`, `device`, `replica_id`) for each array, and assembles the shards it
                returns by the shardings in `out_specs`, or else by those of the arguments of the same shape. Small
                shards of the same part have to be equal, or the call fails with a ValueError.
            run_ahead: how many calls to make before their results are requested; for functions without arguments. Other
                methods of the object do not see those that are not taken: `state` of `colocated_python_class`.
            vmap_method: how `jax.vmap` makes a call with batched arguments, as for `jax.pure_callback`. "sequential",
                the default unless the function is `pure`, calls the function once per example, in order. The others
                call it once, with batched arrays, and expect results with the batch at axis 0: "expand_dims" gives
                arguments that are not batched an axis of size 1 there, "broadcast_all" repeats them. `in_specs` and
                `out_specs` are always those of a call that is not batched.

        Raises:
            ValueError: an option was given before, or has none of its possible values.
            TypeError: an option is of the wrong type.

        Example:
            >>> import jax
            >>> from partjit.colocated import colocated_python
            >>> spec = jax.ShapeDtypeStruct((8,), jax.numpy.float32)
            >>> double = colocated_python(lambda x: 2 * x).specialize(out_specs=spec, stream="io")
            >>> double(jax.numpy.ones(8)).sum()
            Array(16., dtype=float32)
        """
        more = {"in_specs": in_specs, "out_specs_fn": out_specs_fn, "devices": devices, **options}
        return self._with_options(self.options.adding(f"{self._name}.specialize", **more))

    def defvjp(self, fwd: Callable[..., PyTree], bwd: Callable[..., PyTree], symbolic_zeros: bool = False) -> None:
        """Defines the reverse-mode derivative of calls, as `jax.custom_vjp.defvjp` does.

        The rules may compute on the devices and call colocated functions, including this one. Copies that `specialize`
        makes afterwards have the same rules. Earlier rules, those of `defjvp` as well, are replaced.

        Args:
            fwd: takes the arguments, by position, and returns the result and the residuals for `bwd`.
            bwd: takes the residuals and the cotangent of the result, and returns a tuple with one cotangent for each
                argument, None for zeros.
            symbolic_zeros: whether `fwd` and `bwd` receive symbolic zeros for what is not differentiated.

        Raises:
            TypeError: a rule is not a function.

        Example:
            >>> import jax
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

    def defjvp(self, jvp: Callable[..., PyTree], symbolic_zeros: bool = False) -> Callable[..., PyTree]:
        """Defines the derivative of calls, as `jax.custom_jvp.defjvp` does.

        It works in reverse mode as well if `jvp` processes the tangents with device code only.

        Args:
            jvp: takes a tuple of the arguments and one of their tangents, and returns the result and its tangent.
            symbolic_zeros: whether it receives symbolic zeros for what is not differentiated.

        Returns:
            `jvp`, so that this is a decorator.

        Raises:
            TypeError: the rule is not a function.

        Example:
            >>> import jax
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
