"""The shape of the configuration: a dataclass for every section, a docstring below every field.

--help and the table of options are made from these docstrings.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_sparse.options.patterns import (
    DenseOptions,
    MoBAOptions,
    VerticalSlashOptions,
    XAttentionOptions,
)
from titan_sparse.options.values import (
    MOST,
    Count,
    NotNegative,
    Positive,
    PositiveTokens,
    Range,
    Tokens,
)

Text = Annotated[str, "not empty"]


@dataclass
class Model:
    """The decoder that is trained."""

    flavour: str = "debug"
    """a published architecture (docs/training.md)"""
    vocab_size: Annotated[int, Range(0, 10**7)] = 0
    """rows of the embedding; 0: the flavour's. Above those of initial_hf: new
    rows begin as the mean"""
    layers: Annotated[int, Range(0, 10**4)] = 0
    """decoder layers; 0: the flavour's"""
    rope_scaling: Literal["flavour", "none", "llama3", "yarn"] = "flavour"
    """context extension of the rotary embedding; flavour: as published"""
    rope_factor: Annotated[float, Range(1)] = 1.0
    """factor of llama3 and yarn, above 1"""
    rope_original_length: Tokens = 0
    """length before extension; tokens; 0: the flavour's training length"""
    rope_theta: NotNegative = 0.0
    """base of the rotary frequencies; 0: the flavour's"""
    initial_hf: str = ""
    """shape and first weights: a Hugging Face folder, or a name on its hub (Qwen/Qwen2.5-0.5B)"""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """whose code computes initial_hf; auto: native for its families (docs/huggingface.md)"""
    random_weights: bool = False
    """initial_hf gives the shape alone; weights are drawn from training.seed"""
    router_loss: float = -1.0
    """weight of the load-balancing loss of a mixture of experts; -1: router_aux_loss_coef of
    config.json where its output_router_logits is true, else 0"""


@dataclass
class Data:
    """The source of the text, and how it becomes documents of tokens."""

    source: Text = "python"
    """python (files of the stdlib and torch), a file or folder (.txt .jsonl .json .parquet),
    prepared tokens, or a dataset name; "a:0.7, b:0.3" mixes several with weights"""
    join_packages: bool = False
    """join the files of a package (folder) into one long document; source = python only"""
    format: Text = "text"
    """text, messages (chats), prompt_completion; "messages, text": one for
    each part of a mixture"""
    text_field: Text = "text"
    """column that holds the text"""
    messages_field: Text = "messages"
    """column that holds a chat's messages; format = messages"""
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """messages of a chat that are learned; its "train" wins in each message"""
    chat_template: str = ""
    """file of the template of chats; empty: that of data.tokenizer, else of model.initial_hf"""
    chat_template_kwargs: str = ""
    """variables of the chat template as JSON, such as '{"enable_thinking": false}'"""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """rows that are not UTF-8, JSON, text, or a chat, and chats that the template refuses: refuse
    the source, or skip and count them"""
    subset: str = ""
    """configuration name of a Hugging Face dataset; empty: its default"""
    split: Text = "train"
    """split of a Hugging Face dataset"""
    tokenizer: str = ""
    """bytes, a folder with a tokenizer, its tokenizer.json, or a name on the Hugging Face hub;
    empty: that of model.initial_hf, else bytes"""
    other_tokenizer: bool = False
    """true: data.tokenizer is meant to have other tokens than that of model.initial_hf"""
    add_bos: bool = True
    """texts begin with the tokens that the tokenizer puts before a text, if it has any (Llama 3,
    Gemma); chats are as their template writes them"""
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

    output_dir: Text = "outputs/debug"
    """folder of the run: configuration, logs, checkpoints"""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """seed of the weights and of the order of documents"""
    steps: Positive = 100
    """optimizer steps"""
    seq_len: PositiveTokens = 4096
    """tokens of a sequence, padded to whole blocks on each rank that shares it"""
    local_batch_size: Annotated[int, Range(1, 10**4)] = 1
    """sequences per data-parallel rank per forward"""
    gradient_accumulation_steps: Annotated[int, Range(1, 10**6)] = 1
    """forwards and backwards per optimizer step"""
    max_norm: NotNegative = 1.0
    """gradients are clipped to this norm; 0: no clipping"""
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """compute dtype (docs/training.md)"""
    loss_chunk_tokens: PositiveTokens = 4096
    """tokens whose logits exist at one time, 4 bytes per logit; more are faster"""
    z_loss: NotNegative = 0.0
    """weight of the logits' mean squared log-sum-exp in the loss (PaLM: 1e-4); 0: off"""
    mlp_chunk_tokens: Tokens = 0
    """tokens that an MLP computes at one time; 0: all"""
    gc_interval: Positive = 50
    """steps between Python garbage collections"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one"""
    deterministic: bool = False
    """deterministic algorithms only; slower"""
    stop_grace_seconds: Count = 25
    """after a signal the step is finished if that and a save take less than this; seconds"""


