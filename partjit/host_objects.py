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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax

from partjit._jax.tracing import is_staged
from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import Numbered, parameter_names, positions

__all__ = [
    "HostConstant",
    "HostReference",
    "Placeholder",
    "calling_with",
    "check_returned",
    "explaining_misuse",
    "given",
    "has_objects",
    "is_placeholder",
    "referenced",
    "with_objects",
    "without_objects",
]


_Result = TypeVar("_Result")
_Class = TypeVar("_Class")


_BINARY = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_SPECIAL = f"""
abs bool bytes ceil complex float floor fspath index int invert len neg pos round trunc
lt le gt ge {_BINARY} r{_BINARY.replace(" ", " r")}
contains delattr delitem format getitem iter next reversed setattr setitem
aenter aexit aiter anext await enter exit instancecheck subclasscheck
array array_function array_ufunc copy deepcopy reduce_ex
"""
"""The methods that Python and NumPy look up in the type of an object: `__getattr__` does not see them.

`__call__` is not one of them: functions are keys of caches of jax, which compare them with others, and that is refused.
"""


def _refusing(cls: type[_Class]) -> type[_Class]:
    """A class of placeholders, with which nothing can be done but to pass them on."""

    def refuse(self: Placeholder, *_: object, **__: object) -> NoReturn:
        raise TypeError(self.problem)

    for name in _SPECIAL.split():
        setattr(cls, f"__{name}__", refuse)
    return cls


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Placeholder:
    """What takes the place of an object that is no array.

    Attributes:
        owner: the name of the program or function whose argument it is.
        path: the key path of the argument.
        is_of_function: whether the owner is a colocated function.
    """

    owner: str
    path: str
    is_of_function: bool = dataclasses.field(default=False, kw_only=True)

    def __repr__(self) -> str:
        return f"<{'' if self.is_of_function else 'host '}argument {self.path} of {self.owner}>"

    @property
    def problem(self) -> str:
        """Why it can only be passed on, and what to do."""
        if self.is_of_function:
            return (
                f"{self.path} of {self.owner} is no array: only {self.owner} itself gets it, when it runs. Its "
                "out_specs_fn cannot use it, and its rules for derivatives can only pass it to colocated functions"
            )
        return (
            f"{self.path} is a host argument of {self.owner}: only colocated functions get its value, when they run. "
            f"Pass it to one of them, or make it a static argument, which is known while {self.owner} is traced"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self.problem, name=name, obj=self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placeholder):  # as are those of the places that structures and caches compare
            raise TypeError(self.problem)
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return HostReference, self.owner, self.path


@jax.tree_util.register_static
@_refusing
class HostReference(Placeholder):
    """The place of an object that each execution of a program, or each call of a colocated function, is given."""


_EQUAL_BY_VALUE = (str, bytes, pathlib.PurePath)


@jax.tree_util.register_static
@_refusing
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class HostConstant(Placeholder):
    """An object that is known when a function is traced. Others than texts and paths are equal only to themselves."""

    value: object

    @property
    def _key(self) -> tuple[object, ...]:
        value = self.value
        return HostConstant, type(value), value if isinstance(value, _EQUAL_BY_VALUE) else id(value)


@contextlib.contextmanager
def explaining_misuse(values: Iterable[object]) -> Iterator[None]:
    """Adds what to do to an exception about placeholders among these values that does not say it itself.

    To others than Python's operators a placeholder is a value of a type that they do not take or, as it has no leaves,
    no value at all.
    """
    try:
        yield
    except Exception as error:
        placeholders = [value for value in values if isinstance(value, Placeholder)]
        text = str(error) if placeholders else ""
        named = [placeholder for placeholder in placeholders if repr(placeholder) in text]
        is_of_all = any(words in text for words in ("HostReference", "HostConstant", *_IN_ITS_PLACE))
        for placeholder in named or (placeholders if is_of_all else []):
            if placeholder.problem not in (text, *getattr(error, "__notes__", ())):
                error.add_note(placeholder.problem)
        raise


_IN_ITS_PLACE = ("got no values to scan over", "at least one array or dtype is required", "should be callable")
"""What jax says of a tree without leaves, and of what is no function."""


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
            return HostConstant(owner, path, value)
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
    return isinstance(node, Placeholder)


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
        if isinstance(node, Placeholder):
            where = f"result{jax.tree_util.keystr(path)}"
            raise TypeError(f"{where} of {name} is its host argument {node.path}, but programs return arrays")
