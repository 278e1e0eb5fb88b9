"""The shape of the configuration: a dataclass for every section, a docstring below every field.

--help and the table of options are made from these docstrings.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

Tokens = Annotated[int, "tokens"]
"""A number of tokens, which may be written as 128k."""


@dataclass
class Model:
    """Which decoder is trained."""

    flavour: str = "debug"
    """a published architecture (docs/training.md)"""
    vocab_size: int = 0
    """rows of the embedding; 0: the flavour's"""
    layers: int = 0
    """decoder layers; 0: the flavour's"""
    rope_scaling: Literal["flavour", "none", "llama3", "yarn"] = "flavour"
    """context extension of the rotary embedding; flavour: as published"""
    rope_factor: float = 1.0
    """factor of llama3 and yarn, above 1"""
    rope_original_length: Tokens = 0
    """length before extension; tokens; 0: the flavour's training length"""
    rope_theta: float = 0.0
    """base of the rotary frequencies; 0: the flavour's"""
    initial_hf: str = ""
    """Hugging Face folder (config.json, *.safetensors) of the shape and the first weights"""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """whose code computes initial_hf; auto: native for its families (docs/huggingface.md)"""
    random_weights: bool = False
    """initial_hf gives the shape alone; weights are drawn from training.seed"""
    router_loss: float = -1.0
    """weight of the load-balancing loss of a mixture of experts; -1: router_aux_loss_coef of
    config.json where its output_router_logits is true, else 0"""


@dataclass
class Data:
    """Where the text comes from and how it becomes documents of tokens."""

    source: str = "python"
    """python (files of the stdlib and torch), a file or folder (.txt .jsonl .json .parquet),
    prepared tokens, or a dataset name; "a:0.7, b:0.3" mixes several with weights"""
    join_packages: bool = False
    """join the files of a package (folder) into one long document; source = python only"""
    format: str = "text"
    """text, messages (chats), prompt_completion; "messages, text": one for each part of a mixture"""
    text_field: str = "text"
    """column that holds the text"""
    messages_field: str = "messages"
    """column that holds a chat's messages; format = messages"""
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """messages of a chat that are learned; its "train" wins in each message"""
    chat_template: str = ""
    """file of the template of chats; empty: that of data.tokenizer, else of model.initial_hf"""
    chat_template_kwargs: str = ""
    """variables of the chat template as JSON, such as '{"enable_thinking": false}'"""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """rows that are no UTF-8, JSON, text or chat, and chats that the template refuses: refuse the
    source, or skip and count them"""
    subset: str = ""
    """configuration name of a Hugging Face dataset; empty: its default"""
    split: str = "train"
    """split of a Hugging Face dataset"""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json"""
    split_special_tokens: bool = False
    """true: a special token spelled out in a text, such as <|im_end|>, is read as letters"""
    min_document_length: Tokens = 0
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
    """optimizer steps"""
    seq_len: Tokens = 4096
    """tokens of a sequence, padded to a multiple of attention.block_size * parallelism.cp (zigzag:
    twice that)"""
    local_batch_size: int = 1
    """sequences per data-parallel rank per forward"""
    gradient_accumulation_steps: int = 1
    """forwards and backwards per optimizer step"""
    max_norm: float = 1.0
    """gradients are clipped to this norm; 0: no clipping"""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """compute dtype (docs/training.md)"""
    loss_chunk_tokens: Tokens = 4096
    """tokens whose logits exist at one time, 4 bytes per logit; more are faster"""
    z_loss: float = 0.0
    """weight of the logits' mean squared log-sum-exp in the loss (PaLM: 1e-4); 0: off"""
    mlp_chunk_tokens: Tokens = 0
    """tokens that an MLP computes at one time; 0: all"""
    gc_interval: int = 50
    """steps between Python garbage collections"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one"""
    deterministic: bool = False
    """deterministic algorithms only; slower"""
    stop_grace_seconds: int = 25
    """after a signal the step is finished if that and a save take less than this; seconds"""


