"""register(), the settings, and what is refused by name."""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import peft
import pytest
import torch
import torch.distributed.nn.functional
from transformers import AttentionInterface

from tests.distributed import on_ranks, run_processes
from tests.integrations.transformers.families import (
    BLOCK,
    assert_close,
    positions,
    tokens,
    transformers,
    with_ours,
)
from tests.models.transformers_models import tiny_model
from titan_sparse import recording
from titan_sparse.attention.masks import Causal, Full, documents
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.integrations.transformers import (
    AttentionMask,
    AttentionSettings,
    attention,
    register,
)
from titan_sparse.integrations.transformers.attention import layer_mask
from titan_sparse.integrations.transformers.masks import MaskRule, ranges_of_tokens

masking_utils = transformers.masking_utils

SEQ_LEN = 50
SPARSE = VerticalSlash(recall=0.5, sinks=1, local_slashes=1, max_verticals=8, max_slashes=2)


def density(model: torch.nn.Module) -> float:
    with recording() as seen:
        model(tokens(1, 8 * BLOCK))
    return seen.density().mean().item()


def test_the_last_settings_of_a_name_hold_and_names_live_beside_each_other():
    model = with_ours("llama")
    register(AttentionSettings(pattern=SPARSE, block_size=BLOCK), name="ours_sparse")
    assert density(model) == 1.0
    model.set_attn_implementation("ours_sparse")
    assert density(model) < 1.0
    register(name="ours_sparse")
    assert density(model) == 1.0


LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "my_flash", "a/b", "")


def causal_mask_function(batch, head, query, key):
    """This is not transformers' function, despite its name."""
    return key <= query + 1


def run(name: str, changes: dict | None = None, **inputs) -> None:
    """One forward in training mode, with our attention."""
    model = with_ours(name, **(changes or {})).train()
    model(**{"input_ids": tokens(1, SEQ_LEN), **inputs})


def run_other(config_class: str, given="titan_sparse", **changes) -> None:
    settings = {"vocab_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    model = tiny_model(config_class, **(settings | changes))
    model.set_attn_implementation(given)
    model(tokens(1, SEQ_LEN))


def run_sparse(**inputs) -> None:
    register(AttentionSettings(pattern=SPARSE))
    run("llama", **inputs)


def run_backend(name: str) -> None:
    register(AttentionSettings(backend=name))
    run("llama")


def run_vision_tower() -> None:
    """Vision towers and cross attention call without a mask."""
    tower = torch.nn.Module()
    tower.is_causal = False
    q = torch.zeros(1, 2, 9, 16)
    attention.attention_forward(AttentionSettings(), tower, q, q, q, None)


def run_compressed() -> None:
    """DeepSeek-V4 adds keys that stand for several tokens each."""
    q, k = torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 12, 16)
    sizes = {"batch_size": 1, "q_length": 9, "kv_length": 9}
    mask = layer_mask(AttentionSettings(), **sizes, mask_function=CAUSAL)
    attention.attention_forward(AttentionSettings(), torch.nn.Module(), q, k, k, mask)


def read_positions(*shape: int) -> None:
    """Positions of several dimensions are those of models with pictures."""
    q = torch.zeros(2, 1, SEQ_LEN, 16)
    ranges_of_tokens(torch.zeros(shape), None, MaskRule(), q, SPARSE)


def build_mask(mask_function: Callable) -> None:
    sizes = {"batch_size": 1, "q_length": 9, "kv_length": 9}
    layer_mask(AttentionSettings(), **sizes, mask_function=mask_function)


