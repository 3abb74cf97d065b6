"""Figures of how source code is written, to hold it in the ranges of docs/develop/style.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class StyleFigures(NamedTuple):
    """Shares in percent: of non-blank lines, of functions, of assignments; and a count."""

    docstring_lines: float
    comments: float
    signatures_with_any: float
    tuple_assignments: float
    formatter_exceptions: int


def measure_style(folder: Path) -> StyleFigures:
    """Measure all Python files below a folder."""
    lines = docstrings = comments = functions = with_any = assignments = tuples = exceptions = 0
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines += sum(1 for line in text.splitlines() if line.strip())
        comments += sum(t.type == tokenize.COMMENT for t in tokenize.generate_tokens(io.StringIO(text).readline))
        exceptions += text.count("# fmt: skip")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
                first = node.body[0]
                docstrings += (first.end_lineno or first.lineno) - first.lineno + 1
            if isinstance(node, _FUNCTIONS):
                functions += 1
                signature = ast.unparse(node.args) + (ast.unparse(node.returns) if node.returns else "")
                with_any += bool(re.search(r"\bAny\b", signature))
            if isinstance(node, ast.Assign):
                assignments += 1
                tuples += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    return StyleFigures(
        docstring_lines=100 * docstrings / lines,
        comments=100 * comments / lines,
        signatures_with_any=100 * with_any / functions,
        tuple_assignments=100 * tuples / assignments,
        formatter_exceptions=exceptions,
    )
