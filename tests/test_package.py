"""The package as a user has it: what `import titan_sparse` offers, and a wheel that trains."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import titan_sparse
from titan_sparse import attention
from titan_sparse.attention import observe

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
    """Loggers, warnings, signals, generators, and settings of torch, which are the whole process's."""
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
    """kernels/ has no __init__.py, so that a package of that name anywhere on the path comes first."""
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
