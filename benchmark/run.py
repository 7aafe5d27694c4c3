"""Runs a plan: scripts x environments x seeds, each run resumable, several at a time.

    python benchmark/run.py benchmark/plans/classic.toml --workers 2
    python benchmark/run.py benchmark/plans/classic.toml --cluster slurm --partition gpu    # one job per run

A plan is a TOML file of [[runs]] with `script`, `env_ids`, `seeds`, and as needed `flags`, a `name` for
them, and `replace`: texts of the script and what stands there instead, for ablations without a flag. Each
run has a folder below benchmark/runs/, in which the script leaves what it always leaves, and log.txt with
what it printed. A finished run is skipped, an interrupted one goes on from its last checkpoint; one whose
flags have changed starts anew. benchmark/results/ gets the returns of all finished runs as CSV (script, env,
name, seed, step, seconds, return, length of the episodes) and how they were made; what it has of others
stays. With --keep, those count as finished, so that a plan can be spread over days and machines.
"""

import contextlib
import csv
import importlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent


@dataclass(kw_only=True)
class Place:
    """Where to run, and where results are."""

    workers: int = 1
    """runs at a time, one PyTorch thread each unless the plan says otherwise; "local" has all at once"""
    cluster: Literal["none", "local", "slurm"] = "none"
    """hand the runs to submitit: as processes here (local) or as a job array (slurm)"""
    partition: str | None = None
    """partition of the SLURM jobs"""
    gpus: int = 0
    """GPUs of each SLURM job"""
    hours: int = 24
    """time limit of a job"""
    keep: bool = False
    """run only what the results lack"""
    runs: Path = ROOT / "benchmark/runs"
    """folder of the runs"""
    results: Path = ROOT / "benchmark/results"
    """folder of the results"""