HOLES = torch.ones(1, SEQ_LEN, dtype=torch.int64).index_fill(1, torch.tensor([10, 11]), 0)
PACKED = {"position_ids": positions(25, 25)}
CAUSAL = masking_utils.causal_mask_function
WINDOW = masking_utils.sliding_window_overlay
REFUSED = [
    *((partial(AttentionSettings, block_size=x), f"block_size={x!r}") for x in (100, 8, "64")),
    (partial(AttentionSettings, cp=2), "cp=int is not a ContextParallel"),
    (partial(AttentionSettings, "moba"), "pattern='moba' is not a pattern; write"),
    (partial(register, name=3), "name=3.* is not a name; write"),
    (partial(AttentionMask, None), "NoneType.* is not a mask of ours"),
    (partial(register, {"pattern": SPARSE}), "AttentionSettings"),
    *((partial(register, name=name), "write") for name in IMPLEMENTATIONS),
    (partial(run_backend, "flex"), "backend"),
    (partial(run_sparse, attention_mask=HOLES), "vertical_slash does not compute; move the pad"),
    (partial(run, "qwen3_5", attention_mask=HOLES, **PACKED), "know the documents of padding"),
    (partial(run, "qwen3_5", attention_mask=AttentionMask(documents([25, 25]))), "or of Slices"),
    (partial(run, "qwen3_5", use_cache=True, **PACKED), "states of linear attention are not"),
    (partial(run, "llama", output_attentions=True), "write output_attentions=False"),
    (
        partial(run, "llama", attention_mask=torch.zeros(1, 1, SEQ_LEN, SEQ_LEN)),
        "attention_mask with 4 dims",
    ),
    (
        partial(run, "llama", cu_seq_lens_q=torch.tensor([0, 20, SEQ_LEN])),
        "return_flash_attn_kwargs=False",
    ),
    (partial(run, "llama", position_bias=torch.zeros(1)), "position_bias"),
    (partial(run, "llama", alibi=torch.zeros(1)), "alibi"),
    (partial(run, "llama", {"attention_dropout": 0.1}), "write config.attention_dropout = 0"),
    (partial(run_other, "GPT2Config"), "write config.attn_pdrop = 0 before you make the model"),
    (partial(run, "llama4", attention_mask=AttentionMask(Causal())), "not know of chunks; write"),
    (partial(run, "llama4", attention_mask=Causal()), "not know of chunks; write"),
    (partial(run, "llama", {"is_causal": False}), "bidirectional"),
    (partial(run_other, "Gemma2Config"), "softcap"),
    (partial(run_other, "BloomConfig", n_head=2), 'would not use "titan_sparse"'),
    (partial(run_other, "BloomConfig", {"": "titan_sparse"}, n_head=2), "would not use"),
    (partial(run_other, "DeepseekV3Config", **LATENT), "MLA"),
    (run_vision_tower, "Module is bidirectional or cross attention"),
    (
        run_compressed,
        "attends to 12 keys where there are 9 tokens, which is not computed; write attn",
    ),
    (partial(read_positions, 3, 1, SEQ_LEN), "positions of one dimension"),
    (partial(read_positions, 3, SEQ_LEN), "are not .2, 50.; write"),
    (partial(build_mask, masking_utils.bidirectional_mask_function), "bidirectional attention"),
    (partial(build_mask, WINDOW(4)), "bidirectional attention"),
    (partial(build_mask, masking_utils.or_masks(CAUSAL, WINDOW(4))), "function or_masks"),
    (
        partial(build_mask, masking_utils.and_masks(CAUSAL, lambda b, h, q, k: k > 2)),
        "function <lambda> of others",
    ),
    (partial(build_mask, causal_mask_function), "causal_mask_function of others"),
    (
        partial(
            build_mask,
            masking_utils.and_masks(
                WINDOW(4), masking_utils.sliding_window_causal_mask_function(9)
            ),
        ),
        "two mask functions sliding_window_overlay",
    ),
]


