"""Python imports this as it starts, in each process that tests start: it records branches there too."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "gpu_branch_recorder", Path(__file__).parents[1] / "recorder.py"
)
_recorder = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_recorder)
_recorder.start()