@dataclass
class Parallelism:
    """Degrees of the device mesh; dp_replicate * dp_shard * cp is the number of ranks."""

    dp_replicate: int = 1
    """replicas of the sharded model"""
    dp_shard: int = -1
    """ranks that share the parameters (FSDP); -1: all ranks that are left"""
    cp: int = 1
    """ranks that share a sequence"""
    cp_intra: int = 0
    """ranks of the inner ring; 0: min(cp, ranks of a node)"""
    first_step_timeout_seconds: int = 1800
    """timeout of collectives in the first step, in saves, and in validation; seconds"""
    timeout_seconds: int = 300
    """timeout of other collectives; seconds"""
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
    """joint: each head reaches recall, in the least time; layer: the heads of a layer do on
    average; independent: as published (docs/masks_and_patterns.md)"""
    probe: Tokens = 0
    """queries of a document that choose; tokens; 0: attention.block_size"""
    probe_rows: Literal["both", "spread", "last"] = "both"
    """spread: one query of each of `probe` equal parts of the document, drawn anew in each step;
    last: its last queries; both: a quarter last ones, the others spread"""
    sinks: Tokens = 4
    """first tokens that are always verticals"""
    count_sinks: bool = False
    """their mass counts in recall; budget = "independent" needs true"""
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
    dense_below: Tokens = 4096
    """documents shorter than this are dense; tokens"""
    index: Literal["probe", "xattention"] = "probe"
    """what chooses: the probe, or xattention's scores"""


@dataclass
class XAttention:
    """Pattern xattention: each query block takes the fewest key blocks whose antidiagonal scores
    reach the threshold."""

    stride: Tokens = 16
    """tokens of a cell; divides attention.block_size"""
    threshold: float = 0.9
    """share of a query block's scores that its key blocks must reach, in (0, 1]"""
    dense_below: Tokens = 4096
    """documents shorter than this are dense; tokens"""


@dataclass
class MoBA:
    """Pattern moba: each query chooses chunks of keys by their mean key."""

    chunk_size: Tokens = 4096
    """tokens of a chunk; at least attention.block_size"""
    top_k: int = 12
    """chunks that a query sees, its own included"""


@dataclass
class Attention:
    """Mask, pattern, layout, schedule, backend.

    Only the sub-table that `pattern` names is used. The others may hold changed values and do
    nothing, so that a sweep over variants changes one line.
    """

    mask: Literal["documents", "causal", "causal_across_documents"] = "documents"
    """documents: causal inside each document; causal needs data.sequences = fixed;
    causal_across_documents sees earlier documents too"""
    sliding_window: Tokens = 0
    """a query sees this many last tokens, itself included; 0: all"""
    window_sinks: Tokens = 0
    """first tokens of the document (other masks: of the sequence) that every query sees beside a
    sliding_window; for pattern = dense"""
    pattern: Literal["dense", "vertical_slash", "xattention", "moba"] = "vertical_slash"
    """what is worth seeing"""
    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = "striped"
    """which rank owns which blocks (docs/context_parallel.md)"""
    balance_costs: str = ""
    """file of scripts.calibrate: layout = balanced deals out blocks by this machine's costs; empty:
    by those of an H200"""
    schedule: Literal["auto", "local", "all_gather", "ring", "double_ring", "group_cast"] = "auto"
    """in which order keys and values meet queries"""
    overlap_stages: int = 0
    """group_cast: parts in which other ranks' blocks arrive in the forward; 0: one inside a node,
    two between nodes"""
    overlap_stages_backward: int = 0
    """the same in the backward; 0: as in the forward"""
    backward_circulates: Literal["auto", "kv", "q"] = "auto"
    """what goes round a ring in the backward; auto: fewer bytes"""
    route_by: Literal["auto", "mask", "index"] = "auto"
    """what decides how far a ring sends a chunk; index: also the diagonals that a group of heads
    selected, for which the host waits in every layer; auto: mask for striped and balanced"""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of attention's gradients between ranks"""
    backend: Literal["auto", "cudnn", "eager", "flex", "triton"] = "auto"
    """which kernel computes; cudnn: dense only; eager: slow, exact"""
    block_size: Tokens = 128
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
    """weights, gradients and optimizer states are on the CPU; for GPUs"""


