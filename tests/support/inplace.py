"""Finds every operation in place in source text, and proves of most that the operand is the function's own.

An operand is proven to be owned if its memory was allocated in the same function: by an operation that always allocates
(`torch.zeros`, `torch.bmm`, `x * y`, `x.clone()`), or as a view or a copy of that. What may return its own input, such
as `x.float()`, `x.to(dtype)`, `x.flatten(0, 1)`, `x.reshape(...)` or `x.contiguous()`, owns nothing by itself. Memory
that the function has given away, to autograd or to an object, is not proven.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

ALLOCATING = re.compile(
    r"abs|amax|arange|bmm|cat|clone|copy|cos|empty|empty_like|eq|exp|full|full_like|ge|gt|index_select|isfinite|le|"
    r"linear|log|logical_not|lt|masked_fill|matmul|mean|mm|mul|ne|new_empty|new_full|new_ones|new_zeros|ones|ones_like|"
    r"outer|pow|rand|randint|randn|reciprocal|rsqrt|scatter|sigmoid|silu|sin|softmax|sqrt|square|stack|sub|sum|tanh|"
    r"tensor|tril|triu|where|zeros|zeros_like"
)
"""Functions of torch and methods of tensors whose result never is, or looks into, what they are given."""

VIEWING = re.compile(
    r"bfloat16|chunk|contiguous|cpu|detach|double|expand|flatten|float|half|int|long|movedim|narrow|permute|reshape|"
    r"split|squeeze|t|to|transpose|type|unflatten|unsqueeze|view|view_as"
)
"""Methods whose result may be, or look into, what they are called on."""

COMMUNICATING = frozenset(("all_reduce", "start_all_reduce"))
"""Collectives that work in place."""

FILLING = {
    "all_gather_into_tensor": 0,
    "reduce_scatter_tensor": 0,
    "broadcast": 0,
    "irecv": 0,
    "recv": 0,
    "copyto": 0,
    "bucket_allreduce_gradients": "grads_list",
}
"""Functions that write an argument: its place or name."""

METHOD = re.compile(r"[a-z_][a-z0-9_]*[a-z0-9]_")
HOST_TYPES = re.compile(
    r"(ClassVar\[)?(dict|list|set|tuple|int|float|str|bytes|bool|Counter|defaultdict|deque|bytearray)\b"
)
COUNTS = re.compile(
    r"(dict\[[\w ,\[\]]*, (int|float|str)\]|list\[(int|float|str)\]|Counter\b|defaultdict\[\w+, (int|float)\])"
)
_CONTAINERS = re.compile(r"(Mutable)?(Mapping|dict|list|Counter|defaultdict|deque)\b")
HOST_CALLS = re.compile(r"Counter|defaultdict|deque|dict|list|set|int|float|str|sum|bytearray|max|min")

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class InPlace:
    """An operation in place whose operand is not proven to be the function's own.

    Args:
        function: Qualified name; empty at module level.
        operation: The operation with its operand, as text.
        line: In the file.
    """

    function: str
    operation: str
    line: int


def unproven(source: str) -> list[InPlace]:
    """Operations in place of a module that the table of owners must know."""
    tree = ast.parse(source)
    has_tensors = any(
        name.split(".")[0] in {"torch", "numpy"}
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    )
    return [*_Scope(tree, "", None, has_tensors).found()]


class _Scope:
    """A function or a module: what is assigned in it, and what it does in place.

    Args:
        node: Its syntax.
        name: Qualified name.
        owner: The class around it.
        has_tensors: The module handles tensors, so that an index or `+=` may write one.
    """

    def __init__(self, node: ast.AST, name: str, owner: ast.ClassDef | None, has_tensors: bool) -> None:
        self._node, self._name, self._owner, self._has_tensors = node, name, owner, has_tensors
        self._own = list(_own_nodes(node))
        self._values: dict[str, list[ast.expr | None]] = {}
        self._types: dict[str, str] = {}
        for child in self._own:
            self._note(child)
        if isinstance(node, Function):
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            for argument in (*every, *filter(None, (node.args.vararg, node.args.kwarg))):
                self._values.setdefault(argument.arg, []).append(None)
                if argument.annotation is not None:
                    self._types[argument.arg] = ast.unparse(argument.annotation)
        self._given_away = {name for child in self._own for name in _given_away(child)}

    def found(self) -> Iterator[InPlace]:
        """Operations that are not proven, those of functions and classes within included."""
        for child in self._own:
            for operand, text in self._operations(child):
                if not self._is_owned(operand):
                    yield InPlace(self._name, text, getattr(child, "lineno", 0))
        for child, owner in _inner(self._node, self._owner):
            name = f"{self._name}.{getattr(child, 'name', '<lambda>')}".removeprefix(".")
            yield from _Scope(
                child, name, child if isinstance(child, ast.ClassDef) else owner, self._has_tensors
            ).found()

    def _note(self, node: ast.AST) -> None:
        """Remember what names are bound to; None: to something unknown."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._bind(node.target, node.value)
            self._types[ast.unparse(node.target)] = ast.unparse(node.annotation)
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._bind(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, None)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self._values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, None)
        elif isinstance(target, ast.Tuple | ast.List):
            for index, part in enumerate(target.elts):
                item: ast.expr | None = None
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                    item = value.elts[index]
                elif isinstance(value, ast.GeneratorExp | ast.ListComp):
                    item = value.elt
                self._bind(part, item)

    def _operations(self, node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
        """Operand and operation, in words, of a node that works in place."""
        if isinstance(node, ast.Call):
            yield from _calls(node)
        elif isinstance(node, ast.AugAssign):
            if self._has_tensors and not self._is_host(node):
                yield node.target, f"{ast.unparse(node.target)} {_SIGNS[type(node.op).__name__]}="
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                    if isinstance(part, ast.Subscript) and self._has_tensors and not self._holds(part.value):
                        yield part.value, f"{ast.unparse(part)} ="
        elif isinstance(node, ast.Attribute) and node.attr == "data" and self._has_tensors:
            if ast.unparse(node.value).split(".")[-1] in {"config", "nxtrain", "inputs"}:
                return  # a table of the configuration, or a package
            yield node, ast.unparse(node)

    def _is_owned(self, x: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """True for memory that this function allocated and has not given away."""
        if isinstance(x, ast.Name):
            if x.id in seen:
                return True
            values = self._values.get(x.id)
            if not values or x.id in self._given_away:
                return False
            return all(value is not None and self._is_owned(value, seen | {x.id}) for value in values)
        if isinstance(x, ast.Constant | ast.Compare):
            return True
        if isinstance(x, ast.BinOp):
            return True  # arithmetic makes a tensor
        if isinstance(x, ast.UnaryOp):
            return not isinstance(x.op, ast.UAdd)  # `+x` is `x`
        if isinstance(x, ast.IfExp):
            return self._is_owned(x.body, seen) and self._is_owned(x.orelse, seen)
        if isinstance(x, ast.Subscript):
            return self._is_owned(x.value, seen)
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute):
            method = x.func.attr
            if any(keyword.arg == "out" for keyword in x.keywords):
                return False
            if any(keyword.arg == "copy" and ast.unparse(keyword.value) == "True" for keyword in x.keywords):
                return True
            if ALLOCATING.fullmatch(method):
                return True
            if VIEWING.fullmatch(method) or METHOD.fullmatch(method):
                return self._is_owned(x.func.value, seen)
        return False

    def _is_host(self, node: ast.AugAssign) -> bool:
        """True for a `+=` that provably acts on numbers or lists of the host."""
        target, value = node.target, node.value
        if isinstance(value, ast.List | ast.ListComp | ast.JoinedStr | ast.Tuple):
            return True
        if isinstance(target, ast.Subscript):
            return self._matches(target.value, COUNTS)
        return self._is_number(target)

    def _is_number(self, target: ast.expr) -> bool:
        return self._matches(target, HOST_TYPES)

    def _holds(self, container: ast.expr) -> bool:
        """True for an index that provably writes a container of the host."""
        return self._matches(container, _CONTAINERS)

    def _matches(self, target: ast.expr, kinds: re.Pattern[str]) -> bool:
        text = ast.unparse(target)
        annotation = self._types.get(text) or _class_type(self._owner, text)
        if annotation is not None:
            return kinds.match(annotation) is not None
        values = self._values.get(text) if isinstance(target, ast.Name) else _class_values(self._owner, text)
        return bool(values) and all(value is not None and _host_kind(value, kinds) for value in values or ())


_SIGNS = {"Add": "+", "Sub": "-", "Mult": "*", "MatMult": "@", "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**"}
_SIGNS |= {"BitXor": "^", "BitAnd": "&", "BitOr": "|", "LShift": "<<", "RShift": ">>"}


def _host_kind(value: ast.expr, kinds: re.Pattern[str]) -> bool:
    """True for a number or container of the host that a pattern of types names."""
    if isinstance(value, ast.Constant):
        return value.value is not None and kinds.match(type(value.value).__name__) is not None
    if isinstance(value, ast.JoinedStr):
        return kinds.match("str") is not None
    if isinstance(value, ast.Dict | ast.DictComp):
        return kinds.match("dict") is not None
    if isinstance(value, ast.List | ast.ListComp):
        return kinds.match("list") is not None
    if isinstance(value, ast.IfExp):
        return _host_kind(value.body, kinds) and _host_kind(value.orelse, kinds)
    if isinstance(value, ast.BinOp) and isinstance(value.left, ast.List):
        return kinds.match("list") is not None
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).split(".")[-1]
        if name in {"len", "perf_counter", "prod"}:
            return kinds.match("int") is not None
        return HOST_CALLS.fullmatch(name) is not None and kinds.match(name) is not None
    return False


