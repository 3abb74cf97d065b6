"""Write the results tables of README and docs from results/*.json, so that no number is typed by hand.

    python experiments/table.py            rewrite every table
    python experiments/table.py --check    exit 1 if one is stale, and change nothing

A table stands between `<!-- KIND: NAME -->` and `<!-- /KIND -->`. The kinds, and the files that they are made from:

    results    results/NAME.json, by `torchcaps evaluate --results`; words behind NAME are metrics: only these columns
    attacks    results/NAME-attacks.json, by `torchcaps attack --results`
    lab        results/lab-NAME.json, by a study in experiments/
    bench      benchmarks/NAME.json, by `python -m benchmarks --json`
    cells      benchmarks/NAME.json, by another module of benchmarks/: a table as it was written
    load       benchmarks/NAME.json, by `python -m benchmarks.explore`
    moves      the same file, a row a model that ships
    zoo        cards of the models that ship and whose names begin with NAME; "all" for all
    systems    experiments/NAME.toml: which numbers of results/ stand beside those of the papers and of public code
    sources    experiments/NAME.toml: where the numbers of public code come from
    public     benchmarks/NAME.json, by `python -m benchmarks.public_code`: training steps beside public code
    ratios     benchmarks/NAME.json: training steps only, as ratios to the form that stores the votes
    value      results/NAME.json, one number inside a sentence: `<!-- value: NAME METRIC ROW -->`, ROW may be left out;
               NAME is `zoo/MODEL` for the result that ships with a model
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from torchcaps.evaluate.results import Result, read_result
from torchcaps.systems.attack_runs import attack_rows, curves_of, verdicts
from torchcaps.systems.report import metric_of, rows_of

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for `benchmarks`, which is no part of the installed package
KINDS = "results|bench|cells|attacks|lab|load|moves|systems|sources|ratios|public|zoo"
PLACE = re.compile(rf"(<!-- ({KINDS}): ([\w-]+)((?: \w+)*) -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: ((?:zoo/)?[\w-]+) (\w+)(?: ([\w -]+?))? -->)[^<]*(<!-- /value -->)")
CASES = {
    "dynamic-1152x8-10x16": "dynamic routing, 1152 children to 10 classes",
    "dynamic-4608x8-16x16": "dynamic routing, 4608 children to 16 parents",
    "cd-576x8-20x16": "contrastive divergence, 576 children to 20 experts",
    "em-64-8-16-16": "matrix capsules, smaller network of the paper",
    "em-32-32-32-32": "matrix capsules, full network of the paper",
    "capsnet-28": "CapsNet of the paper, 28x28",
    "sparse-40": "sparse capsules of the paper, 40x40",
}


def results_table(name: str, metrics: Sequence[str] = ()) -> str:
    """Format a result as Markdown: the recipe's row, its controls, and one line on seeds and budget.

    Args:
        name: Of the result.
        metrics: The columns, in this order; all metrics of the result if none is named.
    """
    result = read_result(ROOT / "results" / f"{name}.json")
    lines = _lines(_columns(result, metrics))
    budget = result.budget
    made = result.versions
    seeds = _count(len(result.seeds), "seed")
    read = f"; the SVM probe learned from {budget['read_images']:,.0f} images" if "read_images" in budget else ""
    read += ", of codes before the mask unless a row says behind" if "before_mask" in budget else ""
    lines += [
        "",
        f"{seeds}, {budget['steps']:.0f} steps, {budget['seconds']:.0f} s each "
        f"on {_count(budget['threads'], 'thread')}, "
        f"{budget['parameters']:,.0f} parameters{read}; torch {made['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def _columns(result: Result, metrics: Sequence[str]) -> list[list[str]]:
    """The table of a result with the named columns only; rows that have none of them are left out."""
    rows = rows_of(result)
    if not metrics:
        return rows
    names = list(result.metrics)
    chosen = [0, *(1 + names.index(metric) for metric in metrics)]
    head, *body = ([row[n] for n in chosen] for row in rows)
    return [head, *(row for row in body if set(row[1:]) != {"-"})]


def _count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def speed_table(name: str) -> str:
    """Format every row of a measurement of speed and memory."""
    from benchmarks.machine import describe_machine
    from benchmarks.report import cells_of
    from benchmarks.rows import read_measurement

    found = read_measurement(ROOT / "benchmarks" / f"{name}.json")
    return "\n".join([*_lines(cells_of(found.rows)), "", describe_machine(found.machine)]) + "\n"


def cell_table(name: str) -> str:
    """Format a table whose cells are stored as text."""
    return "\n".join(_lines(json.loads((ROOT / "benchmarks" / f"{name}.json").read_text()))) + "\n"


def attack_table(name: str) -> str:
    """Format accuracies by epsilon, and whether the curves show gradient masking."""
    found = json.loads((ROOT / "results" / f"{name}-attacks.json").read_text())
    curves = curves_of(found)
    images = next(iter(curves.values())).images
    verdict = f"{images} images. {'; '.join(verdicts(curves))}."
    return "\n".join([*_lines(attack_rows(curves)), "", verdict]) + "\n"


def lab_table(name: str) -> str:
    """Format the rows of a study."""
    return "\n".join(_lines(json.loads((ROOT / "results" / f"lab-{name}.json").read_text())["rows"])) + "\n"


def load_table(name: str) -> str:
    """Format how long clients of the explorer wait, alone and together."""
    found = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    keys = ("moves", "p50_ms", "p95_ms", "max_ms", "moves_per_second", "turned_away", "lost")
    rows = [["clients", *(key.replace("_", " ") for key in keys)]]
    rows += [[str(one["clients"]), *(f"{one[key]:.4g}" for key in keys)] for one in (found["alone"], found["load"])]
    where = found["machine"]
    return "\n".join([*_lines(rows), "", f"{found['run']}; {_machine(where)}"]) + "\n"


def moves_table(name: str) -> str:
    """Format how long one client of the explorer waits for a slider move, for every model that ships."""
    found = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    keys = ("p50_ms", "p95_ms", "max_ms")
    rows = [["model", *(f"{kind}, {key.replace('_', ' ')}" for kind in ("input", "pose") for key in keys)]]
    for one in found["models"]:
        cells = [f"{one[kind][key]:.3g}" if kind in one else "-" for kind in ("input", "pose") for key in keys]
        rows.append([one["run"], *cells])
    where = found["machine"]
    return "\n".join([*_lines(rows), "", _machine(where)]) + "\n"


def _machine(facts: dict[str, str]) -> str:
    """Name the machine that times were measured on, and whether it did other work beside."""
    warning = f" Measured beside other work: {facts['warning']}." if facts.get("warning") else ""
    return f"{facts['cpus']} cores; torch {facts['torch']}.{warning}"


def zoo_table(name: str) -> str:
    """Format one row a model that ships, of those whose names fit a pattern without its stars; "all" for all."""
    from torchcaps.zoo import list_models, model_card

    cards = [model_card(one) for one in list_models("*" if name == "all" else f"{name}*")]
    rows = [["model", "system", "data", "parameters", "result"]]
    rows += [[f"`{one.name}`", one.system, one.data, f"{one.parameters:,}", one.headline] for one in cards]
    return "\n".join(_lines(rows)) + "\n"


def systems_table(name: str, base: str = "") -> str:
    """Format one row a system and data set: the paper's number, public code's, a baseline's, ours and its cost.

    Args:
        name: Of a file in experiments/ that lists the rows.
        base: What links to pages of docs/ begin with.
    """
    rows = [["system", "data and measure", "paper", "public code", "baseline", "ours", "minutes"]]
    for one in tomllib.loads((ROOT / "experiments" / f"{name}.toml").read_text())["rows"]:
        result = read_result(_result_file(one))
        metric = one["metric"]
        paper = result.paper.get(metric)
        rows.append(
            [
                f"[{one['system']}]({base}{one['page']})",
                one["data"],
                "-" if paper is None else _number(metric, [paper]),
                one.get("public", "-"),
                _baseline(result, metric, one),
                f"**{_value(result, metric, one.get('row'))}**",
                f"{result.budget['seconds'] / 60:.0f}",
            ]
        )
    head, rule, *body = _lines(rows)
    return "\n".join([head, rule.replace("--:", "---", 1), *body]) + "\n"


def sources_list(name: str) -> str:
    """Format where each number of public code comes from.

    Args:
        name: Of a file in experiments/ that lists the rows.
    """
    rows = tomllib.loads((ROOT / "experiments" / f"{name}.toml").read_text())["rows"]
    return "".join(f"- {one['system']}, {one['public']}: {one['source']}\n" for one in rows if "source" in one)


def _result_file(row: Mapping[str, str]) -> Path:
    """The file of a row's result: in results/, or beside the weights of a model that ships."""
    if "model" in row:
        return ROOT / "src" / "torchcaps" / "zoo" / "models" / row["model"] / "result.json"
    return ROOT / "results" / f"{row['result']}.json"


