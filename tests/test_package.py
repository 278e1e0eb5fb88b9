"""The package as a user has it: what `import titan_sparse` offers, a wheel that trains, what a bare
installation can do, and what the rest says without the extra that it needs.
"""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import titan_sparse
from titan_sparse import attention
from titan_sparse.__main__ import COMMANDS
from titan_sparse.attention import observe
from titan_sparse.options.extras import EXTRAS, is_installed

ROOT = Path(__file__).parents[1]


def _run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """python with these arguments in `folder`, which is not the checkout."""
    clean = {key: value for key, value in os.environ.items() if not key.endswith(("RANK", "SIZE"))}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def test_offers():
    assert set(titan_sparse.__all__) <= set(dir(titan_sparse))
    assert titan_sparse.attend is attention.attend
    assert titan_sparse.ContextParallel is attention.ContextParallel
    assert titan_sparse.recording is observe.recording
    assert titan_sparse.masks.Causal().rows(4).stop.tolist() == [[1, 2, 3, 4]]
    assert titan_sparse.patterns.Dense().name == "dense"
    assert re.fullmatch(r"\d+\.\d+\.\d+", titan_sparse.__version__)
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        titan_sparse.atend  # noqa: B018


def test_offers_nothing_before_it_is_asked_for():
    code = "import sys, titan_sparse; dir(titan_sparse); assert 'torch' not in sys.modules"
    _run(ROOT, "-c", code)
    heavy = {"torchao", "datasets", "transformers", "matplotlib"}
    code = f"import sys, titan_sparse.training.trainer; print(*{heavy} & {{*sys.modules}})"
    assert _run(ROOT, "-c", code).stdout.split() == []


def test_imports_leave_others_alone():
    """Loggers, warnings, signals, generators, and settings of torch, which are
    the whole process's."""
    code = """
import logging, os, signal, sys, warnings
import accelerate, torch, torch._dynamo.config, torch._inductor.config, torchao, torchtitan
from transformers import PreTrainedModel, Trainer

def state():
    loggers = {None: logging.getLogger(), **logging.root.manager.loggerDict}
    return {
        "filters": {
            name: (x.level, x.filters[:], x.handlers[:])
            for name, x in loggers.items()
            if isinstance(x, logging.Logger) and not str(name).startswith("titan_sparse")
            and (x.filters or x.handlers or x.level)
        },
        "warnings": warnings.filters[:],
        "environment": dict(os.environ),
        "signals": [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "hooks": (sys.excepthook, sys.unraisablehook),
        "generator": torch.get_rng_state().tolist(),
        "dtype": (torch.get_default_dtype(), torch.get_num_threads()),
        "matmul": (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.are_deterministic_algorithms_enabled(),
        ),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.get_config_copy(),
        "methods": dict(vars(PreTrainedModel)),
    }

before = state()
import titan_sparse
titan_sparse.attend, titan_sparse.ContextParallel
import titan_sparse.integrations.transformers
import titan_sparse.integrations.transformers.context_parallel
after = state()
print([name for name in before if before[name] != after[name]])
"""
    assert _run(ROOT, "-c", code).stdout.strip() == "[]"


def test_type_checkers_see_what_is_offered():
    stub = ast.parse((ROOT / "titan_sparse/__init__.pyi").read_text())
    names = {getattr(node, "asname", None) for node in ast.walk(stub)}
    names |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert names - {None} == set(titan_sparse.__all__)


USER = """
import torch
from torch import Tensor
from typing import assert_type

from titan_sparse import ContextParallel, attend, masks, patterns, recording
from titan_sparse.attention.attend import Auxiliary

q = torch.randn(1, 4, 256, 32)
mask = masks.Documents([100, 156]) & masks.SlidingWindow(64)
pattern = patterns.VerticalSlash(recall=0.9, max_verticals=16)
with recording(recall_rows=8) as seen:
    out = attend(q, q, q, mask, pattern, block_size=64)
assert_type(out, Tensor)
assert_type(out.sum(), Tensor)
both = attend(q, q, q, return_aux=True)
assert_type(both, tuple[Tensor, Auxiliary])
assert_type(both[1].lse, Tensor)
assert_type(seen.density(), Tensor)


def spread(cp: ContextParallel) -> Tensor:
    local = cp.shard(q, dim=2)
    return cp.unshard(attend(local, local, local, cp=cp), dim=2)
"""
MISTAKES = """
import torch

from titan_sparse import attend, masks, patterns

q = torch.randn(1, 4, 256, 32)
attend(q, q, q, mask="causal")
attend(q, q, q, patern=patterns.Dense())
patterns.VerticalSlash(recal=0.9)
masks.Documents(3)
"""