@dataclass
class Parallelism:
    """Degrees of the device mesh; dp_replicate * dp_shard * cp is the number of ranks."""

    dp_replicate: Positive = 1
    """replicas of the sharded model"""
    dp_shard: Annotated[int, Range(1, MOST, also=(-1,))] = -1
    """ranks that share the parameters (FSDP); -1: all ranks that are left"""
    cp: Positive = 1
    """ranks that share a sequence"""
    cp_intra: Count = 0
    """ranks of the inner ring; 0: min(cp, ranks of a node)"""
    first_step_timeout_seconds: Positive = 1800
    """timeout of collectives in the first step, in saves, and in validation; seconds"""
    timeout_seconds: Positive = 300
    """timeout of other collectives; seconds"""
    reshard_after_forward: bool = True
    """free gathered parameters after the forward: less memory, one more all-gather"""


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
    dense_layers: Annotated[str, "layers"] = ""
    """layers that ignore `pattern` and compute all that the mask allows, such as [0, 1], or 0,1 on
    the command line; from 0; empty: none"""
    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = "striped"
    """which rank owns which blocks (docs/context_parallel.md)"""
    balance_costs: str = ""
    """costs for layout = balanced, a file of scripts.calibrate; empty: those of an H200"""
    schedule: Literal[
        "auto", "local", "all_gather", "ring", "double_ring", "group_cast", "ulysses"
    ] = "auto"
    """in which order keys and values meet queries"""
    overlap_stages: Count = 0
    """group_cast: parts in which blocks arrive in the forward; 0: one, between nodes two"""
    overlap_stages_backward: Count = 0
    """the same in the backward; 0: as in the forward"""
    backward_circulates: Literal["auto", "kv", "q"] = "auto"
    """what goes round a ring in the backward; auto: fewer bytes"""
    route_by: Literal["auto", "mask"] = "auto"
    """what decides how far a ring sends a chunk; auto: in the layouts contiguous and zigzag also
    the slashes that heads selected, for which the host waits in every layer"""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of attention's gradients between ranks"""
    backend: Literal["auto", "cudnn", "eager", "flex", "triton"] = "auto"
    """which kernel computes; cudnn: dense only; eager: slow, exact"""
    block_size: Tokens = 128
    """tokens of a block; a power of two, at least 16"""
    vertical_slash: VerticalSlashOptions = field(default_factory=VerticalSlashOptions)
    """choices of pattern = vertical_slash"""
    xattention: XAttentionOptions = field(default_factory=XAttentionOptions)
    """choices of pattern = xattention"""
    moba: MoBAOptions = field(default_factory=MoBAOptions)
    """choices of pattern = moba"""
    dense: DenseOptions = field(default_factory=DenseOptions)
    """choices of pattern = dense: none"""


