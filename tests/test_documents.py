"""Tags, pins and copies: what must agree between the scripts, the requirements and the README."""

import ast
import difflib
import re

import pytest
from helpers import IMAGE, MULTI, ROOT, SCRIPTS, VECTOR, images

CORE = [f"D{i:02d}" for i in range(1, 13)] + ["A1", "A2", "A3"]
TAGS = {
    "ppo": [*CORE, "D13"],
    "ppo_shared": [*CORE, "D13"],
    "ppo_continuous_action": [*CORE, "D13", *(f"D{i}" for i in range(23, 32))],
    "ppo_multidiscrete": [*CORE, "D13", "D37"],
    "ppo_multidiscrete_mask": [*CORE, "D13", "D37", "A4"],
    "ppo_atari": CORE + [f"D{i}" for i in range(14, 23)],
    "ppo_atari_lstm": CORE + [f"D{i}" for i in [*range(14, 23), *range(32, 37)]],
}
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
SECTIONS = [
    *("Imports", "Arguments", "Environments", "Networks", "Experience", "Advantages", "Loss", "Learning"),
    *("What was learned", "Training", "Command line"),
]
ALL = SCRIPTS
NOT_RECURRENT = [name for name in SCRIPTS if not name.endswith("lstm")]
PLAIN = [name for name in NOT_RECURRENT if not name.endswith("mask")]
# Functions and classes that are the same in several scripts, to the letter.
COPIES = {
    "make_vec of games": IMAGE,
    "make_envs of games": IMAGE,
    **dict.fromkeys(
        ["BadInput", "num_cores", "env_kwargs", "ignored_interrupts", "derive_seed", "layer_init"], ALL
    ),
    **dict.fromkeys(["gae", "ppo_loss", "on_cpu", "save_checkpoint", "load_checkpoint"], ALL),
    **dict.fromkeys(["start_process", "gather", "noted_signals", "build", "open_run", "log_iteration"], ALL),
    "parse_args": ALL,
    **dict.fromkeys(["evaluate_rollout", "update", "train"], NOT_RECURRENT),
    **dict.fromkeys(["Rollout", "rollout", "evaluate_policy", "load_agent"], PLAIN),
    "EpisodeTracker": [*VECTOR, "ppo_multidiscrete"],
    "hidden_layers": VECTOR,
    **dict.fromkeys(["start_java", "MicroRTS", "make_vec", "check_spaces"], MULTI),
    "ColorTwin": IMAGE,
    "make_envs": ["ppo", "ppo_shared", *MULTI],
}


def source(script):
    return (ROOT / f"{script.__name__}.py").read_text()


def tag_comments(text) -> dict[str, str]:
    """tag -> its whole comment, on one line."""
    found = {}
    for tag, comment in re.findall(r"^ *# \[([DA]\d+)\] (.*(?:\n *# (?!\[).*)*)", text, flags=re.M):
        assert tag not in found, f"{tag} stands twice"
        found[tag] = re.sub(r"\n *# ", " ", comment)
    return found


def test_tags_are_those_of_the_script(script):
    comments = tag_comments(source(script))
    assert sorted(comments) == sorted(TAGS[script.__name__])
    for tag, comment in comments.items():
        assert comment.startswith(f"{TITLES[tag]}: "), tag


def test_tags_say_the_same_in_all_scripts():
    comments = [tag_comments((ROOT / f"{name}.py").read_text()) for name in SCRIPTS]
    for one in comments:
        for other in comments:
            assert {t: c for t, c in one.items() if t in other} == {
                t: c for t, c in other.items() if t in one
            }


def test_every_tag_has_a_test():
    names = " ".join(
        re.findall(r"def (test_\w+)", "".join(p.read_text() for p in ROOT.glob("tests/test_*.py")))
    )
    for tag in TITLES:
        assert f"test_{tag.lower()}_" in names, tag


