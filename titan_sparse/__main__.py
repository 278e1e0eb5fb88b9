"""The program titan-sparse: `titan-sparse COMMAND ...`, the same as `python -m
titan_sparse COMMAND ...`."""

import importlib
import os
import sys

from titan_sparse.options.extras import program

COMMANDS = {
    "init": "prints an example configuration with comments",
    "train": "trains a model (under torchrun on several GPUs)",
    "generate": "continues a text or answers a message",
    "evaluate": "measures a checkpoint: loss by position, Needle In A Haystack",
    "prepare_data": "tokenizes a source once, into shards that data.source reads",
    "show_data": "shows samples as the model sees them, with what is learned",
    "export_hf": "writes a checkpoint as a Hugging Face folder",
    "plan": "predicts the time of attention for parallelism settings",
    "inspect": "draws which keys each head attends to",
    "choose": "measures what each recall of vertical_slash costs with your model and text",
    "options": "prints all options, and which choices of attention do not run together",
}
_USAGE = "\n".join(
    [
        "usage: titan-sparse COMMAND [OPTION ...]",
        "       torchrun --nproc-per-node 8 -m titan_sparse COMMAND [OPTION ...]",
        "",
        *(f"  {name:<14}{summary}" for name, summary in COMMANDS.items()),
        "",
        "titan-sparse COMMAND --help prints the options of a command.",
    ]
)


def main() -> int:
    """Run the command that sys.argv names; returns its exit status."""
    try:
        status = _command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # What reads the output, such as head, has seen enough. Python flushes it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _command() -> int:
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print(_USAGE)
        return 0
    if name not in COMMANDS:
        commands = ", ".join(COMMANDS)
        print(f"error: {name} is not a command; write one of {commands}", file=sys.stderr)
        return 2
    return _run(name, words)


@program
def _run(name: str, words: list[str]) -> int:
    # Loaded when it is asked for: train refuses a mistake before torch has been loaded.
    from titan_sparse.training.faults.launcher import hide_warnings_of_imports

    hide_warnings_of_imports()
    status = importlib.import_module(f"titan_sparse.commands.{name}").main(words)
    distributed = sys.modules.get("torch.distributed")
    if status == 0 and distributed is not None and distributed.is_initialized():
        # After a failure, destroying the group could wait for ranks that are gone.
        distributed.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
