"""Configuration of the documentation site: `make docs` builds it, offline and with warnings as errors."""

from __future__ import annotations

import os
import re
import shutil
import sys
import zlib
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
# As the command line does, before torch is loaded: idle threads that spin make the gallery slow on a busy machine
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

from torchcaps import __version__  # noqa: E402  (of this tree, not of another installation)

project = "torchcaps"
author = "The torchcaps developers"
copyright = "The torchcaps developers; MIT license"
release = __version__
version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery/**/*.ipynb", "gallery/**/*.py", "**/GALLERY_HEADER.rst"]
suppress_warnings = ["config.cache"]
default_role = "code"  # docstrings write `name` for code
nitpicky = False

# Markdown pages
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# API pages: signatures as they are written; Google sections by napoleon
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
# Annotations that are checks keep their names in signatures
autodoc_type_aliases = {
    name: name
    for name in (
        "Count",
        "Size",
        "Sizes",
        "Seed",
        "Iterations",
        "Share",
        "PositiveFloat",
        "NonNegativeFloat",
        "NonNegativeInt",
        "RouterChoice",
        "Options",
        "Table",
    )
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # "Attributes:" of a class are a list, beside its members

# Tutorials and examples: run by `make docs`; `-D plot_gallery=0` renders them without running
sphinx_gallery_conf = {
    "examples_dirs": ["tutorials", "../examples"],
    "gallery_dirs": ["gallery/tutorials", "gallery/examples"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "copyfile_regex": r".*\.npz",
    "abort_on_example_error": True,
    "capture_repr": (),
    "download_all_examples": False,
    "min_reported_time": 1,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
}

# The look: furo brings its own fonts and scripts, so a page asks no other host for anything
html_theme = "furo"
html_title = f"torchcaps {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_search_summary = False  # it fetches pages, which a browser refuses for pages that are opened as files

# Names of torch that signatures use, and the pages that explain them. The inventory is written here, because the build
# has no network; links are followed by the reader only.
TORCH_URL = "https://docs.pytorch.org/docs/stable/"
TORCH_NAMES = {
    "torch.Tensor": ("py:class", "tensors.html#torch.Tensor"),
    "torch.dtype": ("py:class", "tensor_attributes.html#torch.dtype"),
    "torch.device": ("py:class", "tensor_attributes.html#torch.device"),
    "torch.Generator": ("py:class", "generated/torch.Generator.html#torch.Generator"),
    "torch.nn.Module": ("py:class", "generated/torch.nn.Module.html#torch.nn.Module"),
    "torch.nn.Parameter": ("py:class", "generated/torch.nn.parameter.Parameter.html"),
    "torch.nn.Conv2d": ("py:class", "generated/torch.nn.Conv2d.html#torch.nn.Conv2d"),
    "torch.optim.Optimizer": ("py:class", "optim.html#torch.optim.Optimizer"),
}


def write_torch_inventory(path: Path) -> Path:
    """Write the names of torch in the format of intersphinx, version 2; returns the path."""
    head = "# Sphinx inventory version 2\n# Project: torch\n# Version: stable\n"
    head += "# The remainder of this file is compressed using zlib.\n"
    rows = "".join(f"{name} {kind} 1 {page} -\n" for name, (kind, page) in TORCH_NAMES.items())
    # "torch.nn.modules.module.Module" is what autodoc finds for nn.Module
    rows += "torch.nn.modules.module.Module py:class 1 generated/torch.nn.Module.html#torch.nn.Module -\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress(rows.encode()))
    return path


intersphinx_mapping = {"torch": (TORCH_URL, str(write_torch_inventory(HERE / "_build" / "torch.inv")))}
intersphinx_disabled_reftypes: list[str] = []


def collect_live_page(folder: Path) -> Path:
    """Put the page that runs without a server, and the weights it reads, into one folder; returns that folder."""
    live = folder / "live"
    shutil.rmtree(live, ignore_errors=True)
    shutil.copytree(HERE / "live", live)
    models = HERE.parent / "src" / "torchcaps" / "zoo" / "models"
    for name in ("capsnet-digits", "poe-mnist"):
        shutil.copyfile(models / name / "model.safetensors", live / f"{name}.safetensors")
    return folder


html_extra_path = [str(collect_live_page(HERE / "_build" / "extra"))]

CODE = re.compile(r"(``.+?``|`[^`]+`)")
SPECIAL = re.compile(r"([*|\\])|(?<=\w)(_)(?=\W|$)")


def escape_docstring(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make a docstring safe for reStructuredText: |z| and W* are text, and an indented block is shown as it stands.

    Runs before napoleon, so sections ("Args:") are still plain text. Of attributes, napoleon takes what stands before a
    colon in the first line for their type, so a dash replaces it.
    """
    if what in {"attribute", "property"} and lines:
        lines[0] = lines[0].replace(": ", " – ", 1)
    found: list[str] = []
    in_section = False
    in_block = False
    for number, line in enumerate(lines):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped and indent == 0:
            in_section = bool(re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields|Examples?|Note):", stripped))
            in_block = False
        after_blank = number > 0 and not lines[number - 1].strip()
        # An indented paragraph outside of a section is an equation or a table in plain text
        starts_block = stripped and indent >= 2 and after_blank and not in_section and not in_block
        if starts_block and not stripped.startswith((">>>", "- ", "* ")):
            found += ["::", ""]
            in_block = True
        if in_block or stripped.startswith((">>>", "...")):
            found.append(line)
            continue
        parts = CODE.split(line)
        found.append("".join(part if CODE.fullmatch(part) else SPECIAL.sub(r"\\\1\2", part) for part in parts))
    lines[:] = found


def skip_member(app: object, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leave out fields of named tuples, which "Attributes:" explains, and what scikit-learn adds to its estimators."""
    is_field = type(obj).__name__ == "_tuplegetter"
    return True if is_field or re.fullmatch(r"set_\w+_request", name) else None


def setup(app: object) -> None:
    """Register the hooks of autodoc."""
    app.connect("autodoc-skip-member", skip_member)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", escape_docstring, priority=400)  # type: ignore[attr-defined]
