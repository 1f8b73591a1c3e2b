"""Objects that are no arrays, as arguments of programs and of colocated functions.

While a function is traced, a `HostReference` takes the place of an object that each execution is given, and a
`HostConstant` that of one that is known. Both are nodes of a tree without leaves: no equation reads them and no
transformation sees them, until a colocated function runs, which gets the objects.
"""

import contextlib
import contextvars
import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax

from partjit._jax.tracing import is_staged
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import Numbered, parameter_names, positions

__all__ = [
    "HostConstant",
    "HostReference",
    "calling_with",
    "check_returned",
    "given",
    "has_objects",
    "is_placeholder",
    "referenced",
    "with_objects",
    "without_objects",
]


_Result = TypeVar("_Result")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class HostReference:
    """The place of an object that each execution of a program, or each call of a colocated function, is given.

    Attributes:
        owner: the name of the program or function.
        path: the key path of the argument.
    """

    owner: str
    path: str

    def __repr__(self) -> str:
        return f"<host argument {self.path} of {self.owner}>"

    @property
    def _problem(self) -> str:
        return (
            f"{self.path} is a host argument of {self.owner}: only colocated functions get its value, when they run. "
            f"Pass it to one of them, or make it a static argument, which is known while {self.owner} is traced"
        )

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(self._problem)

    __bool__ = __iter__ = __len__ = __index__ = __int__ = __float__ = __call__ = __getitem__ = __jax_array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __mod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __contains__ = __format__ = __fspath__ = __enter__ = _refuse

    def __eq__(self, other: object) -> bool:
        if not is_placeholder(other):  # as are those of the places that structures and caches compare
            self._refuse()
        return isinstance(other, HostReference) and (self.owner, self.path) == (other.owner, other.path)

    def __hash__(self) -> int:
        return hash((self.owner, self.path))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._problem, name=name, obj=self)


_EQUAL_BY_VALUE = (str, bytes, pathlib.PurePath)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class HostConstant:
    """An object that is known when a function is traced. Others than texts and paths are equal only to themselves."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostConstant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[type, object]:
        value = self.value
        return type(value), value if isinstance(value, _EQUAL_BY_VALUE) else id(value)


def referenced(
    owner: str,
    signature: inspect.Signature | None,
    host: Numbered,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> tuple[tuple[PyTree, ...], dict[str, PyTree], dict[HostReference, object]]:
    """The arguments of a program with references in the place of its host arguments, and what these refer to.

    In a function that is traced they are constants, since that is executed later.

    Args:
        owner: the name of the program.
        signature: that of its function, or None if it has none.
        host: the numbers and names of its host arguments.
        args, kwargs: what it is called with.
    """
    objects: dict[HostReference, object] = {}

    def place(path: str, value: object) -> object:
        if is_placeholder(value):  # of a program around this one
            return value
        if is_staged():
            return HostConstant(value)
        reference = HostReference(owner, path)
        objects[reference] = value
        return reference

    names, numbers = parameter_names(signature, len(args)), positions(host[0], len(args))
    placed = tuple(place(names[i], arg) if i in numbers else arg for i, arg in enumerate(args))
    return placed, {key: place(key, v) if key in host[1] else v for key, v in kwargs.items()}, objects


_MISSING = object()
_given: "contextvars.ContextVar[Mapping[HostReference, object]]" = contextvars.ContextVar("partjit_host_objects")


@contextlib.contextmanager
def given(objects: Mapping[HostReference, object]) -> Iterator[None]:
    """Gives these objects to the calls that are made in the block, in whatever thread they run."""
    token = _given.set(objects)
    try:
        yield
    finally:
        _given.reset(token)


def calling_with(
    objects: Mapping[HostReference, object], function: Callable[..., _Result], *args: Any, **kwargs: Any
) -> _Result:
    """Calls a function, as in a block of `given`, which takes longer."""
    token = _given.set(objects)
    try:
        return function(*args, **kwargs)
    finally:
        _given.reset(token)


def with_objects(target: Callable[..., PyTree], tree: PyTreeDef) -> Callable[..., PyTree]:
    """A function that calls `target` with the objects themselves.

    Args:
        target: the function.
        tree: the structure of its `(args, kwargs)`.

    Raises:
        RuntimeError: when called: an object is not given any more.
    """
    if not has_objects(tree):
        return target
    own_args, own_kwargs = _unflattened(tree)
    if not any(_is_deep(arg) for arg in (*own_args, *own_kwargs.values())):

        def call_with_arguments(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return target(*map(_value_of, args), **{name: _value_of(arg) for name, arg in kwargs.items()})

        return call_with_arguments

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        args, kwargs = jax.tree.map(_value_of, (args, kwargs), is_leaf=is_placeholder)
        return target(*args, **kwargs)

    return call


def _value_of(node: object) -> object:
    if isinstance(node, HostConstant):
        return node.value
    if not isinstance(node, HostReference):
        return node
    found = _given.get({}).get(node, _MISSING)
    if found is _MISSING:
        raise RuntimeError(
            f"{node.path} is a host argument of {node.owner}, whose value is known until {node.owner} returns; a call "
            "that needs it was made afterwards, as by the backward pass of an eager jax.grad: differentiate inside of "
            "a partjit.pjit, or make the argument static"
        )
    return found


def is_placeholder(node: object) -> bool:
    """Whether a node of a tree is in the place of an object."""
    return isinstance(node, HostReference | HostConstant)


def has_objects(tree: PyTreeDef) -> bool:
    """Whether there are references or constants in a structure."""
    return _has_objects(_unflattened(tree))


def _has_objects(tree: PyTree) -> bool:
    return any(map(is_placeholder, jax.tree.leaves(tree, is_leaf=is_placeholder)))


def _is_deep(argument: PyTree) -> bool:
    """Whether there are objects in an argument that is none itself."""
    return not is_placeholder(argument) and _has_objects(argument)


def without_objects(tree: PyTreeDef) -> PyTreeDef:
    """A structure with None in the place of references and constants."""
    bare = jax.tree.map(lambda node: None if is_placeholder(node) else node, _unflattened(tree), is_leaf=is_placeholder)
    return jax.tree.structure(bare)


def _unflattened(tree: PyTreeDef) -> Any:
    return tree.unflatten(range(tree.num_leaves))


def check_returned(result: PyTree, name: str) -> None:
    """Raises TypeError if a traced function returns a host argument."""
    for path, node in jax.tree_util.tree_leaves_with_path(result, is_leaf=is_placeholder):
        if isinstance(node, HostReference):
            where = f"result{jax.tree_util.keystr(path)}"
            raise TypeError(f"{where} of {name} is its host argument {node.path}, but programs return arrays")
