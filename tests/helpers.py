"""What several test files need: arguments, rollouts and agents in small, and scripts as processes."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
VECTOR = ["ppo", "ppo_shared", "ppo_continuous_action"]  # by what they observe
IMAGE = ["ppo_atari", "ppo_atari_lstm"]
MULTI = ["ppo_multidiscrete", "ppo_multidiscrete_mask"]  # vectors or grids
SCRIPTS = VECTOR + IMAGE + MULTI
# One of each group with equal copies of sections 5 to 11, for tests of these that take their time.
DISTINCT = ["ppo", "ppo_continuous_action", "ppo_atari_lstm", "ppo_multidiscrete_mask"]
TRAINS = ["ppo_continuous_action", "ppo_atari_lstm"]  # train() is one of these in all scripts


def continuous(script) -> bool:
    return hasattr(script, "RunningMoments")


def images(script) -> bool:
    return hasattr(script, "ColorTwin")


def recurrent(script) -> bool:
    return "state" in script.Rollout._fields


def masked(script) -> bool:
    return "masks" in script.Rollout._fields


def multi(script) -> bool:
    return hasattr(script, "MicroRTS")


def probe(script, name) -> str:
    """Id of a probe environment with the actions, observations and masks that the script takes."""
    kinds = {"Box": continuous, "Image": images, "Masked": masked, "Multi": multi}
    return f"probe_envs:{name}{next((kind for kind, has in kinds.items() if has(script)), '')}-v0"


def other_actions(script) -> str:
    """--env-kwargs of a probe environment with other actions that the script takes."""
    name = "asymmetric" if continuous(script) else "start_multi" if multi(script) else "start"
    return f'{{"actions": "{name}"}}'


def real(script) -> dict[str, str]:
    """env_id and env_kwargs of an environment that users of the script have, with episodes of at most 500 steps."""
    if images(script):
        return {"env_id": "Pong", "env_kwargs": '{"max_num_frames_per_episode": 400}'}
    if multi(script):
        return {"env_id": "MicrortsMining4x4-v1"}
    return {"env_id": "Pendulum-v1" if continuous(script) else "CartPole-v1"}


def vectors(script, obs, size):
    """The numbers that a probe shows, (..., size): read from the stripes of its last frame, or observed as such."""
    if not images(script):
        return obs
    width = 84 // size
    return obs[..., 42, width // 2 : size * width : width, -1] / 127.5 - 1


def frames(script, obs):
    """(n, D) numbers as the environments of the script show them in a probe."""
    if not images(script):
        return obs
    levels = np.round((np.asarray(obs) + 1) * 127.5).astype(np.uint8)
    stripes = np.repeat(levels, 84 // levels.shape[1], axis=1)  # (n, 84)
    shape = (len(stripes), 1 if recurrent(script) else 4, 84, 84)
    return np.broadcast_to(stripes[:, None, None], shape).copy()


def make_args(script, env="Const", **changes):
    """Small and quick: 10 iterations of 4 probe environments, 12 steps, 2 epochs of few minibatches, no normalizers."""
    small = {"env_id": probe(script, env), "num_envs": 4, "num_steps": 12}
    small |= {"num_minibatches": 4 if recurrent(script) else 3, "clip_coef": 0.2}
    small |= {"update_epochs": 2, "learning_rate": 1e-3}
    small |= {"norm_obs": False, "norm_reward": False} if continuous(script) else {}
    small |= changes
    return script.Args(**({"total_timesteps": 10 * small["num_envs"] * small["num_steps"]} | small))


def build(script, env="Const", **changes):
    """args, envs, agent, optimizer."""
    args = make_args(script, env, **changes)
    return args, *script.build(args, 0, torch.device("cpu"), None, 0)


def rollout(script, agent, envs, args, last=None):
    """One rollout, after the rollout `last` if there is one."""
    if not recurrent(script):
        return script.rollout(agent, envs, args)
    state = agent.initial_state(envs.num_envs) if last is None else last.next_state
    return script.rollout(agent, envs, args, state)


def act(script, agent, obs, deterministic=False):
    """Actions for normalized observations of which each is the first of its episode."""
    if masked(script):
        return agent.act(obs, torch.ones(len(obs), 5, dtype=torch.bool), deterministic)
    if not recurrent(script):
        return agent.act(obs, deterministic)
    return agent.act(obs, agent.initial_state(len(obs)), torch.ones(len(obs)), deterministic)[0]


def value(script, agent, obs):
    """Values of normalized observations of which each is the first of its episode."""
    if not recurrent(script):
        return agent.get_value(obs)
    return agent.get_value(obs, agent.initial_state(len(obs)), torch.ones(len(obs)))


def value_of_next(script, agent, batch):
    """Values of what the last step of a rollout led to."""
    state = (batch.next_state, torch.zeros(batch.valid.shape[1])) if recurrent(script) else ()
    return agent.get_value(batch.next_obs, *state).detach()


def make_batch(script, **columns):
    """A Rollout of these columns, the rest None; with `obs` alone, each row is the first of its episode."""
    if recurrent(script) and "obs" in columns:
        T, n = columns["obs"].shape[:2]
        columns = {"starts": torch.ones(T, n), "state": torch.zeros(2, n, 128)} | columns
    if masked(script) and "obs" in columns:
        columns = {"masks": torch.ones(*columns["obs"].shape[:2], 5, dtype=torch.bool)} | columns
    return script.Rollout(**(dict.fromkeys(script.Rollout._fields) | columns))


def recorded(script, env="Const", **changes):
    """args, agent, optimizer, and one rollout with advantages."""
    args, envs, agent, optimizer = build(script, env, **changes)
    batch = script.evaluate_rollout(agent, rollout(script, agent, envs, args), args)
    envs.close()
    return args, agent, optimizer, batch


class FakeAgent(torch.nn.Module):
    """Returns leaf tensors as logprobs, entropies and values, so that a loss can be differentiated by each."""

    def __init__(self, logprobs, entropies, values):
        super().__init__()
        self.outputs = [
            torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (logprobs, entropies, values)
        ]

    def evaluate_actions(self, batch):
        return self.outputs


def loss_of(
    script, *, new, old=None, advantages=None, values=None, old_values=None, returns=None, valid=None, **flags
):
    """loss, debug and a FakeAgent for hand-made numbers; unnamed ones are 0, entropies 0.5, clip range 0.2."""
    n = len(new)
    zeros, tensor = [0.0] * n, lambda x: torch.tensor(zeros if x is None else x, dtype=torch.float64)
    agent = FakeAgent(new, [0.5] * n, zeros if values is None else values)
    batch = make_batch(
        script,
        valid=torch.ones(n, dtype=torch.float64) if valid is None else tensor(valid),
        logprobs=tensor(old),
        values=tensor(old_values),
        advantages=tensor(advantages),
        returns=tensor(returns),
    )
    flags = {"norm_adv": False, "clip_vloss": True, "ent_coef": 0.0, "vf_coef": 0.0} | flags
    loss, debug = script.ppo_loss(
        agent, batch, torch.tensor(0.2, dtype=torch.float64), SimpleNamespace(**flags)
    )
    return loss, debug, agent


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    """name -> (step, value) pairs from the event files of a run folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def only_run() -> Path:
    (folder,) = Path("runs").iterdir()
    return folder


