"""What num_envs does to gradient, return and time: ppo_continuous_action.py with 1 to 4,096 environments.

    python benchmark/num_envs.py --workers 2                 # everything: 15 hours on 2 cores
    python benchmark/num_envs.py --seeds 1 --regimes a d     # a part; with --keep, results add up
    python benchmark/num_envs.py --only-figure               # figures, and the tables of NUM_ENVS.md

Each run has one core (one thread for PyTorch, one for the physics) and ends after 10 minutes of training or
2,000,000 samples (20,000,000 from N = 1024 on), those of regimes d and e when their schedule does. Times are
CPU seconds of the process, which on a core of its own are seconds: other load changes them little. Training
is what the script does; between its iterations, and not counted in its time,

- 16 episodes are played with the policy as it is, at 25 points of each run: the curves;
- gradients are measured on the batch that the next update will learn from, before it does, as often as that
  takes less than a twentieth of the time: see gradient_statistics().

benchmark/results/num_envs.csv has the curves, num_envs.json the rest.
"""

import importlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.run import ROOT, Place, Run, enter, forwarded_sigterm, label_of, logged, machine, run_all

NUMBERS = [1, 4, 16, 64, 256, 1024, 4096]
SCRIPT = "ppo_continuous_action"
SECONDS = 600
POINTS, EPISODES = 25, 16  # of a curve; played at each
# What stays the same while N grows. The learning rate of a, b and c is that of ppo2 for every N.
REGIMES = {
    "a": "T and samples per environment: batch and minibatch grow (MimicKit: 32 steps, 4 of them, 5 epochs)",
    "b": "batch of 4,096 and minibatch of 64: T shrinks (10 epochs, as ppo2)",
    "c": "T of 64 and minibatch of 64: more gradients for a batch (5 epochs)",
    "d": "the defaults of the script",
    "e": "the defaults, first episodes cut at random steps",
}

SHORT = {
    "a": "a: T, samples per environment fixed",
    "b": "b: batch, minibatch fixed",
    "c": "c: T, minibatch fixed",
    "d": "d: defaults",
    "e": "e: defaults, first episodes cut",
}
PAGE = ROOT / "benchmark/NUM_ENVS.md"


@dataclass(kw_only=True)
class Args(Place):
    env_ids: tuple[str, ...] = ("HalfCheetah-v5", "Hopper-v5")
    """HalfCheetah-v5 has all regimes, others a, d and e"""
    regimes: tuple[str, ...] = tuple(REGIMES)
    """letters of the regimes to run"""
    numbers: tuple[int, ...] = tuple(NUMBERS)
    """numbers of environments; e has those from 64 on"""
    seeds: tuple[int, ...] = (1, 2)
    """seeds"""
    only_figure: bool = False
    """run nothing: figure and table of the results that are there"""


