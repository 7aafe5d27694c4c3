"""Training steps per second of the scripts, of stable-baselines3 at the same work, and of two floors.

    python benchmark/speed.py                              # all works, 3 repetitions: 40 minutes on 2 cores
    python benchmark/speed.py --works cartpole --repetitions 5

Same work: same environment, number of environments, steps per rollout, epochs, minibatch size, networks. Each
measurement is a process of its own; contestants take turns, and the table shows medians over the repetitions.
With an LSTM or masks, sb3-contrib's RecurrentPPO or MaskablePPO is the opponent.
Making the environments does not count, the first iteration does.

Floors: environments, stepped with actions sampled once, under the backend that the script takes; and matrix
products, the products and convolutions of the update alone, forward and backward, at the same minibatch size.
"Two processes" are those of torchrun, each with as many environments as the one they are compared with.
Their memory is that of one of them.
"mj_step" are raw physics on all cores, five calls of it to one step. MountainCar stands for an environment in
Python; gymnasium's sync loop steps it without anything of ours.
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
EIGHT = {"num_envs": 8, "backend": "gymnasium", "update_epochs": 10}
# script, flags that differ from its defaults, iterations to measure, who else takes part
WORKS = {
    "cartpole": ("ppo", {}, 200, "stable-baselines3"),
    "cartpole-4096": ("ppo", {"num_envs": 4096}, 12, None),
    "halfcheetah": ("ppo_continuous_action", {}, 8, "stable-baselines3"),
    "halfcheetah-4096": ("ppo_continuous_action", {"num_envs": 4096}, 5, None),
    "breakout": ("ppo_atari", BREAKOUT, 4, "stable-baselines3"),
    "breakout-lstm": ("ppo_atari_lstm", BREAKOUT, 3, "sb3-contrib"),
    "microrts": ("ppo_multidiscrete_mask", {}, 40, "sb3-contrib"),
    # With epochs given, so that two processes do not derive fewer of them.
    "halfcheetah-8": ("ppo_continuous_action", EIGHT, 8, "two processes"),
    "halfcheetah-4096-torchrun": ("ppo_continuous_action", {"num_envs": 4096}, 5, "two processes"),
    "halfcheetah-4096-envpool": ("ppo_continuous_action", {"num_envs": 4096, "backend": "envpool"}, 5, None),
    "halfcheetah-mj_step": ("ppo_continuous_action", {"num_envs": 4096}, 5, "mj_step"),
    "mountaincar-64": ("ppo", {"env_id": "MountainCar-v0", "num_envs": 64}, 100, "gymnasium's sync loop"),
}


@dataclass
class Args:
    works: list[Literal[*WORKS]] = field(default_factory=lambda: list(WORKS))
    """what to measure"""
    repetitions: int = 3
    """turns of each contestant"""
    compile: bool = False
    """also measure the scripts with --compile, without the first two iterations, which compile"""
    iterations: int | None = None
    """iterations per measurement; default depends on the work"""
    worker: str | None = None
    """for the processes that this program starts: a measurement, as JSON"""


def make_args(script, flags, iterations, **changes):
    """Args of the script for so many iterations, annealing included."""
    batch = script.Args(**flags)
    return script.Args(**flags, **changes, total_timesteps=batch.rows_per_iteration * iterations)


def measure_script(script, flags, iterations, threads, compiled):
    """Real steps per second, as the script counts them; of a compiled one, those after two iterations."""
    changes = {"torch_threads": threads} if threads else {}
    result = script.train(make_args(script, flags, iterations, compile=compiled, **changes))
    if not compiled:
        return result["sps"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(Path(result["checkpoint"]).parent)).Reload()
    first, *_, last = log.Scalars("charts/SPS")[1:]
    return (last.step - first.step) / (last.wall_time - first.wall_time)


def measure_products(script, flags, iterations, threads):
    """Rows per second if an iteration were the matrix products of its minibatches alone."""
    import torch
    from torch import nn

    args = make_args(script, flags, iterations, **({"torch_threads": threads} if threads else {}))
    envs, agent, optimizer = script.build(args, *script.start_process(args), None, 0)
    products = []  # functions, each of which computes what a layer computes

    def note(layer, inputs, output):
        x = inputs[0].detach()
        wants_gradient = inputs[0].requires_grad  # those of the first layers do not
        if isinstance(layer, nn.Conv2d):
            gradient, masks = torch.randn_like(output), (wants_gradient, True, False)
            rest = (layer.stride, layer.padding, layer.dilation, False, [0, 0], 1)
            backward = torch.ops.aten.convolution_backward
            products.append(lambda: nn.functional.conv2d(x, layer.weight, None, *rest[:3]))
            products.append(lambda: backward(gradient, x, layer.weight, None, *rest, masks))
        elif isinstance(layer, nn.Linear):
            multiply(x.flatten(0, -2), layer.weight.detach(), wants_gradient)
        elif isinstance(layer, nn.LSTM):
            multiply(x.flatten(0, -2), layer.weight_ih_l0.detach(), wants_gradient)
            for row in torch.randn(len(x), x.shape[1], layer.hidden_size):
                multiply(row, layer.weight_hh_l0.detach(), True)

    def multiply(x, weight, wants_gradient):
        gradient = torch.randn(len(x), len(weight))
        products.append(lambda: x @ weight.T)
        products.append(lambda: gradient.T @ x)
        if wants_gradient:
            products.append(lambda: gradient @ weight)

    def spy(agent, *inputs):
        hooks = [layer.register_forward_hook(note) for layer in agent.modules() if not products]
        result = script.ppo_gradient(agent, *inputs)
        for hook in hooks:
            hook.remove()
        return result

    state = [agent.initial_state(args.num_envs)] if hasattr(agent, "initial_state") else []
    batch = script.evaluate_rollout(agent, script.rollout(agent, envs, args, *state), args)
    script.update(agent, optimizer, batch, args, args.clip_coef, spy)
    seconds = []
    for _ in range(30):
        started = time.perf_counter()
        with torch.no_grad():
            for product in products:
                product()
        seconds.append(time.perf_counter() - started)
    per_iteration = statistics.median(seconds) * args.num_minibatches * args.update_epochs
    return args.batch_size / per_iteration


def masked_vec_env(envs):
    """Our vector environment with masks as MaskablePPO takes it, which learns from fillers, too."""
    from stable_baselines3.common.vec_env import VecEnv

    class Masked(VecEnv):
        def reset(self):
            return envs.reset(seed=1)[0]

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            obs, rewards, terminations, truncations, _ = envs.step(self.actions)
            infos = [{"terminal_observation": each} for each in obs]
            return obs, rewards, terminations | truncations, infos

        def env_method(self, name, *args, indices=None, **kwargs):
            return list(envs.masks)

        def get_attr(self, name, indices=None):
            return [getattr(envs, name.removeprefix("action_"))] * self.num_envs

        def set_attr(self, name, value, indices=None):
            raise NotImplementedError

        def env_is_wrapped(self, wrapper, indices=None):
            return [False] * self.num_envs

        def close(self):
            envs.close()

    return Masked(envs.num_envs, envs.single_observation_space, envs.single_action_space)


def make_sb3_envs(args, script):
    """Environments as stable-baselines3 makes, wraps and normalizes them itself; microRTS is ours."""
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    if args.exp_name == "ppo_multidiscrete_mask":
        return masked_vec_env(script.make_envs(args, args.num_envs, 1))
    if args.env_id.endswith("NoFrameskip-v4"):
        envs = make_atari_env(args.env_id, n_envs=args.num_envs, seed=args.seed)
        return envs if args.exp_name == "ppo_atari_lstm" else VecFrameStack(envs, 4)
    envs = make_vec_env(args.env_id, n_envs=args.num_envs, seed=args.seed)
    return VecNormalize(envs, gamma=args.gamma) if hasattr(args, "norm_obs") else envs


def measure_sb3(script, flags, iterations, threads):
    """PPO of stable-baselines3, or RecurrentPPO of sb3-contrib with the LSTM that our script has."""
    import torch
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Grids(BaseFeaturesExtractor):
        """The hidden layers that our script has for (H, W, C) grids."""

        def __init__(self, space):
            super().__init__(space, 64)
            self.layers = torch.nn.Sequential(*script.hidden_layers(space.shape))

        def forward(self, obs):
            return self.layers(obs.permute(0, 3, 1, 2))

    if threads:
        torch.set_num_threads(threads)
    args = make_args(script, flags, iterations)
    algorithm, policy, network = PPO, "MlpPolicy", {}
    if args.exp_name == "ppo_atari":
        policy = "CnnPolicy"
    if args.exp_name == "ppo_atari_lstm":
        algorithm, policy = RecurrentPPO, "CnnLstmPolicy"
        network = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
    if args.exp_name == "ppo_multidiscrete_mask":
        algorithm, network = MaskablePPO, {"features_extractor_class": Grids, "net_arch": []}
        network["share_features_extractor"] = False
    model = algorithm(
        policy,
        make_sb3_envs(args, script),
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


def measure_mj_step(script, flags, iterations):
    """Steps per second of the physics alone: one long trajectory for each core, random controls."""
    import mujoco.rollout
    import numpy as np

    args = make_args(script, flags, iterations)
    one = script.make_envs(args, 1, 1).unwrapped.one
    cores, calls = script.num_cores(), 20_000
    controls = np.random.default_rng(0).uniform(-1, 1, (cores, calls, one.model.nu))
    states = np.concatenate([np.zeros(1), one.init_qpos, one.init_qvel])[None].repeat(cores, axis=0)
    datas = [mujoco.MjData(one.model) for _ in range(cores)]
    with mujoco.rollout.Rollout(nthread=cores) as threads:
        started = time.perf_counter()
        threads.rollout([one.model] * cores, datas, states, controls)
        return cores * calls / one.frame_skip / (time.perf_counter() - started)


def measure_sync_loop(script, flags, iterations):
    """Steps per second of gymnasium's SyncVectorEnv, without wrappers of ours."""
    import gymnasium

    args = make_args(script, flags, iterations)
    envs = gymnasium.make_vec(args.env_id, args.num_envs, "sync")
    envs.reset(seed=1)
    actions = envs.action_space.sample()
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
        elif measurement["who"] in ("mj_step", "gymnasium's sync loop"):
            measure_floor = measure_mj_step if measurement["who"] == "mj_step" else measure_sync_loop
            sps = measure_floor(script, flags, iterations)
        elif measurement["who"] == "products":
            sps = measure_products(script, flags, iterations, measurement["threads"])
        elif measurement["who"] == "sb3":
            sps = measure_sb3(script, flags, iterations, measurement["threads"])
        else:
            compiled = measurement["who"] == "compiled"
            sps = measure_script(script, flags, iterations, measurement["threads"], compiled)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps({"sps": sps, "memory": memory}))


