"""`colocated_call_p`: a colocated call as one equation of a traced function.

Parameters:

* `callee`: the function for one kind of arguments: what is known of it and of its results.
* `stream`: the stream that the traced function itself put the call on; None where the caller's is meant.

An equation has an effect unless its function was said to be pure, so that nothing drops it or does it twice. The effect
is not one of jax's ordered ones, which there are on a single device only: in which order the calls of a stream run is
the order of the equations, and it is the plan's work to keep it.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Primitive

from partjit import _compat
from partjit._compat import ad, batching, core, mlir, pe
from partjit.colocated.ahead import Ahead
from partjit.colocated.specialization import Specialization, SpecializationCache
from partjit.colocated.specialized import Origin
from partjit.colocated.streams import Stream

__all__ = ["Callee", "ColocatedEffect", "colocated_call_p", "opaque_calls"]

colocated_call_p = Primitive("colocated_call")
colocated_call_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class ColocatedEffect(_compat.Effect):  # type: ignore[misc]
    """That host Python runs.

    Attributes:
        stream: the name of the stream it runs on.
    """

    stream: str

    def __str__(self) -> str:
        return f"Colocated<{self.stream}>"


@dataclasses.dataclass(frozen=True, eq=False)
class Callee:
    """A colocated function for one kind of arguments in a traced function.

    Attributes:
        origin: where what runs comes from.
        specialization: what was said of its calls.
        in_tree: the structure of `(args, kwargs)`.
        in_avals: the type of each argument.
        in_shardings: the sharding each argument should have; None where the partitioner chooses.
        out_tree: the structure of the result.
        out_avals: the type of each result.
        out_shardings: the sharding of each result; None where the partitioner chooses.
        paths: the key path of each argument in terms of the function's parameters.
        cache: the specializations of the function, for calls outside of programs.
        ahead: its calls that were made before they are asked for.
    """

    origin: Origin
    specialization: Specialization
    in_tree: Any
    in_avals: tuple[Any, ...]
    in_shardings: tuple[Any, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    paths: tuple[str, ...]
    cache: SpecializationCache
    ahead: Ahead | None

    @property
    def has_stated_results(self) -> bool:
        """Whether the user said what it returns, rather than an earlier call showed."""
        return self.specialization.out_specs is not None or self.specialization.out_specs_fn is not None

    def returns_what(self, other: "Callee") -> bool:
        """Whether the results are known to be of the same types, and at the same places."""
        known = (self.out_tree, self.out_avals, self.out_shardings)
        return known == (other.out_tree, other.out_avals, other.out_shardings)

    @property
    def name(self) -> str:
        """What the function is called."""
        return self.origin.name

    @property
    def is_pure(self) -> bool:
        """Whether a call may be left out when nobody needs its results, and be made once for equal arguments."""
        return bool(self.specialization.pure)


def stream_name(stream: Stream | None) -> str:
    """How a stream is called where it is printed."""
    if stream is None:
        return "caller"
    return stream.name or f"stream {id(stream):x}"


@colocated_call_p.def_effectful_abstract_eval
def _abstract_eval(*_: Any, callee: Callee, stream: Stream | None) -> Any:
    return [*callee.out_avals], set() if callee.is_pure else {ColocatedEffect(stream_name(stream))}


class _Mode(threading.local):
    def __init__(self) -> None:
        self.is_opaque = False


_mode = _Mode()


@contextlib.contextmanager
def opaque_calls() -> Iterator[None]:
    """Lets programs with calls be lowered in the block, to be looked at; they cannot run."""
    outer, _mode.is_opaque = _mode.is_opaque, True
    try:
        yield
    finally:
        _mode.is_opaque = outer


def _lower(ctx: Any, *args: Any, callee: Callee, **_: Any) -> Any:
    if not _mode.is_opaque:
        raise ValueError(
            f"the colocated function {callee.name} is called in a program of jax.jit, which cannot call Python on the "
            "hosts beside its devices: wrap the outermost function with partjit.pjit instead of jax.jit"
        )
    args = tuple(
        arg if sharding is None else _compat.lower_constraint_to(ctx, arg, aval, sharding)
        for arg, aval, sharding in zip(args, ctx.avals_in, callee.in_shardings, strict=True)
    )
    results = _compat.lower_opaque(ctx, "colocated_call", args)
    return [
        result if sharding is None else _compat.lower_constraint_to(ctx, result, aval, sharding)
        for result, aval, sharding in zip(results, ctx.avals_out, callee.out_shardings, strict=True)
    ]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, callee: Callee, **_: Any) -> Any:
    differentiated = [
        path for path, tangent in zip(callee.paths, tangents, strict=True) if type(tangent) is not ad.Zero
    ]
    del primals
    raise ValueError(
        f"the colocated function {callee.name} has no derivative, and is differentiated with respect to "
        f"{', '.join(differentiated)}: pass what it only looks at as jax.lax.stop_gradient(x)"
    )


def _batch(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, callee: Callee, stream: Any) -> Any:
    del axis_data
    batched = [path for path, dim in zip(callee.paths, dims, strict=True) if dim is not None]
    if not batched:  # one call for the whole batch
        return colocated_call_p.bind(*args, callee=callee, stream=stream), [None] * len(callee.out_avals)
    raise ValueError(
        f"the colocated function {callee.name} cannot be batched, and is called under jax.vmap with a batched "
        f"{', '.join(batched)}: call it outside of the function that is batched"
    )


def _save_results(
    saveable: Any, unknown_ins: Sequence[bool], inst_in: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Under `jax.checkpoint`: a call is made once, forward, and its results are kept whatever the policy."""
    del saveable
    in_backward_half = any(unknown_ins)
    flags = [in_backward_half] * len(eqn.outvars)
    if in_backward_half:
        needed = [v for v, inst in zip(eqn.invars, inst_in, strict=True) if type(v) is core.Var and not inst]
        return None, eqn, flags, flags, needed
    return eqn, None, flags, flags, []  # what the backward half reads of the results becomes a residual


class _Shown:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _show(params: dict[str, Any]) -> dict[str, Any]:
    callee: Callee = params["callee"]
    said = callee.specialization
    return {
        "name": _Shown(callee.name),
        "stream": _Shown(stream_name(params["stream"])),
        "in_specs": _Shown(_show_shardings(callee.in_shardings)),
        "out_specs": _Shown(_show_shardings(callee.out_shardings)),
        **({"pure": True} if callee.is_pure else {}),
        **({"layout": _Shown(said.layout)} if said.layout not in (None, "global") else {}),
        **({"run_ahead": said.run_ahead} if said.run_ahead else {}),
    }


def _show_shardings(shardings: Sequence[Any]) -> str:
    shown = ("open" if s is None else str(getattr(s, "spec", s)).replace("PartitionSpec", "P") for s in shardings)
    return f"({', '.join(shown)})"


_compat.register_effect(ColocatedEffect)
_compat.register_printing(colocated_call_p, _show)
mlir.register_lowering(colocated_call_p, _lower, cacheable=False)
ad.primitive_jvps[colocated_call_p] = _jvp
batching.fancy_primitive_batchers[colocated_call_p] = _batch
pe.partial_eval_jaxpr_custom_rules[colocated_call_p] = _save_results
