"""Collects the error messages of the source, for the page that lists them.

The source is read, not run: every exception that is made with a message gives an entry, with "…"
in place of what is known only when the error is raised.
"""

import ast
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PLACEHOLDER = "…"
FOLDERS = ("jaxmux", "data", "sharding", "pallas_kernels")
# What the messages of a folder are about.
AREAS = {
    "data": "Data: files, records, chats, tokenizers",
    "jaxmux": "Tasks, optimizers and other settings",
    "jaxmux/cli": "Commands and configs",
    "jaxmux/runs": "Training runs and run directories",
    "jaxmux/server": "Servers and watched folders",
    "jaxmux/specifications": "Task files",
    "jaxmux/peft": "Adapters and their folders",
    "jaxmux/models": "Backbones and checkpoints",
    "jaxmux/objectives": "Objectives",
    "jaxmux/planner": "Plans, profiles, meshes and memory",
    "jaxmux/engine": "Engine",
    "jaxmux/generation": "Generation",
    "jaxmux/ui": "The page of a run",
    "jaxmux/profiling": "Measuring profiles",
    "pallas_kernels": "Kernels",
}
# An expression with more alternatives, or functions that call each other deeper, become "…".
_MOST_TEXTS, _DEEPEST = 12, 6
_BASES = ("InputError", "OutOfDeviceMemory", "ProcessFailed", "ValueError", "TypeError", "OSError")
_OTHERS = ("RuntimeError", "FileExistsError", "NotImplementedError", "IndexError", "SystemExit")
_EXCEPTIONS = {"Exception", "BaseException", *_BASES}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
Texts = list[str]


class Message(NamedTuple):
    """One message.

    Attributes:
      exception: name of the exception's class; "error" where the caller chooses the class, and
        "reason" for a text that becomes part of another message.
      text: the message on one line, with "…" for what varies.
      path: the source file, relative to the repository.
      line: the line on which the exception is made.
    """

    exception: str
    text: str
    path: str
    line: int

    @property
    def area(self) -> str:
        """A key of `AREAS`."""
        first, *others = self.path.split("/")[:-1]
        return "/".join((first, *others[: first == "jaxmux"]))


