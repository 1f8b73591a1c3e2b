"""Lowered programs as data, which another process compiles and runs as jax would in this one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax.extend.backend import get_backend
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partjit._jax.lowering import as_bytecode, from_bytecode

__all__ = ["LoadedComputation", "SavedComputation", "saved_computation"]


@dataclasses.dataclass(frozen=True, eq=False)
class SavedComputation:
    """A lowered program as data.

    Attributes:
        module: its module, as bytecode.
        options: jax's options of the compilation, as a serialized protocol buffer.
        devices: the ids of its devices, in its order.
        constants: the values that come before its arguments.
        kept: the positions of the constants and arguments that it uses.
    """

    module: bytes
    options: bytes
    devices: tuple[int, ...]
    constants: tuple[Any, ...]
    kept: tuple[int, ...]


def saved_computation(lowered: jax.stages.Lowered) -> SavedComputation | None:
    """A lowered program as data; None if it calls Python, or has refs, which another process does not have.

    Source: `UnloadedMeshExecutable.from_hlo` and `_cached_compilation` of jax.
    """
    computation: Any = lowered._lowering
    args = computation.compile_args
    if args["keepalive"] or args["host_callbacks"] or args["mut"] or args["ordered_effects"]:
        return None
    devices = np.array([*computation._device_list], dtype=object)
    propagated = pxla.get_prop_to_input_output(args["in_shardings"], args["out_shardings"], 0)
    module = computation.stablehlo()
    options = pxla.create_compile_options(
        module, args["tuple_args"], *propagated, args["backend"], devices, dict(computation._compiler_options_kvs)
    )
    return SavedComputation(
        as_bytecode(module),
        options.SerializeAsString(),
        tuple(device.id for device in devices),
        tuple(map(np.asarray, computation.const_args)),
        tuple(sorted(args["kept_var_idx"])),
    )


class LoadedComputation:
    """A saved program, compiled for CPU devices of this process.

    Raises:
        jax.errors.JaxRuntimeError: it cannot be compiled.
    """

    def __init__(self, saved: SavedComputation) -> None:
        """Compiles it."""
        self._kept = saved.kept
        backend: Any = get_backend("cpu")
        devices = {device.id: device for device in backend.devices()}
        own = [devices[number] for number in saved.devices]
        replicated = NamedSharding(Mesh(own, "all"), PartitionSpec())
        self._constants = [jax.device_put(value, replicated) for value in saved.constants]
        options = xla_client.CompileOptions.ParseFromString(saved.options)
        module: Any = from_bytecode(saved.module)
        with module.context:
            self._executable = compiler.backend_compile_and_load(
                backend, module, xla_client.DeviceList(tuple(own)), options, []
            )

    def run(self, arguments: Sequence[jax.Array]) -> object:
        """The results, per device, when they are there. Arguments that are donated are consumed."""
        given = [*self._constants, *arguments]
        results = self._executable.execute_sharded([given[k] for k in self._kept])
        return jax.block_until_ready(results.disassemble_into_single_device_arrays())
