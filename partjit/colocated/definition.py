"""The definition of a colocated function: what runs, with which options."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence

import jax

from partjit._jax.types import PyTree, PyTreeDef
from partjit.arguments import code_of
from partjit.colocated.options import Options
from partjit.colocated.runtime.call import Lane
from partjit.colocated.runtime.failures import Site
from partjit.colocated.runtime.history import History
from partjit.colocated.runtime.one_by_one import Examples
from partjit.colocated.runtime.run_ahead import RunAhead
from partjit.host_objects import has_objects
from partjit.signatures import misfit

__all__ = ["Definition", "HostFunction", "options_of_calls", "site_of_definition"]


@dataclasses.dataclass(frozen=True, eq=False)
class HostFunction:
    """A function that runs on hosts.

    Attributes:
        name: what it is called in messages.
        signature: its parameters, if they are known; of what it wraps, if it is a wrapper.
        takes: the parameters that it is itself called with, if they are known.
        load: returns the callable that runs on this host; called once per specialization, by its first call.
        defined_at: where it is in the user's code, for calls of which no line is known.
        lane: orders its calls in addition to their stream, if it is the method of an object.
        history: what its calls see of those made ahead, if it is the method of an object.
        shows_state: whether it is the method that returns the state of the object.
        others_use_jax: whether other methods of the object may use jax.
        reference: how to rebuild the colocated function elsewhere if copying its callable is not enough: a function and
            its leading arguments; the callable and the options follow.
        examples: those of the batch that it is called with; None if it gets the arguments as they are.
    """

    name: str
    signature: inspect.Signature | None
    takes: inspect.Signature | None
    load: Callable[[], Callable[..., PyTree]]
    defined_at: Site
    lane: Lane | None = None
    history: History | None = None
    shows_state: bool = False
    others_use_jax: bool = False
    reference: tuple[Callable[..., object], tuple[object, ...]] | None = None
    examples: Examples | None = None

    @property
    def says_that_it_returns_nothing(self) -> bool:
        """Whether its result is annotated, `-> None`; a string where annotations are not evaluated."""
        return self.signature is not None and self.signature.return_annotation in (None, "None")


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """A host function with its options.

    Attributes:
        function: what runs.
        options: the options of its calls.
        ahead: the calls made before their results are requested; None without `run_ahead`.
    """

    function: HostFunction
    options: Options
    ahead: RunAhead | None = None

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return self.function.name

    def check_arguments(
        self, paths: Sequence[str], tree: PyTreeDef, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> None:
        """Checks a call before it is made, which may be much later and somewhere else.

        Args:
            paths, tree: those of the arguments.
            args, kwargs: the arguments.

        Raises:
            ValueError: the options are for calls with arguments and there are none, or the other way round.
            TypeError: the function does not take these arguments.
        """
        options = self.options
        if options.run_ahead and (paths or has_objects(tree)):
            raise ValueError(
                f"run_ahead={options.run_ahead} lets calls of {self.name} be made before their results are requested, "
                "which can only be done with calls that have no arguments; this one has "
                f"{', '.join(paths) or 'objects'}"
            )
        if options.run_ahead and options.mode == "inline":
            raise ValueError(f"run_ahead={options.run_ahead} needs a thread, but {self.name} has mode='inline'")
        if options.layout == "per_shard" and not paths:
            raise ValueError(
                f"layout='per_shard' calls {self.name} with the shards of its arguments, and there are none"
            )
        for path, leaf in zip(paths, jax.tree.leaves((args, kwargs)), strict=True):
            if options.takes_numpy and jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
                raise ValueError(
                    f"{path} of {self.name} is {jax.typeof(leaf).str_short()}, and NumPy has no typed keys: pass "
                    "jax.random.key_data of it, or leave out arrays='numpy' and uses_jax=False"
                )
        problem = misfit(self.name, self.function.takes, args, kwargs)
        if problem is not None:
            raise TypeError(problem)


def options_of_calls(function: HostFunction, options: Options) -> Options:
    """The options of a function's calls: if it is annotated to return nothing, and no specs are given, these say so."""
    if options.has_out_specs or not function.says_that_it_returns_nothing:
        return options
    return dataclasses.replace(options, out_specs_fn=_nothing)


def _nothing(*_: object, **__: object) -> None:
    return None


def site_of_definition(fun: Callable[..., PyTree], name: str) -> Site:
    """Where a function is in the user's code: for calls that nothing but jax makes, which has no line of theirs.

    Args:
        fun: the function.
        name: what it is called in messages.
    """
    code = code_of(fun)
    return ("<unknown>", 0, name) if code is None else (code.co_filename, code.co_firstlineno, code.co_name)
