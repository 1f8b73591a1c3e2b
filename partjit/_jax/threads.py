"""jax's settings of one thread, applied in another."""

from jax._src import config
from jaxlib._jax.config import Config, unset

from partjit._jax.meshes import SET_MESH_STATES, EnteredMeshes


class ThreadSettings:
    """What jax keeps per thread, taken from one thread to be applied in another.

    That is what its settings' context managers set (`enable_x64`, `default_device`, transfer guards, ...), what
    `jax.set_mesh` set and the meshes entered. What belongs to a trace under way is left out.
    """

    __slots__ = ("_meshes", "_outer", "_outer_meshes", "_values")

    def __init__(self) -> None:
        # Nothing is set, as a rule, and this runs with every call.
        values = [get_local() for get_local in _get_local]
        self._values = (
            [(state, value) for state, value in zip(_thread_states, values, strict=True) if value is not unset]
            if values.count(unset) < len(values)
            else []
        )
        self._meshes = EnteredMeshes()

    # A generator would turn a StopIteration of the user's into another exception.
    def __enter__(self) -> None:
        """Applies them to this thread."""
        self._outer = [state.swap_local(value) for state, value in self._values]
        for state, value in self._values:
            _update_runtime(state, value)
        self._outer_meshes = self._meshes.enter()

    def __exit__(self, *_: object) -> None:
        self._meshes.leave(self._outer_meshes)
        for (state, _), value in zip(self._values, self._outer, strict=True):
            state.set_local(value)
            _update_runtime(state, None if value is unset else value)


def _update_runtime(state: Config, value: object) -> None:
    """Some settings are kept a second time by the runtime, per thread as well."""
    hook = getattr(state, "_update_thread_local_hook", None)
    if hook is not None:
        hook(value)


_found = [*vars(config).values(), *SET_MESH_STATES, *getattr(config, "config_states", {}).values()]
_thread_states = [*{id(state): state for state in _found if isinstance(state, Config)}.values()]
_get_local = [state.get_local for state in _thread_states]
