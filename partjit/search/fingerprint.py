"""What identifies a jaxpr in any process: its equations with their types, parameters and scopes, as a digest.

Two traces of a function have the same one; names of variables, addresses of objects and lines of sources are not in it.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Literal, Var

from partjit._jax.jaxprs import Atom

__all__ = ["fingerprint"]

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(jaxpr: ClosedJaxpr) -> str:
    """The digest of a closed jaxpr: 64 hexadecimal digits.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> one, same, other = (jax.make_jaxpr(lambda x, n=n: jnp.sin(x) ** n)(1.0) for n in (2, 2, 3))
        >>> fingerprint(one) == fingerprint(same), fingerprint(one) == fingerprint(other)
        (True, False)
    """
    return _Fingerprints().of(jaxpr)


class _Fingerprints:
    def __init__(self) -> None:
        self._known: dict[int, str] = {}  # by the identity of jaxprs, which equations keep alive

    def of(self, jaxpr: Any) -> str:
        """That of a jaxpr, closed or open."""
        found = self._known.get(id(jaxpr))
        if found is None:
            inner = getattr(jaxpr, "jaxpr", jaxpr)
            lines = [*map(_constant, getattr(jaxpr, "consts", ()) or ())]
            numbers: dict[Var, int] = {}

            def read(atom: Atom) -> str:
                if isinstance(atom, Literal):
                    return f"{atom.val!r}:{atom.aval}"
                return "_" if isinstance(atom, DropVar) else f"v{numbers.setdefault(atom, len(numbers))}"

            def made(atom: Atom) -> str:
                return f"{read(atom)}:{atom.aval}"

            lines.append(" ".join(map(made, (*inner.constvars, *inner.invars))))
            for eqn in inner.eqns:
                params = self._text(eqn.params)
                ins, outs = " ".join(map(read, eqn.invars)), " ".join(map(made, eqn.outvars))
                lines.append(f"{outs} = {eqn.primitive.name} {params} {ins} in {eqn.source_info.name_stack}")
            lines.append(" ".join(map(read, inner.outvars)))
            found = self._known[id(jaxpr)] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return found

    def _text(self, param: object) -> str:
        """A parameter as text that does not depend on the process."""
        if hasattr(param, "eqns"):
            return self.of(param)
        if isinstance(param, Mapping):
            return f"{{{', '.join(f'{key}: {self._text(value)}' for key, value in sorted(param.items(), key=_key))}}}"
        if isinstance(param, set | frozenset):
            return f"{{{', '.join(sorted(map(self._text, param)))}}}"
        if isinstance(param, tuple | list):
            return f"({', '.join(map(self._text, param))})"
        return _ADDRESS.sub("", repr(param))


def _key(item: tuple[object, object]) -> str:
    return str(item[0])


def _constant(value: object) -> str:
    """A constant: its type, and its value if it is a number, which may say how often a loop runs."""
    shape, dtype = np.shape(value), getattr(value, "dtype", type(value).__name__)  # type: ignore[arg-type]
    is_number = shape == () and isinstance(value, bool | int | float | np.ndarray | np.generic)
    return f"{dtype}{shape}{f' = {value!r}' if is_number else ''}"
