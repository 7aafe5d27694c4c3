"""Where each of the implementation details stands: detail -> script:line.

    python -m benchmark.details            # prints the tables of details and of differences of scripts
    python -m benchmark.details --write    # puts them into README.md, between their markers

Numbers and names are those of "The 37 Implementation Details of Proximal Policy Optimization" (Huang et al.
2022); A1 to A4 are its auxiliary details.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
TITLES = {
    "D01": "Vectorized architecture",
    "D02": "Orthogonal initialization and constant biases",
    "D03": "Adam epsilon 1e-5",
    "D04": "Adam learning rate annealing",
    "D05": "Generalized advantage estimation",
    "D06": "Mini-batch updates",
    "D07": "Normalization of advantages",
    "D08": "Clipped surrogate objective",
    "D09": "Value function loss clipping",
    "D10": "Overall loss and entropy bonus",
    "D11": "Global gradient clipping",
    "D12": "Debug variables",
    "D13": "Shared and separate MLP networks",
    "D14": "NoopResetEnv",
    "D15": "MaxAndSkipEnv",
    "D16": "EpisodicLifeEnv",
    "D17": "FireResetEnv",
    "D18": "WarpFrame",
    "D19": "ClipRewardEnv",
    "D20": "FrameStack",
    "D21": "Shared Nature-CNN",
    "D22": "Scaling images to [0, 1]",
    "D23": "Continuous actions via normal distributions",
    "D24": "State-independent log standard deviation",
    "D25": "Independent action components",
    "D26": "Separate MLP networks for continuous control",
    "D27": "Action clipping and storage",
    "D28": "Normalization of observation",
    "D29": "Observation clipping",
    "D30": "Reward scaling",
    "D31": "Reward clipping",
    "D32": "Layer initialization for LSTM",
    "D33": "Initialize LSTM states to zeros",
    "D34": "Reset LSTM states at episode end",
    "D35": "Sequential rollouts in mini-batches",
    "D36": "Reconstruct LSTM states during training",
    "D37": "Independent components of MultiDiscrete actions",
    "A1": "Clip range annealing",
    "A2": "Parallelized gradient update",
    "A3": "Early stopping of the policy optimizations",
    "A4": "Invalid action masking",
}
CORE = [*(f"D{i:02d}" for i in range(1, 13)), "A1", "A2", "A3"]
TAGS = {
    "ppo": [*CORE, "D13"],
    "ppo_shared": [*CORE, "D13"],
    "ppo_continuous_action": [*CORE, "D13", *(f"D{i}" for i in range(23, 32))],
    "ppo_atari": [*CORE, *(f"D{i}" for i in range(14, 23))],
    "ppo_atari_lstm": [*CORE, *(f"D{i}" for i in [*range(14, 23), *range(32, 37)])],
    "ppo_multidiscrete": [*CORE, "D13", "D37"],
    "ppo_multidiscrete_mask": [*CORE, "D13", "D37", "A4"],
}
# parent, child: where one script was made from the other
PAIRS = [
    ("ppo", "ppo_shared"),
    ("ppo", "ppo_continuous_action"),
    ("ppo", "ppo_atari"),
    ("ppo", "ppo_multidiscrete"),
    ("ppo_atari", "ppo_atari_lstm"),
    ("ppo_multidiscrete", "ppo_multidiscrete_mask"),
]


def source(name) -> str:
    return (ROOT / f"{name}.py").read_text()


def tag_comments(text) -> dict[str, tuple[int, str]]:
    """tag -> line (from 1) and the whole comment on one line. Raises ValueError where a tag stands twice."""
    found = {}
    for match in re.finditer(r"^ *# \[([DA]\d+)\] (.*(?:\n *# (?!\[).*)*)", text, flags=re.M):
        tag, comment = match.groups()
        if tag in found:
            raise ValueError(f"[{tag}] stands twice")
        found[tag] = text.count("\n", 0, match.start()) + 1, re.sub(r"\n *# ", " ", comment)
    return found


def without_environments(text) -> list[str]:
    """The lines outside section 3, which holds what depends on the environment."""
    before, after = text.split("# ---- 3. "), text.split("# ---- 4. ")
    return [*before[0].splitlines(), *f"# ---- 4. {after[1]}".splitlines()]


def changed_lines(parent, child) -> int:
    """Lines that `diff` marks with < or > outside section 3."""
    pair = (without_environments(source(name)) for name in (parent, child))
    lines = difflib.unified_diff(*pair, n=0, lineterm="")
    return sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in lines)


def table(head, rows) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def details_table() -> str:
    """One row per detail, one column per script, with the line of the tag."""
    where = {name: tag_comments(source(name)) for name in TAGS}
    rows = []
    for tag, title in TITLES.items():
        cells = [
            f"[{where[name][tag][0]}]({name}.py#L{where[name][tag][0]})" if tag in where[name] else ""
            for name in TAGS
        ]
        rows.append([tag, title, *cells])
    return table(["", "detail", *(f"{name.removeprefix('ppo_')}" for name in TAGS)], rows)


def differences_table() -> str:
    """Outside section 3: lines that differ between parents and children, and lines of the children."""
    rows = []
    for parent, child in PAIRS:
        lines = len(without_environments(source(child)))
        rows.append([f"`{parent}.py`", f"`{child}.py`", str(changed_lines(parent, child)), str(lines)])
    return table(["from", "to", "changed lines", "of"], rows)


TABLES = {"details": details_table, "differences": differences_table}


def with_tables(text) -> str:
    """The text of README.md with both tables as they are now."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name}: made by python -m benchmark.details --write -->\n\n).*?(\n\n<!-- end -->)"
        text, count = re.subn(pattern, lambda m, make=make: m[1] + make() + m[2], text, flags=re.S)
        if count != 1:
            raise ValueError(f"README.md has {count} places for the table of {name}")
    return text


@dataclass
class Args:
    write: bool = False
    """put the tables into README.md instead of printing them"""


def main(args):
    if args.write:
        readme = ROOT / "README.md"
        readme.write_text(with_tables(readme.read_text()))
    else:
        print("\n\n".join(make() for make in TABLES.values()))


if __name__ == "__main__":
    main(tyro.cli(Args))