def environment(**changes) -> dict[str, str]:
    """For a script as a process: probes can be imported, threads stay few."""
    return os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"} | changes


def run(script_path, *flags, launcher=(), timeout=120, **changes) -> subprocess.CompletedProcess:
    """The script as a process in the current folder."""
    command = [*(launcher or [sys.executable]), str(script_path), *map(str, flags)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(**changes), check=False
    )


def run_here(script, *flags) -> SimpleNamespace:
    """run() in this process, which need not import everything again; for what ends in an exit status."""
    stdout, stderr, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [script.__file__, *map(str, flags)]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            runpy.run_path(script.__file__, run_name="__main__")
    except SystemExit as end:
        return SimpleNamespace(returncode=end.code, stdout=stdout.getvalue(), stderr=stderr.getvalue())
    finally:
        sys.argv = argv
    raise AssertionError("the script did not exit")


def small_flags(script, env="Const", iterations=5) -> list[str]:
    """make_args() as typed on a command line."""
    minibatches = "4" if recurrent(script) else "3"
    return [
        *("--env-id", probe(script, env), "--num-envs", "4", "--num-steps", "9"),
        *(
            "--num-minibatches",
            minibatches,
            "--update-epochs",
            "2",
            "--total-timesteps",
            str(36 * iterations),
        ),
    ]


def brute_force_gae(rewards, values, terminations, dones, gamma, lam):
    """Each advantage as its own sum over later deltas, in plain Python: (T, N) arrays, values (T+1, N)."""
    T, N = rewards.shape
    advantages = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                following = 0.0 if terminations[k, n] else values[k + 1, n]
                advantages[t, n] += weight * (rewards[k, n] + gamma * following - values[k, n])
                if dones[k, n]:
                    break
                weight *= gamma * lam
    return advantages