@pytest.mark.parametrize("call, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_not_computed_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_prefix_tuning_is_dense_and_a_pattern_is_refused():
    """The trained prefix is a cache, and what follows a cache is dense."""
    losses = {}
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    for name in ("eager", "titan_sparse"):
        register()
        torch.manual_seed(0)
        model = peft.get_peft_model(with_ours("llama"), prefix).train()
        model.set_attn_implementation(name)
        inputs = {"input_ids": tokens(1, SEQ_LEN), "labels": tokens(1, SEQ_LEN)}
        losses[name] = model(**inputs).loss
    torch.testing.assert_close(losses["eager"], losses["titan_sparse"])
    register(AttentionSettings(pattern=SPARSE))
    with pytest.raises(ValueError, match="training would ignore vertical_slash; write register"):
        model(**inputs)
    with torch.no_grad():
        torch.testing.assert_close(losses["eager"], model(**inputs).loss)


@pytest.mark.parametrize("side", [slice(0, 5), slice(40, None)])
def test_patterns_take_padding_on_one_side(side):
    run_sparse(attention_mask=torch.ones_like(HOLES).index_fill(1, torch.arange(SEQ_LEN)[side], 0))


def test_a_mask_that_was_never_built_is_refused(monkeypatch):
    mapping = transformers.AttentionMaskInterface._global_mapping
    monkeypatch.delitem(mapping, "titan_sparse")
    with pytest.raises(ValueError, match="NoneType for a mask; write register()"):
        run("llama")


def test_bidirectional_and_cross_attention_are_refused():
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, intermediate_size=32, vocab_size=64)
    bert = transformers.BertModel(config).eval()
    input_ids = tokens(1, SEQ_LEN)
    wanted = bert(input_ids).last_hidden_state
    bert.set_attn_implementation("titan_sparse")
    with pytest.raises(ValueError, match="bidirectional .*=AttentionMask\\(Full\\(\\)\\)"):
        bert(input_ids)
    # What it says to write.
    got = bert(input_ids, attention_mask=AttentionMask(Full())).last_hidden_state
    assert_close([got], [wanted])


