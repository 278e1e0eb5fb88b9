"""The shape of the configuration: a dataclass for every section, a docstring below every field.

--help and the table of options are made from these docstrings.
"""

import ast
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal


@dataclass
class Model:
    """Which decoder is trained."""

    flavour: str = "debug"
    """name of a published architecture, a key of titan_sparse.models.flavours.FLAVOURS"""
    vocab_size: int = 0
    """rows of the embedding; 0: the flavour's"""
    layers: int = 0
    """decoder layers; 0: the flavour's. Write fewer to time or try a large flavour"""
    rope_scaling: Literal["flavour", "none", "llama3", "yarn"] = "flavour"
    """context extension of the rotary embedding; flavour: as published"""
    rope_factor: float = 1.0
    """context extension factor of llama3 and yarn, above 1"""
    rope_original_length: int = 0
    """length before extension in tokens, for llama3 and yarn; 0: the flavour's training length"""
    rope_theta: float = 0.0
    """base of the rotary frequencies; 0: the flavour's"""
    initial_hf: str = ""
    """Hugging Face folder (config.json, *.safetensors) of the shape and the first weights"""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """whose code computes initial_hf; auto: native for its families (docs/huggingface.md)"""
    random_weights: bool = False
    """true: initial_hf gives the shape alone; first weights are drawn from training.seed"""
    router_loss: float = -1.0
    """weight of the load-balancing loss of a mixture of experts; -1: router_aux_loss_coef of
    config.json where its output_router_logits is true, else 0"""


@dataclass
class Data:
    """Where the text comes from and how it becomes documents of tokens."""

    source: str = "python"
    """python (files of the stdlib and torch), a file (.txt .jsonl .jsonl.zst .parquet), a folder of
    such files, prepared tokens, or a dataset name; several with weights, such as "a:0.7, b:0.3",
    are a mixture"""
    join_packages: bool = False
    """join the files of a package (folder) into one long document; source = python only"""
    text_field: str = "text"
    """column that holds the text"""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """rows that are no UTF-8, no JSON or hold no text: refuse the source, or skip and count them"""
    subset: str = ""
    """configuration name of a Hugging Face dataset; empty: its default"""
    split: str = "train"
    """split of a Hugging Face dataset"""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json"""
    split_special_tokens: bool = False
    """true: a special token spelled out in a text, such as <|im_end|>, is read as letters"""
    min_document_length: int = 0
    """shorter documents are skipped; tokens"""
    shuffle: bool = True
    """shuffle the documents anew in every epoch"""
    sequences: Literal["packed", "fixed", "fixed_and_rest"] = "packed"
    """packed: documents one after the other; fixed: training.seq_len tokens of one document;
    fixed_and_rest: its rest is kept and padded, not dropped"""


@dataclass
class Training:
    """The step loop."""

    output_dir: str = "outputs/debug"
    """folder of the run: configuration, logs, checkpoints"""
    seed: int = 0
    """seed of the weights and of the order of documents"""
    steps: int = 100
    """number of optimizer steps"""
    seq_len: int = 4096
    """tokens of a sequence; padded up to a multiple of attention.block_size * parallelism.cp (twice
    that for zigzag)"""
    local_batch_size: int = 1
    """sequences per data-parallel rank per forward"""
    gradient_accumulation_steps: int = 1
    """forwards and backwards per optimizer step"""
    max_norm: float = 1.0
    """gradients are clipped to this norm; 0: no clipping, the norm is still logged"""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """compute dtype; weights, reduced gradients and optimizer states stay float32 (float64 for
    float64)"""
    loss_chunk_tokens: int = 4096
    """tokens whose logits exist at one time, 4 bytes per logit; more are faster"""
    z_loss: float = 0.0
    """weight of the mean squared log-sum-exp of the logits in the loss; 0: off"""
    mlp_chunk_tokens: int = 0
    """tokens that a block's MLP computes at one time; 0: all"""
    gc_interval: int = 50
    """steps between Python garbage collections"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one"""
    deterministic: bool = False
    """deterministic algorithms only; slower"""
    stop_grace_seconds: int = 25
    """after SIGINT or SIGTERM the step in hand is finished if that and a save take less than this;
    torchrun kills after 30 s; seconds"""


@dataclass
class Parallelism:
    """Degrees of the device mesh; dp_replicate * dp_shard * cp is the number of ranks."""

    dp_replicate: int = 1
    """replicas of the sharded model"""
    dp_shard: int = -1
    """ranks that share the parameters (FSDP); -1: all ranks that are left"""
    cp: int = 1
    """context-parallel degree: ranks that share a sequence"""
    cp_intra: int = 0
    """context-parallel ranks of the inner ring; 0: min(cp, ranks of a node)"""
    first_step_timeout_seconds: int = 1800
    """timeout of collectives until the first step is done, in saves, and in validation; seconds"""
    timeout_seconds: int = 300
    """timeout of collectives after the first step; seconds"""
    reshard_after_forward: bool = True
    """free gathered parameters after the forward: less memory, one more all-gather"""


