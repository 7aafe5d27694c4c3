"""The work of a script done by stable-baselines3: is a surprising return PPO's, or that of a fault?

    python benchmark/referee.py ppo_shared --env-ids CartPole-v1 Acrobot-v1    # a quarter of an hour
    python benchmark/referee.py ppo_continuous_action --env-ids Humanoid-v4    # an hour on one core

Prints the mean return of the last 100 episodes of each run. Networks, kind of initial weights, and numbers
are those of the script; environments, normalizers, rollouts, advantages, losses and updates are those of
stable-baselines3. Its value loss has no factor 1/2; clipped, it has no maximum of two errors.
"""

import contextlib
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.speed import make_sb3_envs


@dataclass
class Args:
    script: tyro.conf.Positional[Literal["ppo", "ppo_shared", "ppo_continuous_action"]]
    """script whose work is done"""
    env_ids: tuple[str, ...]
    """environments"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds"""
    total_timesteps: int | None = None
    """as the flag of the script"""
    vf_coef: float | None = None
    """weight of the value loss; default as in the script, whose loss has half the size"""


def policy_arguments(script) -> dict:
    """Networks as the script has them: two of them, or a trunk that policy and value share."""

    class Trunk(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 64)
            self.layers = script.hidden_layers(space.shape[0])

        def forward(self, obs):
            return self.layers(obs)

    if script.__name__ == "ppo_shared":
        return {"features_extractor_class": Trunk, "net_arch": []}
    return {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}  # of tanh units, unasked


def final_return(script, env_id, seed, total_timesteps=None, vf_coef=None) -> float:
    """Trains once; mean return of the last 100 episodes."""
    args = script.Args(env_id=env_id, seed=seed, total_timesteps=total_timesteps)
    with getattr(script, "quiet_mujoco", contextlib.nullcontext)():
        envs = make_sb3_envs(args, script)
    model = PPO(
        "MlpPolicy",
        envs,
        policy_kwargs=policy_arguments(script),
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=args.update_epochs,
        learning_rate=lambda remaining: args.learning_rate * remaining,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef if vf_coef is None else vf_coef,
        max_grad_norm=args.max_grad_norm,
        seed=seed,
        device="cpu",
    )
    model.learn(args.total_timesteps)
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer]))


def main(args):
    torch.set_num_threads(1)
    script = importlib.import_module(args.script)
    for env_id in args.env_ids:
        numbers = args.total_timesteps, args.vf_coef
        returns = [final_return(script, env_id, seed, *numbers) for seed in args.seeds]
        text = ", ".join(f"{each:.1f}" for each in returns)
        print(f"{env_id}: {np.mean(returns):.1f} ± {np.std(returns):.1f} ({text})", flush=True)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
