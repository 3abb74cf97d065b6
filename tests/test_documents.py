"""README, docs, tutorials and examples are executed; tables, links, options and spelling in them are right."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from torchcaps.models import MODELS
from torchcaps.routing import ROUTERS
from torchcaps.systems import SYSTEMS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILT = {"_build", "gallery"}
PAGES = [ROOT / "README.md", *(p for p in sorted(DOCS.rglob("*.md")) if not BUILT & set(p.relative_to(DOCS).parts))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))
BLOCKS = [(page, block) for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def clean_tables(monkeypatch, tmp_path):
    """Forget routers, models and systems that a page registers; draw figures into memory; leave the cache alone."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tables = [(table, dict(table)) for table in (ROUTERS, MODELS, SYSTEMS)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{name_of(p)}-{n}" for n, (p, _) in enumerate(BLOCKS)])
def test_code_blocks_run(page, block, capsys, clean_tables):
    exec(compile(block, str(page), "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out or "print" not in block


def test_the_readme_has_its_quick_start_and_prints_shapes(capsys):
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert sum(bool(line) for line in first.splitlines()) == 5
    exec(compile(first, "README.md", "exec", dont_inherit=True), {})
    expected = "torch.Size([2, 10, 16]) torch.Size([2, 10]) torch.Size([3, 2, 1152, 10])"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("path", [*EXAMPLES, *TUTORIALS], ids=name_of)
def test_examples_and_tutorials_run(path, capsys, clean_tables):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", [*EXAMPLES, *TUTORIALS], ids=name_of)
def test_examples_are_short_and_have_a_title_for_the_gallery(path):
    lines = len(path.read_text().splitlines()) - 3  # without the title
    assert lines < (60 if path in EXAMPLES else 150)
    title, rule = ast.get_docstring(ast.parse(path.read_text())).splitlines()[:2]
    assert rule == "=" * len(title), f"{path.name}: its docstring begins with a title and a line of = below"


QUESTIONS = [
    ("how-to/data.md", "## Your own images"),  # how do I train on my own pictures?
    ("start/glossary.md", "**NMI**"),  # what is NMI here?
    ("gallery/tutorials/plot_5_write_a_router.rst", "ROUTERS["),  # how do I add a router?
    ("results/speed.md", "times faster"),  # is it faster than X?
    ("results/index.md", "## Not reproduced, and why"),  # did you reproduce Y?
    ("how-to/resume.md", "--resume runs/"),  # how do I resume?
    ("how-to/scale.md", "## GPU"),  # can I use a GPU?
    ("how-to/export.md", "## Get weights"),  # how do I get weights?
    ("start/glossary.md", "**over**"),  # what does `over` mean?
    ("start/faq.md", "### How do I cite it?"),
    ("start/faq.md", "### Why is my loss NaN?"),
    ("start/glossary.md", "**frame**"),  # what is the frame of a capsule?
]
"""The page that answers each of twelve questions, and what stands there."""


@pytest.mark.parametrize(("target", "phrase"), QUESTIONS)
def test_questions_of_readers_are_answered_one_click_from_the_front_page(target, phrase):
    assert re.search(rf"\]\({re.escape(target)}[#)]", (DOCS / "index.md").read_text())
    source = DOCS / target.removeprefix("gallery/").replace(".rst", ".py")
    assert phrase in source.read_text()


def linked(page: Path) -> set[Path]:
    """Return the pages of the repository that a page links to, and itself."""
    found = re.findall(r"\]\((?!http)([^)#]+)", page.read_text()) if page.suffix == ".md" else []
    return {page, *((page.parent / target).resolve() for target in found)}


@pytest.mark.parametrize(("target", "phrase"), QUESTIONS)
def test_questions_of_readers_are_answered_two_clicks_from_the_readme(target, phrase):
    near = {page for first in linked(ROOT / "README.md") if first.is_file() for page in linked(first)}
    assert DOCS / target.removeprefix("gallery/").replace(".rst", ".py") in near


def test_tables_are_fresh():
    import table

    assert table.main(["--check"]) == 0
    assert "<!-- systems: overview -->\n|" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("page", "number", "wrong"),
    [
        ("docs/systems/capsnet.md", r"\| capsnet-mnist-small \| [\d.]+", "| capsnet-mnist-small | 99.99"),
        ("README.md", r"\*\*[\d.]+\*\* \| \d+ \|", "**99.99** | 1 |"),
        ("docs/results/critics.md", r"(?<= -->)[\d.]+(?= ?±?[\d. ]*<!-- /value)", "99.99"),
    ],
)
def test_a_stale_number_is_seen(page, number, wrong):
    import table

    text = (ROOT / page).read_text()
    base = table.base_of(ROOT / page)
    assert table.regenerate(text, base) == text
    stale = re.sub(number, wrong, text, count=1)
    assert stale != text and table.regenerate(stale, base) == text


def test_a_sentence_may_quote_the_result_of_a_shipped_model():
    import table

    made = table.regenerate("<!-- value: zoo/capsnet-digits test_error -->9<!-- /value -->")
    assert made == "<!-- value: zoo/capsnet-digits test_error -->0.49<!-- /value -->"


def test_a_table_may_have_some_columns_only():
    import table

    made = table.regenerate("<!-- results: capsnet-glyphs factor_correlation_x test_error -->\n<!-- /results -->")
    head, _, first, *_ = made.splitlines()[1:]
    assert [cell.strip() for cell in head.split("|")[2:-1]] == ["factor correlation x", "test error (%)"]
    assert first.startswith("| capsnet-glyphs | 0.9") and table.regenerate(made) == made
    empty = "<!-- results: capsnet-glyphs factor_correlation_x -->\n<!-- /results -->"
    assert "nearest mean" in made and "nearest mean" not in table.regenerate(empty)


STATED_PERCENT = {
    "docs/start/glossary.md": {"90": "threshold of the confident fraction"},
    "docs/systems/capsnet.md": {
        ".2": "by how much the sizes of two networks may differ",
        "99": "accuracy at which training stops",
        "0.25": "Sabour 2017, table 1",
        "5.2": "Sabour 2017, table 1",
        "79": "Sabour 2017, section 5.2: CapsNet",
        "66": "Sabour 2017, section 5.2: CNN",
    },
    "docs/systems/sparse.md": {"97.9": "Monnier 2020"},
    "docs/systems/matrix.md": {"2.2": "Hinton 2018, table 1", "1.8": "Hinton 2018, table 1"},
    "docs/results/index.md": {"1.8": "Hinton 2018, table 1"},
}
"""Percentages that pages may state in prose: settings, and numbers of papers. Our own come from results/."""


def typed_percentages(text: str) -> set[str]:
    """Return the percentages of a page that stand neither in a generated place nor in code."""
    for outside in (r"<!-- (\w+): [^>]*-->.*?<!-- /\1 -->", r"```.*?```", r"`[^`\n]*`"):
        text = re.sub(outside, "", text, flags=re.DOTALL)
    return set(re.findall(r"(?<![\w.])(\d*\.?\d+) ?(?:%|percent\b)", text))


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.parent.name in {"start", "how-to", "systems", "results"} or p.name == "README.md"],
    ids=name_of,
)
def test_percentages_in_prose_are_generated_or_stated_with_their_source(page):
    assert typed_percentages(page.read_text()) == set(STATED_PERCENT.get(name_of(page), {}))


