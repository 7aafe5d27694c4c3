"""Runs a plan: scripts x environments x seeds, each run resumable, several at a time.

    python benchmark/run.py benchmark/plans/classic.toml --workers 2
    python benchmark/run.py benchmark/plans/classic.toml --cluster slurm --partition gpu    # one job per run

A plan is a TOML file of [[runs]] with `script`, `env_ids`, `seeds` and `flags`. Each run has a folder below
benchmark/runs/, in which the script leaves what it always leaves, and log.txt with what it printed. A
finished run is skipped, an interrupted one goes on from its last checkpoint. benchmark/results/ gets the
returns of all finished runs as CSV (script, env, name, seed, step, seconds, return) and how they were made.
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
from dataclasses import dataclass
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
        for env_id in entry["env_ids"]:
            env = env_id.replace("/", "-").replace(":", "-")
            for seed in entry["seeds"]:
                label = "__".join(filter(None, [script, env, name, str(seed)]))
                runs.append(Run(folder.resolve() / path.stem / label, script, env_id, seed, name, flags))
    return sorted(runs, key=lambda run: run.seed)


def work_on(run) -> str:
    """Trains one run in its folder: "finished" or "interrupted". Raises what training raises."""
    run.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(run.folder)
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(run.script)
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


def returns_of(run) -> list[tuple[int, float, float]]:
    """(step, seconds of training, mean return) of each iteration in which an episode ended."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points, seconds = [], 0.0
    folders = sorted(run.folder.glob("runs/*"), key=lambda folder: folder.name.rsplit("__", 1)[1])
    for folder in folders:
        log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        if "charts/SPS" not in log.Tags()["scalars"]:
            continue
        first = log.Scalars("charts/SPS")[0].wall_time
        points = [point for point in points if point[0] < log.Scalars("charts/SPS")[0].step]
        if "charts/episodic_return" in log.Tags()["scalars"]:
            events = log.Scalars("charts/episodic_return")
            points += [(event.step, seconds + event.wall_time - first, event.value) for event in events]
        seconds += log.Scalars("charts/SPS")[-1].wall_time - first
    return points


def collect(plan, results, runs):
    """Writes the results of the finished runs."""
    results.mkdir(parents=True, exist_ok=True)
    finished = [run for run in runs if run.done]
    with open(results / f"{plan.stem}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["script", "env", "name", "seed", "step", "seconds", "return"])
        for run in finished:
            for step, seconds, value in thinned(returns_of(run)):
                row = (run.script, run.env_id, run.name, run.seed, step, f"{seconds:.1f}", f"{value:.6g}")
                writer.writerow(row)
    notes = {run.folder.name: json.loads((run.folder / "done.json").read_text()) for run in finished}
    for note in notes.values():
        note.pop("checkpoint")
    text = json.dumps({"command": f"python benchmark/run.py {plan}", "runs": notes}, indent=1)
    (results / f"{plan.stem}.json").write_text(text + "\n")


def thinned(points, most=200) -> list:
    """At most so many of the points, means of neighbors: curves stay small enough to commit."""
    size = -(-len(points) // most) if points else 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], part[-1][1], sum(value for _, _, value in part) / len(part)) for part in parts]


def main(args) -> int:
    """Exit status: 0 if all runs are finished."""
    runs = read_plan(args.plan, args.runs)
    waiting, failed = [run for run in runs if not run.done], []
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before", flush=True)
    executor = make_executor(args)
    futures = {executor.submit(work_on, run): run for run in waiting}
    bar = tqdm(total=len(waiting), unit="run")
    with bar:
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
    collect(args.plan, args.results, runs)
    table = args.results / f"{args.plan.stem}.csv"
    print(f"{sum(run.done for run in runs)} of {len(runs)} runs are finished; see {table}")
    for line in failed:
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
