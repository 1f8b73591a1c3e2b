"""Values that nobody should have to take: each with a name, and with kinds by which an argument says what it does take.

They are made anew for each use, since some can be used once, and some are changed by use.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import partjit
from partjit import colocated

__all__ = ["BAD_VALUES", "FORMS", "Bad", "HostileError", "nested"]


class HostileError(Exception):
    """What a hostile object raises: its own business, whoever provokes it."""


def _raises(*_: object, **__: object) -> Any:
    raise HostileError


class Hostile:
    """Raises whatever one does with it."""

    __eq__ = __bool__ = __len__ = __iter__ = __hash__ = __repr__ = __str__ = __index__ = __getitem__ = _raises

    def __getattr__(self, name: str) -> Any:
        raise HostileError


class Nonsense:
    """Answers what no object should."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    def __bool__(self) -> Any:
        return 3  # not a bool

    def __len__(self) -> int:
        return -1

    def __repr__(self) -> Any:
        return 5

    def __iter__(self) -> Any:
        return 5


class Anything:
    """Has every attribute, and each of them is another one like it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


@dataclasses.dataclass(frozen=True)
class Bad:
    """A value that most arguments refuse.

    Attributes:
        name: how a report names it.
        make: makes it.
        kinds: what it is; an argument that takes one of them takes it.
    """

    name: str
    make: Callable[[], Any]
    kinds: frozenset[str]


def _deleted() -> jax.Array:
    array = jnp.arange(8.0) + 1
    array.delete()
    return array


@functools.cache
def _mesh() -> partjit.Mesh:
    return partjit.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def _generator() -> Any:
    yield 0


def _bad(name: str, make: Callable[[], Any], kinds: str) -> Bad:
    return Bad(name, make, frozenset(kinds.split()))


_NAMED = [
    ("None", lambda: None, "none tree spec"),
    ("5", lambda: 5, "int positive number hashable leaf"),
    ("0", lambda: 0, "int zero number hashable leaf"),
    ("-1", lambda: -1, "int minus_one negative number hashable leaf"),
    ("2**70", lambda: 2**70, "int positive huge number hashable"),
    ("numpy.int64(3)", lambda: np.int64(3), "int positive number numpy_scalar hashable leaf"),
    ("True", lambda: True, "bool hashable leaf"),
    ("numpy.True_", lambda: np.True_, "bool numpy_scalar hashable leaf"),
    ("1.5", lambda: 1.5, "float number hashable leaf"),
    ("numpy.float32(1.5)", lambda: np.float32(1.5), "float number numpy_scalar hashable leaf"),
    ("nan", lambda: float("nan"), "nan float hashable leaf"),
    ("inf", lambda: float("inf"), "inf float number hashable leaf"),
    ("1j", lambda: 1j, "complex hashable leaf"),
    ("'a'", lambda: "a", "str hashable"),
    ("''", lambda: "", "str empty_str hashable"),
    ("'x'", lambda: "x", "str x hashable"),
    ("a long str", lambda: "a" * 100_000, "str hashable"),
    ("b''", lambda: b"", "bytes empty_bytes hashable"),
    ("b'a'", lambda: b"abc" * 30, "bytes hashable"),
    ("[]", list, "empty list tree ints strs seq empty_seq"),
    ("()", lambda: (), "empty tuple tree ints strs seq empty_seq hashable"),
    ("{}", dict, "empty dict tree"),
    ("[5]", lambda: [5], "one_hashable list ints seq leaf_tree"),
    ("[-9]", lambda: [-9], "one_hashable list negatives seq leaf_tree"),
    ("(1.5,)", lambda: (1.5,), "one_hashable tuple floats seq leaf_tree hashable"),
    ("[True]", lambda: [True], "one_hashable list seq leaf_tree"),
    ("['a']", lambda: ["a"], "one_hashable list strs seq"),
    ("('a', 5)", lambda: ("a", 5), "tuple seq hashable"),
    ("[None]", lambda: [None], "list tree seq nones"),
    ("[[1, 2], 3]", lambda: [[1, 2], 3], "list seq leaf_tree"),
    ("{'a': 5}", lambda: {"a": 5}, "dict str_dict leaf_tree"),
    ("{5: 'a'}", lambda: {5: "a"}, "dict"),
    ("a set", lambda: {5}, "one_hashable set ints leaf_set"),
    ("object()", object, "object hashable"),
    ("a hostile object", Hostile, "hostile"),
    ("a nonsense object", Nonsense, "nonsense"),
    ("an object with every attribute", Anything, "anything object hashable"),
    ("...", lambda: ..., "object hashable"),
    ("NotImplemented", lambda: NotImplemented, "object hashable"),
    ("int", lambda: int, "class callable hashable"),
    ("Hostile", lambda: Hostile, "class callable hashable"),
    ("a function", lambda: lambda *_: 5, "function callable hashable"),
    ("a function that raises", lambda: _raises, "function callable hashable"),
    ("a generator function", lambda: _generator, "generator_function callable hashable"),
    ("a generator", _generator, "one_hashable generator ints hashable"),
    ("a range", lambda: range(2), "ints seq range hashable"),
    ("a module", lambda: np, "module object hashable"),
    ("a dtype", lambda: np.dtype("float32"), "dtype hashable"),
    ("an exception", lambda: ValueError("x"), "exception object hashable"),
    ("numpy int32[3]", lambda: np.arange(3, dtype=np.int32), "array ints numpy leaf"),
    ("numpy float32[8]", lambda: np.ones(8, np.float32), "array numpy leaf"),
    ("numpy float32[2,2]", lambda: np.ones((2, 2), np.float32), "array numpy leaf"),
    ("numpy int32[]", lambda: np.array(3, np.int32), "array scalar_array numpy leaf"),
    ("numpy bool[2]", lambda: np.array([True, False]), "array numpy leaf"),
    ("numpy str[2]", lambda: np.array(["a", "b"]), "strs numpy str_array"),
    ("numpy object[2]", lambda: np.array([None, "a"], object), "numpy object_array"),
    ("numpy float32[0]", lambda: np.ones(0, np.float32), "array numpy leaf empty_array empty_seq"),
    ("numpy datetime64", lambda: np.datetime64("2020-01-01"), "datetime hashable"),
    ("jax float32[8]", lambda: jnp.arange(8.0), "array jax leaf"),
    ("jax int32[]", lambda: jnp.asarray(3), "array scalar_array jax leaf"),
    ("jax bool[2]", lambda: jnp.asarray([True, False]), "array jax leaf"),
    ("a key", lambda: jax.random.key(0), "array jax key leaf"),
    ("a deleted array", _deleted, "array jax deleted"),
    ("a mesh", _mesh, "mesh callable hashable"),
    ("jax's mesh", lambda: jax.sharding.Mesh(np.array(jax.devices()[:2]), "x"), "mesh callable hashable"),
    ("an Explicit mesh", lambda: jax.make_mesh((2,), ("x",), (AxisType.Explicit,)), "mesh callable explicit hashable"),
    ("an empty mesh", lambda: jax.sharding.Mesh(np.empty((), object), ()), "empty_mesh callable hashable"),
    ("an abstract mesh", lambda: AbstractMesh((2, 2), ("x", "y")), "abstract_mesh hashable"),
    ("P('x')", lambda: P("x"), "one_hashable spec pspec tree hashable strs x"),
    ("P()", lambda: P(), "spec pspec tree hashable empty empty_seq strs"),
    ("P(5)", lambda: P(5), "one_hashable spec pspec tree ints hashable"),
    ("P(None, 'q')", lambda: P(None, "q"), "spec pspec tree unknown_axis hashable"),
    ("P(['x'], None)", lambda: P(["x"], None), "spec pspec tree hashable"),
    ("P(UNCONSTRAINED)", lambda: P(P.UNCONSTRAINED), "one_hashable unconstrained_pspec hashable"),
    ("a NamedSharding", lambda: NamedSharding(_mesh(), P("x")), "spec sharding named_sharding tree hashable"),
    (
        "a SingleDeviceSharding",
        lambda: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        "sharding single_sharding hashable",
    ),
    ("UNSPECIFIED", lambda: partjit.UNSPECIFIED, "unspecified hashable"),
    ("FROM_ARRAY", lambda: partjit.FROM_ARRAY, "from_array hashable"),
    ("a device", lambda: jax.devices()[1], "device hashable"),
    ("devices", lambda: jax.devices()[:2], "devices list seq"),
    ("a device twice", lambda: jax.devices()[:1] * 2, "same_devices list seq"),
    ("an array of devices", lambda: np.array(jax.devices()[:2]), "devices numpy object_array"),
    ("a struct", lambda: jax.ShapeDtypeStruct((8,), np.float32), "struct hashable"),
    ("a struct on a mesh", lambda: _struct_on_mesh(), "struct sharded_struct hashable"),
    ("a Stream", lambda: colocated.Stream(), "stream hashable"),
    ("a parsed spec", lambda: partjit.ParsedPartitionSpec(P("x"), (("x",),)), "one_hashable parsed hashable"),
    ("a function of pjit", lambda: partjit.pjit(lambda *_: 5), "callable pjit hashable"),
    ("a colocated function", lambda: colocated.colocated_python(lambda *_: None), "callable colocated hashable"),
]
BAD_VALUES = tuple(_bad(*row) for row in _NAMED)


def _struct_on_mesh() -> Any:
    return jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(_mesh(), P("x")))


_OF_ITEMS = {"int": "ints", "str": "strs", "x": "x", "device": "devices", "hashable": "one_hashable", "none": "nones"}
"""What a list of one value is, by what the value is."""


FORMS = ("list", "tuple", "dict")


def nested(bad: Bad, how: str) -> Bad:
    """A bad value in a tree, which is one of `FORMS`."""
    make = bad.make
    forms = {"list": lambda: [make()], "tuple": lambda: (make(),), "dict": lambda: {"a": make()}}
    kinds = {how, *(f"{kind}_inside" for kind in bad.kinds)}
    if how == "dict":
        kinds.add("str_dict" if "int" in bad.kinds else "dict")
    elif "negative" in bad.kinds:
        kinds |= {"negatives", "minus_one" if "minus_one" in bad.kinds else "negatives", "one_hashable"}
    else:
        kinds |= {of_items for kind, of_items in _OF_ITEMS.items() if kind in bad.kinds}
    return Bad(f"{bad.name} in a {how}", forms[how], frozenset(kinds))