@dataclass
class LRScheduler:
    """Linear warm-up, constant, decay."""

    warmup_steps: int = 10
    """steps of linear warm-up"""
    decay_ratio: float = -1.0
    """share of the steps that decay at the end (WSD), in [0, 1]; -1: all after warm-up"""
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
    """share of each sequence, from its start, whose attention is recomputed, in [0, 1]; -1: as much
    as memory needs"""
    offload: bool = False
    """kept results wait in pinned CPU memory; needs compile.enable"""


@dataclass
class Float8:
    """Matmuls of the blocks' linear layers in float8 (torchao), on Hopper GPUs and newer. Does
    nothing unless enabled."""

    enable: bool = False
    """compute the blocks' linear layers in float8; the head stays in training.dtype"""
    recipe: Literal["tensorwise", "rowwise"] = "rowwise"
    """one scale for a whole tensor (fastest), or one for each row (more exact)"""
    filter: str = ""
    """linear layers named like one of these, such as "o_proj,layers.0.", stay in training.dtype"""


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
    """Steps that would spoil the weights change nothing. docs/training.md"""

    enable: bool = True
    """skip updates whose loss or gradient norm is not finite, or whose norm is a spike"""
    spike_factor: float = 10.0
    """a gradient norm this many times its running mean is a spike (docs/training.md); 0: none
    is"""
    average_steps: int = 100
    """steps of the running mean"""
    warmup_steps: int = 20
    """accepted steps before any norm counts as a spike"""
    max_skips_in_a_row: int = 10
    """skipped updates after which the run goes back to the last good checkpoint"""
    max_rollbacks: int = 5
    """how often a run may go back"""


@dataclass
class Checkpoint:
    """Saving and resuming. Does nothing unless enabled."""

    enable: bool = False
    """save, and resume from the newest checkpoint that is whole"""
    interval: int = 500
    """steps between saves"""
    keep_latest_k: int = 3
    """checkpoints kept; 0: all; else at least 2"""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """async: write while training goes on; async_with_pinned_mem: at next to no cost, with GPUs and
    host memory for what they save"""
    load_step: int = -1
    """step to go back to; -1: the newest whole one"""
    initial_load_path: str = ""
    """checkpoint to start from when the run has none of its own"""
    last_save_in_hf: bool = False
    """at the end, write <output_dir>/huggingface/step-N for transformers"""


@dataclass
class Metrics:
    """What is measured and where it is written."""

    log_every: int = 10
    """steps between log lines"""
    recall_every: int = 50
    """recall is measured at step 1 and at logged multiples of this; 0: never"""
    recall_rows: int = 64
    """query rows per sequence that measure recall"""
    tensorboard: bool = True
    """write TensorBoard events to the run folder"""
    trackers: Literal["none", "wandb"] = "none"
    """wandb: write metrics to Weights & Biases too, which follows its own WANDB_... variables"""
    pictures_every: int = 0
    """steps between TensorBoard pictures of the selection; a multiple of log_every; 0: never"""
    peak_tflops: float = 0.0
    """TFLOP/s of one device, for MFU; 0: by the GPU's name"""


@dataclass
class Validation:
    """Loss by position and needles, measured while training, if enabled. docs/huggingface.md"""

    enable: bool = False
    """measure every `every` steps and after the last"""
    every: int = 500
    """steps between measurements"""
    source: str = ""
    """held-out text, a single source as in data.source, without data.subset; empty: data.source"""
    split: str = ""
    """split of a Hugging Face dataset; empty: data.split"""
    windows: int = 16
    """windows of training.seq_len tokens from the beginning of the source, over all ranks"""
    position_buckets: int = 8
    """equally wide ranges of positions with a loss of their own"""
    needle_lengths: str = ""
    """lengths of Needle In A Haystack, such as "4096,16384"; tokens; empty: none"""
    needle_depths: int = 5
    """depths of the needle, evenly spaced"""
    needle_samples: int = 2
    """needles of each length and depth"""


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
