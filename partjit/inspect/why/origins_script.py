"""Shardy's propagation with the origins of shardings recorded, as a script for a subprocess.

The propagation can crash the process. The script reads a line of JSON and a module from standard input, and writes JSON
to standard output. It imports neither jax nor this package, so that it starts as fast as the MLIR bindings do.

The keys of the input:

* `path`: where to look for modules besides those of the interpreter.
* `bindings`, `passes`: the package of the bindings, and the module in it that registers passes.
* `dialects`: modules of dialects, each with the function in it that registers the dialect.
* `mark`: the call target of the marks, whose operands are the values in question and whose configuration numbers them.
* `tag`: the prefix of the number of an equation in a location.
* `without`: the names of operations to leave out.

The keys of the output:

* `values`: for each number and each axis that shards that value its origin: "input: 1", "output: 0", "constraint_2",
  "mc_0_input: 1" or "mc_0_output: 0".
* `names`: for each constraint and manual computation so named the equations in its location, the counts of its operands
  and results, and the numbers of its results.
"""

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeAlias

try:
    import resource
except ImportError:  # not on Windows
    resource = None

__all__: list[str] = []

_ORIGINS = ("sdy.sharding_origins", "sdy.result_sharding_origins")
_NAME = "sdy.sharding_origin_name"

# Objects of the bindings, which are imported when the script runs.
Module: TypeAlias = Any
Operation: TypeAlias = Any
Value: TypeAlias = Any


def _main() -> None:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the bindings print does not get into the output
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may well crash, and needs no core file
    request = json.loads(sys.stdin.buffer.readline())
    sys.path.extend(request["path"])  # after the interpreter's own, so that no module there hides one of these
    ir, passmanager = (importlib.import_module(f"{request['bindings']}.{name}") for name in ("ir", "passmanager"))
    registry = ir.DialectRegistry()
    importlib.import_module(f"{request['bindings']}.{request['passes']}").register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    for name, register in request["dialects"].items():
        getattr(importlib.import_module(f"{request['bindings']}.dialects.{name}"), register)(context)
    with context:
        module = ir.Module.parse(sys.stdin.buffer.read().decode())
        for op in [op for op in _nested(module.operation) if op.name in request["without"]]:
            op.erase()
        passes = [_recording(name) for name in _pipeline(passmanager)]
        deciding = next(i for i, name in enumerate(passes) if "apply-sharding-constraints" in name)
        propagation = next(i for i, name in enumerate(passes) if "propagate{" in name) + 1
        _run(passmanager, passes[:deciding], module)
        with _hidden_marks(ir, request["mark"], module):
            _run(passmanager, passes[deciding:propagation], module)
        # Later passes drop constraints that are satisfied, and their names with them.
        reader = _Reader(ir, request, module)
        names, opened = _names(reader, module), dict(reader.opened(module))
        _run(passmanager, passes[propagation:], module)
        values = dict(_Reader(ir, request, module).values(module))
        for origins in values.values():
            for axis in origins:
                seen = set()
                while origins[axis] in opened and origins[axis] not in seen:
                    seen.add(origins[axis])
                    origins[axis] = opened[origins[axis]].get(axis, origins[axis])
        output.write(json.dumps({"values": values, "names": names}))
    output.close()


def _pipeline(passmanager: ModuleType) -> Iterator[str]:
    """The passes of the propagation, one after another."""
    text = str(passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)"))
    depth, start = 0, 0
    inner = text.removeprefix("builtin.module(").removesuffix(")")
    for at, character in enumerate(f"{inner},"):
        depth += (character in "({") - (character in ")}")
        if character == "," and not depth:
            yield inner[start:at]
            start = at + 1


def _recording(name: str) -> str:
    """A pass with the recording of origins turned on, if it has that option."""
    return re.sub(r"(user-priority-propagate.*|sink-)(debug-sharding-origins=)false", r"\1\2true", name)