def flags_of(regime, num_envs) -> dict:
    """Flags of the script."""
    rate = {"learning_rate": 3e-4, "anneal_lr": False, "update_epochs": 5}
    rate["total_timesteps"] = 20_000_000 if num_envs >= 1024 else 2_000_000
    return {
        "a": rate | {"num_steps": 32, "samples_per_env": 4},
        "b": rate | {"num_steps": 4096 // num_envs, "num_minibatches": 64, "update_epochs": 10},
        "c": rate | {"num_steps": 64, "num_minibatches": num_envs},
        "d": {},
        "e": {},
    }[regime] | {"num_envs": num_envs, "backend": "mujoco", "cuda": False}


def all_runs(args, numbers=None) -> list[Run]:
    """The runs of the study, seed by seed."""
    runs = []
    for seed in args.seeds:
        for env_id in args.env_ids:
            for regime in args.regimes:
                if env_id != "HalfCheetah-v5" and regime in "bc":
                    continue
                for n in args.numbers:
                    if regime == "e" and n < 64:
                        continue
                    name = f"{regime}-{n}"
                    folder = args.runs.resolve() / "num_envs" / label_of(SCRIPT, env_id, name, seed)
                    runs.append(Run(folder, SCRIPT, env_id, seed, name, flags_of(regime, n)))
    return runs


# ---- Measurements ----
def gradient_statistics(script, agent, batch, args, seed) -> dict[str, float]:
    """Signal and noise of the gradient on one batch, of the policy's and of the value function's parameters.

    The batch is dealt into minibatches as update() deals it, or into 8 if it deals fewer; at most 64 of them
    are looked at. With K of M rows and gradients g_k of mean g:
    trace: trace of the covariance of one row's gradient, M / (K - 1) sum |g_k - g|^2
    square: |g|^2 - trace / (K M), an estimate of |G|^2 if rows are independent
    trace / square is the simple noise scale of McCandlish et al. 2018, arXiv 1812.06162, in rows. With the
    gradients u and v of two halves of the environments (with N = 1, of the time), each of B / 2 rows:
    halves_dot: u v, an estimate of |G|^2 even if the rows of an environment resemble each other
    halves_trace: B |u - v|^2 / 4, which exceeds trace as far as they do
    cosine: of u and v
    As in training, advantages are normalized within what a gradient is taken of, which biases small parts.
    Fillers count as rows; environments that started together share their phase, which no estimate shows.
    """
    columns = [x.flatten(0, 1) if x is not None else None for x in batch._replace(next_obs=None)]
    clip_coef = torch.tensor(args.clip_coef)
    names = [name for name, parameter in agent.named_parameters() for _ in range(parameter.numel())]
    is_value = torch.tensor([name.startswith("critic") for name in names])

    def gradient(rows):
        part = script.Rollout(*(None if x is None else x.index_select(0, rows) for x in columns))
        return script.ppo_gradient(agent, list(agent.parameters()), part, clip_coef, args)[0]

    generator = torch.Generator().manual_seed(seed)
    T, N = batch.valid.shape
    parts = torch.randperm(T * N, generator=generator).tensor_split(max(8, args.num_minibatches))[:64]
    gradients = torch.stack([gradient(rows) for rows in parts])
    rows = torch.arange(T * N).view(T, N)
    order = torch.randperm(N, generator=generator)
    sides = rows.tensor_split(2) if N == 1 else (rows[:, order[: N // 2]], rows[:, order[N // 2 :]])
    u, v = (gradient(side.flatten()) for side in sides)
    M, K = sum(len(part) for part in parts) / len(parts), len(parts)
    result = {}
    for name, mask in {"policy": ~is_value, "value": is_value}.items():
        g, a, b = gradients[:, mask].double(), u[mask].double(), v[mask].double()
        trace = M * (g - g.mean(0)).square().sum() / (K - 1)
        result[f"{name}_trace"] = trace
        result[f"{name}_square"] = g.mean(0).square().sum() - trace / (K * M)
        result[f"{name}_halves_dot"] = a @ b
        result[f"{name}_halves_trace"] = T * N * (a - b).square().sum() / 4
        result[f"{name}_cosine"] = a @ b / (a.norm() * b.norm()).clamp(min=1e-30)
    return {name: float(number) for name, number in result.items()}


@torch.inference_mode()
def play(agent, envs) -> tuple[np.ndarray, np.ndarray]:
    """Return and length of an episode in each environment, with sampled actions; keeps the random numbers."""
    with torch.random.fork_rng(devices=[]):
        envs.reset()
        returns, lengths = np.zeros((2, envs.num_envs))
        running = np.ones(envs.num_envs, bool)
        while running.any():
            actions = agent.env_actions(agent.act(agent.normalize(envs.obs)))
            _, rewards, terminations, truncations, _ = envs.step(actions)
            returns += rewards * running
            lengths += running
            running &= ~(terminations | truncations)
        envs.pop_episodes()
    return returns, lengths


@dataclass
class Probe:
    """Stands in for rollout(), update() and make_envs() of the script, and measures around them."""

    script: object
    spread: bool  # cut first episodes at random
    limit: float  # seconds of training
    started: float | None = None  # by the CPU time of this process, as all that follows
    in_play: float = 0.0  # seconds that went into what is not training
    in_gradients: float = 0.0
    in_envs: float = 0.0
    in_update: float = 0.0
    steps: int = 0
    iterations: int = 0
    peak_gib: float = 0.0  # after the first iteration, before anything was measured
    cut: bool = False
    curve: list = field(default_factory=list)  # step, seconds, mean return and length, std of returns
    gradients: list = field(default_factory=list)

    def install(self):
        self.make_envs, self.update, self.rollout = (
            self.script.make_envs,
            self.script.update,
            self.script.rollout,
        )
        self.tracker_step = self.script.EpisodeTracker.step
        self.script.num_cores = lambda: 1
        self.script.make_envs, self.script.update = self.made_envs, self.updated
        self.script.rollout = self.rolled_out

        def step(envs, actions):
            before = time.process_time()
            result = self.tracker_step(envs, actions)
            self.in_envs += time.process_time() - before
            return result

        self.script.EpisodeTracker.step = step

    def made_envs(self, args, num_envs, seed, video_folder=None):
        self.test_envs = self.make_envs(args, EPISODES, seed + 1)
        envs = self.make_envs(args, num_envs, seed, video_folder)
        if self.spread:
            planar = envs.unwrapped
            planar.steps[:] = planar.np_random.integers(planar.max_steps, size=num_envs)
        return envs

    def seconds(self) -> float:
        return time.process_time() - self.started - self.in_play - self.in_gradients

    def rolled_out(self, agent, envs, args):
        if self.started is None:
            self.started = time.process_time()
        return self.rollout(agent, envs, args)

    def updated(self, agent, optimizer, batch, args, clip_coef, gradient_fn):
        began = time.process_time()
        if self.iterations and self.in_gradients < 0.05 * self.seconds():
            at = {"step": self.steps, "seconds": self.seconds()}
            statistics = gradient_statistics(self.script, agent, batch, args, self.steps)
            self.gradients.append(at | statistics)
            self.in_gradients += time.process_time() - began
        began = time.process_time()
        result = self.update(agent, optimizer, batch, args, clip_coef, gradient_fn)
        ended = time.process_time()
        self.in_update += ended - began
        self.steps += int(batch.valid.count_nonzero())
        self.iterations += 1
        if self.iterations == 1:
            self.peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        progress = max(self.iterations / args.num_iterations, self.seconds() / self.limit)
        if progress * POINTS >= len(self.curve) + 1:
            seconds, in_envs = self.seconds(), self.in_envs
            returns, lengths = play(agent, self.test_envs)
            self.curve.append((self.steps, seconds, returns.mean(), lengths.mean(), returns.std()))
            self.in_envs = in_envs
            self.in_play += time.process_time() - ended
        if self.seconds() > self.limit and not self.cut:
            self.cut = True
            os.kill(os.getpid(), signal.SIGTERM)  # ends the run after this iteration
        return result


def mean_gradients(gradients, most=10) -> list[dict]:
    """Means over at most so many stretches of the run."""
    parts = np.array_split(np.arange(len(gradients)), min(most, len(gradients)))
    mean = lambda name, part: float(f"{np.mean([gradients[i][name] for i in part]):.4g}")  # noqa: E731
    return [{name: mean(name, part) for name in gradients[0]} | {"measured": len(part)} for part in parts]


def work_on(run) -> str:
    """Trains one run from its start and measures it."""
    shutil.rmtree(run.folder, ignore_errors=True)
    enter(run)
    script = importlib.import_module(run.script)
    args = script.Args(env_id=run.env_id, seed=run.seed, torch_threads=1, **run.flags)
    own_schedule = run.name[0] in "de"
    probe = Probe(script, run.name.startswith("e"), math.inf if own_schedule else SECONDS)
    probe.install()
    with logged():
        made_with, result = machine(), script.train(args)
    if result["signal"] and not probe.cut:
        return "interrupted"
    seconds = probe.seconds()
    numbers = {
        "env_id": run.env_id,
        "regime": run.name[0],
        "seed": run.seed,
        **{
            name: getattr(args, name)
            for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs")
        },
        **{name: getattr(args, name) for name in ("minibatch_size", "learning_rate", "total_timesteps")},
        "steps": probe.steps,
        "seconds": round(seconds, 1),
        "steps_per_second": round(probe.steps / seconds, 1),
        "share_of_environments": round(probe.in_envs / seconds, 3),
        "share_of_update": round(probe.in_update / seconds, 3),
        "peak_gib": round(probe.peak_gib, 2),
        "training_return": result["episodic_return"],
        "std_of_episodes": [round(std, 1) for *_, std in probe.curve],
        "gradients": mean_gradients(probe.gradients),
        "finished": time.strftime("%Y-%m-%d %H:%M"),
        **run.orders,
        **made_with,
    }
    Path("curve.json").write_text(json.dumps([point[:4] for point in probe.curve]))
    Path("done.json").write_text(json.dumps(numbers))
    return "finished"


def returns_of(run) -> list:
    """(step, seconds of training, mean return, mean length) of each point of the curve."""
    return json.loads((run.folder / "curve.json").read_text())


# ---- Figure and table ----
def noise_of_curve(returns) -> float:
    """Standard deviation of a curve around its trend: how far each point is off the mean of its neighbors.

    Gasser, Sroka and Jennen-Steinmetz 1986; no trend needs to be fitted.
    """
    if len(returns) < 3:
        return math.nan
    off = returns[1:-1] - (returns[:-2] + returns[2:]) / 2
    return float(np.sqrt(np.mean(off**2) * 2 / 3))


def numbers_of(curve) -> dict[str, float]:
    """What figure and table show of one run; NaN for what it did not reach."""
    notes, gradients = curve.notes, curve.notes["gradients"]
    weights = [g["measured"] for g in gradients]
    mean = {name: np.average([g[name] for g in gradients], weights=weights) for name in gradients[0]}
    reached = lambda x, at: np.interp(at, x, curve.returns) if x[-1] >= 0.98 * at else math.nan  # noqa: E731
    of_playing = np.mean(np.square(notes["std_of_episodes"])) / (EPISODES - 1)  # they are without ddof
    return {
        "cosine": mean["policy_cosine"],
        "value_ratio": mean["value_halves_trace"] / mean["value_trace"],
        "trace": mean["policy_trace"],
        "dot": mean["policy_halves_dot"],
        "dot_error": np.std([g["policy_halves_dot"] for g in gradients], ddof=1) / math.sqrt(len(gradients)),
        "curve_noise": math.sqrt(max(0, noise_of_curve(curve.returns) ** 2 - of_playing)),
        "at_samples": reached(curve.steps, 1_000_000),
        "at_seconds": np.interp(SECONDS, curve.seconds, curve.returns),  # of the end if that was sooner
        "last": curve.returns[-1],
        "updates": notes["update_epochs"] / notes["minibatch_size"],
        **{name: notes[name] for name in ("steps_per_second", "share_of_environments", "peak_gib")},
        **{name: notes[name] for name in ("minibatch_size", "steps", "seconds", "regime", "num_envs")},
    }


PANELS = {
    "cosine": ("agreement of policy gradients", "cosine of two halves"),
    "value_ratio": ("value gradient: rows are alike", "rows worth an independent one"),
    "at_samples": ("after 1M samples", "return"),
    "at_seconds": ("after 10 minutes of one core or at the end", "return"),
    "steps_per_second": ("speed on one core", "samples per second"),
    "peak_gib": ("memory", "GiB"),
}


def noise_scale_of(numbers) -> str:
    """Of the policy's gradient, in rows, from means over runs; a lower bound where |G|^2 is hardly known.

    That is within 3 errors of 0; the bound takes it to be 2 errors larger.
    """
    trace, dot = (np.mean([x[name] for x in numbers]) for name in ("trace", "dot"))
    error = math.sqrt(sum(x["dot_error"] ** 2 for x in numbers)) / len(numbers)
    known = dot > 3 * error
    return f"{'' if known else '> '}{float(f'{trace / (dot if known else dot + 2 * error):.2g}'):,.0f}"


def means_by_number(numbers, regime, name) -> tuple[list[int], list[float]]:
    """N and the mean over seeds, where there is one."""
    values = {n: [x[name] for x in numbers if (x["regime"], x["num_envs"]) == (regime, n)] for n in NUMBERS}
    means = {n: np.mean(v) for n, v in values.items() if v}
    means = {n: mean for n, mean in means.items() if not math.isnan(mean)}
    return list(means), list(means.values())


def draw(env_id, name, numbers):
    """The figure of one environment: a line for each regime."""
    from benchmark import plot

    plot.style()
    figure, grid = plot.plt.subplots(2, 3, figsize=(9, 5.4), layout="constrained")
    for axes, (key, (title, unit)) in zip(grid.flat, PANELS.items(), strict=True):
        for color, regime in zip(plot.COLORS, REGIMES, strict=False):
            x, y = means_by_number(numbers, regime, key)
            if regime not in {each["regime"] for each in numbers}:
                continue
            axes.plot(x, y, color=color, marker="o", markersize=3.5, linewidth=1.3, label=SHORT[regime])
        axes.set_xscale("log", base=4)
        axes.set_xticks(NUMBERS, [f"{n // 1024}k" if n >= 1024 else str(n) for n in NUMBERS])
        axes.set_title(title, fontsize=9)
        axes.set_ylabel(unit)
        axes.set_xlabel("N, environments")
    for axes, key in zip(grid.flat, PANELS, strict=True):
        if key in ("value_ratio", "steps_per_second"):
            axes.set_yscale("log")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle(f"{env_id}: ppo_continuous_action.py with N environments", fontsize=10)
    plot.save(figure, name)


def table(numbers) -> str:
    """Numbers of all runs of an environment, means over seeds."""
    heads = [
        "",
        "N",
        "rows of a gradient",
        "gradients a sample",
        "noise scale",
        "cosine",
        "value",
        "noise of the curve",
    ]
    heads += ["1M samples", "10 minutes"]
    heads += ["the end", "samples", "seconds", "samples/s", "environments' share", "GiB"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for regime in REGIMES:
        for n in NUMBERS:
            chosen = [x for x in numbers if (x["regime"], x["num_envs"]) == (regime, n)]
            if not chosen:
                continue
            mean = lambda name, chosen=chosen: float(np.mean([x[name] for x in chosen]))  # noqa: E731
            number = lambda x: "" if math.isnan(x) else f"{x:,.0f}"  # noqa: E731
            cells = [
                regime,
                f"{n:,}",
                f"{chosen[0]['minibatch_size']:,}",
                f"{mean('updates'):.3g}",
            ]
            cells += [noise_scale_of(chosen), f"{mean('cosine'):.2f}", f"{mean('value_ratio'):.1f}"]
            cells += [number(mean(key)) for key in ("curve_noise", "at_samples", "at_seconds", "last")]
            cells += [
                f"{mean('steps') / 1e6:.2f}M",
                number(mean("seconds")),
                number(mean("steps_per_second")),
            ]
            cells += [f"{mean('share_of_environments'):.2f}", f"{mean('peak_gib'):.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_tables(page, numbers_by_env) -> str:
    """The page with current tables between their marks."""
    for env_id, numbers in numbers_by_env.items():
        begin, end = (
            f"<!-- {env_id}: made by python benchmark/num_envs.py --only-figure -->\n",
            "\n<!-- end -->",
        )
        if begin in page:
            head, rest = page.split(begin)
            page = f"{head}{begin}\n{table(numbers)}\n{end}{rest.split(end, 1)[1]}"
    return page


def load_numbers(results) -> dict[str, list[dict]]:
    """Environment -> numbers_of() each run that `results` have."""
    from benchmark import plot

    curves = plot.load("num_envs", results)
    return {e: [numbers_of(c) for c in curves if c.env == e] for e in dict.fromkeys(c.env for c in curves)}


def main(args) -> int:
    """Exit status: 0 if all runs are finished."""
    status = 0
    if not args.only_figure:
        command = " ".join(["python benchmark/num_envs.py", *sys.argv[1:]])
        with forwarded_sigterm():
            status = run_all(all_runs(args), args, "num_envs", command, work_on, returns_of)
    if args.results != Place.results:  # the page shows those of the repository
        return status
    numbers_by_env = load_numbers(args.results)
    for env_id, numbers in numbers_by_env.items():
        draw(env_id, f"num_envs_{env_id}", numbers)
    PAGE.write_text(with_tables(PAGE.read_text(), numbers_by_env))
    return status


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
