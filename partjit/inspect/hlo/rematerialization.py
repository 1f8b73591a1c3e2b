"""XLA's warning that it reshards an array by replicating it in full.

Most reshardings take a collective or two. Where the partitioner knows none, it gathers the whole array on every device
and slices it, an "involuntary full rematerialization", and logs a warning in C++ to standard error. Here that is caught
while a program is compiled.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from partjit._jax.compiling import no_compilation_cache, xla_warnings
from partjit.errors import UnrepresentableShardingError
from partjit.inspect.hlo.captured_stderr import take_lines
from partjit.inspect.hlo.resharding import resharding_path
from partjit.inspect.hlo.source_lines import tags_of
from partjit.inspect.hlo.text import parse_instruction, parse_module, type_bytes
from partjit.inspect.modules import module_of
from partjit.inspect.user_lines import Site
from partjit.opsharding import parse_op_sharding
from partjit.spec import ParsedPartitionSpec

__all__ = ["Rematerialization", "catch_rematerializations", "parse_rematerialization", "with_sites"]

_MESSAGE = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (?P<source>\{.*?\}) to "
    r"(?P<target>\{.*?\}) efficiently for HLO operation (?P<operation>.*)\. As the last resort, SPMD will replicate"
)
# The beginning of a line of XLA's log; the letter is the level.
_LEVEL = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """An array that is replicated in full, because the partitioner knows no other way to its next sharding.

    Attributes:
        name: of the instruction whose result it is.
        shape: its dtype and shape on a device, before: `f32[2,8]`.
        source, target: its shardings before and after, as XLA writes them.
        source_spec, target_spec: the same as specs on the mesh; None where no spec describes it.
        between: specs in between that avoid the rematerialization, if known: see `resharding_path`.
        total_bytes: of the replicated array, padding included; None if `source_spec` is.
        op_name: the name stack of the instruction.
        tags: the numbers of the equations that it comes from, outermost first.
        site: the user's line that it comes from, or None: see `with_sites`.
        frame_id: the number of its stack frame in the text of the program, or None.
        message: what XLA wrote.
    """

    name: str
    shape: str
    source: str
    target: str
    source_spec: ParsedPartitionSpec | None
    target_spec: ParsedPartitionSpec | None
    between: tuple[P, ...]
    total_bytes: int | None
    op_name: str
    tags: tuple[int, ...]
    site: Site | None
    frame_id: int | None
    message: str

    @property
    def module(self) -> str:
        """The path of the module that it comes from."""
        return module_of(self.op_name.rpartition("/")[0])

    @property
    def suggestion(self) -> str:
        """A remedy, in words."""
        size = "" if self.total_bytes is None else f" ({self.total_bytes} bytes)"
        route = f"from {_show(self.source_spec, self.source)} to {_show(self.target_spec, self.target)}"
        problem = f"{self.name} is replicated in full on every device{size} to be resharded {route}."
        if not self.between:
            return f"{problem} Use one sharding before and after, or keep axes on the dimensions they shard."
        specs = ", then ".join(str(ParsedPartitionSpec.from_user_input(spec, "between")) for spec in self.between)
        return f"{problem} Constrain it to {specs} in between: no shard is then larger than before or after."


@contextlib.contextmanager
def catch_rematerializations(mesh: Mesh | AbstractMesh) -> Iterator[list[Rematerialization]]:
    """Catches the warnings of XLA about programs that are compiled in the block, for this mesh.

    jax's persistent compilation cache is not read in the block, since XLA warns only about what it compiles. All other
    output is written when the block ends, also if it raises. XLA writes to a file descriptor that all threads share, so
    warnings about programs that other threads compile meanwhile are caught as well. If XLA's warnings are turned off,
    they are turned on for the block.

    Yields:
        A list, which is filled when the block ends; each warning once, in order.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import NamedSharding
        >>> from partjit import Mesh
        >>> mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
        >>> def fun(a):
        ...     a = jax.lax.with_sharding_constraint(jax.numpy.sin(a), NamedSharding(mesh, P(("y", "x"))))
        ...     return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(None, "y"))) * 2
        >>> with catch_rematerializations(mesh) as found:
        ...     compiled = jax.jit(fun).lower(jax.ShapeDtypeStruct((16, 8), "float32")).compile()
        >>> [(one.between, one.total_bytes) for one in found]
        [((P('y', None),), 512)]
    """
    found: list[Rematerialization] = []
    messages: set[str] = set()
    with no_compilation_cache(), xla_warnings() as level:

        def take(line: str) -> bool:
            one = parse_rematerialization(line, mesh)
            if one is None:
                logged = _LEVEL.match(line)
                return logged is not None and "IWEF".index(logged[1]) < level  # it would not have been logged otherwise
            if one.message not in messages:
                messages.add(one.message)
                found.append(one)
            return True

        with take_lines(take):
            yield found


def parse_rematerialization(line: str, mesh: Mesh | AbstractMesh) -> Rematerialization | None:
    """Parses a line of XLA's log about a program on this mesh; None if it is another message."""
    match = _MESSAGE.search(line)
    if match is None or (operation := parse_instruction(match["operation"])) is None:
        return None
    metadata = operation.metadata
    op_name, frame = metadata.get("op_name", ""), metadata.get("stack_frame_id", "")
    source_spec, target_spec = (_spec(match[which], mesh) for which in ("source", "target"))
    between: tuple[P, ...] = ()
    if source_spec is not None and target_spec is not None:
        between = resharding_path(source_spec.partitions, target_spec.partitions, mesh.shape)
    total_bytes = None
    if source_spec is not None:
        total_bytes = type_bytes(operation.type) * math.prod(mesh.shape[axis] for axis in source_spec.mesh_axes)
    return Rematerialization(
        name=operation.name,
        shape=operation.type.partition("{")[0],
        source=match["source"],
        target=match["target"],
        source_spec=source_spec,
        target_spec=target_spec,
        between=between,
        total_bytes=total_bytes,
        op_name=op_name,
        tags=tags_of(op_name),
        site=(metadata["source_file"], int(metadata.get("source_line", 0)), "") if "source_file" in metadata else None,
        frame_id=int(frame) if frame.isdigit() else None,
        message=line[match.start() :],
    )


def with_sites(found: Sequence[Rematerialization], hlo_text: str) -> list[Rematerialization]:
    """The warnings about one program with the user's lines, which `compiled.as_text()` has for their stack frames."""
    if not found:
        return []
    lines = parse_module(hlo_text).lines
    return [
        one
        if one.frame_id is None
        else dataclasses.replace(one, site=lines.lines({"stack_frame_id": str(one.frame_id)})[0] or one.site)
        for one in found
    ]


def _spec(text: str, mesh: Mesh | AbstractMesh) -> ParsedPartitionSpec | None:
    try:
        return parse_op_sharding(text, mesh)
    except UnrepresentableShardingError:
        return None


def _show(spec: ParsedPartitionSpec | None, text: str) -> str:
    return text if spec is None else str(spec)
