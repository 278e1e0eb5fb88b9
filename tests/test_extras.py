"""What a bare installation can do, and what the rest says without the extra that it needs.

The wheel is installed into a folder, beside links to nothing but what it requires.
"""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_package import ROOT, installed, wheel  # noqa: F401
from titan_sparse.__main__ import COMMANDS
from titan_sparse.options.extras import EXTRAS, is_installed


def _link(names: list[str], folder: Path) -> None:
    """Link installed distributions, and all that they require, into a folder."""
    waiting, seen = [Requirement(name) for name in names], set()
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name, *sorted(requirement.extras))
        is_here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if key in seen or not is_here:
            continue
        seen.add(key)
        try:
            found = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # this torch has no GPU libraries
        for needed in found.requires or []:
            waiting.append(Requirement(needed))
        for top in {file.parts[0] for file in found.files or [] if ".." not in file.parts}:
            source, link = Path(found.locate_file(top)), folder / top
            if source.exists() and not link.exists() and top != "__pycache__":
                link.symlink_to(source)


@pytest.fixture(scope="module")
def bare(installed, tmp_path_factory) -> list[Path]:  # noqa: F811
    """The paths of an environment after `pip install titan-sparse`."""
    folder = tmp_path_factory.mktemp("bare")
    (metadata,) = importlib.metadata.distributions(name="titan-sparse", path=[str(installed)])
    core = [line for line in metadata.requires if "extra ==" not in line]
    assert {Requirement(line).name for line in core} == {"torch", "triton", "numpy"}
    _link(core, folder)
    return [installed, folder]