def _run(passmanager: ModuleType, passes: list[str], module: Module) -> None:
    kept = [name for name in passes if "sdy-save-module" not in name]  # it saves a copy after every pass, for debugging
    manager = passmanager.PassManager.parse(f"builtin.module({','.join(kept)})")
    manager.enable_verifier(False)
    manager.run(module.operation)


@contextlib.contextmanager
def _hidden_marks(ir: ModuleType, target: str, module: Module) -> Iterator[None]:
    """In which marks use nothing, as a use decides where Shardy propagates first."""
    marks = [op for op in _nested(module.operation) if _is_mark(op, target) and len(op.operands)]
    hidden, scalars = [], []
    for op in marks:
        with ir.InsertionPoint(op), ir.Location.unknown():
            number = ir.FloatAttr.get_f32(0.0)
            value = ir.DenseElementsAttr.get_splat(ir.RankedTensorType.get((), number.type), number)
            scalars.append(ir.Operation.create("stablehlo.constant", [value.type], attributes={"value": value}))
        for k, value in enumerate([*op.operands]):
            hidden.append((op, k, value))
            op.operands[k] = scalars[-1].results[0]
    unused: set[Operation] = set()  # which would be removed
    for op in reversed([*_nested(module.operation)]):
        is_pure = len(op.results) and not len(op.regions) and op.name != "stablehlo.custom_call"
        if is_pure and all(use.owner.operation in unused for result in op.results for use in result.uses):
            unused.add(op)
    later = []
    for op, k, value in hidden:
        if not isinstance(value.owner, ir.Block) and value.owner.operation in unused:
            op.operands[k] = value
        else:
            later.append((op, k, value))
    yield
    for op, k, value in later:
        op.operands[k] = value


def _is_mark(op: Operation, target: str) -> bool:
    return op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == target


def _names(reader: "_Reader", module: Module) -> dict[str, dict[str, Any]]:
    names = {}
    constrained: dict[Value, str] = {}
    for op in _nested(module.operation):
        if _NAME in op.attributes:
            if op.name == "sdy.sharding_constraint":
                constrained[op.operands[0]] = op.attributes[_NAME].value
            names[op.attributes[_NAME].value] = {
                "tags": reader.tags(op),
                "operands": len(op.operands),
                "results": len(op.results),
                "numbers": [],
            }
    for number, value in reader.marked(module):
        if not reader.is_argument(value) and _NAME in value.owner.attributes:
            names[value.owner.attributes[_NAME].value]["numbers"].append(number)
        elif value in constrained:  # at once, as the one value that it is in the program
            names[constrained[value]]["numbers"].append(number)
    return names