@dataclass
class Dense:
    """Pattern dense: everything the mask allows. No choices."""


@dataclass
class VerticalSlash:
    """Pattern vertical_slash: key verticals and block diagonals (slashes) chosen online from a probe
    of queries."""

    recall: float = 0.9
    """share of the attention mass, sinks left out, that verticals and slashes must reach, in (0, 1]"""
    budget: Literal["joint", "layer", "independent"] = "joint"
    """joint: each head reaches recall, in the least time; layer: the heads of a layer do on average;
    independent: verticals and slashes each reach it alone in the probe's queries, as published
    (docs/masks_and_patterns.md)"""
    probe: int = 0
    """queries of a document that choose; tokens; 0: attention.block_size"""
    probe_rows: Literal["both", "spread", "last"] = "both"
    """spread: one query of each of `probe` equal parts of the document, drawn anew in each step;
    last: its last queries, as published; both: a quarter last ones, the others spread"""
    sinks: int = 4
    """first tokens that are always verticals"""
    count_sinks: bool = False
    """their mass counts in recall, of which it is much and says little; budget = "independent" needs
    true"""
    local_diagonals: int = 2
    """nearest block diagonals that are always on, the main one included"""
    min_columns: int = 0
    """fewest verticals per head"""
    max_columns: int = 4096
    """most verticals per head"""
    min_slashes: int = 0
    """fewest slashes (block diagonals) per head"""
    max_slashes: int = 0
    """most slashes (block diagonals) per head; 0: no cap"""
    dense_below: int = 4096
    """documents shorter than this are dense; tokens"""
    index: Literal["probe", "xattention"] = "probe"
    """what chooses: the probe, or xattention's scores, with the keys of attention.xattention"""


@dataclass
class XAttention:
    """Pattern xattention: each query block takes the fewest key blocks whose antidiagonal scores
    reach the threshold."""

    stride: int = 16
    """tokens of a cell, along whose antidiagonals scores are summed; divides attention.block_size"""
    threshold: float = 0.9
    """share of a query block's scores that its key blocks must reach, in (0, 1]"""
    dense_below: int = 4096
    """documents shorter than this are dense; tokens"""


@dataclass
class MoBA:
    """Pattern moba: each query chooses chunks of keys by their mean key."""

    chunk_size: int = 4096
    """tokens of a chunk, counted from the beginning of a document; at least attention.block_size"""
    top_k: int = 12
    """chunks that a query sees, its own included"""


@dataclass
class Attention:
    """Mask, pattern, layout, schedule, backend.

    Only the sub-table that `pattern` names is used. The others may hold changed values and do
    nothing, so that a sweep over variants changes one line.
    """

    mask: Literal["documents", "causal", "causal_across_documents"] = "documents"
    """what may be seen: documents is causal inside each document; causal needs sequences of one
    document (data.sequences = fixed); causal_across_documents sees earlier documents too"""
    sliding_window: int = 0
    """a query sees this many last tokens, itself included; 0: all"""
    window_sinks: int = 0
    """with a sliding_window: first tokens of the document (other masks: of the sequence) that
    every query sees too; for pattern = dense"""
    pattern: Literal["dense", "vertical_slash", "xattention", "moba"] = "vertical_slash"
    """what is worth seeing"""
    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = "striped"
    """which context-parallel rank owns which blocks; balanced: chosen for each batch by its mask"""
    schedule: Literal["auto", "local", "all_gather", "ring", "double_ring", "group_cast"] = "auto"
    """in which order keys and values meet the queries"""
    overlap_stages: int = 0
    """of schedule = group_cast: parts in which other ranks' blocks arrive in the forward, each while
    the part before is computed; 0: one inside a node, two between nodes"""
    overlap_stages_backward: int = 0
    """the same in the backward; 0: as in the forward"""
    backward_circulates: Literal["auto", "kv", "q"] = "auto"
    """what goes round a ring in the backward: keys and values, or queries; auto: fewer bytes"""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of attention's gradients between ranks; sums are float32 (float64 for float64)"""
    backend: Literal["auto", "cudnn", "eager", "flex", "triton"] = "auto"
    """which kernel computes; cudnn: dense only; eager: slow, exact"""
    block_size: int = 128
    """tokens of a block; a power of two, at least 16"""
    vertical_slash: VerticalSlash = field(default_factory=VerticalSlash)
    """choices of pattern = vertical_slash"""
    xattention: XAttention = field(default_factory=XAttention)
    """choices of pattern = xattention"""
    moba: MoBA = field(default_factory=MoBA)
    """choices of pattern = moba"""
    dense: Dense = field(default_factory=Dense)
    """choices of pattern = dense: none"""