@dataclass(kw_only=True)
class Args(Place):
    plan: tyro.conf.Positional[Path]
    """TOML file that says what to run"""


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
    def orders(self) -> dict:
        """What makes it this run, as results state it."""
        flags = {"env_id": self.env_id, "seed": self.seed} | self.flags
        return {"flags": flags} | ({"replace": self.replace} if self.replace else {})

    def is_made_by(self, notes) -> bool:
        """Whether the notes of a finished run are of this one, flags and all."""
        return {name: notes[name] for name in ("flags", "replace") if name in notes} == self.orders

    @property
    def done(self) -> bool:
        path = self.folder / "done.json"
        return path.exists() and self.is_made_by(json.loads(path.read_text()))

    def checkpoints(self) -> list[Path]:
        """Of this run and what it was resumed from, oldest first."""
        return sorted(self.folder.glob("runs/*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)


def label_of(script, env_id, name, seed) -> str:
    """Folder of a run, and its key in the results."""
    return re.sub(r"[^\w.-]", "-", "__".join(filter(None, [script, env_id, name, str(seed)])))


def read_plan(path, folder) -> list[Run]:
    """The runs of a plan, seed by seed, so that all have one result before any has three.

    Raises ValueError for two runs that only their flags tell apart: they need names.
    """
    runs = []
    for entry in tomllib.loads(path.read_text())["runs"]:
        script, name, flags = entry["script"], entry.get("name", ""), entry.get("flags", {})
        replace = entry.get("replace", {})
        for env_id in entry["env_ids"]:
            for seed in entry["seeds"]:
                place = folder.resolve() / path.stem / label_of(script, env_id, name, seed)
                if place in {run.folder for run in runs}:
                    raise ValueError(f"{path} has two runs {place.name}: give one of them a name")
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


def enter(run):
    """Goes into the folder of the run, which is emptied if it was made by other flags."""
    orders = run.folder / "orders.json"
    if orders.exists() and json.loads(orders.read_text()) != run.orders:
        shutil.rmtree(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    orders.write_text(json.dumps(run.orders))
    os.chdir(run.folder)


@contextlib.contextmanager
def logged():
    """What is printed, and what is raised, goes into log.txt; what is raised is raised as RuntimeError.

    Errors of a script's own cannot be unpickled where the script was not imported.
    """
    with open("log.txt", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


def work_on(run) -> str:
    """Trains one run in its folder: "finished" or "interrupted". Raises what training raises."""
    enter(run)
    with logged():
        made_with, script = machine(), load_script(run)
        args = script.Args(**{"env_id": run.env_id, "seed": run.seed, "torch_threads": 1} | run.flags)
        saved = run.checkpoints()
        rows = script.load_checkpoint(saved[-1])["progress"]["rows"] if saved else 0
        if rows < args.num_iterations * args.rows_per_iteration:
            if saved:
                args = script.Args(**args.given, resume=str(saved[-1]))
            if script.train(args)["signal"]:
                return "interrupted"
        progress = script.load_checkpoint(run.checkpoints()[-1])["progress"]
        returns = progress["recent_returns"]
        seconds = timeline(run)[0][-1][1]
    notes = {"episodic_return": sum(returns) / len(returns) if returns else None}
    notes |= {"global_step": progress["global_step"], "seconds": round(seconds, 1)} | run.orders
    notes |= {"finished": time.strftime("%Y-%m-%d %H:%M"), **made_with}
    (run.folder / "done.json").write_text(json.dumps(notes, indent=2))
    return "finished"


def machine() -> dict:
    """Versions and hardware."""
    names = ("torch", "gymnasium", "numpy", "mujoco", "ale-py", "envpool")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip(),
    }


def in_own_process(work, run) -> str:
    """work(run) in a new process: if that is killed, the others go on."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, run).result()


def make_executor(args):
    """Something whose submit(work, run) returns a future."""
    if args.cluster == "none":
        executor = ThreadPoolExecutor(args.workers)
        executor.submit = partial(executor.submit, in_own_process)
        return executor
    import submitit

    # Functions are unpickled there by name, from wherever the job starts.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    executor = submitit.AutoExecutor(args.runs / "jobs", cluster=args.cluster)
    executor.update_parameters(timeout_min=60 * args.hours, cpus_per_task=1, gpus_per_node=args.gpus)
    if args.partition:
        executor.update_parameters(slurm_partition=args.partition)
    executor.update_parameters(slurm_array_parallelism=args.workers)
    return executor


@contextlib.contextmanager
def forwarded_sigterm():
    """SIGTERM reaches the runs, which save, and then ends this program as Ctrl-C does."""

    def stop(number, frame):
        for child in multiprocessing.active_children():
            child.terminate()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def timeline(run) -> tuple[list[tuple[int, float]], dict[str, dict[int, float]]]:
    """(step, seconds of training) of each iteration, over all resumptions; and all scalars, by name and step.

    Iterations that were lost, and done again after the last checkpoint, count once.
    """
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    iterations, scalars, saved = [], {}, 0  # at which step
    for folder in sorted(run.folder.glob("runs/*"), key=lambda folder: folder.name.rsplit("__", 1)[1]):
        log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        if "charts/SPS" not in log.Tags()["scalars"]:
            continue
        speeds = log.Scalars("charts/SPS")
        iterations = [each for each in iterations if each[0] <= saved]
        step, seconds = iterations[-1] if iterations else (0, 0.0)
        began = speeds[0].wall_time - (speeds[0].step - step) / speeds[0].value
        iterations += [(speed.step, seconds + speed.wall_time - began) for speed in speeds]
        for name in log.Tags()["scalars"]:
            known = {s: v for s, v in scalars.get(name, {}).items() if s <= saved}
            scalars[name] = known | {event.step: event.value for event in log.Scalars(name)}
        if (folder / "checkpoint.pt").exists():
            saved = torch.load(folder / "checkpoint.pt")["progress"]["global_step"]
    return iterations, scalars


def returns_of(run) -> list[tuple[int, float, float, float]]:
    """(step, seconds of training, mean return, mean length) of each iteration in which an episode ended."""
    iterations, scalars = timeline(run)
    returns, lengths = (scalars.get(f"charts/episodic_{name}", {}) for name in ("return", "length"))
    both = returns.keys() & lengths.keys()  # a killed process may have written only one
    return [(step, seconds, returns[step], lengths[step]) for step, seconds in iterations if step in both]


COLUMNS = ["script", "env", "name", "seed", "step", "seconds", "return", "length"]


def read_results(stem, results) -> tuple[list[dict], dict[str, dict]]:
    """What `results` hold of a plan: the rows of its CSV, and how each run was made."""
    if not (results / f"{stem}.json").exists():
        return [], {}
    with open(results / f"{stem}.csv", newline="") as file:
        return list(csv.DictReader(file)), json.loads((results / f"{stem}.json").read_text())["runs"]


def collect(stem, command, results, runs, returns_of):
    """Adds the finished runs to the results, in place of what these have of the same runs."""
    done = [run for run in runs if run.done]
    if not done:
        return
    results.mkdir(parents=True, exist_ok=True)
    rows, notes = read_results(stem, results)
    for run in done:
        notes[run.folder.name] = json.loads((run.folder / "done.json").read_text())
        key = {"script": run.script, "env": run.env_id, "name": run.name, "seed": str(run.seed)}
        rows = [row for row in rows if not key.items() <= row.items()]
        for step, seconds, value, length in thinned(returns_of(run)):
            numbers = {"return": f"{value:.6g}", "length": f"{length:.6g}"}
            rows.append(key | {"step": step, "seconds": f"{seconds:.1f}"} | numbers)
    with open(results / f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    text = json.dumps({"command": command, "runs": notes}, indent=1)
    (results / f"{stem}.json").write_text(text + "\n")


def thinned(points, most=200) -> list:
    """At most so many of the points, means of neighboring iterations: curves stay small enough to commit."""
    size = -(-len(points) // most) if points else 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    mean = lambda part, i: sum(point[i] for point in part) / len(part)  # noqa: E731
    return [(*part[-1][:2], mean(part, 2), mean(part, 3)) for part in parts]


def run_all(runs, args, stem, command, work=work_on, returns_of=returns_of) -> int:
    """Runs what is not finished and writes the results; 0 if then all is finished, else 1."""
    _, notes = read_results(stem, args.results) if args.keep else ([], {})
    waiting = [run for run in runs if not run.done and not run.is_made_by(notes.get(run.folder.name, {}))]
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before", flush=True)
    executor, failed, here = make_executor(args), [], args.cluster == "none"
    jobs = [executor.submit(work, run) for run in waiting] if here else executor.map_array(work, waiting)
    futures = dict(zip(jobs, waiting, strict=True))
    try:
        bar = tqdm(total=len(waiting), unit="run")
        for future in as_completed(futures) if here else futures:
            run = futures[future]
            try:
                outcome = future.result()
            except Exception as error:
                outcome = f"failed: {error if type(error) is RuntimeError else repr(error)}"
            if outcome != "finished":
                failed.append(f"{run.folder.name} {outcome}; see {run.folder / 'log.txt'}")
                bar.write(failed[-1], file=sys.stderr)
            bar.update()
        bar.close()
    finally:  # also after Ctrl-C, when those that are running save and end
        for future in futures:
            if not future.done():
                future.cancel()
        if here:
            executor.shutdown()
        collect(stem, command, args.results, runs, returns_of)
    finished = len(runs) - len(failed)
    print(f"{finished} of {len(runs)} runs are finished; see {args.results / f'{stem}.csv'}")
    for line in failed:
        print(line)
    return 1 if failed else 0


def main(args) -> int:
    """Exit status: 0 if all runs are finished."""
    runs, command = read_plan(args.plan, args.runs), " ".join(["python benchmark/run.py", *sys.argv[1:]])
    with forwarded_sigterm():
        return run_all(runs, args, args.plan.stem, command)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