def test_types_of_a_users_file(tmp_path):
    """What mypy says of it outside of the repository and with the strict rules."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "user.py"]
    environment = os.environ | {"MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(tmp_path / "cache")}

    def checked(source: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "user.py").write_text(source)
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    right = checked(USER)
    assert right.returncode == 0, right.stdout
    wrong = checked(MISTAKES)
    lines = [int(line.split(":")[1]) for line in wrong.stdout.splitlines() if ": error:" in line]
    assert sorted(set(lines)) == [7, 8, 9, 10], wrong.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of this checkout, built in a copy of it, so that nothing is left here; no network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    no_cache = shutil.ignore_patterns("__pycache__")
    for name in ("titan_sparse", "kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=no_cache)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    _run(folder, "-m", "pip", "wheel", *offline, "--wheel-dir", str(folder), str(source))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """A folder to put first in Python's path."""
    folder = wheel.parent / "installed"
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile")
    _run(wheel.parent, "-m", "pip", "install", *offline, "--target", str(folder), str(wheel))
    return folder


def test_wheel_holds_the_whole_package(wheel):
    assert wheel.name.startswith(f"titan_sparse-{titan_sparse.__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("titan_sparse/**/*.py")}
    sources |= {f"titan_sparse/{path.relative_to(ROOT)}" for path in ROOT.glob("kernels/**/*.py")}
    assert sources <= names
    assert {"titan_sparse/py.typed", "titan_sparse/__init__.pyi"} <= names
    assert "titan_sparse/kernels/block_sparse/forward.py" in names
    folders = {name.split("/")[0] for name in names}
    assert folders == {"titan_sparse", f"titan_sparse-{titan_sparse.__version__}.dist-info"}


KERNELS_FOLDER = (
    "from importlib.util import find_spec; print(find_spec('titan_sparse.kernels.merge').origin)"
)


def test_kernels_are_found_in_an_editable_installation(wheel, tmp_path):
    source = wheel.parent / "source"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    _run(tmp_path, "-m", "pip", "install", *options, "--target", str(tmp_path), "-e", str(source))
    # -S leaves out the environment's own installation. addsitedir reads the new one's path file.
    code = f"import site; site.addsitedir({str(tmp_path)!r}); {KERNELS_FOLDER}"
    found = _run(tmp_path, "-I", "-S", "-c", code).stdout
    assert Path(found.strip()).resolve() == source / "kernels/merge.py"


def test_transformers_does_not_take_our_folder_for_the_package_kernels(tmp_path):
    """kernels/ has no __init__.py, so that a package of that name anywhere on
    the path comes first."""
    code = (
        "from transformers.utils.import_utils import _is_package_available, is_kernels_available; "
        "print(_is_package_available('kernels', return_version=True), is_kernels_available())"
    )
    assert _run(ROOT, "-c", code).stdout == _run(tmp_path, "-c", code).stdout


def test_wheel_has_the_commands(installed, tmp_path):
    """Each file of commands/, and train, prints its options."""
    path = {"PYTHONPATH": str(installed)}
    shown = _run(tmp_path, str(installed / "bin/titan-sparse"), "--help", **path).stdout
    commands = {file.stem for file in ROOT.glob("titan_sparse/commands/*.py")} - {"__init__"}
    commands |= {"train"}
    assert set(re.findall(r"^  (\w+) ", shown, re.MULTILINE)) == commands
    code = (
        "import contextlib, sys; from titan_sparse.__main__ import main\n"
        f"for command in {sorted(commands)}:\n"
        "    sys.argv = ['titan-sparse', command, '--help']\n"
        "    with contextlib.suppress(SystemExit): main()"
    )
    shown = _run(tmp_path, "-c", code, **path).stdout
    usages = re.findall(r"^usage: (titan-sparse \w+|torchrun train.py)", shown, re.MULTILINE)
    commands = {f"titan-sparse {name}" for name in commands - {"train"}}
    assert set(usages) == commands | {"torchrun train.py"}
    assert (installed / "titan_sparse/estimate/constants_h200.json").is_file()


def test_wheel_trains(installed, tmp_path):
    path = {"PYTHONPATH": str(installed)}
    found = _run(tmp_path, "-c", KERNELS_FOLDER, **path).stdout
    assert found.startswith(str(installed / "titan_sparse"))

    config = tmp_path / "run.toml"
    config.write_text(
        '[model]\nflavour = "debug"\n\n[data]\nsource = "text.txt"\n\n'
        '[training]\nsteps = 2\nseq_len = 256\ndevice = "cpu"\ndtype = "float32"\n'
        'output_dir = "output"\n\n[attention]\nblock_size = 64\npattern = "dense"\n\n'
        "[lr_scheduler]\nwarmup_steps = 1\n\n[metrics]\ntensorboard = false\n"
    )
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 50)
    program = ("-m", "titan_sparse.train", "--config", str(config))
    trained = _run(tmp_path, *program, **path)
    assert "finished 2 steps" in trained.stdout
    lines = (tmp_path / "output/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


# Without extras: the wheel lies in a folder, beside links to nothing but what it requires.


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
def bare(installed, tmp_path_factory) -> list[Path]:
    """The paths of an environment after `pip install titan-sparse`."""
    folder = tmp_path_factory.mktemp("bare")
    (metadata,) = importlib.metadata.distributions(name="titan-sparse", path=[str(installed)])
    core = [line for line in metadata.requires if "extra ==" not in line]
    assert {Requirement(line).name for line in core} == {"torch", "triton", "numpy"}
    _link(core, folder)
    return [installed, folder]


def _run_bare(paths: list[Path], folder: Path, *arguments: str) -> subprocess.CompletedProcess:
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
    result = _run_bare(bare, tmp_path, "-c", LIBRARY.format(absent=absent))
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
    missing = _run_bare(bare, tmp_path, "-c", "import titan_sparse.integrations.transformers")
    assert missing.stderr.strip().endswith('write pip install "titan-sparse[huggingface]"')
    folder = tmp_path / "transformers"
    folder.mkdir()
    _link(["transformers"], folder)
    assert not any((folder / name).exists() for name in ("torchtitan", "datasets", "tensorboard"))
    result = _run_bare([*bare, folder], tmp_path, "-c", ADAPTER)
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
    result = _run_bare(bare, tmp_path, *PROGRAMS[program])
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line == f"error: {', '.join(EXTRAS['train'])} are not installed; {ADVICE}"


def test_one_line_under_torchrun(bare, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # Its own choice of a Python would find everything.
    program = ("--no-python", sys.executable, "-S", "-m", "titan_sparse.train", "--help")
    result = _run_bare(bare, tmp_path, *launcher, *program)
    assert result.returncode == 1
    assert [line.endswith(ADVICE) for line in result.stderr.splitlines()].count(True) == 1


def test_what_needs_nothing_needs_no_extra(bare, tmp_path):
    shown = _run_bare(bare, tmp_path, "-m", "titan_sparse", "--help")
    assert shown.returncode == 0 and "usage: titan-sparse" in shown.stdout
    unknown = _run_bare(bare, tmp_path, "-m", "titan_sparse", "trian")
    assert unknown.returncode == 2 and "trian is not a command" in unknown.stderr


@pytest.mark.parametrize(
    "module",
    ["config", "data", "models.flavours", "estimate.flops", "evaluation.needle"]
    + ["training.trainer", "commands.plan", "integrations.lm_eval"],
)
def test_every_import_of_the_trainer_says_so(bare, tmp_path, module):
    result = _run_bare(bare, tmp_path, "-c", f"import titan_sparse.{module}")
    assert result.returncode == 1 and result.stderr.strip().endswith(ADVICE)


def test_one_missing_package_is_named(bare, tmp_path):
    """And a package that is there but cannot be imported is not blamed on an extra."""
    folder = tmp_path / "stand_ins"
    for name in {*EXTRAS["train"]} - {"tqdm"}:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('undefined symbol: foo')\n")
    paths = [*bare, folder]
    command = ("-m", "titan_sparse", "prepare_data", "--help")
    result = _run_bare(paths, tmp_path, *command)
    assert result.stderr == f"error: tqdm is not installed; {ADVICE}\n" and result.returncode == 2
    (folder / "tqdm.py").write_text("tqdm = None\n")
    result = _run_bare(paths, tmp_path, *command)
    assert "undefined symbol: foo" in result.stderr and "pip install" not in result.stderr


def test_lm_eval_without_its_extra(bare, tmp_path):
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    for name in EXTRAS["train"]:
        (folder / f"{name}.py").write_text("")
    module = ("-m", "titan_sparse.integrations.lm_eval")
    result = _run_bare([*bare, folder], tmp_path, *module)
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
