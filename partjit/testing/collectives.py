"""Assertions on the collectives of compiled programs, and on transfers between host and devices."""

import collections
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh

from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit.api import pjit
from partjit.checks import abridged, require, require_callable, require_flag, require_integer, require_mesh_type
from partjit.inspect.collectives import KINDS
from partjit.mesh import Mesh
from partjit.spec import parse_spec_tree

__all__ = ["assert_collectives", "assert_no_collectives", "assert_no_transfers"]

# An instruction: `%name = type kind(operands), ...`; on some platforms a collective is split into a start and a done.
_INSTRUCTION = re.compile(rf"^.* = .*? ({'|'.join(KINDS)})(?:-start)?\((?P<rest>.*)$", re.M)


def assert_collectives(
    expected: Mapping[str, int],
    fun: Callable[..., object] | jax.stages.Lowered,
    *args: object,
    mesh: JaxMesh | None = None,
    in_specs: object = UNSPECIFIED,
    out_specs: object = UNSPECIFIED,
) -> None:
    """Asserts which collectives the compiled program of `fun(*args)` has, and how many instructions of each kind.

    An instruction in the body of a loop counts once, however often the loop runs. XLA combines collectives of one kind
    where it can.

    Args:
        expected: numbers by kind, such as `{"all-reduce": 1}`; other kinds must not occur. The kinds are those of HLO:
            all-gather, all-reduce, all-to-all, collective-broadcast, collective-permute, ragged-all-to-all and
            reduce-scatter.
        fun: a function, which is partitioned with the specs; or one that `pjit` or `jax.jit` returned; or a
            `jax.stages.Lowered` or `Compiled`.
        *args: its arguments; `jax.ShapeDtypeStruct`s are enough.
        mesh: the ambient mesh, or None for the one that is set.
        in_specs, out_specs: the specs of a plain function, as for `pjit`.

    Raises:
        AssertionError: the program has others; the message shows their instructions.
        ValueError: a kind is not known, or a number is negative.
        TypeError: an argument is of a wrong type.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit import P
        >>> mesh = Mesh(jax.devices(), ("x",))
        >>> x = jnp.ones((8, 4))
        >>> assert_collectives({"all-reduce": 1}, jnp.sum, x, mesh=mesh, in_specs=P("x"), out_specs=None)
    """
    require("assert_collectives", "expected", expected, Mapping, "a mapping from kinds of collectives to numbers")
    unknown = [kind for kind in expected if kind not in KINDS]
    if unknown:
        raise ValueError(
            f"assert_collectives: in expected, {abridged(unknown[0])} is no collective; the kinds are "
            f"{', '.join(KINDS)}"
        )
    for kind, count in expected.items():
        require_integer("assert_collectives", f"expected[{kind!r}]", count, 0)
    text = _compiled_text(fun, args, mesh, in_specs, out_specs)
    instructions = collections.defaultdict(list)
    for match in _INSTRUCTION.finditer(text):
        instructions[match[1]].append(match[0].strip())
    found = {kind: len(lines) for kind, lines in instructions.items()}
    wanted = {kind: count for kind, count in expected.items() if count}
    if found == wanted:
        return
    lines = [f"expected {_show(wanted)}, but the compiled program has {_show(found)}"]
    for kind in sorted({*found, *wanted}):
        if found.get(kind, 0) != wanted.get(kind, 0):
            lines += [f"  {line[:300]}" for line in instructions[kind]]
    raise AssertionError("\n".join(lines))


def assert_no_collectives(
    fun: Callable[..., object] | jax.stages.Lowered,
    *args: object,
    mesh: JaxMesh | None = None,
    in_specs: object = UNSPECIFIED,
    out_specs: object = UNSPECIFIED,
) -> None:
    """Asserts that the compiled program of `fun(*args)` has no collectives. See `assert_collectives`.

    Example:
        >>> import jax.numpy as jnp
        >>> from partjit import P
        >>> mesh = Mesh(jax.devices(), ("x",))
        >>> assert_no_collectives(jnp.sin, jnp.ones(8), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    """
    assert_collectives({}, fun, *args, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@contextlib.contextmanager
def assert_no_transfers(*, allow_explicit: bool = False) -> Iterator[None]:
    """Asserts that there are no transfers between host and devices, or between devices, while the block runs.

    Passing a NumPy array or scalar to a compiled function is a transfer, and so is a constant of an operation outside
    of one. Collectives in a compiled program are not: see `assert_collectives`. On the CPU, reading an array on a
    single device copies nothing, so it is no transfer there.

    Args:
        allow_explicit: allow `jax.device_put` and `jax.device_get`.

    Raises:
        AssertionError: there is a transfer; `__cause__` is jax's own error.
        TypeError: `allow_explicit` is neither True nor False.

    Example:
        >>> import jax.numpy as jnp
        >>> double, x = jax.jit(lambda x: x * 2), jnp.ones(8)
        >>> with assert_no_transfers():
        ...     y = double(x)

    Source: `jax.transfer_guard`.
    """
    allow_explicit = require_flag("assert_no_transfers", "allow_explicit", allow_explicit)
    try:
        with jax.transfer_guard("disallow" if allow_explicit else "disallow_explicit"):
            yield
    except Exception as error:
        if "isallowed" not in str(error) or "transfer" not in str(error):
            raise
        raise AssertionError(f"a transfer in a block that should have none: {error}") from error


def _compiled_text(fun: Any, args: Sequence[object], mesh: JaxMesh | None, in_specs: object, out_specs: object) -> str:
    if mesh is not None:
        require_mesh_type("assert_collectives", "mesh", mesh)
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        parse_spec_tree(specs, name)
    if isinstance(fun, jax.stages.Compiled):
        return fun.as_text() or ""
    own = None if mesh is None else Mesh(mesh.devices, mesh.axis_names, mesh.axis_types)  # jax's own warns
    with own or contextlib.nullcontext():
        if not isinstance(fun, jax.stages.Lowered):
            require_callable("assert_collectives", "fun", fun, "a function, a jax.stages.Lowered or a Compiled")
            has_specs = not (isinstance(in_specs, UnspecifiedValue) and isinstance(out_specs, UnspecifiedValue))
            # The functions of jax.numpy can be lowered as well: with specs they are partitioned instead.
            partitioned = pjit(fun, in_specs, out_specs) if has_specs or not hasattr(fun, "lower") else fun
            fun = partitioned.lower(*args)
        return fun.compile().as_text() or ""


def _show(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no collectives"
