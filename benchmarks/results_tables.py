"""Print the tables of docs/results.md from the folders of evaluation runs.

python benchmarks/results_tables.py RUN [RUN...]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyramidkv.compression import without_amount
from pyramidkv.evaluation.folders import read_lines, read_settings
from pyramidkv.evaluation.summary import FULL, asked_length, differences_of, summarise

PAIRS = (("pyramidkv", "snapkv"), ("pyramidkv-paper", "snapkv-paper"), ("snapkv", "snapkv-paper"))


def percent(value: float, interval: Iterable[float], sign: str = "") -> str:
    """Return a share and its interval in percent."""
    low, high = (f"{100 * bound:{sign}z.0f}" for bound in interval)
    return f"{100 * value:{sign}z.1f} ({low} to {high})"


def table(corner: str, columns: list[str], rows: Mapping[str, list[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join([corner, *columns])} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()]
    return "\n".join(lines)


def scores(group: Mapping[str, Any], arms: Mapping[str, Any], budgets: list[int]) -> str:
    """Return scores by method and budget."""
    described = group["arms"]
    full = described[FULL]
    rows: dict[str, list[str]] = {}
    footprints: dict[int, list[float]] = {budget: [] for budget in budgets}
    for name, parameters in arms.items():
        if name == FULL:
            continue
        told = percent(described[name]["score"], described[name]["interval"])
        rows.setdefault(f"`{without_amount(name, parameters)}`", []).append(told)
        footprints[parameters["budget"]].append(100 * described[name]["footprint"])
    rows["KV footprint"] = [f"{sum(f) / len(f):.1f}%" for f in footprints.values()]
    title = f"full: {percent(full['score'], full['interval'])}"
    return table(title, [str(budget) for budget in budgets], rows)


def differences(group: Mapping[str, Any], budgets: list[int]) -> str:
    """Return paired differences of some methods by budget, in points."""
    rows: dict[str, list[str]] = {}
    for first, second in PAIRS:
        for budget in budgets:
            found = differences_of(group, f"{first} {budget}").get(f"{second} {budget}")
            if found is not None:  # else the run has only one of them
                told = percent(found["difference"], found["interval"], "+")
                rows.setdefault(f"`{first}` - `{second}`", []).append(told)
    return table("points", [str(budget) for budget in budgets], rows)


def critical(group: Mapping[str, Any]) -> str:
    """Return each method's critical footprint in one sentence."""
    told = ", ".join(
        f"`{method}` " + ("-" if share is None else f"{100 * share:.1f}%")
        for method, share in group["critical_footprint"].items()
    )
    return f"Smallest footprint with 90% of the full cache's score: {told}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    for run in parser.parse_args().runs:
        asked = read_settings(run)["asked"]
        arms = asked["arms"]
        budgets = sorted({arm["budget"] for name, arm in arms.items() if name != FULL})
        lines = list(read_lines(run))
        how = "context alone" if asked["agnostic"] else "with the question"
        print(f"# {run.name}: {how}, {len(lines)} of {asked['samples']} samples\n")
        groups = dict(summarise(lines, arms))
        for length in sorted({asked_length(line) for line in lines} - {None}):
            some = [line for line in lines if asked_length(line) == length]
            groups[f"{length:,} tokens"] = summarise(some, arms)["all"]
        for name, group in groups.items():
            print(f"## {name}: {group['samples']} samples\n\n{scores(group, arms, budgets)}\n")
            if name == "all":
                print(f"{differences(group, budgets)}\n\n{critical(group)}\n")


if __name__ == "__main__":
    main()