def test_typed_percentages_are_found_outside_generated_places_only():
    made = "errs on <!-- value: a test_error -->4.30<!-- /value --> %, `50 %`\n"
    made += "<!-- results: a -->\n| 3 % |\n<!-- /results -->\n"
    assert typed_percentages(made) == set()
    assert typed_percentages(made + "and 3.29 % of it, .5 percent") == {"3.29", ".5"}


def test_numbers_of_public_code_name_their_source():
    import tomllib

    rows = tomllib.loads((ROOT / "experiments" / "overview.toml").read_text())["rows"]
    sources = {(row["data"], row["public"]) for row in rows if "source" in row}
    assert sources and {(row["data"], row["public"]) for row in rows if "public" in row} == sources
    assert all(row["source"] in (DOCS / "results" / "index.md").read_text() for row in rows if "source" in row)


def test_the_readme_is_short_and_its_tables_are_narrow():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert max(line.count("|") - 1 for line in lines if line.startswith("|")) <= 7
    commands = "\n".join(lines[:25])
    assert "    make demo" in commands and "    make test" in commands


def test_the_readme_names_every_model_that_ships():
    from torchcaps.zoo import list_models

    rows = re.findall(r"(?m)^\|.*\(docs/systems/\w+\.md\) \(.*\|([^|]+)\|$", (ROOT / "README.md").read_text())
    assert sorted(re.findall(r"`([\w-]+)`", "".join(rows))) == sorted(list_models())