@dataclass
class Optimizer:
    """The optimizer."""

    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """class of torch.optim"""
    lr: Annotated[float, Range(0, open_left=True)] = 3e-4
    """peak learning rate"""
    beta1: Annotated[float, Range(0, 1, open_right=True)] = 0.9
    """decay of the mean of gradients; Adam and AdamW"""
    beta2: Annotated[float, Range(0, 1, open_right=True)] = 0.95
    """decay of the mean of squared gradients; Adam and AdamW"""
    eps: Annotated[float, Range(0, open_left=True)] = 1e-8
    """added to the root of the second moment; Adam and AdamW"""
    weight_decay: NotNegative = 0.1
    """weight decay per unit of learning rate"""
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"
    """how torch.optim runs the update; auto: fused where it exists"""
    offload: bool = False
    """weights, gradients and optimizer states are on the CPU; for GPUs"""


@dataclass
class LRScheduler:
    """Linear warm-up, constant, decay."""

    warmup_steps: Annotated[int, Range(-1, MOST)] = -1
    """steps of linear warm-up; -1: 10, or all steps of a shorter run"""
    decay_ratio: Annotated[float, Range(0, 1, also=(-1,))] = -1.0
    """share of the steps that decay at the end (WSD), in [0, 1]; -1: all after warm-up"""
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    """shape of the decay"""
    min_lr_factor: Annotated[float, Range(0, 1)] = 0.1
    """learning rate at the end, as a share of optimizer.lr"""
    total_steps: Count = 0
    """steps that the schedule is made for; 0: training.steps"""


@dataclass
class ActivationCheckpoint:
    """The choice of what is kept for the backward and what is recomputed."""

    mode: Literal["none", "full", "selective"] = "full"
    """full: recompute each block; selective: keep its costly results; none: keep everything"""
    attention_recompute: Annotated[float, Range(0, 1, also=(-1,))] = 0.0
    """share of each sequence whose attention is recomputed; -1: as much as memory needs"""
    offload: bool = False
    """kept results wait in pinned CPU memory; needs compile.enable"""


@dataclass
class Float8:
    """Matmuls of linear layers in float8 (torchao), on Hopper and newer, if enabled."""

    enable: bool = False
    """compute the blocks' linear layers in float8; the head stays in training.dtype"""
    recipe: Literal["tensorwise", "rowwise"] = "rowwise"
    """one scale for a whole tensor (fastest), or one for each row (more exact)"""
    filter: str = ""
    """linear layers named like one of these, such as "o_proj,layers.0.", stay in training.dtype"""


@dataclass
class Lora:
    """Low-rank adapters in place of training all weights, through PEFT. Does
    nothing with rank 0."""

    rank: Annotated[int, Range(0, 10**5)] = 0
    """rank of the adapters; 0: all weights are trained. Above, these are
    frozen in training.dtype"""
    alpha: Positive = 16
    """adapters count alpha / rank"""
    dropout: Annotated[float, Range(0, 1, open_right=True)] = 0.0
    """share of an adapter's inputs that training drops, in [0, 1)"""
    targets: Text = "all-linear"
    """linear layers with adapters, such as "q_proj,v_proj"; all-linear: all of attention and MLP"""
    init: Literal["default", "gaussian"] = "default"
    """how A begins, as PEFT names it: default is uniform as nn.Linear; B begins as zero"""
    trainable_tokens: str = ""
    """tokens whose rows of the embedding and the head are trained too, such as
    "<|im_start|>,<|im_end|>" (PEFT's trainable_token_indices)"""


@dataclass
class Compile:
    """torch.compile of each block, if enabled, and CUDA graphs."""

    enable: bool = False
    """compile the blocks"""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """of torch.compile"""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """replay forward and backward as CUDA graphs, also without torch.compile;
    auto: where it helps"""


@dataclass
class Guard:
    """Steps that would spoil the weights change nothing. docs/training.md"""

    enable: bool = True
    """skip updates whose loss or gradient norm is not finite, or whose norm is a spike"""
    spike_factor: Annotated[float, Range(1, open_left=True, also=(0,))] = 10.0
    """a gradient norm this many times its running mean is a spike; 0: none is"""
    average_steps: Positive = 100
    """steps of the running mean"""
    warmup_steps: Count = 20
    """accepted steps before any norm counts as a spike"""
    max_skips_in_a_row: Positive = 10
    """skipped updates after which the run goes back to the last good checkpoint"""
    max_rollbacks: Count = 5
    """how often a run may go back"""