def _run(paths: list[Path], folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Python in `folder`, with nothing to import but its own library and these paths."""
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


LIBRARY = """
import importlib.util, sys
import torch
from titan_sparse import attend, masks, patterns, recording
from titan_sparse.attention.patterns import PATTERNS
from titan_sparse.loss import linear_cross_entropy

for name in {absent}:
    assert importlib.util.find_spec(name) is None, name
torch.manual_seed(0)
q = torch.randn(1, 4, 512, 32, dtype=torch.float64, requires_grad=True)
k, v = (torch.randn(1, 2, 512, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
options = {{
    "dense": {{}},
    "vertical_slash": {{"dense_below": 128}},
    "xattention": {{"dense_below": 128, "threshold": 0.5}},
    "moba": {{"chunk_size": 128, "top_k": 2}},
}}
assert options.keys() == PATTERNS.keys()
for name, pattern in PATTERNS.items():
    for mask in (masks.Causal(), masks.Documents([300, 212])):
        q.grad = None
        with recording() as recorded:
            out = attend(q, k, v, mask, pattern=pattern(**options[name]))
        out.sum().backward()
        assert out.isfinite().all() and q.grad.abs().sum() > 0, name
hidden, weight = torch.randn(1, 8, 16, requires_grad=True), torch.randn(50, 16)
linear_cross_entropy(hidden, weight, torch.arange(8)[None], 4).backward()
print("attended")
"""


def test_the_library_needs_torch_triton_and_numpy(bare, tmp_path):
    absent = {*EXTRAS["train"], *EXTRAS["eval"], "torchtitan", "peft", "accelerate"}
    result = _run(bare, tmp_path, "-c", LIBRARY.format(absent=absent))
    assert result.stdout.strip() == "attended", result.stderr


ADAPTER = """
import torch, transformers
from titan_sparse import patterns
from titan_sparse.integrations.transformers import AttentionSettings, register
register(AttentionSettings(pattern=patterns.VerticalSlash(recall=0.9)))
config = transformers.Qwen2Config(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=64,
)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="titan_sparse")
tokens = torch.randint(0, 64, (1, 300))
loss = model(input_ids=tokens, labels=tokens).loss
loss.backward()
assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
print("adapted")
"""


def test_the_adapter_needs_transformers_in_addition(bare, tmp_path):
    missing = _run(bare, tmp_path, "-c", "import titan_sparse.integrations.transformers")
    assert missing.stderr.strip().endswith('write pip install "titan-sparse[huggingface]"')
    folder = tmp_path / "transformers"
    folder.mkdir()
    _link(["transformers"], folder)
    assert not any((folder / name).exists() for name in ("torchtitan", "datasets", "tensorboard"))
    result = _run([*bare, folder], tmp_path, "-c", ADAPTER)
    assert result.stdout.strip() == "adapted", result.stderr


ADVICE = 'write pip install "titan-sparse[train]"'
PROGRAMS = {
    **{name: ("-m", "titan_sparse", name) for name in COMMANDS},
    "help of a command": ("-m", "titan_sparse", "plan", "--help"),
    "titan_sparse.train": ("-m", "titan_sparse.train", "--help"),
    "train.py": (str(ROOT / "train.py"), "--help"),
    "lm_eval": ("-m", "titan_sparse.integrations.lm_eval", "--model", "titan_sparse"),
    "a module of a command": ("-m", "titan_sparse.commands.plan"),
    "a module of the trainer": ("-m", "titan_sparse.training.trainer"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_line_says_what_to_install(bare, tmp_path, program):
    # A folder of data, where the command is started, is not the package.
    (tmp_path / "datasets").mkdir()
    result = _run(bare, tmp_path, *PROGRAMS[program])
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line == f"error: {', '.join(EXTRAS['train'])} are not installed; {ADVICE}"


def test_one_line_under_torchrun(bare, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # Its own choice of a Python would find everything.
    program = ("--no-python", sys.executable, "-S", "-m", "titan_sparse.train", "--help")
    result = _run(bare, tmp_path, *launcher, *program)
    assert result.returncode == 1
    assert [line.endswith(ADVICE) for line in result.stderr.splitlines()].count(True) == 1


def test_what_needs_nothing_needs_no_extra(bare, tmp_path):
    shown = _run(bare, tmp_path, "-m", "titan_sparse", "--help")
    assert shown.returncode == 0 and "usage: titan-sparse" in shown.stdout
    unknown = _run(bare, tmp_path, "-m", "titan_sparse", "trian")
    assert unknown.returncode == 2 and "trian is not a command" in unknown.stderr


@pytest.mark.parametrize(
    "module",
    ["config", "data", "models.flavours", "estimate.flops", "evaluation.needle"]
    + ["training.trainer", "commands.plan", "integrations.lm_eval"],
)
def test_every_import_of_the_trainer_says_so(bare, tmp_path, module):
    result = _run(bare, tmp_path, "-c", f"import titan_sparse.{module}")
    assert result.returncode == 1 and result.stderr.strip().endswith(ADVICE)


def test_one_missing_package_is_named(bare, tmp_path):
    """And a package that is there but cannot be imported is not blamed on an extra."""
    folder = tmp_path / "stand_ins"
    for name in {*EXTRAS["train"]} - {"tqdm"}:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('undefined symbol: foo')\n")
    paths = [*bare, folder]
    command = ("-m", "titan_sparse", "prepare_data", "--help")
    result = _run(paths, tmp_path, *command)
    assert result.stderr == f"error: tqdm is not installed; {ADVICE}\n" and result.returncode == 2
    (folder / "tqdm.py").write_text("tqdm = None\n")
    result = _run(paths, tmp_path, *command)
    assert "undefined symbol: foo" in result.stderr and "pip install" not in result.stderr


def test_lm_eval_without_its_extra(bare, tmp_path):
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    for name in EXTRAS["train"]:
        (folder / f"{name}.py").write_text("")
    module = ("-m", "titan_sparse.integrations.lm_eval")
    result = _run([*bare, folder], tmp_path, *module)
    assert result.stderr == (
        'error: lm_eval is not installed; write pip install "titan-sparse[eval]"\n'
    )
    assert result.returncode == 2


def test_extras_are_those_of_the_project():
    """Found by the names that are imported, installed by the names that pip takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [Requirement(line).name.replace("-", "_") for line in extras["train"]]
    assert sorted(names) == sorted(EXTRAS["train"])
    assert EXTRAS["eval"][0] in {Requirement(line).name for line in extras["eval"]}
    assert all(is_installed(name) for name in EXTRAS["train"])
    for name in ("dev", "eval", "study"):
        first = Requirement(extras[name][0])
        assert first.name == "titan-sparse" and "train" in first.extras
