"""Random programs with loops, branches, derivatives and batches around colocated calls, as data.

A program is a list of steps over a growing list of values: `i` a small integer, `m` a matrix, `s` a scalar, `b`, `u`,
`e`, `h` and `c` an integer as another type (`OTHERS`), and `m*3` what a loop of three turns has stacked. The steps of a
loop, of a branch or of a function that is differentiated see the values so far, and after them their own.
"""

import dataclasses
import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from partjit import P
from tests import census

# Each is compiled, so there are fewer than of other things; the soak profile draws as many as it says.
EXAMPLES = 20 if settings().max_examples <= 100 else settings().max_examples
SHAPE = (8, 4)
SPECS = [P(), P("x"), P("x", "y"), P(None, "y"), P("y", "x")]
OTHERS = {
    "b": ((), "bool"),
    "u": ((2,), "uint8"),
    "e": ((0, 4), "int16"),
    "h": ((3, 2), "bfloat16"),
    "c": ((2,), "complex64"),
}
"""Of which shapes and types the arrays are that an integer is cast to: the third has no elements."""
KINDS = {"m": (SHAPE, "float32"), "s": ((), "float32"), "i": ((), "int32"), **OTHERS}
INTEGERS = ("i", *OTHERS)
RULED = ("matrix", "scalar", "both")
BACKWARD = 1000
"""What the number of a backward call is more than that of its call."""


@dataclasses.dataclass(frozen=True)
class Device:
    """An operation on the devices: `op` of the values at `args`."""

    op: str
    args: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that is known when the program is traced.

    Attributes:
        kind: of which kind it is.
        form: "numpy" for an array or a number of NumPy, "jax" for an array, "weak" for a weakly typed one.
        value: each of its elements.
    """

    kind: str
    form: str
    value: float


@dataclasses.dataclass(frozen=True)
class Call:
    """A colocated call.

    Attributes:
        number: tells it apart.
        args, arg_kinds: the values it gets, and of which kinds they are.
        result: "matrix", "scalar", "none", "both" for a matrix and a scalar, "integer", "same" for its first argument.
        form: how it gets them: "each", "by keyword", "in a tree", or "beside a tag" that is no array.
        gets: as what the function gets arrays: "jax", "numpy", or "no jax" if it does not use jax either.
        stream: a name, or None for the caller's.
        of: the object whose method it is, or None for a function.
        pure: whether it has no effect.
        does: what the function does besides: "nothing", "sleep", "jit" or "pjit" over all devices, a "call" of another.
        is_decorated: whether the function is one that `functools.wraps` another.
        mode: as in `specialize`.
        in_spec: where its first argument is wanted, if that is said.
        out_spec: where its first result is, if that is said.
        rule: "vjp on devices", "vjp on hosts", "jvp" or None.
        is_stopped: whether it is called with `stop_gradient` of its arguments.
        vmap_method: as in `specialize`.
    """

    number: int
    args: tuple[int, ...]
    arg_kinds: tuple[str, ...]
    result: str
    form: str
    gets: str
    stream: str | None
    of: int | None
    pure: bool
    does: str
    is_decorated: bool
    mode: str | None
    in_spec: Any
    out_spec: Any
    rule: str | None
    is_stopped: bool
    vmap_method: str | None


@dataclasses.dataclass(frozen=True)
class Nested:
    """A nested function over all values so far, which adds the value at `out` of its own."""

    wrapper: str
    steps: tuple
    out: int


@dataclasses.dataclass(frozen=True)
class Scan:
    """A `lax.scan`, which adds its last carries and what it stacked.

    Attributes:
        length: its turns.
        init: the values that its carries begin with; they are the first of its own.
        xs: per array that it goes over: a value that is stacked, or one that is spread.
        steps: its body.
        carry, ys: what the body gives.
        y_kinds: of which kinds `ys` are.
        is_reverse, unroll: as in `lax.scan`.
        anchor: where it is differentiated, a value with a tangent, so that all carries have one from the first turn on.
    """

    length: int
    init: tuple[int, ...]
    xs: tuple[int, ...]
    steps: tuple
    carry: tuple[int, ...]
    ys: tuple[int, ...]
    y_kinds: tuple[str, ...]
    is_reverse: bool
    unroll: int
    anchor: int | None


@dataclasses.dataclass(frozen=True)
class Fori:
    """A `lax.fori_loop` from `lower` to `upper`, or to the value at `traced`; its turn is its first own value."""

    lower: int
    upper: int
    traced: int | None
    init: tuple[int, ...]
    steps: tuple
    carry: tuple[int, ...]
    anchor: int | None


@dataclasses.dataclass(frozen=True)
class While:
    """A `lax.while_loop` of at most `most` turns, which ends when the scalar `watched` of its predicate is large."""

    most: int
    init: tuple[int, ...]
    predicate: tuple
    watched: int | None
    steps: tuple
    carry: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Branch:
    """A `lax.cond` (of two) or `lax.switch` on the value at `on`; the branches give the values at their `outs`."""

    on: int
    by: str
    branches: tuple[tuple, ...]
    outs: tuple[tuple[int, ...], ...]
    anchor: int | None


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of the value at `of` of the steps, with respect to the values at `wrt`.

    "grad" adds the gradients, "value_and_grad" the value as well, "jvp" the value and its tangent. In a batch,
    `is_batched`, those that are zero are made to depend on the example as well.
    """

    way: str
    wrt: tuple[int, ...]
    steps: tuple
    of: int
    is_batched: bool