@dataclass
class Checkpoint:
    """Saving and resuming. Does nothing unless enabled."""

    enable: bool = False
    """save, and resume from the newest checkpoint that is whole"""
    interval: Positive = 500
    """steps between saves"""
    keep_latest_k: Annotated[int, Range(2, MOST, also=(0,))] = 3
    """checkpoints kept; 0: all; else at least 2, as one may be damaged"""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """async: write while training goes on; async_with_pinned_mem: at next to no cost, with GPUs and
    host memory for what they save"""
    load_step: Annotated[int, Range(-1, MOST)] = -1
    """step to go back to; -1: the newest whole one"""
    initial_load_path: str = ""
    """checkpoint to start from when the run has none of its own"""
    last_save_in_hf: bool = False
    """at the end, write <output_dir>/huggingface/step-N for transformers"""


@dataclass
class Metrics:
    """The measurements, and where they are written."""

    log_every: Positive = 10
    """steps between log lines"""
    recall_every: Count = 50
    """recall is measured at step 1 and at logged multiples of this; 0: never"""
    recall_rows: Annotated[int, Range(1, 10**6)] = 64
    """query rows per sequence that measure recall"""
    tensorboard: bool = True
    """write TensorBoard events, and at the end a picture of loss and density
    (training.png), to the run folder"""
    trackers: Literal["none", "wandb"] = "none"
    """wandb: write metrics to Weights & Biases too, which follows its own WANDB_... variables"""
    pictures_every: Count = 0
    """steps between TensorBoard pictures of the selection; a multiple of log_every; 0: never"""
    peak_tflops: NotNegative = 0.0
    """TFLOP/s of one device, for MFU; 0: by the GPU's name"""


@dataclass
class Validation:
    """Loss by position and needles, measured while training, if enabled. docs/huggingface.md"""

    enable: bool = False
    """measure every `every` steps and after the last"""
    every: Positive = 500
    """steps between measurements"""
    at_start: bool = True
    """measure before the first step too"""
    prompt: str = ""
    """text that the model continues, or a user's message with data.format =
    messages; empty: none"""
    source: str = ""
    """held-out text, a single source as in data.source, without data.subset; empty: data.source"""
    split: str = ""
    """split of a Hugging Face dataset; empty: data.split"""
    windows: Annotated[int, Range(1, 10**6)] = 16
    """windows of training.seq_len tokens from the beginning of the source, over all ranks"""
    position_buckets: Positive = 8
    """equally wide ranges of positions with a loss of their own"""
    needle_lengths: str = ""
    """lengths of Needle In A Haystack, such as "4096,16384"; tokens; empty: none"""
    needle_depths: Positive = 5
    """depths of the needle, evenly spaced"""
    needle_samples: Positive = 2
    """needles of each length and depth"""


@dataclass
class Profiling:
    """torch.profiler. Does nothing unless enabled."""

    enable: bool = False
    """write a trace"""
    first_step: Positive = 5
    """first traced step, counted from 1"""
    steps: Positive = 2
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

    config: Text = ""
    """TOML file with the configuration"""
    print_config: bool = False
    """print the resolved configuration and stop"""
    dry_run: bool = False
    """print the memory and FLOPs of a step; exit status 1 if it does not fit"""
    find_max_length: bool = False
    """print the longest training.seq_len that fits and stop"""
    ranks: Positive = 0
    """world size to assume by a dry run; 0: that of torchrun, or the least that fits"""
    device_memory: Annotated[float, Range(0, open_left=True)] = 0.0
    """memory of a GPU to assume by a dry run, GiB; 0: that of the local GPU"""
    host_memory: Annotated[float, Range(0, open_left=True)] = 0.0
    """CPU memory of a node to assume by a dry run, GiB; 0: that of a machine with a GPU"""

    @property
    def starts_nothing(self) -> bool:
        """True if something is printed in place of a run."""
        return self.print_config or self.dry_run or self.find_max_length