OTHER_MODELS: dict[str, dict] = {
    "LlamaConfig": {},
    # An encoder, one with attention of its own, and one of two parts.
    "BertConfig": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "BloomConfig": {"n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "T5Config": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 2, "dropout_rate": 0.0},
}
METHODS = ("post_init", "set_attn_implementation")


def behavior_of_others(folder: Path) -> dict[str, object]:
    """What models with names of transformers do, and how the methods that register() wraps look."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    found: dict[str, object] = {}
    for config_class, more in OTHER_MODELS.items():
        for name in ("eager", "sdpa"):
            config = getattr(transformers, config_class)(**(sizes | heads | more))
            torch.manual_seed(0)
            try:
                model = transformers.AutoModel.from_config(config, attn_implementation=name)
            except ValueError as error:
                found[f"{config_class} {name}"] = str(error)
                continue
            inputs = {"input_ids": tokens(2, 9)}
            if config.is_encoder_decoder:
                inputs["decoder_input_ids"] = tokens(2, 5)
            out = model(**inputs)[0]
            out.sum().backward()
            gradients = [x.grad.tolist() for x in model.parameters() if x.grad is not None]
            found[f"{config_class} {name}"] = out.tolist(), gradients
            model.save_pretrained(folder)
            again = transformers.AutoModel.from_pretrained(folder, attn_implementation=name)
            found[f"{config_class} {name} read"] = again(**inputs)[0].tolist()
            # As one writes it by position, by keyword, and for parts.
            names = []
            for arguments, keywords in (
                (("eager",), {}),
                ((), {"attn_implementation": "sdpa"}),
                (({"": "eager"},), {"allow_all_kernels": False}),
                (("nonsense",), {}),
                ((), {}),
            ):
                try:
                    names.append(model.set_attn_implementation(*arguments, **keywords))
                except (ValueError, TypeError, ImportError) as error:
                    names.append((type(error), str(error)))
                names.append(model.config._attn_implementation)
            found[f"{config_class} {name} changed"] = names
    for name in METHODS:
        method = getattr(transformers.PreTrainedModel, name)
        texts = method.__doc__, method.__name__, method.__qualname__, method.__module__
        found[name] = inspect.signature(method), texts
    return found


@on_ranks(1)
def test_models_of_other_names_behave_as_before(tmp_path):
    """In a process that has not called register()."""
    at_first = dict(vars(transformers.PreTrainedModel))
    before = behavior_of_others(tmp_path)
    assert len(before) > 20
    register(AttentionSettings(pattern=SPARSE, block_size=BLOCK))
    after = behavior_of_others(tmp_path)
    assert [name for name in before if before[name] != after[name]] == []
    wrapped = dict(vars(transformers.PreTrainedModel))
    assert {name for name in wrapped if wrapped[name] is not at_first[name]} == {*METHODS}
    assert all(wrapped[name].__wrapped__ is at_first[name] for name in METHODS)
    # Nothing is wrapped twice.
    register(name="another")
    register()
    assert dict(vars(transformers.PreTrainedModel)) == wrapped
    assert behavior_of_others(tmp_path) == before


def test_the_sequence_parallelism_of_verl_and_ms_swift_is_refused(monkeypatch):
    """As in verl 0.9.1 (verl/utils/ulysses.py) and ms-swift 4.6.0 (swift/sequence_parallel)."""
    register()
    model = with_ours("llama")
    tokens = torch.arange(12)[None]
    verl = ModuleType("verl.utils.ulysses")
    monkeypatch.setitem(sys.modules, verl.__name__, verl)
    verl.get_ulysses_sequence_parallel_world_size = lambda group=None: 2
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=1"):
        model(tokens)
    verl.get_ulysses_sequence_parallel_world_size = lambda group=None: 1
    swift = ModuleType("swift.sequence_parallel.sequence_parallel")
    monkeypatch.setitem(sys.modules, swift.__name__, swift)
    swift.sequence_parallel = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match="--sequence_parallel_size 1"):
        model(tokens)
    # None before its trainer is set up.
    swift.sequence_parallel.world_size = None
    model(tokens)


def _later_part():
    register()
    model = with_ours("llama")
    rank = torch.distributed.get_rank()
    tokens = torch.arange(12)[None]
    if rank == 1:
        with pytest.raises(ValueError, match="position_ids do not begin at 0.*cp="):
            model(tokens, position_ids=tokens + 12)
    # Padding on the left, whose positions say nothing.
    padding = torch.ones_like(tokens)
    padding[:, :3] = 0
    model(tokens, attention_mask=padding, position_ids=(tokens - 3).clamp(min=1))
    model(tokens, position_ids=tokens)


def test_a_later_part_of_a_sequence_is_refused():
    run_processes(2, _later_part)
    # Alone, a process holds all there is.
    model = with_ours("llama")
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(model(tokens, position_ids=tokens + 12).logits, model(tokens).logits)


def _alst(attention, group_size):
    """What DeepSpeed 0.19.8's UlyssesSPAttentionHF (runtime/sequence_parallel/ulysses_sp.py)
    does: each rank computes whole sequences of its heads, with no mask and with the positions
    of all ranks."""

    def gathered(x, dim):
        return torch.cat(torch.distributed.nn.functional.all_gather(x), dim=dim)

    def forward(module, query, key, value, attention_mask, *args, **kwargs):
        positions = [torch.empty_like(kwargs["position_ids"]) for _ in range(group_size)]
        torch.distributed.all_gather(positions, kwargs["position_ids"])
        kwargs["position_ids"] = torch.cat(positions, dim=1)
        rank = torch.distributed.get_rank()
        heads = [gathered(x, 2).chunk(group_size, 1)[rank] for x in (query, key, value)]
        out, weights = attention(module, *heads, None, *args, **kwargs)
        whole = gathered(out, 2)
        return whole.chunk(group_size, 1)[rank], weights

    return forward


@pytest.mark.parametrize("packed", [False, True])
@on_ranks(2)
def test_inside_alst_each_rank_computes_whole_sequences(packed):
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if not packed:
        settings |= {"use_sliding_window": True, "sliding_window": 20}
        settings |= {"layer_types": ["sliding_attention", "full_attention"]}
    truth = tiny_model("Qwen3Config", **settings)
    tokens = torch.arange(64)[None] % 37
    positions = torch.arange(64)[None]
    if packed:
        positions = torch.cat([torch.arange(40), torch.arange(24)])[None]
    want = truth(tokens, position_ids=positions, use_cache=False).logits
    want.square().mean().backward()

    register(name="whole_heads")
    model = tiny_model("Qwen3Config", **settings)
    model.set_attn_implementation("whole_heads")
    state = ModuleType("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    state.get_sequence_parallel_world_size = lambda: 2
    state._SEQUENCE_PARALLEL_GROUP = torch.distributed.group.WORLD
    sys.modules[state.__name__] = state
    ours = AttentionInterface()["whole_heads"]
    AttentionInterface.register("whole_heads", _alst(ours, 2))
    rank = torch.distributed.get_rank()
    local = slice(32 * rank, 32 * rank + 32)
    got = model(tokens[:, local], position_ids=positions[:, local], use_cache=False).logits
    torch.testing.assert_close(got, want[:, local], rtol=1e-4, atol=1e-5)
    (got.square().sum() / want.numel()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
        torch.distributed.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6, msg=name)
