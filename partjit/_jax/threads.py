"""jax's settings of one thread, applied in another."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax._src import config
from jaxlib._jax.config import Config, unset

from partjit._jax.meshes import NO_MESHES, SET_MESH_STATES, EnteredMeshes, entered_meshes

_Result = TypeVar("_Result")


def has_64_bits() -> bool:
    """Whether `jax_enable_x64` is set here; the types of the public configuration do not have it."""
    return config.enable_x64.value


def with_64_bits() -> contextlib.AbstractContextManager[object]:
    """A context in which `jax_enable_x64` is set."""
    return config.enable_x64(True)


class ThreadSettings:
    """What jax keeps per thread, taken from one thread to be applied in another.

    That is what is set by the context managers of its settings (`enable_x64`, `default_device`, transfer guards, ...)
    and by `jax.set_mesh`, and the meshes entered. What belongs to a trace under way is left out.
    """

    __slots__ = ("_context", "_meshes", "_others")

    def __init__(self, context: tuple[object, ...], others: Sequence[object] | None, meshes: EnteredMeshes) -> None:
        self._context = context
        self._others = others
        self._meshes = meshes

    @staticmethod
    def here() -> "ThreadSettings":
        """Those of this thread."""
        global _last
        # This runs with every call, and asking all settings one by one would be half of what a call costs its caller.
        # Most of them are in a tuple that jax keeps for its caches.
        context = config.trace_context()
        others = [*map(_get_local, _others)]
        meshes = entered_meshes()
        if others != _none_of_others or meshes is not NO_MESHES:
            return ThreadSettings(context, others, meshes)
        if _last._context != context:  # of most calls they are those of the last one
            _last = ThreadSettings(context, None, NO_MESHES)
        return _last

    def are_here(self) -> bool:
        """Whether this thread has the same, at a glance: False may be wrong."""
        if self._others is not None or self._context != config.trace_context():
            return False
        return self._meshes is NO_MESHES is entered_meshes()

    def run(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Calls a function under them."""
        if self.are_here():
            return function(*args)
        missing = self._missing_here()
        outer = [(state, state.swap_local(value)) for state, value in missing]
        for state, value in missing:
            _update_runtime(state, value)
        outer_meshes = self._meshes.enter()
        try:
            return function(*args)
        finally:
            self._meshes.leave(outer_meshes)
            for state, value in outer:
                state.set_local(value)
                _update_runtime(state, None if value is unset else value)

    def _missing_here(self) -> list[tuple[Config, object]]:
        """The settings that this thread does not have, as a rule none."""
        missing: list[tuple[Config, object]] = []
        here = config.trace_context()
        if self._context != here:
            names = config.trace_context_names()
            missing += [
                (_states[name], value)
                for name, value, own in zip(names, self._context, here, strict=False)
                if value is not own and name in _states
            ]
        if self._others is not None:
            missing += [(s, v) for s, v in zip(_others, self._others, strict=True) if v is not unset]
        return missing


_last = ThreadSettings((), None, NO_MESHES)


def _update_runtime(state: Config, value: object) -> None:
    """Some settings are kept a second time by the runtime, per thread as well."""
    hook = getattr(state, "_update_thread_local_hook", None)
    if hook is not None:
        hook(value)


_found = [*vars(config).values(), *SET_MESH_STATES, *getattr(config, "config_states", {}).values()]
_states = {state.name: state for state in _found if isinstance(state, Config)}
# The other settings with a public context manager, and what `jax.set_mesh` sets.
_public = {state.name: state for state in (*vars(jax).values(), *SET_MESH_STATES) if isinstance(state, Config)}
_others = [state for name, state in _public.items() if name not in config.trace_context_names()]
_none_of_others = [unset for _ in _others]
_get_local = Config.get_local
