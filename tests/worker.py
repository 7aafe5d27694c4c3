"""One of two processes under torchrun, for test_processes.py: python worker.py SCRIPT FOLDER."""

import atexit
import importlib
import os
import sys
from pathlib import Path

import numpy as np
import torch
from helpers import continuous, images, make_args, make_batch, recurrent


def global_batch(script, seed, T=6, N=8):
    """args, agent, optimizer, and made-up experience of N environments in which some rows are fillers."""
    torch.manual_seed(seed)
    flags = {"num_steps": T, "num_minibatches": 1, "update_epochs": 1, "norm_adv": False}
    args = make_args(script, "Clock", total_timesteps=10**6, **flags)
    _envs, agent, optimizer = script.build(args, 0, torch.device("cpu"), None, 0)
    rows = {name: torch.randn(T, N) for name in ("logprobs", "values", "advantages", "returns")}
    valid = (torch.rand(T, N) < 0.7).float()
    valid[:, 0] = 0
    obs = torch.randn(T, N, 6)
    if images(script):
        obs = torch.randint(256, (T, N, *agent.obs_shape), dtype=torch.uint8)
    actions = torch.randn(T, N, 1) if continuous(script) else torch.randint(2, (T, N))
    if recurrent(script):
        rows |= {"starts": (torch.rand(T, N) < 0.3).float(), "state": torch.randn(2, N, 128)}
    batch = make_batch(script, obs=obs, actions=actions, valid=valid, **rows)
    return args, agent, optimizer, batch


def part_of(batch, rank, size):
    """The columns of one process."""
    return type(batch)(*(None if x is None else x[:, rank * size : (rank + 1) * size] for x in batch))


def main(name, folder):
    script = importlib.import_module(name)
    rank = int(os.environ["RANK"])
    atexit.register(
        note_threads, Path(folder, f"{rank}.threads")
    )  # runs last: after what the script registers
    script.start_process(make_args(script, "Clock"))
    args, agent, optimizer, batch = global_batch(script, seed=0)
    debug = script.update(agent, optimizer, part_of(batch, rank, args.num_envs), args, 0.2)
    result = {"weights": [p.detach() for p in agent.parameters()], "debug": debug}
    if hasattr(script, "RunningMoments"):
        moments, rows = script.RunningMoments((3,), None), moment_rows()
        for chunk in np.array_split(rows[rank::2], 7):
            moments.update(chunk, np.ones(len(chunk)))
            moments.update(chunk + 1e9, np.zeros(len(chunk)))
        moments.merge()
        for chunk in np.array_split(rows[rank::2], 5):
            moments.update(chunk + 4, np.ones(len(chunk)))
        moments.merge()
        result["moments"] = [moments.count, moments.mean, torch.as_tensor(moments.std)]
    torch.save(result, f"{folder}/{rank}.pt")


def note_threads(path):
    """Writes the names of the threads of this process, one in each line (Linux)."""
    path.write_text("".join(each.read_text() for each in Path("/proc/self/task").glob("*/comm")))


def moment_rows():
    return np.random.default_rng(0).normal(1e6, 3, size=(101, 3))


if __name__ == "__main__":
    main(*sys.argv[1:])