def test_every_page_of_the_api_has_an_example():
    pages = [page for page in (DOCS / "api").glob("*.md") if page.stem != "index"]
    assert pages and all("```python\n" in page.read_text() for page in pages)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_short_outside_the_lab_notebook(page):
    if {"lab-notebook", "api"} & set(page.parts):
        return
    assert len(page.read_text().splitlines()) <= 250


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name in {"start", "how-to", "systems", "results"}], ids=name_of
)
def test_tables_of_user_pages_fit_the_page(page):
    """All columns of a result are in the lab notebook."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert max([line.count(" | ") + 1 for line in rows], default=0) <= 8


def test_the_installation_page_names_every_extra():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"(?m)^\| `(\w+)` \|", (DOCS / "start" / "index.md").read_text())
    assert sorted(named) == sorted(extras)


@pytest.mark.parametrize("name", ["capsnet", "matrix", "poe", "sparse"])
def test_pages_of_systems_have_the_same_headings(name):
    headings = re.findall(r"(?m)^## (.+)$", (DOCS / "systems" / f"{name}.md").read_text())
    assert headings == ["Idea", "Picture", "Equations and code", "Use", "Numbers", "Limits"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_inside_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        path = page.parent / target
        # Pages of the gallery are made from programs when the site is built
        if "gallery" in path.parts:
            source = DOCS / "tutorials" if path.parent.name == "tutorials" else ROOT / "examples"
            path = source / f"{path.stem}.py"
        assert path.exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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


def known_options() -> set[str]:
    """Every flag of a command and of a script, every key of a recipe as a flag, and flags of tools that pages name."""
    import dataclasses

    from torchcaps.cli.parse import COMMANDS, flags_of
    from torchcaps.config import flatten, to_dict
    from torchcaps.data import DATASETS
    from torchcaps.train import load_recipe, recipe_names

    flags = {flag for command in COMMANDS.values() for flag in flags_of(command)} | {"--help", "--debug", "--version"}
    keys = {key for name in recipe_names() for key in flatten(to_dict(load_recipe(name)))}
    for table, named in (("model", MODELS), ("data", DATASETS)):
        keys |= {f"{table}.{field.name}" for config in named.values() for field in dataclasses.fields(config)}
    for router in ROUTERS.values():
        keys |= {f"model.routing.{field.name}" for field in dataclasses.fields(router.settings)}
    keys |= {f"model.energy.routing.{key.rpartition('.')[2]}" for key in keys if key.startswith("model.routing.")}
    keys |= {f"{table}.name" for table in ("model.routing", "data", "optimizer", "schedule")} | {"start"}
    scripts = [*(ROOT / "experiments").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    flags |= {flag for script in scripts for flag in re.findall(r'"(--[a-z-]+)"', script.read_text())}
    flags |= {"--nproc-per-node", "--max-restarts", "--local-addr", "--strict", "--check"}  # torchrun, mypy, ruff
    return flags | {f"--{key}" for key in keys}


def options_of_ours(text: str) -> set[str]:
    """Return the options in a text that are not those of another program."""
    others = re.compile(r"\b(git|pip|python -m|python experiments|make|pytest|apt-get)\b")
    found: set[str] = set()
    for line in text.replace("\\\n", " ").splitlines():
        # torchrun's options come before the command that it starts
        ours = line.rpartition("-m torchcaps")[2] if "torchrun -" in line else line
        if line.startswith("#SBATCH") or ("torchcaps " not in line and others.search(line)):
            continue
        found |= set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", ours))
    return found


def test_options_that_the_documents_name_exist():
    known = {flag.replace("-", "_") for flag in known_options()}
    named = {(name_of(page), option) for page in PAGES for option in options_of_ours(page.read_text())}
    plain = {one: re.sub(r"^--stages\.\w+\.", "--", one[1]).replace("-", "_") for one in named}
    unknown = [one for one, option in plain.items() if option not in known]
    assert named and not unknown, unknown


def test_spelling():
    words = [str(ROOT / name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples", "src")]
    words += [str(page) for page in PAGES] + [str(DOCS / "tutorials")]
    tool = Path(sys.executable).parent / "codespell"
    if not tool.exists():
        pytest.skip("codespell is not installed: it is part of the extra `dev`")
    done = subprocess.run([tool, "--toml", str(ROOT / "pyproject.toml"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_recipes_and_experiments_that_documents_and_help_name_exist():
    from torchcaps.train import recipe_names

    texts = [page.read_text() for page in PAGES]
    texts += [path.read_text() for path in sorted((ROOT / "src" / "torchcaps" / "cli").glob("*.py"))]
    texts += [path.read_text() for path in [*EXAMPLES, *TUTORIALS]]
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
