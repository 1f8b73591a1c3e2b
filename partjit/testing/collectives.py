"""Assertions on the collectives of compiled programs, and on transfers between host and devices."""

import collections
import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import Mesh as JaxMesh

from partjit._jax.reads import observed_reads
from partjit._jax.shardings import UNSPECIFIED, UnspecifiedValue
from partjit.api import pjit
from partjit.checks import abridged, require, require_callable, require_flag, require_integer, require_mesh_type
from partjit.inspect.collectives import KINDS
from partjit.inspect.hlo.optimized import read_collectives
from partjit.inspect.user_lines import shown_lines
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
        AssertionError: the program has others; the message shows their axes, results and lines.
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
    compiled = _compiled(fun, args, mesh, in_specs, out_specs)
    text = compiled.as_text() or ""
    found = collections.Counter(match[1] for match in _INSTRUCTION.finditer(text))
    wanted = {kind: count for kind, count in expected.items() if count}
    if found == wanted:
        return
    lines = [f"expected {_show(wanted)}, but the compiled program has {_show(found)}"]
    differing = [kind for kind in sorted({*found, *wanted}) if found.get(kind, 0) != wanted.get(kind, 0)]
    raise AssertionError("\n".join([*lines, *_described(text, differing, _mesh_of(compiled, mesh))]))


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
    of one. Collectives in a compiled program are not: see `assert_collectives`.

    Reading an array, as `float(loss)`, `print(loss)` and `if loss > 1:` do, is a transfer on the CPU as well, where it
    copies nothing: on an accelerator it would wait for the device. Only `np.asarray` of an array on a single CPU device
    is not seen there, for which NumPy calls no Python.

    Args:
        allow_explicit: allow `jax.device_put` and `jax.device_get`.

    Raises:
        AssertionError: there is a transfer, or an array is read; for a transfer, `__cause__` is jax's own error.
        TypeError: `allow_explicit` is neither True nor False.

    Example:
        >>> import jax.numpy as jnp
        >>> double, x = jax.jit(lambda x: x * 2), jnp.ones(8)
        >>> with assert_no_transfers():
        ...     y = double(x)

    Source: `jax.transfer_guard`.
    """
    allow_explicit = require_flag("assert_no_transfers", "allow_explicit", allow_explicit)
    thread = threading.get_ident()

    def on_read(array: jax.Array, is_explicit: bool) -> None:
        if threading.get_ident() == thread and not (is_explicit and allow_explicit):
            raise AssertionError(
                f"a transfer in a block that should have none: an array {array.aval.str_short()} is read by Python, as "
                "float(x), bool(x), x.item() and print(x) do, which waits for the device; keep it on the device, or "
                "read it after the loop"
            )

    try:
        with jax.transfer_guard("disallow" if allow_explicit else "disallow_explicit"), observed_reads(on_read):
            yield
    except AssertionError:
        raise
    except Exception as error:
        if "isallowed" not in str(error) or "transfer" not in str(error):
            raise
        raise AssertionError(f"a transfer in a block that should have none: {error}") from error


def _described(text: str, kinds: Sequence[str], mesh: JaxMesh | AbstractMesh | None) -> list[str]:
    """The collectives of some kinds in a compiled program: their axes, results, lines and modules."""
    try:
        if mesh is None:
            raise ValueError("the axes have no names")
        collectives = read_collectives(text, mesh)
    except ValueError:  # as HLO: of several programs, or for a mesh that is not known
        return [f"  {m[0].strip()[:300]}" for m in _INSTRUCTION.finditer(text) if m[1] in kinds]
    lines = []
    for found in {c.name: c for c in collectives if c.kind in kinds}.values():
        axes = ", ".join(found.axes) or f"groups of {found.group_size} devices"
        sites = [shown_lines(site, found.library) for site in found.sites] or ["an unknown line"]
        module = f", in {', '.join(found.modules)}" if found.modules else ""
        lines.append(f"  {found.kind} over {axes} to {found.result}, at {', '.join(sites)}{module}")
    return lines


def _mesh_of(compiled: Any, mesh: JaxMesh | None) -> JaxMesh | AbstractMesh | None:
    """The mesh whose axes name groups of devices: the one that was given, or that of an argument or a result."""
    if mesh is not None:
        return mesh
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)


def _compiled(fun: Any, args: Sequence[object], mesh: JaxMesh | None, in_specs: object, out_specs: object) -> Any:
    if mesh is not None:
        require_mesh_type("assert_collectives", "mesh", mesh)
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        parse_spec_tree(specs, name)
    if isinstance(fun, jax.stages.Compiled):
        return fun
    own = None if mesh is None else Mesh(mesh.devices, mesh.axis_names, mesh.axis_types)  # jax's own warns
    with own or contextlib.nullcontext():
        if not isinstance(fun, jax.stages.Lowered):
            require_callable("assert_collectives", "fun", fun, "a function, a jax.stages.Lowered or a Compiled")
            has_specs = not (isinstance(in_specs, UnspecifiedValue) and isinstance(out_specs, UnspecifiedValue))
            # The functions of jax.numpy can be lowered as well: with specs they are partitioned instead.
            partitioned = pjit(fun, in_specs, out_specs) if has_specs or not hasattr(fun, "lower") else fun
            fun = partitioned.lower(*args)
        return fun.compile()


def _show(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no collectives"
