"""The modules of a transformers model that work on one token at a time, apart from attention.

With several ranks, each holds some blocks of a sequence, and a packed row holds several documents.
Our attention handles both. A convolution or a recurrence along the sequence does not, and the loss
hardly shows it. So this is an allow list: a model is accepted if every one of its modules is known
here, by its type, or by the name that transformers gives to parts with its role.
"""

import functools
import inspect
import re
from collections.abc import Iterator

from torch import nn

_TOKEN_WISE = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Identity,
    nn.Dropout,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.Sequential,
)
"""With their subclasses."""

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""The Python modules whose classes, attention aside, are functions of single elements."""

# How the names of the other parts end. What these are made of is looked at in turn.
_ROLES = re.compile(
    r"""(
    Linear | Conv1D | Adapter | Wrapper                  # Conv1D is the Linear of GPT-2.
    | Norm | Norm1P | RMSNormGated | Clip | Scaling | Dropout
    | Embeddings? | Activation | GELU | Gelu | SwiGLU
    | MLP | Mlp | FFN | FeedForward | Experts? | Router | Gate | Gating | MoE | Moe | MoA | Statics
    | Intermediate | Output | AltUp
    | Block | Layer | Stack | Encoder | Decoder | Transformer | Model
    | Head | Predictions | Transform | ForCausalLM | LMHeadModel | ForConditionalGeneration
    )$""",
    re.VERBOSE,
)

_ATTENTION = ("Attention", "MLA")
"""How the names of attention modules end."""


def mixers(module: nn.Module, path: str = "") -> Iterator[str]:
    """The modules that are not known to be token-wise, as "layers.0.conv (Lfm2ShortConv)".

    Attention that asks transformers' AttentionInterface for its function is known. What it is made
    of is looked at like everything else. So is linear attention whose forward is one of ours.
    """
    kind = type(module).__name__
    is_linear = kind.endswith("GatedDeltaNet")
    is_known = "forward" in vars(module) if is_linear else _is_known(module)
    if not is_known:
        yield f"{path} ({kind})"
    elif not is_linear:
        # What mixes tokens may lie inside.
        for name, child in module.named_children():
            yield from mixers(child, f"{path}.{name}" if path else name)


def calls_interface(module: nn.Module) -> bool:
    """True if this module itself asks AttentionInterface for its attention function."""
    return "ALL_ATTENTION_FUNCTIONS" in _names(type(module))


def chooses_keys(module: nn.Module) -> bool:
    """True if this attention makes its own masks from the content of the tokens."""
    return calls_interface(module) and not _names(type(module)).isdisjoint({"topk", "scatter"})


def numbers_tokens(module: nn.Module) -> bool:
    """True if this module numbers the tokens other than by position_ids starting at 0."""
    if calls_interface(module):
        names = _names(type(module))
        return "arange" in names and "position_ids" not in names
    # RoBERTa and its kin begin behind the padding's index.
    positions = getattr(module, "position_embeddings", None)
    return isinstance(positions, nn.Embedding) and positions.padding_idx is not None


def _is_known(module: nn.Module) -> bool:
    kind = type(module)
    if kind.__name__.endswith(_ATTENTION):
        # In BERT, attention is a module in a module of that name.
        inner = [child for child in module.children() if type(child).__name__.endswith(_ATTENTION)]
        return calls_interface(module) or len(inner) > 0
    if isinstance(module, _TOKEN_WISE) or kind.__module__ in _ACTIVATIONS:
        return True
    return _ROLES.search(kind.__name__) is not None


@functools.cache
def _names(kind: type[nn.Module]) -> frozenset[str]:
    """The globals, attributes, variables and keys in the methods of an attention's class."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__name__.endswith(_ATTENTION):
            for function in filter(inspect.isfunction, vars(base).values()):
                code = inspect.unwrap(function).__code__
                found.update(code.co_names, code.co_varnames)
    return frozenset(found)