def _baseline(result: Result, metric: str, row: Mapping[str, str]) -> str:
    """The number of the row's baseline and its name, or a dash if it has none."""
    if "baseline" not in row:
        return "-"
    return f"{_value(result, metric, row['baseline'])}, {row.get('baseline_label', row['baseline'])}"


def ratios_table(name: str) -> str:
    """Format training steps as ratios of time and memory to the form that stores the votes."""
    from benchmarks.machine import describe_machine
    from benchmarks.rows import read_measurement

    found = read_measurement(ROOT / "benchmarks" / f"{name}.json")
    rows = [["one training step, batch 128", "ms an image", "times faster", "times less memory"]]
    for row in found.rows:
        if row.kind == "step":
            star = "" if row.plain_batch == row.batch else "*"
            memory = "-" if row.memory_ratio is None else f"{row.memory_ratio:.1f}"
            rows.append([CASES[row.name], f"{row.ms_per_sample:.2g}", f"{row.plain_ratio:.1f}{star}", memory])
    return "\n".join([*_lines(rows), "", describe_machine(found.machine)]) + "\n"


def public_table(name: str) -> str:
    """Format training steps beside those of named public code, and the machine."""
    from benchmarks.machine import Machine, describe_machine
    from benchmarks.public_code import Comparison, cells_of

    found = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    rows = cells_of([Comparison(**row) for row in found["rows"]])
    return "\n".join([*_lines(rows), "", describe_machine(Machine(**found["machine"]))]) + "\n"


