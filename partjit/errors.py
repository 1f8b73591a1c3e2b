"""The errors and warnings partjit raises, all in one place so that callers can catch them by name.

Every error of specs against values or a mesh is a `ShardingError`, hence a `ValueError`; a `MissingMeshError` is a
`RuntimeError` as well, as it was in the first `pjit`. An `UnrepresentableShardingError` is about a sharding of XLA's.
"""

__all__ = [
    "JournalError",
    "MemoryLimitError",
    "MeshChangedError",
    "MissingMeshError",
    "OtherProcessError",
    "ProgramsDifferError",
    "ReshardWarning",
    "ShardingError",
    "UnrepresentableShardingError",
    "WorkerDiedError",
]


class ShardingError(ValueError):
    """A spec, a mesh and a value do not fit together.

    The message lists *every* failure of the call, each with the key path of the argument, the spec as the user wrote
    it, what was expected and a remedy.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from partjit import Mesh, P, ShardingError, pjit
        >>> with Mesh(jax.devices()[:4], "x"):
        ...     try:
        ...         pjit(lambda v: v, in_axis_resources=P("x"))(jnp.arange(6.0))
        ...     except ShardingError as error:
        ...         print(str(error).splitlines()[0])
        A spec of <lambda> does not fit on the mesh (x=4):
    """


class MissingMeshError(ShardingError, RuntimeError):
    """A `PartitionSpec` names mesh axes, and no mesh is set to look them up in."""


class MeshChangedError(ShardingError, RuntimeError):
    """An inner `pjit` was traced under another mesh than the program it is part of."""


class UnrepresentableShardingError(ValueError, NotImplementedError):
    """No `PartitionSpec` on the mesh expresses an XLA sharding; the message says why.

    It is a `NotImplementedError` as well, as it was in the first `pjit`. See `partjit.opsharding.parse_op_sharding`.
    """


class WorkerDiedError(RuntimeError):
    """The worker process of a colocated function or object, with `isolate="process"`, ended before the call returned.

    The message says how the process ended, and where the call was made. The next call of a function starts another
    worker. The state of an object is lost: its next calls raise this as well.

    Example:
        >>> import os
        >>> from partjit import WorkerDiedError, colocated
        >>> f = colocated.colocated_python(lambda x: x if x > 0 else os._exit(3), isolate="process", mode="inline")
        >>> try:
        ...     f(-1.0)
        ... except WorkerDiedError as error:
        ...     print(error)
        the worker process of <lambda> (pid ...) exited with code 3 in the call made at ...
        >>> float(f(1.0))
        1.0
    """


class JournalError(RuntimeError):
    """A journal and what is asked of it do not fit together; see `partjit.colocated.journal`.

    Its files are damaged, or of something else; another process has it open; or a call differs from the one that it has
    in this place.
    """


class MemoryLimitError(ShardingError):
    """No specs were found with which a program fits into the memory of a device; see `partjit.search_specs`.

    The message says by how much it does not, and which arrays are in the way.
    """


class OtherProcessError(RuntimeError):
    """A program with colocated calls on the devices of several processes ended because another process cannot go on.

    The message names the process and says what happened there: the exception, the call, the line; a note has its
    traceback. In that process the exception itself was raised. The next program runs again on all of them, unless one
    has ended.
    """


class ProgramsDifferError(OtherProcessError):
    """The processes of a program are not at the same point of the same program; the message says where they differ."""


class ReshardWarning(UserWarning):
    """A committed array was resharded as its spec says. See `reshard_policy`."""
