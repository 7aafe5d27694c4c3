"""Runs a plan: scripts x environments x seeds, each run resumable, several at a time.

    python benchmark/run.py benchmark/plans/classic.toml --workers 2
    python benchmark/run.py benchmark/plans/classic.toml --cluster slurm --partition gpu    # one job per run

A plan is a TOML file of [[runs]] with `script`, `env_ids`, `seeds`, and as needed `flags`, a `name` for
them, and `replace`: texts of the script and what stands there instead, for ablations without a flag. Each
run has a folder below benchmark/runs/, in which the script leaves what it always leaves, and log.txt with
what it printed. A finished run is skipped, an interrupted one goes on from its last checkpoint.
benchmark/results/ gets the returns of all finished runs as CSV (script, env, name, seed, step, seconds,
return, length of the episodes) and how they were made. With --keep, the runs that are in there already
stay, so that a plan can be spread over days and machines.
"""

import contextlib
import csv
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import tomllib
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    plan: tyro.conf.Positional[Path]
    """TOML file that says what to run"""
    workers: int = 1
    """runs at a time on this machine, one PyTorch thread each unless the plan says otherwise"""
    cluster: Literal["none", "local", "slurm"] = "none"
    """hand the runs to submitit: as processes here (local) or as jobs (slurm)"""
    partition: str | None = None
    """partition of the SLURM jobs"""
    hours: int = 24
    """time limit of a job"""
    keep: bool = False
    """keep what the results hold already, and run only what they lack"""
    runs: Path = ROOT / "benchmark/runs"
    """folder of the runs"""
    results: Path = ROOT / "benchmark/results"
    """folder of the results"""


