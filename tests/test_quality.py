"""The code base keeps its own rules: types, lint, direction of imports, light import, nothing executed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.style import measure_style

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
SCRIPTS = Path(sys.executable).parent


def tool(*words: str) -> None:
    done = subprocess.run([str(SCRIPTS / words[0]), *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_mypy_strict():
    tool("mypy")  # strict, of src and benchmarks: pyproject.toml


def test_ruff():
    tool("ruff", "check", ".")
    tool("ruff", "format", "--check", ".")


PRIVATE_WORDS = r"\b(crew|team|shelf|sitting|rivals?|voteless|dream(s|t|ed|ing)?|settles?|lean(s|ing)?|makes of)\b"
"""Words of an earlier dialect; each has a conventional name today, such as process group, run folder or baseline."""


def test_private_words_stay_out():
    """`lane` is a word of SIMD, so only kernels may say it."""
    folders = ("src", "tests", "docs", "examples", "experiments", "benchmarks")
    kinds = {".py", ".md", ".rst", ".toml", ".js", ".html", ".css"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    built = {"_build", "gallery", "__pycache__"}
    read = [path for path in files if path != Path(__file__) and not built & set(path.parts)]
    assert len(read) > 300
    found = [
        f"{path.relative_to(ROOT)}: {word[0]}"
        for path in read
        for word in re.finditer(PRIVATE_WORDS, path.read_text(), re.IGNORECASE)
    ]
    found += [
        str(path.relative_to(ROOT))
        for path in read
        if "kernel" not in str(path.relative_to(ROOT)) and re.search(r"\blanes?\b", path.read_text())
    ]
    assert not found, found


def test_imports_only_go_down():
    tool("lint-imports")


def loaded_by(statement: str) -> dict[str, float]:
    """Modules and seconds of an import in a fresh interpreter, beyond torch."""
    code = (
        "import sys, time, json, torch; before = set(sys.modules); t = time.perf_counter(); "
        f"{statement}; t = time.perf_counter() - t; "
        "print(json.dumps({'seconds': t, 'modules': sorted(set(sys.modules) - before)}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_is_light():
    """What makes an import slow is what it pulls in; `experiments/import_time.py` prints the milliseconds."""
    modules = loaded_by("import torchcaps")["modules"]
    heavy = {"matplotlib", "sklearn", "scipy", "starlette", "uvicorn", "tyro", "rich", "tensorboard", "pandas", "PIL"}
    assert not {m.split(".")[0] for m in modules} & heavy
    assert len(modules) < 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_nothing_is_unpickled_or_executed(path):
    tree = ast.parse(path.read_text())
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    imports = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imports |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    loads = [n for n in calls if ast.unparse(n.func) in ("torch.load", "np.load", "numpy.load")]
    assert not names & {"eval", "exec"}
    assert not imports & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for load in loads:  # numpy's own default is the same, but is said all the same
        assert "torch" not in ast.unparse(load.func)
        assert [ast.unparse(k.value) for k in load.keywords if k.arg == "allow_pickle"] == ["False"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_every_module_and_public_function_is_documented(path):
    tree = ast.parse(path.read_text())
    assert path.stat().st_size == 0 or ast.get_docstring(tree), path
    public = [
        n.name
        for n in tree.body
        if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_") and not ast.get_docstring(n)
    ]
    short = {n for n in public if n in {"recipe_names", "versions"}}
    assert set(public) == short, f"no docstring: {public}"


def test_no_test_lacks_an_assertion():
    """An assertion is an assert, a pytest.raises, an assert_... instrument, or a helper in the file that has one."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
        asserting = [f.name for f in functions if re.search(r"\bassert|\braises\(|\.expect\(", ast.unparse(f))]
        wanted = re.compile(r"\b(" + "|".join(map(re.escape, asserting)) + r")\b")
        for function in functions:
            body = "\n".join(ast.unparse(node) for node in function.body)
            direct = function.name in asserting
            assert direct or not function.name.startswith("test_") or wanted.search(body), f"{path}::{function.name}"


def test_the_repository_names_no_path_of_a_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".json", ".txt"} and path.exists():
            assert not re.search(r"/(root|home|work)/\w+", path.read_text()), name


def test_style_stays_in_its_ranges() -> None:
    """The ranges of docs/develop/style.md, section "Measured"."""
    figures = measure_style(ROOT / "src")
    assert 20 <= figures.docstring_lines <= 40
    assert 4 <= figures.comments <= 9
    assert figures.signatures_with_any < 3
    assert figures.tuple_assignments < 2
    assert figures.formatter_exceptions < 10
