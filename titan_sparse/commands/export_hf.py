"""Write a checkpoint of a run as a Hugging Face folder, for transformers' from_pretrained().

    titan-sparse export_hf RUN_OR_CHECKPOINT OUT [--dtype float32] [--merge]

RUN_OR_CHECKPOINT is the output_dir of a run, for its newest checkpoint, or one of its folders
checkpoint/step-N. The config.toml in it says which model it is. The run itself is not changed. One
process on the CPU is enough, whatever the run had.

Of a run with adapters (lora.rank) OUT holds these alone, for PeftModel.from_pretrained() on the
model of model.initial_hf; with --merge, that model with the adapters merged into its weights.
"""

import torch

from titan_sparse.commands import parser_of, refuses
from titan_sparse.config import load, trains_random_base
from titan_sparse.config.reading import config_errors
from titan_sparse.config.sources import tokenizer_folder, tokenizer_name
from titan_sparse.models.flavours import resolve
from titan_sparse.training.checkpoint.reader import verify
from titan_sparse.training.export import export
from titan_sparse.training.load import find_checkpoint, find_config
from titan_sparse.training.preflight import check_base


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("run_or_checkpoint", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32", "float64"],
        help="of the weights; default: training.dtype of the run, of adapters float32",
    )
    parser.add_argument("--merge", action="store_true", help="adapters go into the weights")
    args = parser.parse_args(words)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    checkpoint = find_checkpoint(args.run_or_checkpoint)
    path = find_config(args.run_or_checkpoint)
    config, _ = load(["--config", path])
    # What it names may be elsewhere on this machine. That of a run is the place to correct, and that
    # of a checkpoint has a checksum.
    with config_errors(f"{path}: " if checkpoint != args.run_or_checkpoint else ""):
        resolve(**vars(config.model))
        if (name := tokenizer_name(config)) != "bytes":
            tokenizer_folder(name)
    verify(checkpoint)
    if args.merge and not config.lora.rank:
        raise ValueError(f"--merge: {checkpoint} has no adapters; leave --merge out")
    if config.lora.rank and trains_random_base(config):
        raise ValueError(
            f"{checkpoint} has adapters of random weights (training.seed = "
            f"{config.training.seed}), which no folder holds; train with model.initial_hf"
        )
    if config.lora.rank:
        check_base(config, checkpoint)
    export(checkpoint, config, args.out, dtype, args.merge)
    print(f"wrote {args.out} from {checkpoint}")
    return 0
