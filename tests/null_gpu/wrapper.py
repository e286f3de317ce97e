"""The wrappers that Inductor writes for a GPU, read as they run: what is in flight, and what is written meanwhile."""

import ast
import re
from dataclasses import dataclass, field
from typing import NamedTuple

_COPY = re.compile(r"torch\.ops\.autohete\.(\w+)\.default")
_PRODUCT = re.compile(r"extern_kernels\.\w*mm|torch\.ops\.aten\._scaled_dot_product\w+\.default")
_GRAPH_LINE = re.compile(r": \S.* = (?:autohete\.(\w+)|aten\.(?:\w*mm|_scaled_dot_product\w+))\.default\(")


class Memory(NamedTuple):
    """What a name stands for: equal where two names share memory."""

    number: int
    kind: str


@dataclass
class Reading:
    """What a wrapper does.

    Attributes:
        copies: per op of ours its name, and how many products and attentions come before it.
        late: copies down, updates and norms that stand behind a wait for what the device reads, between the same products.
        faults: writes to what a copy in flight reads, or to host memory; copies that are not waited for with their source.
        returned_homes: outputs that are host memory.
    """

    copies: list[tuple[int, str]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    returned_homes: int = 0


class _Reader:
    def __init__(self, source: str) -> None:
        self.result = Reading()
        self._names: dict[str, Memory] = {}
        self._in_flight: dict[Memory, tuple[str, Memory | None]] = {}
        self._count = self._products = 0
        self._has_waited = False  # since the last product
        self._parameters = {
            name: [p.split(":")[0].strip() for p in parameters.split(",")]
            for name, parameters in re.findall(r"^def (triton_\w+)\(([^)]*)\)", source, re.MULTILINE)
        }

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.With():
                    self.run(statement.body)
                case ast.Delete(targets=targets):
                    for target in targets:
                        self._names.pop(ast.unparse(target), None)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                    self._names.update({ast.unparse(name): self._new("input") for name in names})
                case ast.Assign(targets=[target], value=value):
                    if (memory := self._value(value)) is not None:
                        self._names[ast.unparse(target)] = memory
                case ast.Expr(value=value):
                    self._value(value)
                case ast.Return(value=ast.Tuple(elts=outputs)):
                    values = [self._value(output) for output in outputs]
                    self.result.returned_homes = sum(v is not None and v.kind == "home" for v in values)
        if isinstance(body[-1], ast.Return):
            self.result.faults += [f"nothing waits for {op} of {source}" for op, source in self._in_flight.values()]

    def _new(self, kind: str) -> Memory:
        self._count += 1
        return Memory(self._count, kind)

    def _value(self, expression: ast.expr) -> Memory | None:
        match expression:
            case ast.Name(id=name):
                return self._names.get(name)
            case ast.Subscript(value=value):
                return self._value(value)
            case ast.Call():
                return self._call(ast.unparse(expression.func), expression)
        return None

    def _call(self, name: str, call: ast.Call) -> Memory | None:
        if name == "reinterpret_tensor":
            return self._value(call.args[0])
        if found := _COPY.fullmatch(name):
            self.result.copies.append((self._products, found[1]))
            return self._copy(found[1], call)
        if _PRODUCT.fullmatch(name) or name.endswith("_rng_state"):
            self._products += 1
            self._has_waited = False
        written = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
        for parameter, argument in zip(self._parameters.get(name.removesuffix(".run"), ()), call.args, strict=False):
            if "out_ptr" in parameter:
                written.append(argument)
        for memory in map(self._value, written):
            if memory in [source for _, source in self._in_flight.values()] or (memory and memory.kind == "home"):
                self.result.faults.append(f"line {call.lineno}: {name} writes {memory}")
        return self._value(written[0]) if written else self._new("made")

    def _copy(self, op: str, call: ast.Call) -> Memory | None:
        first, second = self._value(call.args[0]), self._value(call.args[1])
        if self._has_waited and op in ("offload", "start_update", "take_norm"):
            self.result.late.append(f"line {call.lineno}: {op} of {first}")
        if op in ("offload", "reload", "prefetch"):
            handle = self._new("handle")
            self._in_flight[handle] = (op, first)
            return handle
        if op == "wait":
            assert first is not None
            issued, source = self._in_flight.pop(first)
            self._has_waited |= issued != "offload"
            if source is None or source != second:
                self.result.faults.append(f"line {call.lineno}: the wait for {issued} keeps {second}, not {source}")
            return self._new("home" if issued == "offload" else "arrived")
        self._has_waited |= op == "wait_update"
        return first


def read(source: str) -> Reading:
    """What the wrapper does."""
    runner = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Runner")
    call = next(n for n in runner.body if isinstance(n, ast.FunctionDef) and n.name == "call")
    reader = _Reader(source)
    reader.run(call.body)
    return reader.result


def copies_of_graph(text: str) -> list[tuple[int, str]]:
    """`Reading.copies` of a graph that `Compilation.readable` printed."""
    found, products = [], 0
    for line in text.splitlines():
        if (match := _GRAPH_LINE.search(line)) and match[1]:
            found.append((products, match[1]))
        elif match or "_rng_state(" in line:
            products += 1
    return found
