"""Is what ppo_shared.py returns due to its network or to a fault? stable-baselines3 with the same network.

    python benchmark/shared_network.py       # 3 seeds of CartPole-v1 and Acrobot-v1: a quarter of an hour

Prints the mean return of the last 100 episodes of each run. Network, its initial weights, and all numbers are
those of ppo_shared.py; environments, rollouts, advantages, losses and updates are stable-baselines3's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_shared


@dataclass
class Args:
    env_ids: tuple[str, ...] = ("CartPole-v1", "Acrobot-v1")
    """environments"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds"""
    total_timesteps: int | None = None
    """as the flag of the script"""


class Trunk(BaseFeaturesExtractor):
    """The layers that policy and value share."""

    def __init__(self, space):
        super().__init__(space, 64)
        self.layers = ppo_shared.hidden_layers(space.shape[0])

    def forward(self, obs):
        return self.layers(obs)


def final_return(env_id, seed, total_timesteps=None) -> float:
    """Trains once; mean return of the last 100 episodes."""
    args = ppo_shared.Args(env_id=env_id, seed=seed, total_timesteps=total_timesteps)
    model = PPO(
        "MlpPolicy",
        make_vec_env(env_id, args.num_envs, seed=seed),
        policy_kwargs={"features_extractor_class": Trunk, "net_arch": []},
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=args.update_epochs,
        learning_rate=lambda remaining: args.learning_rate * remaining,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        seed=seed,
        device="cpu",
    )
    model.learn(args.total_timesteps)
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer]))


def main(args):
    torch.set_num_threads(1)
    for env_id in args.env_ids:
        returns = [final_return(env_id, seed, args.total_timesteps) for seed in args.seeds]
        text = ", ".join(f"{each:.1f}" for each in returns)
        print(f"{env_id}: {np.mean(returns):.1f} ± {np.std(returns):.1f} ({text})", flush=True)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