def measure(work, who, threads, iterations) -> dict:
    """One measurement: {"sps": steps per second, "memory": peak in GiB}."""
    measurement = {"work": work, "who": who, "threads": threads, "iterations": iterations}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher = [sys.executable, *(torchrun if who == "processes" else [])]
    command = [*launcher, __file__, "--worker", json.dumps(measurement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{measurement} failed:\n{done.stderr}")
    return json.loads(done.stdout.rsplit("RESULT ", 1)[1])


def compare(work, args) -> list[tuple]:
    """Rows of the table for one work, from measurements in turns."""
    script_name, _, _, rival = WORKS[work]
    contestants = [
        ("environments", None),
        ("products", 1),
        ("products", None),
        ("script", 1),
        ("script", None),
    ]
    contestants += [("compiled", 1)] if args.compile else []
    if rival == "two processes":
        contestants += [("processes", 1)]
    elif rival in ("mj_step", "gymnasium's sync loop"):
        contestants = [(rival, None), ("environments", None), ("script", None)]
    elif rival:
        contestants += [("sb3", 1), ("sb3", None)]
    results = {contestant: [] for contestant in contestants}
    for _ in range(args.repetitions):
        for contestant in contestants:
            result = measure(work, *contestant, args.iterations)
            results[contestant].append(result)
            print(f"{work}, {contestant}: {result['sps']:,.0f} steps/s", file=sys.stderr, flush=True)
    ours = f"{script_name}.py"
    names = {"script": ours, "compiled": f"{ours} --compile", "processes": f"two processes of {ours}"}
    names |= {"sb3": rival, "products": "matrix products"}
    sps = {c: statistics.median(result["sps"] for result in results[c]) for c in contestants}
    rows = []
    for who, threads in contestants:
        speed, floor = sps[who, threads], who in ("environments", "products", rival)
        rival_speed = None if floor else sps.get(("sb3", threads))
        if who == "processes":
            rival_speed = sps["script", 1]
        if (rival, None) in sps and who != rival:
            rival_speed = sps[rival, None]
        ratios = [
            rival_speed,
            None if floor else sps["environments", None],
            None if floor else sps.get(("products", threads)),
        ]
        ratios = [f"{speed / reference:.2f}" if reference else "" for reference in ratios]
        memory = statistics.median(result["memory"] for result in results[who, threads])
        label = "" if who == "environments" else str(threads or "default")
        rows.append((work, names.get(who, who), label, *ratios, f"{speed:,.0f}", f"{memory:.2f}"))
    return rows


def main(args):
    header = ("work", "who", "threads", "x rival", "x environments", "x products", "steps/s", "peak GiB")
    rows = [header, ("---",) * len(header), *(row for work in args.works for row in compare(work, args))]
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))


if __name__ == "__main__":
    arguments = tyro.cli(Args, description=__doc__)
    if arguments.worker:
        work_on(json.loads(arguments.worker))
    else:
        main(arguments)