class _Reader:
    """Reads the origins in a module."""

    def __init__(self, ir: ModuleType, request: dict[str, str], module: Module) -> None:
        self._ir = ir
        self._sdy = importlib.import_module(f"{request['bindings']}.dialects.sdy")
        self._mark = request["mark"]
        self._tag = re.compile(rf"{re.escape(request['tag'])}(\d+)")
        self._functions = {
            op.operation.attributes["sym_name"].value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        self._calls = {op.attributes["callee"].value: op for op in _nested(module.operation) if op.name == "func.call"}

    def tags(self, op: Operation) -> list[int]:
        """The numbers of the equations in the location of an operation."""
        return [int(number) for number in self._tag.findall(str(op.location))]

    def marked(self, module: Module) -> Iterator[tuple[int, Value]]:
        """The operands of marks, with their numbers."""
        for op in _nested(module.operation):
            if _is_mark(op, self._mark):
                numbers = map(int, re.findall(r"\d+", op.attributes["backend_config"].value))
                yield from zip(numbers, op.operands, strict=True)

    def opened(self, module: Module) -> Iterator[tuple[str, dict[str, str]]]:
        """The names of constraints that leave all dimensions open, and the origins of what is constrained.

        They request nothing, but Shardy reports them as the origins of the shardings that pass through them, even of
        those of arguments.
        """
        for op in _nested(module.operation):
            if op.name == "sdy.sharding_constraint" and _NAME in op.attributes:
                dims = self._sdy.TensorShardingAttr(op.attributes["sharding"]).dimension_shardings
                if not any(self._sdy.DimensionShardingAttr(dim).is_closed for dim in dims):
                    name, value = op.attributes[_NAME].value, op.operands[0]
                    origins = self.of(value)
                    if self.is_argument(value) and value.owner.owner.operation.name == "func.func":
                        origins = dict.fromkeys(origins, f"input: {self._ir.BlockArgument(value).arg_number}")
                    yield name, origins

    def values(self, module: Module) -> Iterator[tuple[int, dict[str, str]]]:
        """For each number the origins of its value."""
        for number, value in self.marked(module):
            yield number, self.of(value)

    def is_argument(self, value: Value) -> bool:
        """Whether a value is an argument of a block, and no result of an operation."""
        return isinstance(value.owner, self._ir.Block)

    def of(self, value: Value) -> dict[str, str]:
        """The origins of a value: for each axis a name."""
        owner = value.owner
        if self.is_argument(value):
            return self._of_argument(owner.owner.operation, self._ir.BlockArgument(value).arg_number)
        k = self._ir.OpResult(value).result_number
        if owner.name == "func.call":  # with jax 0.10 only the operations in the function have origins
            (block,) = self._functions[owner.attributes["callee"].value].regions[0]
            return self.of([*block][-1].operands[k])
        found = next((owner.attributes[key] for key in _ORIGINS if key in owner.attributes), None)
        name = owner.attributes[_NAME].value if _NAME in owner.attributes else ""
        itself = f"{name}_output: {k}" if owner.name == "sdy.manual_computation" else name
        return {} if found is None else self._read(owner, found, k, itself)

    def _of_argument(self, op: Operation, k: int) -> dict[str, str]:
        if op.name == "func.func":
            name = op.attributes["sym_name"].value
            if name in self._calls:
                return self.of(self._calls[name].operands[k])
            attributes = op.attributes["arg_attrs"][k] if "arg_attrs" in op.attributes else {}
            return self._read(op, attributes[_ORIGINS[0]], 0, f"input: {k}") if _ORIGINS[0] in attributes else {}
        if op.name == "sdy.manual_computation":
            name = op.attributes[_NAME].value if _NAME in op.attributes else ""
            found = "sdy.block_arg_sharding_origins"
            return self._read(op, op.attributes[found], k, f"{name}_input: {k}") if found in op.attributes else {}
        # A carried value is sharded in the body as the result of the loop is.
        found = next((op.attributes[key] for key in _ORIGINS if key in op.attributes), None)
        return {} if found is None or k >= len(op.results) else self._read(op, found, k, "")

    def _read(self, op: Operation, origins: Any, k: int, itself: str) -> dict[str, str]:
        """The origins of the value `k`, with `itself` for "self"."""
        if isinstance(origins, self._ir.ArrayAttr):
            if len(origins) != max(len(op.results), 1) and op.name != "sdy.manual_computation":
                # jax 0.10 leaves out those of unsharded values.
                sharded = [i for i in range(len(op.results)) if self._is_sharded(op, i)]
                k = sharded.index(k) if len(sharded) == len(origins) and k in sharded else len(origins)
            if k >= len(origins):
                return {}
            origins = origins[k]
        found = {named.name: named.attr.value for named in origins}
        return {axis: itself if name == "self" else name for axis, name in found.items()}

    def _is_sharded(self, op: Operation, k: int) -> bool:
        if "sdy.sharding" not in op.attributes:
            return False
        sharding = self._sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings[k]
        dimensions = self._sdy.TensorShardingAttr(sharding).dimension_shardings
        return any(len(self._sdy.DimensionShardingAttr(dimension).axes) for dimension in dimensions)


def _nested(op: Operation) -> Iterator[Operation]:
    """The operations in the regions of an operation, at any depth."""
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _nested(inner.operation)


if __name__ == "__main__":
    _main()