@dataclass(frozen=True)
class Run:
    """One training run of a plan."""

    folder: Path
    script: str
    env_id: str
    seed: int
    name: str  # of the flags, "" for the defaults
    flags: dict[str, object]
    replace: dict[str, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return (self.folder / "done.json").exists()

    def checkpoints(self) -> list[Path]:
        """Of this run and what it was resumed from, oldest first."""
        return sorted(self.folder.glob("runs/*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)


def read_plan(path, folder) -> list[Run]:
    """The runs of a plan, seed by seed, so that all have one result before any has three."""
    runs = []
    for entry in tomllib.loads(path.read_text())["runs"]:
        script, name, flags = entry["script"], entry.get("name", ""), entry.get("flags", {})
        replace = entry.get("replace", {})
        for env_id in entry["env_ids"]:
            env = env_id.replace("/", "-").replace(":", "-")
            for seed in entry["seeds"]:
                label = "__".join(filter(None, [script, env, name.replace(" ", "-"), str(seed)]))
                place = folder.resolve() / path.stem / label
                runs.append(Run(place, script, env_id, seed, name, flags, replace))
    return sorted(runs, key=lambda run: run.seed)


def load_script(run):
    """The module, with what the run replaces. Raises ValueError for a text that is not there just once."""
    text = (ROOT / f"{run.script}.py").read_text()
    for old, new in run.replace.items():
        if text.count(old) != 1:
            raise ValueError(f"{run.script}.py has {text.count(old)} times: {old}")
        text = text.replace(old, new)
    (run.folder / f"{run.script}.py").write_text(text)
    sys.path.insert(0, str(run.folder))
    return importlib.import_module(run.script)


def work_on(run) -> str:
    """Trains one run in its folder: "finished" or "interrupted". Raises what training raises."""
    run.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(run.folder)
    script = load_script(run)
    flags = {"env_id": run.env_id, "seed": run.seed, "torch_threads": 1} | run.flags
    if saved := run.checkpoints():
        flags["resume"] = str(saved[-1])
    started = time.time()
    with open("log.txt", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            result = script.train(script.Args(**flags))
        except Exception:
            traceback.print_exc()  # into the log; what is raised goes to the one who started the runs
            raise
    if result["signal"]:
        return "interrupted"
    result |= {"seconds": time.time() - started, "finished": time.strftime("%Y-%m-%d %H:%M"), **machine()}
    result["flags"] = {"env_id": run.env_id, "seed": run.seed} | run.flags
    if run.replace:
        result["replace"] = run.replace
    (run.folder / "done.json").write_text(json.dumps(result, indent=2))
    return "finished"


def machine() -> dict:
    """Versions and hardware."""
    names = ("torch", "gymnasium", "numpy", "mujoco", "ale-py", "envpool")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "commit": commit.stdout.strip(),
    }


def make_executor(args):
    """Something with the submit() of concurrent.futures."""
    if args.cluster == "none":
        return ProcessPoolExecutor(args.workers, max_tasks_per_child=1)
    import submitit

    executor = submitit.AutoExecutor(args.runs / "jobs", cluster=args.cluster)
    executor.update_parameters(timeout_min=60 * args.hours, cpus_per_task=1)
    if args.partition:
        executor.update_parameters(slurm_partition=args.partition)
    return executor


def returns_of(run) -> list[tuple[int, float, float, float]]:
    """(step, seconds of training, mean return, mean length) of each iteration in which an episode ended."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points, seconds = [], 0.0
    folders = sorted(run.folder.glob("runs/*"), key=lambda folder: folder.name.rsplit("__", 1)[1])
    for folder in folders:
        log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        if "charts/SPS" not in log.Tags()["scalars"]:
            continue
        speeds = log.Scalars("charts/SPS")
        points = [point for point in points if point[0] < speeds[0].step]
        steps = speeds[1].step - speeds[0].step if len(speeds) > 1 else speeds[0].step  # of an iteration
        first = speeds[0].wall_time - steps / speeds[0].value  # when the first iteration began
        if "charts/episodic_return" in log.Tags()["scalars"]:
            returns, lengths = log.Scalars("charts/episodic_return"), log.Scalars("charts/episodic_length")
            for event, length in zip(returns, lengths, strict=True):
                points.append((event.step, seconds + event.wall_time - first, event.value, length.value))
        seconds += speeds[-1].wall_time - first
    return points


COLUMNS = ["script", "env", "name", "seed", "step", "seconds", "return", "length"]


def read_results(stem, results) -> tuple[list[dict], dict[str, dict]]:
    """What `results` hold of a plan: the rows of its CSV, and how each run was made."""
    if not (results / f"{stem}.json").exists():
        return [], {}
    with open(results / f"{stem}.csv", newline="") as file:
        return list(csv.DictReader(file)), json.loads((results / f"{stem}.json").read_text())["runs"]


def collect(stem, command, results, runs, kept, returns_of):
    """Writes what is known of the runs: from their folders if they are finished there, else what was kept."""
    results.mkdir(parents=True, exist_ok=True)
    old_rows, old_notes = kept
    rows, notes = [], {}
    for run in runs:
        key = {"script": run.script, "env": run.env_id, "name": run.name, "seed": str(run.seed)}
        if run.done:
            notes[run.folder.name] = json.loads((run.folder / "done.json").read_text())
            notes[run.folder.name].pop("checkpoint", None)
            for step, seconds, value, length in thinned(returns_of(run)):
                numbers = {"return": f"{value:.6g}", "length": f"{length:.6g}"}
                rows.append(key | {"step": step, "seconds": f"{seconds:.1f}"} | numbers)
        elif run.folder.name in old_notes:
            notes[run.folder.name] = old_notes[run.folder.name]
            rows += [row for row in old_rows if key.items() <= row.items()]
    with open(results / f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    text = json.dumps({"command": command, "runs": notes}, indent=1)
    (results / f"{stem}.json").write_text(text + "\n")


def thinned(points, most=200) -> list:
    """At most so many of the points, means of neighbors: curves stay small enough to commit."""
    size = -(-len(points) // most) if points else 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    mean = lambda part, i: sum(point[i] for point in part) / len(part)  # noqa: E731
    return [(*part[-1][:2], mean(part, 2), mean(part, 3)) for part in parts]


def run_all(runs, args, stem, command, work=work_on, returns_of=returns_of) -> int:
    """Runs what is not finished and writes the results; 0 if then all is finished, else 1."""
    kept = read_results(stem, args.results) if args.keep else ([], {})
    waiting = [run for run in runs if not run.done and run.folder.name not in kept[1]]
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before", flush=True)
    executor, failed = make_executor(args), []
    futures = {executor.submit(work, run): run for run in waiting}
    try:
        bar = tqdm(total=len(waiting), unit="run")
        for future in as_completed(futures) if args.cluster == "none" else futures:
            run = futures[future]
            try:
                outcome = future.result()
            except Exception as error:
                outcome = f"failed: {type(error).__name__}: {error}"
            if outcome != "finished":
                failed.append(f"{run.folder.name} {outcome}; see {run.folder / 'log.txt'}")
                bar.write(failed[-1], file=sys.stderr)
            bar.update()
        bar.close()
    finally:  # also after Ctrl-C
        collect(stem, command, args.results, runs, kept, returns_of)
    finished = len(runs) - len(failed)
    print(f"{finished} of {len(runs)} runs are finished; see {args.results / f'{stem}.csv'}")
    for line in failed:
        print(line)
    return 1 if failed else 0


def main(args) -> int:
    """Exit status: 0 if all runs are finished."""
    runs, command = read_plan(args.plan, args.runs), f"python benchmark/run.py {args.plan}"
    return run_all(runs, args, args.plan.stem, command)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
