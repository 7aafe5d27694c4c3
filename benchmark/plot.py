"""Draws the figures of benchmark/figures/ and the tables of the README from benchmark/results/.

    python benchmark/plot.py             # figures; prints the tables
    python benchmark/plot.py --write     # and puts the tables into README.md

Needs the packages of requirements-dev.txt. Curves: mean of the seeds, and a band from the lowest to the
highest.
"""

import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.run import ROOT, label_of, read_results

RESULTS, FIGURES = ROOT / "benchmark/results", ROOT / "benchmark/figures"
# Okabe and Ito's palette, which the color-blind can tell apart, without its yellow.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]

TITLES = {
    "classic": "Classic control: 4 environments, defaults",
    "mujoco": "MuJoCo: 1 environment, defaults",
    "many": "4,096 environments, defaults",
    "microrts": "microRTS: 8 environments",
}


COMPLETE = "all details"  # among the ablations


@dataclass
class Args:
    write: bool = False
    """put the tables into README.md"""


@dataclass(frozen=True)
class Curve:
    """The returns of one run."""

    script: str
    env: str
    name: str
    seed: int
    steps: np.ndarray
    seconds: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray
    notes: dict  # its entry in the JSON file


def load(plan, results=RESULTS) -> list[Curve]:
    """The runs of a plan, [] where there are no results.

    Raises ValueError where seeds of one thing were run with different flags: their mean would say nothing.
    """
    rows, notes = read_results(plan, results)
    curves = {}
    for row in rows:
        curves.setdefault((row["script"], row["env"], row["name"], row["seed"]), []).append(row)
    made = []
    for (script, env, name, seed), points in curves.items():
        names = ("step", "seconds", "return", "length")
        columns = [np.array([float(point[name]) for point in points]) for name in names]
        made.append(Curve(script, env, name, int(seed), *columns, notes[label_of(script, env, name, seed)]))
    flags = {}
    for c in made:
        own = {k: c.notes.get(k) for k in ("flags", "replace")} | {"seed": None}
        own["flags"] = own["flags"] | {"seed": None}
        if flags.setdefault((c.script, c.env, c.name), own) != own:
            raise ValueError(f"{plan}: the seeds of {c.script}, {c.env}, {c.name} have different flags")
    return made


def published() -> dict[tuple[str, str], dict[str, list[float]]]:
    """(script, env) -> who -> [mean, standard deviation]."""
    entries = tomllib.loads((ROOT / "benchmark/published.toml").read_text())["published"]
    return {(e.pop("script"), e.pop("env")): e for e in entries}


def style():
    mpl.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    mpl.rcParams |= {"grid.alpha": 0.25, "svg.hashsalt": "ppo", "savefig.dpi": 110, "legend.frameon": False}


def save(figure, name):
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", metadata={"Software": None})
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def draw_band(axes, curves, x_of, color, label):
    """Mean of the runs and range from lowest to highest, at 100 points that all of them reach."""
    grid = np.linspace(max(x_of(c)[0] for c in curves), min(x_of(c)[-1] for c in curves), 100)
    values = np.stack([np.interp(grid, x_of(c), c.returns) for c in curves])
    axes.plot(grid, values.mean(0), color=color, label=label, linewidth=1.4)
    axes.fill_between(grid, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)


