"""README, docs and examples are executed; the tables in them are those of results/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCKS = [(page, block) for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def python(*words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{p.name}-{n}" for n, (p, _) in enumerate(BLOCKS)])
def test_code_blocks_run(page, block):
    assert python("-c", block) or "print" not in block


def test_the_readme_has_its_quick_start_and_prints_shapes():
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert sum(bool(line) for line in first.splitlines()) == 5
    assert "torch.Size([2, 10, 16]) torch.Size([2, 10]) torch.Size([3, 2, 1152, 10])" in python("-c", first)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_run_and_are_short(path):
    assert len(path.read_text().splitlines()) < 60
    assert python(str(path)).strip()


def test_tables_are_fresh():
    python("experiments/table.py", "--check")
    assert "<!-- results: capsnet-mnist-small -->\n|" in (ROOT / "README.md").read_text()


def test_a_stale_table_is_seen(tmp_path, monkeypatch):
    import table

    text = (ROOT / "README.md").read_text()
    assert table.regenerate(text) == text
    digits = re.search(r"\| capsnet-mnist-small \| ([\d.]+)", text)
    stale = text.replace(digits[0], "| capsnet-mnist-small | 99.99")
    assert table.regenerate(stale) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_inside_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_that_the_documents_name_exists(page):
    """`file.py: name` is a file of the package or of the repository, and a name in it."""
    for file, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", page.read_text()):
        path = next((p for p in (ROOT / "src" / "torchcaps" / file, ROOT / file) if p.is_file()), None)
        assert path, f"{file} is not there"
        assert re.search(rf"(def|class) {name.split('.')[-1]}\b|\b{name.split('.')[-1]}\b *[:=]", path.read_text()), (
            name
        )


def test_commands_in_the_documents_exist():
    from torchcaps.cli.parse import COMMANDS

    named = {word for page in PAGES for word in re.findall(r"(?m)^ {4}torchcaps (\w+)", page.read_text())}
    assert named and named <= set(COMMANDS)


def test_recipes_and_experiments_that_documents_and_help_name_exist():
    from torchcaps.train import recipe_names

    texts = [page.read_text() for page in PAGES]
    texts += [path.read_text() for path in sorted((ROOT / "src" / "torchcaps" / "cli").glob("*.py"))]
    texts += [path.read_text() for path in EXAMPLES]
    trained = {
        name for text in texts for name in re.findall(r"torchcaps (?:train|list) ([a-z][\w-]+-[\w-]+)(?![\w.])", text)
    }
    assert trained and trained - {"my-recipe"} <= set(recipe_names())
    files = {name for text in texts for name in re.findall(r"experiments/[\w-]+\.(?:toml|py)", text)}
    assert files and all((ROOT / name).exists() for name in files)


def test_recipes_in_the_documents_are_right():
    import tomllib

    from torchcaps.config import from_dict
    from torchcaps.train import Recipe

    blocks = [b for page in PAGES for b in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)]
    assert blocks
    for block in blocks:
        assert from_dict(Recipe, tomllib.loads(block)).seed == 1