@dataclasses.dataclass(frozen=True)
class Vmap:
    """A `jax.vmap` over `size` variants of all values but integers, which adds the means of the values at `outs`."""

    size: int
    steps: tuple
    outs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """Steps over an integer, two matrices and a scalar; `results` are the values that it returns.

    If it is `without_jax` the functions are of NumPy, and those of one stream as a rule, so that executables wait for
    them; but for some without results, which are on another one. It is called three times: with so many `turns`, with
    its matrices `transposed` in memory or not, with the types of 64 bits or without (`x64`), and with arrays of "jax"
    or "numpy", or with numbers of "python" besides. The third time is as the first but that results are arguments:
    `fed` are pairs of their positions.
    """

    steps: tuple
    kinds: tuple[str, ...]
    results: tuple[int, ...]
    out_specs: tuple
    donated: bool
    worth_a_dispatch: float
    emits: bool
    without_jax: bool
    turns: tuple[int, ...]
    devices: int
    at_once: int
    work_until_return: float
    transposed: tuple[bool, ...]
    x64: tuple[bool, ...]
    passed: tuple[str, ...]
    fed: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where steps stand: how deep they may nest, what is done with them, and whether the first of them is a call."""

    depth: int
    derivative: str | None = None
    anchor: int | None = None
    is_batched: bool = False
    calls_first: bool = False

    def deeper(self, **changes: Any) -> "_Place":
        return dataclasses.replace(self, depth=self.depth - 1, **changes)


class _Steps:
    """Draws steps, which extend `kinds` as they go."""

    def __init__(self, draw: Any, without: tuple[str, ...], without_jax: bool = False) -> None:
        self.draw = draw
        self.without_jax = without_jax
        self.numbers = itertools.count()
        self.without = without

    def one_of(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def pick(self, kinds: list[str], *wanted: str, since: int = 0) -> int:
        """A value of such a kind, rather one of the last."""
        found = [i for i, kind in enumerate(kinds) if kind in wanted]
        return self.one_of(*(found[-3:] + found[:1]) if since == 0 else [i for i in found if i >= since] or found)

    def picks(self, kinds: list[str], *wanted: str, least: int, most: int) -> tuple[int, ...]:
        return tuple(self.pick(kinds, *wanted) for _ in range(self.draw(st.integers(least, most))))

    def steps(self, kinds: list[str], place: _Place, most: int, least: int = 1) -> tuple:
        made = []
        if place.calls_first:
            place = dataclasses.replace(place, calls_first=False)
            made.append(self._call(kinds, place, stream=None if self.without_jax else "b", pure=False))
            if self.without_jax and "scan" not in self.without and self.one_of(True, False):  # beside that one
                logs = {"stream": "a", "gets": "jax", "of": None, "mode": None, "pure": False}
                made.append(self._call(kinds, place, "none", **logs))
        for _ in range(self.draw(st.integers(max(least - len(made), 0), max(most - len(made), 0)))):
            options = ["device", "device", "call", "call"]
            options += [] if place.is_batched else ["constant"]  # for a call of constants is no batch of calls
            if place.depth:
                options += ["scan", "scan", "fori", "while", "branch", "branch", "nested"]
                options += [] if place.derivative else ["derivative", "derivative"]
                options += [] if place.is_batched or place.derivative else ["vmap"]
                if place.derivative == "reverse":
                    options.remove("while")
            what = self.one_of(*(option for option in options if option not in self.without))
            made.append(getattr(self, f"_{what}")(kinds, place))
        return tuple(made)

    def _device(self, kinds: list[str], place: _Place) -> Device:
        stacked = [kind for kind in kinds if "*" in kind]
        op = self.one_of("mean", "sine", "matmul", "constrain", "relu", "sum", "scale", *["collapse"] * bool(stacked))
        op = self.one_of(op, op, op, "next", *OTHERS, *["count"] * any(kind in OTHERS for kind in kinds))
        if op == "next" or op in OTHERS:
            args: tuple[int, ...] = (self.pick(kinds, "i"),)
        elif op == "count":
            args = (self.pick(kinds, *OTHERS),)
        elif op == "collapse":
            args = (self.pick(kinds, *stacked),)
        elif op == "scale":
            args = (self.pick(kinds, "m"), self.pick(kinds, "s"))
        else:
            args = (self.pick(kinds, "m"),) * (1 if op in ("constrain", "relu", "sum", "sine") else 2)
            args = (*args[:-1], self.pick(kinds, "m"))
        kinds.append(
            {"next": "i", "count": "i", "sum": "s", "collapse": kinds[args[0]][0]}.get(op, op if op in OTHERS else "m")
        )
        return Device(op, args)

    def _constant(self, kinds: list[str], place: _Place) -> Constant:
        kind = self.one_of("s", "i", "m")
        form = self.one_of("numpy", "jax", *["weak"] * (kind != "m"))
        kinds.append(kind)
        return Constant(kind, form, len(kinds) % 3 if kind == "i" else len(kinds) % 8 / 8)

    def about(self, what: str, kinds: list[str], place: _Place, most: int) -> tuple:
        """Steps of which one is such, with a call within it, between calls whose order is not that of their data.

        One call on a stream waits for a call on another stream; a later one has all it needs from the beginning, and
        no results.
        """
        effect = {"of": None, "pure": False}
        late = len(kinds)
        streams = (None, None) if self.without_jax else ("a", "b")
        first = self._call(kinds, place, "matrix", stream=streams[0], **effect)
        second = self._call(kinds, place, stream=streams[1], args=(late,), arg_kinds=("m",), **effect)
        one = getattr(self, f"_{what}")(kinds, dataclasses.replace(place, calls_first=True))
        last = self._call(kinds, place, "none", stream=streams[1], args=(1,), arg_kinds=("m",), **effect)
        return (first, second, one, last, *self.steps(kinds, place, most, 0))

    def _call(self, kinds: list[str], place: _Place, result: str | None = None, **given: Any) -> Call:
        of_integers = [] if place.is_batched else ["integer"]  # of a batch it would be one as well
        result = result or self.one_of("matrix", "matrix", "scalar", "none", "both", "same", *of_integers)
        rules = {"reverse": [None, "vjp on devices", "vjp on hosts", "jvp"], "forward": [None, "jvp"]}
        rule = self.one_of(*rules.get(place.derivative or "", [None])) if result in RULED else None
        rule = None if "rule" in self.without else rule
        wanted = ("m", "m", "s") if place.is_batched or rule else ("m", "m", "s", *INTEGERS)
        args = self.picks(kinds, *wanted, least=1 if place.is_batched or rule or result == "same" else 0, most=2)
        of = None if rule else self.one_of(None, None, 0, int(not self.without_jax))
        form = self.one_of("each", "each", "by keyword", "in a tree", "beside a tag") if not rule else "each"
        gets = "no jax" if self.without_jax else self.one_of("jax", "jax", "numpy", "no jax")
        made = Call(
            number=next(self.numbers),
            args=args,
            arg_kinds=tuple(kinds[i] for i in args),
            result=result,
            form=form,
            gets=gets,
            stream=self.one_of(None, *(("a", "b", None) if not self.without_jax else ())),
            of=of,
            pure=of is None and self.one_of(False, False, False, True),
            does=self.one_of(
                "nothing",
                "nothing",
                "nothing",
                "nothing",
                "sleep",
                *([] if gets == "no jax" else ["jit", "pjit", "call"]),
            ),
            is_decorated=self.one_of(False, False, True),
            mode=self.one_of(None, None, None, *([] if self.without_jax else ["stream"]), "inline"),
            in_spec=self.one_of(None, None, *SPECS) if form == "each" and self._says(kinds, args[:1], place) else None,
            out_spec=self.one_of(None, None, *SPECS) if result in ("matrix", "both") and not place.is_batched else None,
            rule=rule,
            is_stopped=place.derivative is not None and rule is None and result != "none",
            vmap_method=self.one_of("sequential", "expand_dims", "broadcast_all") if place.is_batched else None,
        )
        made = dataclasses.replace(made, **given)
        kinds += result_kinds(made)
        return made

    @staticmethod
    def _says(kinds: list[str], first: tuple[int, ...], place: _Place) -> bool:
        return bool(first) and kinds[first[0]] == "m" and not place.is_batched

    def _nested(self, kinds: list[str], place: _Place) -> Nested:
        wrappers = ["pjit", "pjit on x", "jit", "checkpoint", "custom_jvp", "custom_vjp"]
        wrapper = self.one_of(*(one for one in wrappers if one not in self.without))
        if place.derivative == "forward" and wrapper == "custom_vjp":
            wrapper = "jit"
        # What the rules of a function call is not differentiated itself.
        derivative = None if wrapper.startswith("custom") else place.derivative
        inner = [*kinds]
        steps = self.steps(inner, place.deeper(derivative=derivative or (place.derivative and "no")), 2)
        out = self.pick(inner, "m", since=len(kinds)) if wrapper == "pjit on x" else self.pick(inner, "m", "s")
        kinds.append(inner[out])
        return Nested(wrapper, steps, out)

    def _scan(self, kinds: list[str], place: _Place) -> Scan:
        length = self.one_of(3, 3, 1, 2, *([] if "zero" in self.without else [0]))
        init = self.picks(kinds, "m", "m", "s", *INTEGERS, least=0, most=2)
        xs = self.picks(kinds, "m", "s", f"m*{length}", f"s*{length}", least=0, most=2)
        inner = [*kinds, *(kinds[i] for i in init), *(kinds[i][0] for i in xs)]
        steps = self.steps(inner, place.deeper(), 3)
        carry = tuple(self.pick(inner, kinds[i], since=len(kinds)) for i in init)
        ys = self.picks(inner, "m", "s", least=0, most=2)
        kinds += [kinds[i] for i in init] + [f"{inner[i]}*{length}" for i in ys]
        y_kinds = tuple(inner[i] for i in ys)
        is_reverse, unroll = self.one_of(False, True), self.one_of(1, 1, 1, 2, 3)
        return Scan(length, init, xs, steps, carry, ys, y_kinds, is_reverse, unroll, place.anchor)

    def _fori(self, kinds: list[str], place: _Place) -> Fori:
        lower = self.one_of(0, 1)
        traced = None if place.derivative == "reverse" else self.one_of(None, self.pick(kinds, "i"))
        init = self.picks(kinds, "m", "m", "s", *INTEGERS, least=1, most=2)
        inner = [*kinds, "i", *(kinds[i] for i in init)]
        steps = self.steps(inner, place.deeper(), 3)
        carry = tuple(self.pick(inner, kinds[i], since=len(kinds) + 1) for i in init)
        kinds += [kinds[i] for i in init]
        return Fori(lower, self.one_of(4, 0, 1, 2), traced, init, steps, carry, place.anchor)

    def _while(self, kinds: list[str], place: _Place) -> While:
        init = self.picks(kinds, "m", "m", "s", *INTEGERS, least=1, most=2)
        inner = [*kinds, *(kinds[i] for i in init)]
        watching = [*inner]
        predicate = self.steps(watching, dataclasses.replace(place, depth=0), 2, 0)
        watched = None if place.is_batched else self.one_of(None, self.pick(watching, "s"))
        steps = self.steps(inner, place.deeper(), 3)
        carry = tuple(self.pick(inner, kinds[i], since=len(kinds)) for i in init)
        kinds += [kinds[i] for i in init]
        return While(self.one_of(3, 0, 1, 2), init, predicate, watched, steps, carry)

    def _branch(self, kinds: list[str], place: _Place) -> Branch:
        by = self.one_of("i") if place.is_batched else self.one_of("i", "s")
        on = self.pick(kinds, by)
        wanted = [self.one_of("m", "s", "i") for _ in range(self.draw(st.integers(0, 2)))]
        branches, outs = [], []
        for _ in range(self.one_of(2, 2, 3)):
            inner = [*kinds]
            branches.append(self.steps(inner, place.deeper(), 2, 0))
            outs.append(tuple(self.pick(inner, kind) for kind in wanted))
        kinds += wanted
        return Branch(on, by, tuple(branches), tuple(outs), place.anchor)

    def _derivative(self, kinds: list[str], place: _Place) -> Derivative:
        way = self.one_of("grad", "value_and_grad", "jvp")
        wrt = tuple(dict.fromkeys(self.picks(kinds, "m", "s", least=1, most=2)))
        inner = [*kinds]
        derivative = "forward" if way == "jvp" else "reverse"
        steps = self.steps(inner, place.deeper(derivative=derivative, anchor=wrt[0]), 3)
        of = self.pick(inner, "m", "s", since=len(kinds))
        gradients = [kinds[i] for i in wrt]
        kinds += {"grad": gradients, "value_and_grad": ["s", *gradients], "jvp": ["s", "s"]}[way]
        return Derivative(way, wrt, steps, of, place.is_batched)

    def _vmap(self, kinds: list[str], place: _Place) -> Vmap:
        inner = [*kinds]
        steps = self.steps(inner, place.deeper(is_batched=True), 3)
        outs = (self.pick(inner, "m", "s", since=len(kinds)), *self.picks(inner, "m", "s", least=0, most=1))
        kinds += [inner[i] for i in outs]
        return Vmap(self.one_of(1, 2, 3), steps, outs)


@st.composite
def random_programs(
    draw: Any,
    most: int = 4,
    depth: int = 3,
    without: tuple[str, ...] = (),
    about: str | None = None,
    without_jax: bool | None = None,
) -> RandomProgram:
    """Programs as data, without some kinds of steps; "zero" are scans of no iterations, "rule" those of calls.

    What is simplest is a real case: partitioned over two axes, donated, with loops of several iterations. With `about`
    there is a step of that kind with a call in it, between calls on two streams.
    """
    kinds = ["i", "m", "m", "s"]
    if without_jax is None:
        without_jax = draw(st.sampled_from([False, False, True]))
    drawing, place = _Steps(draw, without, without_jax), _Place(depth)
    steps = drawing.about(about, kinds, place, most) if about else drawing.steps(kinds, place, most)
    later = [i for i in range(len(kinds)) if i >= 4] or [1]
    results = tuple(draw(st.lists(st.sampled_from([*later, *range(len(kinds))]), min_size=1, max_size=4)))
    specs = []
    for i in results:
        spec = (
            draw(st.sampled_from([*SPECS[1:], SPECS[0]])) if kinds[i][0] == "m" else draw(st.sampled_from([None, P()]))
        )
        if kinds[i] == "m*0":  # of which jax.jit of 0.10 makes arrays whose shards are not those of their sharding
            spec = P()
        specs.append(P(None, *spec) if kinds[i].startswith("m*") else spec)
    x64 = not has(steps, "weak") and draw(st.sampled_from([False, False, True]))  # these would have 64 bits
    fed: dict[int, int] = {}
    for argument, kind in enumerate(kinds[:4]):
        fit = [at for at, i in enumerate(results) if kinds[i] == kind and at not in fed.values()]
        if fit and draw(st.booleans()):
            fed[argument] = draw(st.sampled_from(fit))

    def thrice(*options: Any, second: tuple = ()) -> tuple:
        first = draw(st.sampled_from(options))
        return first, draw(st.sampled_from(second or options)), first

    return RandomProgram(
        steps,
        tuple(kinds),
        results,
        tuple(specs),
        draw(st.sampled_from([True, False])),
        draw(st.sampled_from([1e6, 1e6, 100.0, 0.0] if without_jax else [0.0, 100.0, 1e6])),
        draw(st.sampled_from([True, True, False])),
        without_jax,
        thrice(0, 1, 2, 3),
        draw(st.sampled_from([8, 8, 1])),
        draw(st.sampled_from([32, 2, 1])),
        draw(st.sampled_from([1e8, 0.0])),
        thrice(False, True),
        (False, x64, False),
        thrice("jax", "numpy", "python", second=("jax",) if x64 else ()),
        tuple(fed.items()),
    )


def straight_programs(most: int = 8, without_jax: bool | None = None) -> Any:
    """Programs without loops, branches, derivatives and batches, but longer ones."""
    without = ("scan", "fori", "while", "branch", "derivative", "vmap")
    return random_programs(most, 2, without, "nested", without_jax)


def is_straight(steps: tuple) -> bool:
    """Whether steps are operations, calls and nested functions of such."""
    return not has(steps, "scan", "fori", "while", "branch", "derivative", "vmap")


def has(steps: tuple, *kinds: str) -> bool:
    """Whether there is a step of such a kind; "zero" is a scan without iterations; wrappers and forms are kinds too."""

    def kinds_of(step: Any) -> set[str]:
        zero = {"zero"} if isinstance(step, Scan) and step.length == 0 else set()
        return zero | {type(step).__name__.lower(), getattr(step, "wrapper", ""), getattr(step, "form", "")}

    return any(
        not kinds_of(step).isdisjoint(kinds) or any(has(block, *kinds) for block in inner_steps(step)) for step in steps
    )


@census.features.register
def _(program: RandomProgram) -> set[str]:
    """What a law of a program sees."""
    calls = calls_of(program.steps)
    in_a_row = [step for step in program.steps if isinstance(step, Call) and not step.pure]
    shown = {
        "a colocated call": bool(calls),
        "two streams": len({call.stream for call in calls if not call.pure}) > 1,
        "an early call behind a late one": any(
            max(late.args, default=0) > 3 >= max(early.args, default=0) and late.stream == early.stream
            for late, early in itertools.combinations(in_a_row, 2)
        ),
        "a call without results": any(call.result == "none" and not call.pure for call in calls),
        "a method of an object": any(call.of is not None for call in calls),
        "a pure call": any(call.pure for call in calls),
        "a spec of a call": any(spec is not None and any(spec) for c in calls for spec in (c.in_spec, c.out_spec)),
        "a donated argument": program.donated,
        "a partitioned result": program.devices > 1
        and any(spec is not None and any(spec) for spec in program.out_specs),
        "two mesh axes": program.devices > 1,
        "a loop": has(program.steps, "scan", "fori", "while"),
        "a branch": has(program.steps, "branch"),
        "a derivative": has(program.steps, "derivative"),
        "a batch": has(program.steps, "vmap"),
        "a nested function": has(program.steps, "nested"),
        "a constant": has(program.steps, "constant"),
        "another layout": any(program.transposed),
        "a result that is an argument of the next call": bool(program.fed),
        "arguments of NumPy": program.passed != ("jax",) * 3,
        "a call with an object that is no array": any(call.form == "beside a tag" for call in calls),
        "a call that returns its argument": any(call.result == "same" for call in calls),
        "a call that returns an integer": any(call.result == "integer" for call in calls),
        "a call of a decorated function": any(call.is_decorated for call in calls),
        "a call in a call": any(call.does == "call" for call in calls),
        "types of 64 bits": any(program.x64),
    }
    return {feature for feature, is_there in shown.items() if is_there}


def inner_steps(step: Any) -> list[tuple]:
    """The blocks of steps in a step."""
    if isinstance(step, Branch):
        return [*step.branches]
    if isinstance(step, While):
        return [step.predicate, step.steps]
    return [step.steps] if hasattr(step, "steps") else []


def result_kinds(call: Call) -> list[str]:
    """Of which kinds the results of a call are."""
    if call.result == "same":
        return [call.arg_kinds[0]]
    return {"matrix": ["m"], "scalar": ["s"], "none": [], "both": ["m", "s"], "integer": ["i"]}[call.result]


def calls_of(steps: tuple) -> list[Call]:
    """All calls of a program, each once, in the order of their numbers."""
    found = []
    for step in steps:
        found += [step] if isinstance(step, Call) else [c for block in inner_steps(step) for c in calls_of(block)]
    return found