@dataclass
class Optimizer:
    """The optimizer."""

    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """class of torch.optim"""
    lr: float = 3e-4
    """peak learning rate"""
    beta1: float = 0.9
    """decay of the mean of gradients; Adam and AdamW"""
    beta2: float = 0.95
    """decay of the mean of squared gradients; Adam and AdamW"""
    eps: float = 1e-8
    """added to the root of the second moment; Adam and AdamW"""
    weight_decay: float = 0.1
    """weight decay per unit of learning rate"""
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"
    """how torch.optim runs the update; auto: fused where it exists"""
    offload: bool = False
    """keep float32 weights, gradients and optimizer states on the CPU, update there; for GPUs"""


@dataclass
class LRScheduler:
    """Linear warm-up, constant, decay."""

    warmup_steps: int = 10
    """steps of linear warm-up"""
    decay_ratio: float = -1.0
    """share of the steps used for the decay at the end (WSD), in [0, 1]; -1: decay right after
    warm-up"""
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    """shape of the decay"""
    min_lr_factor: float = 0.1
    """learning rate at the end, as a share of optimizer.lr"""
    total_steps: int = 0
    """steps that the schedule is made for; 0: training.steps"""


@dataclass
class ActivationCheckpoint:
    """What is kept for backward and what is recomputed."""

    mode: Literal["none", "full", "selective"] = "full"
    """full: recompute each block; selective: keep its costly results; none: keep everything"""
    attention_recompute: float = 0.0
    """share of each sequence, from its start, whose attention is recomputed instead of kept, in [0,
    1]; -1: as much as memory needs"""
    offload: bool = False
    """results that are kept wait in pinned CPU memory for the backward; needs compile.enable"""


@dataclass
class Float8:
    """Matmuls of the blocks' linear layers in float8 (torchao), on Hopper GPUs and newer. Does
    nothing unless enabled."""

    enable: bool = False
    """compute the blocks' linear layers in float8; the head stays in training.dtype"""
    recipe: Literal["tensorwise", "rowwise"] = "rowwise"
    """one scale for a whole tensor (fastest), or one for each row (more exact)"""
    filter: str = ""
    """linear layers with one of these in their names, such as "o_proj,layers.0.", stay in
    training.dtype"""


@dataclass
class Lora:
    """Low-rank adapters in place of training all weights, through PEFT. Does nothing with rank 0."""

    rank: int = 0
    """rank of the adapters; 0: all weights are trained. Above, these are frozen in training.dtype"""
    alpha: int = 16
    """adapters count alpha / rank"""
    dropout: float = 0.0
    """share of an adapter's inputs that training drops, in [0, 1)"""
    targets: str = "all-linear"
    """linear layers with adapters, such as "q_proj,v_proj"; all-linear: all of attention and MLP"""
    init: Literal["default", "gaussian"] = "default"
    """how A begins, as PEFT names it: default is uniform as nn.Linear; B begins as zero"""


@dataclass
class Compile:
    """torch.compile of each block. Does nothing unless enabled."""

    enable: bool = False
    """compile the blocks"""
    backend: str = "inductor"
    """inductor, aot_eager or eager"""


@dataclass
class Guard:
    """Steps that would spoil the weights change nothing. docs/reliability.md"""

    enable: bool = True
    """skip updates whose loss or gradient norm is not finite or whose norm is a spike"""
    spike_factor: float = 10.0
    """a gradient norm this many times its running mean, and six standard deviations above it, is a
    spike; 0: none is"""
    average_steps: int = 100
    """steps over which the running mean and deviation are taken"""
    warmup_steps: int = 20
    """accepted steps before any norm counts as a spike"""
    max_skips_in_a_row: int = 10
    """after so many skipped updates the run goes back to the last good checkpoint, past the batches
    since then"""
    max_rollbacks: int = 5
    """how often the run may go back before it ends with status 3"""


@dataclass
class Checkpoint:
    """Saving and resuming. Does nothing unless enabled."""

    enable: bool = False
    """save, and resume from the newest checkpoint that is whole"""
    interval: int = 500
    """steps between saves"""
    keep_latest_k: int = 3
    """checkpoints kept; 0: all; 1 is refused: a damaged one needs another before it"""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """async: write while training goes on; async_with_pinned_mem: from pinned memory, by a process
    of its own, at next to no cost; needs GPUs, and host memory for what a GPU saves"""
    load_step: int = -1
    """step to go back to; newer checkpoints are moved aside; -1: the newest whole one"""
    initial_load_path: str = ""
    """checkpoint to start from when the run has none of its own"""
    last_save_in_hf: bool = False
    """after the last step, write <output_dir>/huggingface/step-N for transformers"""


