"""Show where a checkpoint's attention mass lies, and how much of it selections would keep.

    titan-sparse inspect --config outputs/run/config.toml \\
        --checkpoint outputs/run --length 4096
    titan-sparse inspect --config C --hf FOLDER --length 131072 --layers 0,13,27

One process looks at one sequence, the first document that is long enough, with selections of
several sizes. --attention is that of the forward: the pictures show dense attention on its queries
and keys. Other words are options of the configuration, as train.py takes them. Writes
OUT/inspection.json, OUT/layer-N.png, OUT/curves.png and OUT/top_k.png. See docs/huggingface.md.
"""

import argparse
import functools
import json
from pathlib import Path

from titan_sparse.commands import in_tokens, parser_of, positive, refuses
from titan_sparse.commands.evaluate import origin_of, parse_with_weights
from titan_sparse.config import Config, check, world_from_environment
from titan_sparse.config.reading import layers_of, refuse_ignored, require
from titan_sparse.data import open_tokenizer
from titan_sparse.data.documents import open_documents
from titan_sparse.evaluation.inspection import figures, inspect_layer, inspect_layers, summary
from titan_sparse.evaluation.position import first_windows
from titan_sparse.models.flavours import resolve
from titan_sparse.options.values import full_disk_at
from titan_sparse.training.load import build_scorer, find_checkpoint


@refuses
def main(words: list[str]) -> int:
    args, config = parse(words)
    checkpoint = find_checkpoint(args.checkpoint) if args.checkpoint else None
    tokenizer = open_tokenizer(config)
    documents = open_documents(config.data, tokenizer, config.model.initial_hf)
    length = args.length
    (sequence,) = first_windows(documents, length, length, length, 1)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    scorer = build_scorer(config, checkpoint, tokenizer)
    layers = inspect_layers(
        scorer.model,
        lambda: scorer.token_losses(sequence, args.length),
        args.layers,
        functools.partial(
            inspect_layer,
            attention=config.attention,
            cp=scorer.cp,
            samples=args.rows,
            seed=args.seed,
        ),
    )
    text = json.dumps({"about": origin_of(args, config, checkpoint), **summary(layers)})
    drawn = figures(layers, args.length)
    with full_disk_at(folder):
        (folder / "inspection.json").write_text(text + "\n", encoding="utf-8")
        for name, figure in drawn.items():
            figure.savefig(folder / name, dpi=110)
    print(f"wrote {', '.join(['inspection.json', *drawn])} in {args.out}")
    return 0


def parse(words: list[str]) -> tuple[argparse.Namespace, Config]:
    """Options, and the checked configuration. Raises ConfigError, one line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--length", type=in_tokens, default=0, help="tokens; 0: training.seq_len")
    add("--layers", default="", help="numbers separated by commas; default: all")
    add(
        "--rows",
        type=positive,
        default=64,
        help="random queries to measure recall and density with",
    )
    add("--seed", type=int, default=0, help="of the random queries")
    add("--out", default="inspection", help="folder to write")
    args, config = parse_with_weights(parser, words)
    refuse_ignored(
        words,
        {
            "training.seq_len": "with --length" if args.length else "",
            "data.min_document_length": "as --length decides which document is read",
        },
    )
    args.length = config.training.seq_len = args.length or config.training.seq_len
    require(
        args.length >= 2 * config.attention.block_size,
        f"--length {args.length} is below two blocks; write "
        f"{2 * config.attention.block_size} or more",
    )
    require(
        config.parallelism.cp == 1 and world_from_environment()[0] == 1,
        "one process inspects the whole sequence; "
        "start without torchrun, and leave --parallelism.cp out",
    )
    check(config, 1, 1)
    model = resolve(**vars(config.model))
    require(
        not model.runs_in_transformers,
        f"{config.model.initial_hf} runs through transformers' own code, which cannot be inspected; "
        "write a model that titan_sparse implements itself",
    )
    args.layers = layers_of(args.layers, "--layers", model.layers) or list(range(model.layers))
    return args, config
