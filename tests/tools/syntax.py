"""What `measures` looks for in syntax trees."""

from __future__ import annotations

import ast
import re

FIELDS = (
    {"token_ids", "token_id", "tokens", "token"},
    {"logprobs", "logprob"},
    {"top_ids", "top_tokens", "alternatives"},
    {"top_logprobs"},
    {"reasons", "reason", "finish_reasons", "finish_reason"},
)
"""Of new tokens, as classes spell them."""


def fields(node: ast.ClassDef) -> set[str]:
    targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def has_token_fields(node: ast.ClassDef) -> bool:
    names = {name.lstrip("_") for name in fields(node)}
    return sum(not names.isdisjoint(spellings) for spellings in FIELDS) >= 4


def fills_json(nodes: list[ast.AST]) -> bool:
    """Whether encoded JSON is cut at a mark that stands for what is to come, or members of an
    object are written as bytes."""
    return any(
        _matches(rb'"\w+":', node)
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"split", "partition", "rpartition"}
            and any(map(_is_mark, node.args))
        )
        for node in nodes
    )


def _is_mark(node: ast.expr) -> bool:
    """Whether this is a constant by its name, or bytes with letters in them."""
    if isinstance(node, ast.BinOp):
        node = node.left
    return _matches(rb"\w", node) or (isinstance(node, ast.Name) and node.id.isupper())


def _matches(pattern: bytes, node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, bytes) and re.search(pattern, value) is not None


def count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def count_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


DOCUMENTED = {"_replace", "_fields", "_asdict", "_exit"}
"""Names of Python's own library that are public in spite of how they begin."""


def find_private(node: ast.AST) -> list[str]:
    """Find what this takes of somebody else's private names."""
    names: list[str] = []
    if isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        names = [] if is_own else [node.attr]
    private = (name for name in names if name.startswith("_") and not name.startswith("__"))
    return [name for name in private if name not in DOCUMENTED]