def _class_type(owner: ast.ClassDef | None, text: str) -> str | None:
    """The annotation of `self.x` in a class."""
    for node in ast.walk(owner) if owner is not None and text.startswith("self.") else ():
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in {text, text.removeprefix("self.")}:
            return ast.unparse(node.annotation)
    return None


def _class_values(owner: ast.ClassDef | None, text: str) -> list[ast.expr | None]:
    """Values that a class assigns to `self.x`."""
    found: list[ast.expr | None] = []
    for node in ast.walk(owner) if owner is not None and text.startswith("self.") else ():
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            found += [value for part, value in pairs if ast.unparse(part) == text]
    return found


def _calls(node: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    """Operands that a call writes."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    text = ast.unparse(function)
    for keyword in node.keywords:
        if keyword.arg == "out":
            yield keyword.value, f"{text}(out={ast.unparse(keyword.value)})"
    if METHOD.fullmatch(name) and not name.startswith("__"):
        owner = text.rpartition(".")[0]
        is_function = owner == "self" or re.match(r"(torch|F|nn)\b(?!.*\))", owner)
        if isinstance(function, ast.Attribute) and not is_function:
            yield function.value, text
        else:
            for argument in node.args[:1]:
                yield argument, f"{text}({ast.unparse(argument)})"
            if not node.args:
                yield function, text
    if name in COMMUNICATING and node.args:
        argument = node.args[1] if text.endswith("_xm.all_reduce") else node.args[0]
        yield argument, f"{text}({ast.unparse(argument)})"
    place = FILLING.get(name)
    if isinstance(place, int) and len(node.args) > place:
        yield node.args[place], f"{text}({ast.unparse(node.args[place])})"
    for keyword in node.keywords:
        if isinstance(place, str) and keyword.arg == place:
            yield keyword.value, f"{text}({ast.unparse(keyword.value)})"


def _given_away(node: ast.AST) -> Iterator[str]:
    """Names that others can see from now on: saved for backward, kept by an object."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"save_for_backward", "append", "add", "setdefault", "update", "extend"}:
            for argument in node.args:
                inner = argument.value if isinstance(argument, ast.Starred) else argument
                yield from (part.id for part in _visible(inner))
    elif isinstance(node, ast.Assign):
        kept = [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        if any(isinstance(target, ast.Attribute) for target in kept):
            yield from (part.id for part in _visible(node.value))
    elif isinstance(node, ast.Yield) and node.value is not None:
        yield from (part.id for part in _visible(node.value))


def _visible(value: ast.expr) -> Iterator[ast.Name]:
    """Names that an expression passes on as they are, not merely computes with."""
    if isinstance(value, ast.Name):
        yield value
    elif isinstance(value, ast.Tuple | ast.List):
        for part in value.elts:
            yield from _visible(part)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and VIEWING.fullmatch(value.func.attr):
        yield from _visible(value.func.value)
    elif isinstance(value, ast.Subscript):
        yield from _visible(value.value)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope, those of functions and classes within it left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yield child
        yield from _own_nodes(child)


def _inner(node: ast.AST, owner: ast.ClassDef | None) -> Iterator[tuple[ast.AST, ast.ClassDef | None]]:
    """Functions and classes right within a scope, each with the class around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield child, owner
        else:
            yield from _inner(child, owner)
