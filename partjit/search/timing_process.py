"""A process that compiles programs and takes steps of them, so that a failed check of XLA ends it, not the user's.

It has as many CPU devices as the process that asks, and copies of the arguments.
"""

import dataclasses
import os
import pickle
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partjit._jax.saved_computations import LoadedComputation, SavedComputation
from partjit.inspect.kept_process import KeptProcess, answer_messages
from partjit.search.made_arguments import MadeArguments

__all__ = ["SavedStep", "TimingProcess", "serve"]

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from partjit.search.timing_process import serve; serve({file!r}, {devices})"
)
_DEVICE_COUNT_FLAG = re.compile(r"\s*--xla_force_host_platform_device_count=\S*")


@dataclasses.dataclass(frozen=True, eq=False)
class SavedStep:
    """A step as data.

    Attributes:
        computation: the lowered program.
        shape: of the mesh, the sizes of its axes by their names.
        specs: of the arguments.
    """

    computation: SavedComputation
    shape: tuple[tuple[str, int], ...]
    specs: tuple[PartitionSpec, ...]


class TimingProcess:
    """A process that takes steps, on these arguments each time. It ends with `close`, or with this object.

    Args:
        arguments: the values of the arguments, or structs of those that are to be made up.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        """Starts the process, without waiting for it."""
        folder = tempfile.mkdtemp(prefix="partjit-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        file, devices = os.path.join(folder, "arguments"), len(jax.devices("cpu"))
        flags = _DEVICE_COUNT_FLAG.sub("", os.environ.get("XLA_FLAGS", ""))  # jax refuses two numbers of devices
        self._process = KeptProcess(
            lambda path: _PROGRAM.format(path=path, file=file, devices=devices),
            {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "JAX_NUM_CPU_DEVICES": None, "XLA_FLAGS": flags or None},
        )
        self._process.start()  # it imports jax while the arguments are written
        with open(file, "wb") as opened:
            pickle.dump([*map(_as_data, arguments)], opened)

    def seconds(self, number: int, step: SavedStep) -> float:
        """How long a step with this number takes, which is compiled when it is first taken.

        Raises:
            ProcessEndedError: the process ended. The next step is taken by another one.
            jax.errors.JaxRuntimeError: it cannot be compiled or run.
        """
        answer = self._process.answer((number, None))
        return self._process.answer((number, step)) if answer is None else answer

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def _as_data(value: Any) -> tuple[tuple[int, ...], Any, Any]:
    """Shape, dtype and elements of an argument, the latter None if it is a struct; keys are the numbers in them."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        is_struct = isinstance(value, jax.ShapeDtypeStruct)
        value = jax.eval_shape(jax.random.key_data, value) if is_struct else jax.random.key_data(value)
    elements = None if isinstance(value, jax.ShapeDtypeStruct) else np.asarray(value)
    return value.shape, value.dtype, elements


def serve(path: str, devices: int) -> None:
    """The program of such a process.

    Args:
        path: of the file of arguments, which is there when the first step is to be taken.
        devices: the number of CPU devices.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    made: list[MadeArguments] = []
    known: dict[int, tuple[LoadedComputation, list[NamedSharding]]] = {}

    def seconds(message: tuple[int, SavedStep | None]) -> float | None:
        number, step = message
        if step is not None:
            known[number] = LoadedComputation(step.computation), _shardings(step)
        if number not in known:
            return None
        if not made:
            with open(path, "rb") as file:
                read = pickle.load(file)
            made.append(MadeArguments([(shape, dtype) for shape, dtype, _ in read], [value for *_, value in read]))
        computation, shardings = known[number]
        arguments = jax.block_until_ready(made[0].on(shardings))
        start = time.perf_counter()
        computation.run(arguments)
        return time.perf_counter() - start

    answer_messages(seconds)


def _shardings(step: SavedStep) -> list[NamedSharding]:
    own = {device.id: device for device in jax.devices()}
    devices = np.array([own[number] for number in step.computation.devices])
    names, sizes = zip(*step.shape, strict=True)
    mesh = Mesh(devices.reshape(sizes), names)
    return [NamedSharding(mesh, spec) for spec in step.specs]
