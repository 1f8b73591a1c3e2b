"""Scripts that reproduce a failing case."""

import inspect
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partjit._jax.shardings import UnspecifiedValue
from partjit.spec import FROM_ARRAY

__all__ = ["canonical", "describe", "reproduction"]


def canonical(value: Any) -> Any:
    """An array of the shape and dtype of `value` that `describe` writes in few words."""
    if getattr(getattr(value, "dtype", None), "kind", "O") not in "fiub":
        return value
    size = int(np.prod(value.shape, dtype=np.int64))
    values = np.linspace(-1, 1, size) if value.dtype.kind == "f" else np.arange(size) % 2
    return values.astype(value.dtype).reshape(value.shape)


def describe(value: object) -> str:
    """Python code for an argument: arrays, specs, shardings, and containers of them."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data, impl = describe(jax.random.key_data(value)), str(jax.random.key_impl(value))
        return f"jax.random.wrap_key_data({data}, impl={impl!r})"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _array(np.asarray(value))
    if isinstance(value, P):
        return f"P({', '.join('P.UNCONSTRAINED' if entry is P.UNCONSTRAINED else repr(entry) for entry in value)})"
    if isinstance(value, NamedSharding):
        return f"NamedSharding({describe(value.mesh)}, {describe(value.spec)})"
    if isinstance(value, Mesh):
        return _mesh(value)
    if isinstance(value, UnspecifiedValue):
        return "UNSPECIFIED"
    if value is FROM_ARRAY:
        return "FROM_ARRAY"
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(describe, value)) + "]"
    if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
        items = (f"{name}={describe(item)}" for name, item in zip(names, value, strict=True))
        return f"{type(value).__name__}({', '.join(items)})"
    if type(value) is tuple:
        return "(" + "".join(f"{describe(item)}, " for item in value).rstrip(" ") + ")"
    return repr(value)


def _array(value: np.ndarray) -> str:
    dtype, shape = value.dtype, value.shape
    alike = canonical(value)
    name = f"np.{dtype.name}" if hasattr(np, dtype.name) else f"jnp.{dtype.name}"
    if dtype.kind == "V" and jnp.issubdtype(dtype, jnp.number):  # bfloat16 and other types that NumPy does not know
        return f"np.array({value.astype(np.float64).tolist()!r}, {name})"
    if dtype.kind not in "fiubc":
        return f"np.array({value.tolist()!r})"
    if dtype.kind in "fiub" and shape and value.tobytes() == np.asarray(alike).tobytes():
        size = value.size
        made = f"np.linspace(-1, 1, {size})" if dtype.kind == "f" else f"(np.arange({size}) % 2)"
        return f"{made}.astype({name}){'' if len(shape) == 1 else f'.reshape({shape})'}"
    if not np.isfinite(value.astype(np.float64 if dtype.kind != "c" else np.complex128)).all():
        return f"np.frombuffer({value.tobytes()!r}, {name}).reshape({shape})"
    return f"np.array({value.tolist()!r}, {name})"


def _mesh(mesh: Mesh) -> str:
    ids = [device.id for device in mesh.devices.flat]
    order = f"[{ids}]" if ids != [*range(len(jax.devices()))] else ""
    names = "".join(f"jax.sharding.AxisType.{kind.name}, " for kind in mesh.axis_types)
    types = "" if mesh.are_all_axes_auto else f", axis_types=({names})"
    return f"Mesh(np.array(jax.devices()){order}.reshape({mesh.devices.shape}), {mesh.axis_names}{types})"


def reproduction(
    law: str,
    fun: Callable[..., object],
    args: Sequence[object],
    mesh: Mesh,
    options: Mapping[str, object],
    reference: Callable[..., object] | None = None,
) -> str:
    """A script that checks the law on this case again.

    Args:
        law: the name of the law in `partjit.testing`.
        fun: the function; if it cannot be imported, the script contains its source, or a comment that says where it is.
        args: its arguments.
        mesh: the mesh.
        options: the keyword arguments of the law.
        reference: the function that it is compared with, if the law was given one; the script has it as it has `fun`.
    """
    name, definition = _definition(fun, "fun")
    calls = [name, *map(describe, args), "mesh=mesh", *(f"{key}={describe(value)}" for key, value in options.items())]
    definitions = [definition]
    if reference is not None:
        other, definition = _definition(reference, "reference")
        if other == name and definition != definitions[0]:
            other, definition = "reference", _to_be_filled_in(reference, "reference")
        definitions += [definition] if definition not in definitions else []
        calls.append(f"reference={other}")
    lines = [
        "import os",
        'os.environ.setdefault("NPROC", "32")',
        "import jax",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from jax.sharding import NamedSharding",
        f'jax.config.update("jax_num_cpu_devices", {len(jax.devices())})',
        "from partjit import FROM_ARRAY, UNSPECIFIED, Mesh, P, pjit, with_sharding_constraint",
        f"from partjit.testing import {law}",
        "",
        *definitions,
        *sorted(_imports_of_types(args)),
        "",
        f"mesh = {_mesh(mesh)}",
        f"{law}(",
        *(f"    {call}," for call in calls),
        ")",
    ]
    return "\n".join(lines)


def _imports_of_types(value: object) -> set[str]:
    """The imports of the named tuples in arguments."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return set()
    own = {f"from {type(value).__module__} import {type(value).__name__}"} if hasattr(value, "_fields") else set()
    return own.union(*map(_imports_of_types, value))


def _definition(fun: Callable[..., object], otherwise: str) -> tuple[str, str]:
    """The name of a function in the script, and the lines that define it; `otherwise` where the user has to."""
    inner = inspect.unwrap(fun)
    name, module = getattr(fun, "__qualname__", ""), getattr(fun, "__module__", "")
    if name.isidentifier() and module not in ("", "__main__"):
        file = getattr(inspect.getmodule(fun), "__file__", None)
        path = ""
        if file and "." not in module:
            path = f"import sys; sys.path.insert(0, {str(pathlib.Path(file).parent)!r})\n"
        return name, f"{path}from {module} import {name}"
    try:
        source = textwrap.dedent(inspect.getsource(inner))
    except (OSError, TypeError):
        source = ""
    if source.startswith("def ") and not inner.__code__.co_freevars:
        return inner.__name__, source.rstrip()
    return otherwise, _to_be_filled_in(fun, otherwise)


def _to_be_filled_in(fun: Callable[..., object], name: str) -> str:
    """A comment that says which function is to be defined in the script."""
    inner = inspect.unwrap(fun)
    try:
        where = f"{inspect.getsourcefile(inner)}:{inspect.getsourcelines(inner)[1]}"
    except (OSError, TypeError):
        return f"# {name} is {fun!r}: put its definition here"
    return f"# {name} is {getattr(inner, '__name__', fun)} of {where}: put its definition here"
