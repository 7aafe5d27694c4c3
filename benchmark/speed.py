"""Training steps per second of the scripts, of stable-baselines3 at the same work, and of environments alone.

    python benchmark/speed.py                              # all works, 3 repetitions: 20 minutes on 2 cores
    python benchmark/speed.py --works cartpole --repetitions 5

Same work: same environment, number of environments, steps per rollout, epochs, minibatch size, networks. Each
measurement is a process of its own; contestants take turns, and the table shows medians over the repetitions.
With an LSTM, sb3-contrib's RecurrentPPO is the opponent.
Making the environments does not count, the first iteration does.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
BREAKOUT = {"env_id": "BreakoutNoFrameskip-v4"}
# script, flags that differ from its defaults, iterations to measure, who else takes part
WORKS = {
    "cartpole": ("ppo", {}, 200, "stable-baselines3"),
    "cartpole-4096": ("ppo", {"num_envs": 4096}, 12, None),
    "halfcheetah": ("ppo_continuous_action", {}, 8, "stable-baselines3"),
    "halfcheetah-4096": ("ppo_continuous_action", {"num_envs": 4096}, 5, None),
    "breakout": ("ppo_atari", BREAKOUT, 4, "stable-baselines3"),
    "breakout-lstm": ("ppo_atari_lstm", BREAKOUT, 3, "sb3-contrib"),
}


@dataclass
class Args:
    works: list[Literal[*WORKS]] = field(default_factory=lambda: list(WORKS))
    """what to measure"""
    repetitions: int = 3
    """turns of each contestant"""
    compile: bool = False
    """also measure the scripts with --compile; its compilation counts, so measure more --iterations then"""
    iterations: int | None = None
    """iterations per measurement; default depends on the work"""
    worker: str | None = None
    """for the processes that this program starts: a measurement, as JSON"""


def make_args(script, flags, iterations, **changes):
    """Args of the script for so many iterations, annealing included."""
    batch = script.Args(**flags)
    return script.Args(**flags, **changes, total_timesteps=batch.batch_size * iterations)


def measure_script(script, flags, iterations, threads, compiled):
    """Real steps per second, as the script itself counts them."""
    changes = {"torch_threads": threads} if threads else {}
    return script.train(make_args(script, flags, iterations, compile=compiled, **changes))["sps"]


def make_sb3_envs(args):
    """Environments as stable-baselines3 makes, wraps and normalizes them itself."""
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    if args.env_id.endswith("NoFrameskip-v4"):
        envs = make_atari_env(args.env_id, n_envs=args.num_envs, seed=args.seed)
        return envs if args.exp_name == "ppo_atari_lstm" else VecFrameStack(envs, 4)
    envs = make_vec_env(args.env_id, n_envs=args.num_envs, seed=args.seed)
    return VecNormalize(envs, gamma=args.gamma) if hasattr(args, "norm_obs") else envs


def measure_sb3(script, flags, iterations, threads):
    """PPO of stable-baselines3, or RecurrentPPO of sb3-contrib with the LSTM that our script has."""
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3 import PPO

    if threads:
        torch.set_num_threads(threads)
    args = make_args(script, flags, iterations)
    algorithm, policy, network = PPO, "MlpPolicy", {}
    if args.exp_name == "ppo_atari":
        policy = "CnnPolicy"
    if args.exp_name == "ppo_atari_lstm":
        algorithm, policy = RecurrentPPO, "CnnLstmPolicy"
        network = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
    model = algorithm(
        policy,
        make_sb3_envs(args),
        policy_kwargs=network,
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=args.update_epochs,
        learning_rate=args.learning_rate,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        device="cpu",
    )
    started = time.perf_counter()
    model.learn(args.total_timesteps)
    return args.total_timesteps / (time.perf_counter() - started)


def measure_environments(script, flags, iterations):
    """Steps per second with actions sampled once, under the backend that the script takes."""
    args = make_args(script, flags, iterations)
    envs = script.make_envs(args, args.num_envs, 1)
    actions = envs.env.action_space.sample()
    started = time.perf_counter()
    for _ in range(args.num_steps * iterations):
        envs.step(actions)
    return args.num_steps * iterations * args.num_envs / (time.perf_counter() - started)


def work_on(measurement):
    """Runs in a process of its own; prints steps per second and peak memory."""
    import importlib
    import os
    import resource

    sys.path.insert(0, str(ROOT))
    name, flags, default_iterations, _ = WORKS[measurement["work"]]
    script, iterations = importlib.import_module(name), measurement["iterations"] or default_iterations
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if measurement["who"] == "environments":
            sps = measure_environments(script, flags, iterations)
        elif measurement["who"] == "sb3":
            sps = measure_sb3(script, flags, iterations, measurement["threads"])
        else:
            compiled = measurement["who"] == "compiled"
            sps = measure_script(script, flags, iterations, measurement["threads"], compiled)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    print("RESULT " + json.dumps({"sps": sps, "memory": memory}))


def measure(work, who, threads, iterations) -> dict:
    """One measurement: {"sps": steps per second, "memory": peak in GiB}."""
    measurement = {"work": work, "who": who, "threads": threads, "iterations": iterations}
    command = [sys.executable, __file__, "--worker", json.dumps(measurement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{measurement} failed:\n{done.stderr}")
    return json.loads(done.stdout.rsplit("RESULT ", 1)[1])


def compare(work, args) -> list[tuple]:
    """Rows of the table for one work, from measurements in turns."""
    script_name, _, _, rival = WORKS[work]
    contestants = [("environments", None), ("script", 1), ("script", None)]
    contestants += [("compiled", 1)] if args.compile else []
    contestants += [("sb3", 1), ("sb3", None)] if rival else []
    results = {contestant: [] for contestant in contestants}
    for _ in range(args.repetitions):
        for contestant in contestants:
            result = measure(work, *contestant, args.iterations)
            results[contestant].append(result)
            print(f"{work}, {contestant}: {result['sps']:,.0f} steps/s", file=sys.stderr, flush=True)
    ours = f"{script_name}.py"
    names = {"script": ours, "compiled": f"{ours} --compile", "sb3": rival}
    sps = {c: statistics.median(result["sps"] for result in results[c]) for c in contestants}
    rows = []
    for who, threads in contestants:
        speed, reference = sps[who, threads], sps.get(("sb3", threads))
        to_sb3 = f"{speed / reference:.2f}" if reference and who != "environments" else ""
        memory = statistics.median(result["memory"] for result in results[who, threads])
        label = "" if who == "environments" else str(threads or "default")
        share = f"{speed / sps['environments', None]:.3f}"
        rows.append((work, names.get(who, who), label, to_sb3, share, f"{speed:,.0f}", f"{memory:.2f}"))
    return rows


def main(args):
    header = ("work", "who", "torch threads", "x sb3", "x environments", "steps/s", "peak GiB")
    rows = [header, ("---",) * len(header), *(row for work in args.works for row in compare(work, args))]
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))


if __name__ == "__main__":
    arguments = tyro.cli(Args, description=__doc__)
    if arguments.worker:
        work_on(json.loads(arguments.worker))
    else:
        main(arguments)