def words(text: str) -> list[str]:
    """The words of a message that do not vary."""
    return re.findall(r"[A-Za-z]{2,}", text)


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression of all messages for which a collected text stands."""
    return re.compile(".*".join(re.escape(part) for part in text.split(PLACEHOLDER)), re.DOTALL)


def collect(root: Path) -> list[Message]:
    """All messages of the packages below `root`, in the order of files and lines."""
    files = [p for folder in FOLDERS for p in sorted((root / folder).rglob("*.py"))]
    modules = {p.relative_to(root).as_posix(): ast.parse(p.read_text("utf-8")) for p in files}
    source = _Source(modules)
    found = {m: None for path, tree in modules.items() for m in _Module(source, path, tree)}
    return [m for m in found if words(m.text)]


class _Source:
    """What modules share: classes of exceptions, constants, and functions that make exceptions."""

    def __init__(self, modules: Mapping[str, ast.Module]):
        nodes = [node for tree in modules.values() for node in ast.walk(tree)]
        self.classes = {*_BASES, *_OTHERS, "FolderLockError", "ArgumentTypeError"}
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        bases = [(node.name, {*map(_name, node.bases)}) for node in classes]
        while more := {name for name, of in bases if of & self.classes} - self.classes:
            self.classes |= more
        self.constants = {
            name: node.value
            for tree in modules.values()
            for node in tree.body
            for name, node in _assigned(node)
        }
        # By name, the functions that return an exception.
        self.makers = {
            node.name: node
            for node in nodes
            if isinstance(node, _FUNCTIONS) and node.returns is not None
            if _name(node.returns) in self.classes
        }


class _Module:
    """The messages of one file, as an iterable."""

    def __init__(self, source: _Source, path: str, tree: ast.Module):
        self._source, self._path = source, path
        functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
        self._functions = {node.name: node for node in functions}
        # By call within an exception's class, this class.
        self._owners = {
            call: owner.name
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef) and {*map(_name, owner.bases)} & _EXCEPTIONS
            for call in ast.walk(owner)
        }
        self._tree = tree

    def __iter__(self) -> Iterator[Message]:
        yield from self._visit(self._tree, None)

    def _visit(self, node: ast.AST, function: _FUNCTIONS | None) -> Iterator[Message]:
        raised = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(node, _FUNCTIONS):
            function = node
        if isinstance(node, ast.Call) and _name(node.func) == "Rule":
            # Classes raise the messages of their rules, see `jaxmux.field_checks`.
            text = f"{PLACEHOLDER}{ast.literal_eval(node.args[0])}{PLACEHOLDER}"
            yield Message("error", text, self._path, node.lineno)
        elif isinstance(node, ast.Call):
            yield from self._made(node, function)
        elif isinstance(raised, ast.Call) and self._kind(raised) is None and raised.args:
            # The class is an argument of the function, as in `jaxmux.field_checks`.
            yield from self._messages("error", raised, function)
        elif isinstance(node, ast.Return) and node.value is not None and _is_reason(function):
            yield from self._messages("reason", node, function)
        for child in ast.iter_child_nodes(node):
            yield from self._visit(child, function)

    def _kind(self, call: ast.Call) -> str | None:
        """The class of the exception that a call makes, if it makes one."""
        name = _name(call.func)
        if name in self._source.classes:
            return name
        if name == "__init__" and ast.unparse(call.func) == "super().__init__":
            return self._owners.get(call)
        maker = self._maker(call)
        return None if maker is None else _name(maker.returns)

    def _maker(self, call: ast.Call) -> _FUNCTIONS | None:
        if _is_parser_error(call):
            return None
        name = _name(call.func)
        own = self._functions.get(name)
        if own is not None and own.returns is not None:
            return own if _name(own.returns) in self._source.classes else None
        return self._source.makers.get(name)

    def _made(self, call: ast.Call, function: _FUNCTIONS | None) -> Iterator[Message]:
        kind = self._kind(call)
        # A function that makes exceptions of any text gives no entry; its callers do.
        takes_text = function is not None and function is self._source.makers.get(function.name)
        if kind and call.args and not (takes_text and _uses_argument(call, function)):
            yield from self._messages(kind, call, function)
        elif kind and self._maker(call) is not None:
            yield from self._messages(kind, call, function)
        elif _is_parser_error(call):
            yield from self._messages("usage", call, function)

    def _messages(self, kind: str, node: ast.AST, function: _FUNCTIONS | None) -> Iterator[Message]:
        scope = _Scope(self, function, {}, 0)
        maker = self._maker(node) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Return):
            found = scope.texts(node.value)
        elif maker is not None and _name(node.func) not in self._source.classes:
            found = scope.of_maker(maker, node)
        else:
            # OSError takes the number of the error first.
            found = scope.texts(node.args[1 if kind == "OSError" and node.args[1:] else 0])
        for text in found:
            text = re.sub(rf"{PLACEHOLDER}(\s*{PLACEHOLDER})+", PLACEHOLDER, " ".join(text.split()))
            yield Message(kind, text, self._path, node.lineno)


class _Scope:
    """The texts that expressions of a function may have."""

    def __init__(self, module: _Module, function, arguments: Mapping[str, Texts], depth: int):
        self._module, self._arguments, self._depth = module, arguments, depth
        self._locals: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function) if function is not None else ():
            for name, assignment in _assigned(node):
                self._locals.setdefault(name, []).append(assignment.value)

    def texts(self, node: ast.expr) -> Texts:
        """The texts that an expression may have, or only a placeholder."""
        self._depth += 1
        found = list(dict.fromkeys(self._texts(node))) if self._depth <= _DEEPEST else []
        self._depth -= 1
        return found if 0 < len(found) <= _MOST_TEXTS else [PLACEHOLDER]

    def _texts(self, node: ast.expr) -> Texts:
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Constant(value=None | False):
                return [""]
            case ast.JoinedStr(values=parts):
                return _joined(self.texts(part) for part in parts)
            case ast.FormattedValue(value=value):
                return self.texts(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined([self.texts(left), self.texts(right)])
            case ast.IfExp(body=body, orelse=orelse):
                return self.texts(body) + self.texts(orelse)
            case ast.BoolOp(op=ast.And(), values=values):
                return ["", *self.texts(values[-1])]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.texts(value) if text]
            case ast.Name(id=name):
                return self._named(name)
            case ast.Call(func=ast.Name(id=name)) if name in self._module._functions:
                return self._returned(self._module._functions[name], node)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                function = self._module._functions.get(name)
                return [] if function is None else self._returned(function, node)
        return []

    def _named(self, name: str) -> Texts:
        if name in self._arguments:
            return self._arguments[name]
        if name in self._locals:
            return [text for value in self._locals[name] for text in self.texts(value)]
        value = self._module._source.constants.get(name)
        return self.texts(value) if isinstance(value, ast.Constant | ast.BinOp) else []

    def _returned(self, function: _FUNCTIONS, call: ast.Call) -> Texts:
        inner = _Scope(self._module, function, self._bound(function, call), self._depth)
        returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
        return [text for value in returned for text in inner.texts(value)]

    def of_maker(self, maker: _FUNCTIONS, call: ast.Call) -> Texts:
        """The texts of the exception that a call of `maker` returns."""
        inner = _Scope(self._module, maker, self._bound(maker, call), self._depth)
        (made,) = [n.value for n in ast.walk(maker) if isinstance(n, ast.Return)][-1:]
        if not isinstance(made, ast.Call):
            return [PLACEHOLDER]
        following = self._module._maker(made)
        if following is not None and _name(made.func) not in self._module._source.classes:
            return inner.of_maker(following, made)
        return inner.texts(made.args[0])

    def _bound(self, function: _FUNCTIONS, call: ast.Call) -> dict[str, Texts]:
        names = [a.arg for a in function.args.args if a.arg != "self"]
        bound = {name: [PLACEHOLDER] for name in names}
        bound |= {name: self.texts(value) for name, value in zip(names, call.args, strict=False)}
        return bound | {k.arg: self.texts(k.value) for k in call.keywords if k.arg}


def _name(node: ast.AST | None) -> str | None:
    """The last part of a name such as `argparse.ArgumentTypeError`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _is_parser_error(call: ast.Call) -> bool:
    """True for `parser.error(…)` of argparse."""
    return _name(call.func) == "error" and ast.unparse(call.func) == "parser.error"


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign | ast.NamedExpr]]:
    """The names to which a statement assigns one value."""
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
        if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            for target, value in zip(targets[0].elts, node.value.elts, strict=False):
                yield from _assigned(ast.Assign([target], value))
            return
    elif isinstance(node, ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value):
        targets = [node.target]
    else:
        return
    yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def _joined(parts: Iterable[Texts]) -> Texts:
    """All texts of which the parts are joined. If these are too many, the parts with the most
    alternatives become "…"."""
    parts = list(parts)
    while math.prod(map(len, parts)) > _MOST_TEXTS:
        parts[parts.index(max(parts, key=len))] = [PLACEHOLDER]
    return ["".join(texts) for texts in itertools.product(*parts)]


def _uses_argument(call: ast.Call, function: _FUNCTIONS) -> bool:
    arguments = {a.arg for a in function.args.args} - {"self"}
    return any(isinstance(n, ast.Name) and n.id in arguments for n in ast.walk(call))


def _is_reason(function: _FUNCTIONS | None) -> bool:
    """True for functions that return a text if something cannot be done, and None if it can."""
    return (
        function is not None
        and function.returns is not None
        and ast.unparse(function.returns) == "str | None"
        and re.search("refus|reason|problem|why|wrong", function.name) is not None
    )