def test_sections(script):
    banners = re.findall(r"^# ---- (\d+)\. ([\w ]+?)(?::.*)? ----$", source(script), flags=re.M)
    assert banners == [(str(i), name) for i, name in enumerate(SECTIONS, start=1)]


def parts(name) -> dict[str, str]:
    text = (ROOT / f"{name}.py").read_text()
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    lines = text.splitlines()
    first = lambda n: min([n.lineno, *(d.lineno for d in n.decorator_list)]) - 1  # noqa: E731
    return {n.name: "\n".join(lines[first(n) : n.end_lineno]) for n in nodes}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_equal(copy):
    first, *others = COPIES[copy]
    copy = copy.removesuffix(" of games")
    original = parts(first)[copy].splitlines()
    for name in others:
        other = parts(name)[copy].splitlines()
        diff = "\n".join(difflib.unified_diff(original, other, first, name, lineterm=""))
        assert not diff, f"{copy}() of {name}.py drifted from that of {first}.py:\n{diff}"


def test_functions_are_short(script):
    for node in ast.walk(ast.parse(source(script))):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (90 if node.name == "train" else 50), f"{node.name} has {lines} lines"


def pins(text) -> dict[str, str]:
    """package -> line, from requirements or a script block."""
    found = re.findall(r"^(?:#   \")?(([\w.-]+)(?:\[[\w,-]+\])?==[\w.]+)(?:\",)?$", text, flags=re.M)
    return {package: line for line, package in found}


def test_pins_of_the_script_block(script):
    """The block that `uv run` reads has the pins of requirements.txt, and just the packages that the script imports."""
    block = re.search(r"^# /// script\n(.*?)^# ///$", source(script), flags=re.M | re.S).group(1)
    files = ["requirements.txt", "requirements-microrts.txt"]
    required = pins("".join((ROOT / file).read_text() for file in files))
    declared = pins(block)
    assert declared
    assert all(required[package] == line for package, line in declared.items())
    tree = ast.parse(source(script))
    imports = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imports |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    third_party = {name.replace("_", "-").replace("jpype", "JPype1") for name in imports} & set(required)
    # Imported by torch.utils.tensorboard, gymnasium's RecordVideo and gymnasium's ResizeObservation.
    indirect = {"tensorboard", "moviepy"} | ({"opencv-python-headless"} if images(script) else set())
    indirect |= {"gym-microrts"} if script.__name__ in MULTI else set()  # read for its jar, never imported
    assert set(declared) == third_party | indirect


def test_nothing_of_the_repository_is_imported(script):
    ours = {path.stem for path in ROOT.glob("*.py")} | {"tests", "benchmark"}
    for node in ast.walk(ast.parse(source(script))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & ours


def test_no_hidden_globals(script):
    """Functions read only imports, CONSTANTS, functions and classes of the file, and builtins."""
    import builtins
    import symtable

    table = symtable.symtable(source(script), script.__name__, "exec")
    allowed = set(dir(builtins)) | {"__file__", "__name__"}
    for symbol in table.get_symbols():
        if symbol.is_imported() or symbol.is_namespace() or symbol.get_name().isupper():
            allowed.add(symbol.get_name())

    def check(scope):
        for symbol in scope.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                assert symbol.get_name() in allowed, f"{scope.get_name()} reads {symbol.get_name()}"
        for child in scope.get_children():
            check(child)

    for child in table.get_children():
        check(child)


@pytest.mark.scripts("ppo_continuous_action")
def test_the_code_in_the_readme_runs(script):
    """The blocks in Python, on a shorter run."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert len(blocks) == 2
    names = {}
    exec(blocks[0].replace("total_timesteps=500_000", "total_timesteps=2048"), names)
    result = names["train"](names["Args"](total_timesteps=2048))
    exec(blocks[1].replace("runs/…/checkpoint.pt", result["checkpoint"]), names)
    assert names["env"].action_space.contains(names["action"])