def draw_curves(plan, title):
    """One column per environment: return against steps above, against minutes below."""
    curves, known = load(plan), published()
    envs = list(dict.fromkeys(c.env for c in curves))
    scripts = list(dict.fromkeys((c.script, c.name) for c in curves))
    size = (3.0 * min(len(envs), 3), 2.2 * 2 * -(-len(envs) // 3))
    figure, grid = plt.subplots(
        2 * -(-len(envs) // 3), min(len(envs), 3), figsize=size, squeeze=False, layout="constrained"
    )
    for axes in grid.flat:
        axes.set_visible(False)
    for i, env in enumerate(envs):
        for row, (x_of, unit) in enumerate(
            [(lambda c: c.steps / 1000, "thousand steps"), (lambda c: c.seconds / 60, "minutes")]
        ):
            axes = grid[2 * (i // 3) + row, i % 3]
            axes.set_visible(True)
            for color, (script, name) in zip(COLORS, scripts, strict=False):
                chosen = [c for c in curves if (c.script, c.name, c.env) == (script, name, env)]
                if chosen:
                    draw_band(axes, chosen, x_of, color, " ".join(filter(None, [f"{script}.py", name])))
            for who, (mean, _) in ({} if plan == "many" else known).get((scripts[0][0], env), {}).items():
                style_of = {"CleanRL": "--", "baselines": ":"}[who]
                axes.axhline(mean, color="black", linestyle=style_of, linewidth=1, label=f"published, {who}")
            axes.set_xlabel(unit)
            if row == 0:
                axes.set_title(env, fontsize=9)
    grid[0, 0].set_ylabel("return")
    grid[1, 0].set_ylabel("return")
    panels = [axes.get_legend_handles_labels() for axes in grid.flat]
    legend = {label: handle for panel in panels for handle, label in zip(*panel, strict=True)}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4)
    counts = Counter((c.script, c.env, c.name) for c in curves).values()
    seeds = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(max(counts))
    figure.suptitle(f"{title}, {seeds} seed{'s' if max(counts) > 1 else ''}", fontsize=10)
    save(figure, plan)


def draw_ablations():
    """Interquartile means of final returns as shares of those with all details, with 95% intervals.

    Pooled over tasks and seeds by rliable (Agarwal et al. 2021, arXiv 2108.13264), intervals by bootstrap.
    Details of continuous control have one task and so 3 runs, of which the interquartile mean is the mean.
    """
    from rliable import library, metrics

    scores = {}
    for name, by_env in finals_of_ablations().items():
        shares = [
            np.array(values) / np.mean(finals_of_ablations()[COMPLETE][env]) for env, values in by_env.items()
        ]
        seeds = min(map(len, shares))  # that all tasks have
        scores[name] = np.stack([share[:seeds] for share in shares], axis=1)  # (seeds, tasks)
    iqm = lambda x: np.array([metrics.aggregate_iqm(x)])  # noqa: E731
    points, intervals = library.get_interval_estimates(scores, iqm, reps=2000)
    figure, axes = plt.subplots(figsize=(7, 0.35 * len(scores) + 1), layout="constrained")
    for i, name in enumerate(reversed(scores)):
        low, high = intervals[name].ravel()
        axes.barh(i, high - low, left=low, color=COLORS[0], alpha=0.35)
        axes.plot([points[name][0]] * 2, [i - 0.4, i + 0.4], color=COLORS[0])
    axes.set_yticks(range(len(scores)), list(reversed(scores)))
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("return at the end, as a share of that with all details")
    save(figure, "ablations")


# ---- Tables ----
def spread(values) -> str:
    """mean ± standard deviation over runs, or the one value."""
    digits = 0 if abs(np.mean(values)) >= 1000 else 1
    text = f"{np.mean(values):,.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {np.std(values):,.{digits}f}"


def table_of_results() -> str:
    """Ours beside the published, a row for each script and environment."""
    lines = ["| script | environment | mean return | published | seeds | steps | minutes |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    known = published()
    for plan in ("classic", "mujoco", "many", "microrts"):
        curves = load(plan)
        for script, env, name in dict.fromkeys((c.script, c.env, c.name) for c in curves):
            chosen = [c for c in curves if (c.script, c.env, c.name) == (script, env, name)]
            theirs = {} if name or plan == "many" else known.get((script, env), {})
            texts = [f"{mean:,.1f} ± {std:,.1f} ({who})" for who, (mean, std) in theirs.items()]
            minutes = [c.notes["seconds"] / 60 for c in chosen]
            span = f"{min(minutes):.1f} to {max(minutes):.1f}" if len(chosen) > 1 else f"{minutes[0]:.1f}"
            flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in chosen[0].notes["flags"].items()
                             if k not in ("env_id", "seed", "total_timesteps"))  # fmt: skip
            rows = [
                ", ".join(filter(None, [f"`{' '.join(filter(None, [f'{script}.py', flags]))}`", name])),
                env,
                spread([c.notes["episodic_return"] for c in chosen]),
                ", ".join(texts),
                str(len(chosen)),
                f"{max(c.notes['global_step'] for c in chosen) / 1e6:.2g}M",
                span,
            ]
            lines.append("| " + " | ".join(rows) + " |")
    return "\n".join(lines)


def finals_of_ablations() -> dict[str, dict[str, list[float]]]:
    """Name of the ablation -> environment -> final returns; first what has all details."""
    finals = {COMPLETE: {}}
    for curve in load("ablations"):
        by_env = finals.setdefault(curve.name, {})
        by_env.setdefault(curve.env, []).append(curve.notes["episodic_return"])
    return finals


def table_of_ablations() -> str:
    """Final returns without a detail, means over seeds; "" without results."""
    finals = finals_of_ablations()
    envs = list(dict.fromkeys(env for by_env in finals.values() for env in by_env))
    if not envs:
        return ""
    lines = [f"| | {' | '.join(envs)} |", "| --- " * (1 + len(envs)) + "|"]
    for name, by_env in finals.items():
        cells = [spread(by_env[env]) if env in by_env else "" for env in envs]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def first_reached(curve, target) -> tuple[float, float] | None:
    """Minutes and steps at which the mean of the last 100 episodes, or a few more, first is at the target.

    How many episodes a point of the curve stands for follows from its steps and their mean length.
    """
    episodes = np.diff(curve.steps, prepend=0) / curve.lengths
    for i in range(len(curve.steps)):
        counts = np.cumsum(episodes[i::-1])  # of this point and those before it
        if counts[-1] < 100:
            continue
        window = slice(i - np.searchsorted(counts, 100), i + 1)
        if np.average(curve.returns[window], weights=episodes[window]) >= target:
            return curve.seconds[i] / 60, curve.steps[i]
    return None


def table_of_times() -> str:
    """Minutes and steps to the published score, seed 1, by number of environments; "" without results."""
    numbers, known = ["1", "8", "16", "64", "256"], published()
    curves = {(c.env, c.name): c for c in load("times") if c.seed == 1}
    lines = []
    for env in dict.fromkeys(env for env, _ in curves):
        target = known["ppo_continuous_action", env]["CleanRL"][0]
        cells = [env, f"{target:,.1f}"]
        for n in numbers:
            if (env, n) not in curves:
                cells.append("")
            elif got := first_reached(curves[env, n], target):
                cells.append(f"{got[0]:.1f} min, {got[1] / 1e6:.2f}M")
            else:
                cells.append("not reached")
        lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return ""
    heads = ["environment", "score", *(f"N = {n}" for n in numbers)]
    return "\n".join(["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|", *lines])


def with_tables(readme) -> str:
    """The README with current tables between their marks."""
    for name, table in {
        "results": table_of_results,
        "times": table_of_times,
        "ablations": table_of_ablations,
    }.items():
        begin, end = f"<!-- {name}: made by python benchmark/plot.py --write -->\n", "\n<!-- end -->"
        if begin in readme:
            head, rest = readme.split(begin)
            readme = f"{head}{begin}\n{table()}\n{end}{rest.split(end, 1)[1]}"
    return readme


def main(args):
    style()
    for plan, title in TITLES.items():
        if load(plan):
            draw_curves(plan, title)
    if load("ablations"):
        draw_ablations()
    print("\n\n".join(filter(None, [table_of_results(), table_of_times(), table_of_ablations()])))
    if args.write:
        path = ROOT / "README.md"
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