@dataclass
class Metrics:
    """What is measured and where it is written."""

    log_every: int = 10
    """steps between log lines; a logged step also records attention, which costs time"""
    recall_every: int = 50
    """recall is measured at logged steps that are a multiple of this, and at step 1; 0: never"""
    recall_rows: int = 64
    """sampled query rows per sequence in a measurement of recall"""
    tensorboard: bool = True
    """write TensorBoard events to the run folder"""
    pictures_every: int = 0
    """steps between TensorBoard pictures of what was selected; a multiple of log_every; 0: never"""
    peak_tflops: float = 0.0
    """peak of one device in TFLOP/s, for MFU; 0: by the GPU's name"""


@dataclass
class Validation:
    """Loss by position and needles, measured while training, if enabled. docs/evaluation.md"""

    enable: bool = False
    """measure every `every` steps and after the last; training goes on as if it had not"""
    every: int = 500
    """steps between measurements"""
    source: str = ""
    """text that is not trained on, named as in data.source, but a single source and without
    data.subset; empty: data.source"""
    split: str = ""
    """split of a Hugging Face dataset, such as validation; empty: data.split"""
    windows: int = 16
    """number of windows of training.seq_len tokens from the beginning of the source, over all
    ranks"""
    position_buckets: int = 8
    """number of equally wide ranges of positions with a loss of their own"""
    needle_lengths: str = ""
    """lengths of Needle In A Haystack, separated by commas, such as "4096,16384"; tokens; empty:
    none"""
    needle_depths: int = 5
    """number of depths of the needle, evenly spaced"""
    needle_samples: int = 2
    """number of needles of each length and depth"""


@dataclass
class Profiling:
    """torch.profiler. Does nothing unless enabled."""

    enable: bool = False
    """write a trace"""
    first_step: int = 5
    """first traced step, counted from 1"""
    steps: int = 2
    """traced steps"""
    with_stack: bool = False
    """record Python stacks"""


@dataclass
class Config:
    """The whole configuration; each field is a TOML section."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    attention: Attention = field(default_factory=Attention)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    float8: Float8 = field(default_factory=Float8)
    lora: Lora = field(default_factory=Lora)
    compile: Compile = field(default_factory=Compile)
    guard: Guard = field(default_factory=Guard)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    profiling: Profiling = field(default_factory=Profiling)


@dataclass(frozen=True)
class Flags:
    """Command-line options that are not configuration."""

    print_config: bool = False
    """print the resolved configuration and stop"""
    dry_run: bool = False
    """print the memory and the FLOPs of a step and stop; needs no GPU and no data; exit status 1 if
    it does not fit"""
    find_max_length: bool = False
    """print the longest training.seq_len that fits and stop"""
    ranks: int = 0
    """world size to assume; 0: that of torchrun, or the least that fits; with --dry-run or
    --find-max-length"""
    device_memory: float = 0.0
    """memory of a GPU to assume, GiB; 0: that of the local GPU; with --dry-run or
    --find-max-length"""
    host_memory: float = 0.0
    """CPU memory of a node to assume, GiB; 0: that of the machine, if it has a GPU; with --dry-run
    or --find-max-length"""

    @property
    def starts_nothing(self) -> bool:
        """Whether something is printed in place of a run."""
        return self.print_config or self.dry_run or self.find_max_length


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key below a section with its type. Sub-sections come after the plain fields and
    before their own."""
    plain_fields_first = sorted(fields(section), key=lambda field: is_dataclass(field.type))
    for item in plain_fields_first:
        yield prefix + item.name, item.type
        if is_dataclass(item.type):
            yield from walk(item.type, f"{prefix}{item.name}.")


SECTIONS = {key: kind for key, kind in walk(Config) if is_dataclass(kind)}
"""Dotted key -> class of every section."""

KINDS = {key: kind for key, kind in walk(Config) if not is_dataclass(kind)}
"""Dotted key -> type of every other field."""


def field_docs(section: type) -> dict[str, str]:
    """The docstring below each field of a section class, in one line, by field name.

    A field without one is left out.
    """
    body = ast.parse(inspect.getsource(section)).body[0].body
    docs = {}
    for item, following in itertools.pairwise(body):
        is_docstring = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(item, ast.AnnAssign) and is_docstring:
            docs[item.target.id] = " ".join(following.value.value.split())
    return docs
