"""Formula graph: the dataflow of a formula, and its layout in a drawing."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jinfer.modelspec.expressions import FUNCTIONS, evaluate
from jinfer.modelspec.formula import Formula

Kind = Literal["input", "module", "join", "number", "output"]
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "×", ast.Div: "/"}
_TURNED = {"-": ("+", "× -1"), "/": ("×", "1 / ·")}
_CALL_COST = 1000  # prefers paths of fewer module calls, however many steps they have


@dataclass
class GraphNode:
    """A step of a formula.

    Attributes:
        kind: an input, a module call, arithmetic on vectors ("join") or with a number ("number"),
            an output.
        label: its name, sign, or sign and number.
        args: indices of the nodes it reads, the one nearest to the input first.
        detail: the expression of a number.
        row, lane: its position, from the top and from the left; the main line is lane 0.
    """

    kind: Kind
    label: str
    args: list[int]
    detail: str = ""
    row: int = 0
    lane: int = 0


@dataclass
class FormulaGraph:
    """The steps of a formula, in topological order.

    Attributes:
        value: index of the step that gives the formula's value.
        main: the shortest path from the first input to the value: the residual stream.
    """

    nodes: list[GraphNode] = field(default_factory=list)
    value: int = 0
    main: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return 1 + max(node.row for node in self.nodes)

    @property
    def lanes(self) -> int:
        return 1 + max(node.lane for node in self.nodes)

    def readers(self, number: int) -> list[int]:
        """The nodes that read a node."""
        return [n for n, node in enumerate(self.nodes) if number in node.args]


def formula_graph(
    formula: Formula, stream: str, outputs: bool = False, value_name: str = ""
) -> FormulaGraph:
    """The graph of a formula, with a layout.

    Args:
        stream: the input at which the main line starts.
        outputs: whether the names it assigns are outputs, as in a head.
        value_name: name of its value, if that is an output.
    """
    builder = _Builder(formula, stream)
    graph = builder.graph
    value: Any = None
    for target, expression in formula.statements:
        value = builder.read(expression)
        if target:
            builder.names[target] = value
    graph.value = value
    results = builder.names if outputs else {}
    for name, number in results.items():
        if isinstance(number, int) and name not in (stream, value_name) and number != value:
            graph.nodes.append(GraphNode("output", name, [number]))
    if value_name:
        graph.nodes.append(GraphNode("output", value_name, [graph.value]))
        graph.value = len(graph.nodes) - 1
    _place(graph)
    return graph


class _Builder:
    """Converts expressions to nodes. Numbers stay expressions and are drawn where they are used."""

    def __init__(self, formula: Formula, stream: str) -> None:
        self.graph = FormulaGraph([GraphNode("input", stream, [])])
        # Nodes are integers here, so numbers are always floats.
        self.names: dict[str, int | float] = {n: float(v) for n, v in formula.constants}
        self.names[stream] = 0
        self.inputs = {stream: 0}

    def read(self, expression: ast.expr) -> int | float:
        """The index of an expression's node; a float if it is a plain number."""
        match expression:
            case ast.Name(id=name):
                return self.names[name] if name in self.names else self._input(name)
            case ast.Call(func=ast.Name(id=name)) if name not in FUNCTIONS:
                args = [self.read(argument) for argument in expression.args]
                return self._add("module", name, args)
            case ast.BinOp(op=op) if type(op) in _SIGNS:
                return self._arithmetic(expression, _SIGNS[type(op)])
            case ast.UnaryOp(op=ast.USub()):
                operand = self.read(expression.operand)
                if _is_node(operand):
                    return self._add("number", "× -1", [operand])
            case ast.Subscript(value=whole, slice=ast.Slice(lower=lower, upper=upper) as part):
                ends = [None if end is None else self.read(end) for end in (lower, upper)]
                label = ":".join("" if end is None else f"{end:.0f}" for end in ends)
                text = ast.unparse(part)
                detail = "" if _is_literal(text.replace(":", "")) else text
                return self._add("number", f"[{label}]", [self.read(whole)], detail)
        return float(evaluate(expression, _Numbers(self.names)))

    def _arithmetic(self, expression: ast.BinOp, sign: str) -> int | float:
        left, right = self.read(expression.left), self.read(expression.right)
        if _is_node(left) and _is_node(right):
            # Non-commutative operators become a unary step and a commutative one.
            if sign in _TURNED:
                sign, label = _TURNED[sign]
                right = self._add("number", label, [right])
            return self._add("join", sign, [left, right])
        if not _is_node(left) and not _is_node(right):
            return float(evaluate(expression, _Numbers(self.names)))
        number, written = (right, expression.right) if _is_node(left) else (left, expression.left)
        vectors = left if _is_node(left) else right
        label = f"{sign} {number:.4g}"
        if sign in "-/" and not _is_node(left):
            label = f"{number:.4g} {sign} ·"
        text = ast.unparse(written)
        return self._add("number", label, [vectors], "" if _is_literal(text) else text)

    def _input(self, name: str) -> int:
        if name not in self.inputs:
            self.graph.nodes.append(GraphNode("input", name, []))
            self.inputs[name] = len(self.graph.nodes) - 1
        return self.inputs[name]

    def _add(self, kind: Kind, label: str, args: list[Any], detail: str = "") -> int:
        self.graph.nodes.append(GraphNode(kind, label, args, detail))
        return len(self.graph.nodes) - 1


