"""A page with tables and a plot, of what benchmarks recorded.

    make bench ARGS="--benchmark-json bench.json"
    python -m benchmarks.page bench.json --out docs/benchmarks/2026-12-01-cpu.md

Reads pytest-benchmark's JSON, several files if they are of one machine. Each comparison (``benchmarks.compare``) is a
row: both medians, the ratio with its spread, what was checked. Other benchmarks' records follow as they are. The plot
lies beside the page, under the same name.

Guarantees: a file that holds no benchmark, or of another machine or torch than the first, ends it before anything is
written.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Figure = Mapping[str, Any]


class PageError(ValueError):
    """What was given makes no page."""


def read(paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine and the benchmarks of all files; of one that was measured again, the last file's figures.

    Raises:
        PageError: a file is not pytest-benchmark's, holds nothing, or is of another machine.
    """
    machine: dict[str, Any] = {}
    benchmarks: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = {**content["machine_info"], "datetime": content["datetime"]}
            new = content["benchmarks"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise PageError(
                f"{path} is not a file of pytest-benchmark; write one with --benchmark-json: {error}"
            ) from error
        if not new:
            raise PageError(f"{path} holds no benchmark; look at what that run skipped.")
        machine = machine or found
        for key in ("node", "python_version", "torch", "gpus"):
            if found.get(key) != machine.get(key):
                raise PageError(
                    f"{path} has {key} {found.get(key)} and {paths[0]} has {machine.get(key)}; a page is of one "
                    "machine and one torch. Make a page of each."
                )
        benchmarks.update({benchmark["fullname"]: benchmark for benchmark in new})
    return machine, list(benchmarks.values())


def is_comparison(benchmark: Figure) -> bool:
    return all(key in benchmark["extra_info"] for key in ("ours", "other", "ours_us", "check"))


def in_units(us: float) -> str:
    """A time with three digits and the unit that suits it."""
    for limit, unit, factor in ((1e3, "us", 1.0), (1e6, "ms", 1e-3), (float("inf"), "s", 1e-6)):
        if us < limit:
            return f"{us * factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{us} us"


def time_of(spread: Figure) -> str:
    if spread["p10"] == spread["p90"]:
        return in_units(spread["median"])  # one round has no spread
    return f"{in_units(spread['median'])} ({in_units(spread['p10'])} to {in_units(spread['p90'])})"


def ratio_of(figure: Figure) -> str:
    ratio = figure.get("ratio")
    if ratio is None:
        return "-"
    if ratio["p10"] == ratio["p90"]:
        return f"**{ratio['median']:.2f}**"
    return f"**{ratio['median']:.2f}** ({ratio['p10']:.2f} to {ratio['p90']:.2f})"


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(cell(text) for text in cells)} |"


def by_module(benchmarks: Iterable[Figure]) -> dict[str, list[Figure]]:
    """The benchmarks of each file, in the order in which they ran."""
    modules: dict[str, list[Figure]] = defaultdict(list)
    for benchmark in benchmarks:
        modules[benchmark["fullname"].partition("::")[0].rpartition("/")[2]].append(benchmark)
    return dict(modules)


def comparison_lines(figures: Sequence[Figure]) -> list[str]:
    """A table, then what each row's figures hold for."""
    lines = [row(("", "graphsafe", "beside", "rounds", "ratio")), row(["---"] * 5)]
    for figure in figures:
        info = figure["extra_info"]
        other = time_of(info["other_us"]) if "other_us" in info else info.get("other_outcome", "-")
        lines.append(
            row(
                (
                    f"`{figure['name']}`",
                    f"{info['ours']}: {time_of(info['ours_us'])}",
                    f"{info['other']}: {other}",
                    info.get("num_rounds", "-"),
                    ratio_of(info),
                )
            )
        )
    lines.append("")
    for figure in figures:
        info = figure["extra_info"]
        config = "; ".join(f"{key}: {value}" for key, value in info.get("config", {}).items())
        said = [f"checked: {info['check']}"]
        if "more_us" in info:
            sign = "+" if info["more_us"] >= 0 else "-"
            said.append(f"graphsafe's side takes {sign}{in_units(abs(info['more_us']))} (median of the differences)")
        if "ratio_to_one_thread" in info:
            said.append(f"{info['ratio_to_one_thread']:.2f} times graphsafe's time with one thread")
        lines.append(f"- `{figure['name']}`: {config}; {'; '.join(said)}.")
    return lines


def other_lines(figure: Figure) -> list[str]:
    """A benchmark that records something of its own: its record as JSON, or the time of a round."""
    info = figure["extra_info"]
    if info:
        return [f"`{figure['name']}`:", "```json", json.dumps(info, indent=1), "```"]
    stats = figure["stats"]
    return [f"`{figure['name']}`: median {in_units(stats['median'] * 1e6)} of {stats['rounds']} rounds."]


