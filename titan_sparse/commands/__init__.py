"""The commands of titan-sparse, a module each with main(words). It returns the exit status."""

import argparse


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser for a command. description: its docstring, which begins with how it is called."""
    command = description.partition("titan-sparse ")[2].partition(" ")[0]
    return argparse.ArgumentParser(
        prog=f"titan-sparse {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a trained model: --config, and --checkpoint or --hf."""
    parser.add_argument("--config", required=True, help="the run's config.toml")
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument(
        "--checkpoint",
        help="output_dir of the run, for its newest checkpoint, or its checkpoint/step-N",
    )
    weights.add_argument("--hf", help="Hugging Face folder, instead of a checkpoint")