@dataclass(frozen=True)
class _Numbers:
    names: Mapping[str, Any]

    def name(self, name: str) -> Any:
        return self.names[name]

    def call(self, name: str, arguments: list[Any]) -> Any:
        return FUNCTIONS[name](*arguments)


def _is_node(value: int | float) -> bool:
    return isinstance(value, int)


def _is_literal(text: str) -> bool:
    return text.replace(".", "").replace("e-", "").isdigit()


def _place(graph: FormulaGraph) -> None:
    """Assigns a row and a lane to every node.

    Nodes of one depth share a row, but each join has a row of its own, so that lines from the side
    meet no box. A branch occupies its lane from its beginning to its end.
    """
    nodes = graph.nodes
    cost: list[int] = []
    for node in nodes:
        node.args.sort(key=lambda arg: cost[arg])
        before = cost[node.args[0]] if node.args else 0 if node is nodes[0] else 10**9
        cost.append(before + (_CALL_COST if node.kind == "module" else 1))
    graph.main = [graph.value]
    while nodes[graph.main[0]].args:
        graph.main.insert(0, nodes[graph.main[0]].args[0])
    _place_rows(graph)
    _place_lanes(graph)


def _place_rows(graph: FormulaGraph) -> None:
    nodes, depth = graph.nodes, list[int]()
    for node in nodes:
        depth.append(1 + max((depth[arg] for arg in node.args), default=-1))
    depth[graph.value] = max(depth)  # the value is at the bottom

    def place(number: int) -> tuple[int, int, int]:
        alone = len(nodes[number].args) > 1
        return depth[number], alone, number if alone else 0

    order = sorted({place(number) for number in range(len(nodes))})
    for number, node in enumerate(nodes):
        node.row = order.index(place(number))
    for number, node in enumerate(nodes):
        readers = graph.readers(number)
        if node.kind == "input" and readers and all(nodes[r].args[0] != number for r in readers):
            node.row = nodes[readers[0]].row  # a side input, in the row of its reader


def _place_lanes(graph: FormulaGraph) -> None:
    nodes = graph.nodes
    taken_until: dict[int, int] = {}  # lane -> the last occupied row
    heirs: dict[int, int] = {}  # node -> the one that continues its lane
    # A side input is placed next to its reader, so after it.
    for number in sorted(range(len(nodes)), key=lambda n: (nodes[n].row, not nodes[n].args, n)):
        node = nodes[number]
        last = max([node.row, *(nodes[reader].row for reader in graph.readers(number))])
        if number in graph.main:
            continue
        source = node.args[0] if node.args else None
        inherits = source is not None and source not in graph.main and source not in heirs
        if inherits and source is not None:
            inherits = node.row == max(nodes[reader].row for reader in graph.readers(source))
        if inherits and source is not None:
            heirs[source] = number
            node.lane = nodes[source].lane
        else:
            node.lane = next(
                lane for lane in range(1, len(nodes) + 1) if taken_until.get(lane, -1) < node.row
            )
        taken_until[node.lane] = last