def environment_lines(machine: Figure) -> list[str]:
    cpu = machine.get("cpu", {})
    processor = cpu.get("brand_raw", machine.get("machine", "?"))
    parts = [
        f"{machine.get('num_cores', cpu.get('count', '?'))} cores of {processor}",
        f"Python {machine.get('python_version', '?')}",
        f"torch {machine.get('torch', '?')}",
        f"{machine.get('system', '?')} {machine.get('release', '')}".strip(),
    ]
    parts += [", ".join(machine["gpus"])] if machine.get("gpus") else ["no GPU"]
    if machine.get("load_average"):
        parts.append(f"load average at the end {', '.join(map(str, machine['load_average']))}")
    return [f"{'; '.join(parts)}."]


def render(
    machine: Figure, benchmarks: Sequence[Figure], title: str, command: str, plot: str | None, note: str = ""
) -> str:
    """The page's text.

    Args:
        plot: name of the picture beside the page; None where no benchmark has a ratio.
        note: what a reader should know of this run, such as what else the machine did.
    """
    lines = [f"# {title}", "", *environment_lines(machine), "", "```", command, "```", ""]
    lines += [
        "Times are of one call: the median over rounds, with the 10th and 90th percentile. A ratio is graphsafe's",
        "time over the other side's, the median of the ratios of single rounds; below 1 graphsafe is faster.",
        "[How this is measured](measuring.md).",
        "",
        *([note, ""] if note else []),
    ]
    if plot is not None:
        lines += [f"![The ratios, with their spread]({plot})", ""]
    for module, figures in by_module(benchmarks).items():
        lines += [f"## {module}", "```", f"python -m pytest benchmarks/{module} --benchmark-only", "```", ""]
        compared = [figure for figure in figures if is_comparison(figure)]
        if compared:
            lines += [*comparison_lines(compared), ""]
        for figure in figures:
            if not is_comparison(figure):
                lines += [*other_lines(figure), ""]
    return "\n".join(lines).rstrip() + "\n"


def label_of(figure: Figure) -> str:
    """A test's name in words, with its parameters."""
    name, _, parameters = figure["name"].partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words} ({parameters.rstrip(']')})" if parameters else words


def draw(benchmarks: Sequence[Figure], title: str, path: Path) -> None:
    """The ratios, a row each, on a logarithmic axis; the modules have a colour each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    modules = {
        name: [f for f in figures if f["extra_info"].get("ratio")] for name, figures in by_module(benchmarks).items()
    }
    modules = {name: figures for name, figures in modules.items() if figures}
    num_rows = sum(map(len, modules.values()))
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.27 * num_rows), layout="constrained")
    labels: list[str] = []
    highest = 1.0
    for index, (module, figures) in enumerate(modules.items()):
        places = range(len(labels), len(labels) + len(figures))
        ratios = [benchmark["extra_info"]["ratio"] for benchmark in figures]
        middle = [ratio["median"] for ratio in ratios]
        highest = max(highest, *(ratio["p90"] for ratio in ratios))
        errors = [[r["median"] - r["p10"] for r in ratios], [r["p90"] - r["median"] for r in ratios]]
        axes.errorbar(middle, places, xerr=errors, fmt="o", ms=4, capsize=2, color=f"C{index}", label=module)
        for place, ratio in zip(places, ratios, strict=True):
            axes.annotate(
                f"{ratio['median']:.2f}",
                (ratio["p90"], place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        labels += [label_of(benchmark) for benchmark in figures]
    axes.axvline(1.0, color="0.4", lw=1)
    axes.set_xscale("log")
    axes.set_xlim(right=highest * 1.6)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("graphsafe's time over the other side's: median, 10th to 90th percentile of the rounds")
    axes.set_title(title, fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def make_page(paths: Sequence[Path], out: Path, title: str, command: str, note: str = "") -> None:
    """Write the page, and its plot where there is a ratio.

    Raises:
        PageError: from ``read``.
    """
    machine, benchmarks = read(paths)
    plot = out.with_suffix(".png") if any(benchmark["extra_info"].get("ratio") for benchmark in benchmarks) else None
    out.parent.mkdir(parents=True, exist_ok=True)
    if plot is not None:
        draw(benchmarks, title, plot)
    out.write_text(render(machine, benchmarks, title, command, plot.name if plot else None, note), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="files of --benchmark-json")
    parser.add_argument(
        "--out", type=Path, required=True, help="the page to write, such as docs/benchmarks/DATE-MACHINE.md"
    )
    parser.add_argument("--title", help="the page's heading; its file name else")
    parser.add_argument("--command", default="make bench", help="what made the results")
    parser.add_argument("--note", default="", help="a sentence on this run, such as what else the machine did")
    given = parser.parse_args(arguments)
    try:
        make_page(given.results, given.out, given.title or given.out.stem, given.command, given.note)
    except PageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