def value_of(name: str, metric: str, row: str | None) -> str:
    """Format one number of a result, or of one of its controls, for a sentence."""
    shipped = name.removeprefix("zoo/")
    file = _result_file({"model": shipped} if shipped != name else {"result": name})
    return _value(read_result(file), metric, row)


def _value(result: Result, metric: str, row: str | None) -> str:
    """The metric of the result, or of the row of its controls that is named."""
    return _number(metric, (result.metrics if row is None else result.controls[row])[metric])


def _number(metric: str, values: Sequence[float]) -> str:
    """Mean over seeds, and the standard deviation if there are several; fractions of samples as percent."""
    percent = metric_of(metric).form == "percent" or metric == "confident_fraction"
    scaled = [100 * value if percent else value for value in values]
    digits = 1 if metric == "confident_fraction" else 2
    spread = f" ± {stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{mean(scaled):.{digits}f}{spread}"


def _lines(rows: list[list[str]]) -> list[str]:
    head, *body = rows
    return [_line(head), _line(["---"] + ["--:"] * (len(head) - 1)), *(_line(row) for row in body)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def pages() -> Iterator[Path]:
    """Yield every page that may hold a table."""
    yield ROOT / "README.md"
    yield from (page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts)


TABLES = {
    "results": results_table,
    "attacks": attack_table,
    "lab": lab_table,
    "bench": speed_table,
    "cells": cell_table,
    "load": load_table,
    "moves": moves_table,
    "zoo": zoo_table,
    "systems": systems_table,
    "sources": sources_list,
    "ratios": ratios_table,
    "public": public_table,
}


def regenerate(text: str, base: str = "") -> str:
    """Return the text of a page with each of its tables and numbers made from the stored results.

    Args:
        text: Of the page.
        base: The way from the page to docs/, for links in tables.
    """

    def table(found: re.Match[str]) -> str:
        kind = found[2]
        metrics = found[4].split()
        if kind == "systems":
            made = systems_table(found[3], base)
        elif metrics:
            made = results_table(found[3], metrics)
        else:
            made = TABLES[kind](found[3])
        return found[1] + made + found[6]

    text = PLACE.sub(table, text)
    return VALUE.sub(lambda m: m[1] + value_of(m[2], m[3], m[4]) + m[5], text)


def base_of(page: Path) -> str:
    """Return the way from a page to docs/, as links write it."""
    return "docs/" if page.parent == ROOT else "../" * (len(page.relative_to(ROOT / "docs").parts) - 1)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    arguments = parser.parse_args(words)
    fresh = {page: regenerate(page.read_text(), base_of(page)) for page in pages()}
    stale = [page for page, text in fresh.items() if text != page.read_text()]
    if arguments.check:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is stale: run python experiments/table.py", file=sys.stderr)
        return 1 if stale else 0
    for page in stale:
        page.write_text(fresh[page])
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
