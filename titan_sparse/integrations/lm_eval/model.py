"""lm_eval's model "titan_sparse": the answers of its own HFLM, for our
checkpoints, sparse or dense.

All ranks run rank 0's requests, as tasks may draw them at random, and rank 0 reports.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from titan_sparse.config import Config, ConfigError, Refusal, check, world_from_environment
from titan_sparse.config.checking import chat_template_kwargs
from titan_sparse.config.ignored import of_other_patterns
from titan_sparse.config.reading import as_words, refuse_ignored, require, tokens
from titan_sparse.config.sources import tokenizer_name
from titan_sparse.data.chat_template import as_prepared, run_texts
from titan_sparse.data.tokenizer import Tokenizer, open_tokenizer, read_tokenizer
from titan_sparse.evaluation.generation import Stop, generate
from titan_sparse.evaluation.scorer import Sequence
from titan_sparse.loss import IGNORE_INDEX
from titan_sparse.training.faults.process_groups import on_first_rank
from titan_sparse.training.load import (
    build_scorer,
    find_checkpoint,
    find_config,
    load_for_evaluation,
)

logger = logging.getLogger("titan_sparse")

_NEW_TOKENS = 256
"""Number of new tokens if a task does not set it, as in HFLM."""

_GENERATION = {"do_sample", "temperature", "top_p", "until", "max_gen_toks"}
"""Generation options that a task may set, in addition to the other names of max_gen_toks."""

T = TypeVar("T")
Request = tuple[Any, list[int], list[int]]
"""What lm_eval calls it (None: no name), tokens of the context, and tokens of the continuation."""


class _Silent(int):
    """The rank 0 of one, as which every rank gets all requests, but not equal to 0.

    lm_eval reports where both its rank and LOCAL_RANK are 0, which would be once per node.
    LOCAL_RANK must stay as it is, because it also names the GPU.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = int.__hash__


@register_model("titan_sparse")
class TitanSparseLM(TemplateLM):
    """A checkpoint of ours, or a Hugging Face folder, as a model of lm_eval."""

    def __init__(
        self,
        checkpoint: str | None = None,
        pretrained: str | None = None,
        config: str | None = None,
        tokenizer: str | None = None,
        attention: str | None = None,
        device: str | torch.device | None = None,
        batch_size: int | str = 1,
        max_length: int | str | None = None,
        add_bos_token: bool | None = None,
        **keys: Any,
    ) -> None:
        """checkpoint: a run's folder, for its newest checkpoint, or its checkpoint/step-N.
        pretrained: in its place, a Hugging Face folder.
        config: of the run; by default config.toml in the folder `checkpoint`.
        tokenizer: folder or tokenizer.json; by default data.tokenizer, or that of `pretrained`.
        attention: "dense", or as in the configuration, which is dense for a
        Hugging Face folder alone.
        device: "cpu", "cuda", or in one process "cuda:N"; "cuda:0" is the CPU where no GPU is.
        add_bos_token: whether texts begin with the token that the tokenizer puts there; by
        default as in training.
        max_length: tokens, such as 4096 or "128k"; longer requests lose their beginning, as in
        HFLM. By default the larger of the model's max_position_embeddings and the run's
        training.seq_len.
        keys: of the configuration, such as "parallelism.cp" or "attention.pattern".

        Joins the process group of torchrun. Raises Refusal, before it where possible.
        """
        super().__init__()
        if tokenizer is not None:
            keys["data.tokenizer"] = str(tokenizer)
        device = None if device is None else str(device)
        if device == "cuda:0":
            # What lm_eval writes where --device is not given: as in HFLM, a GPU if there is one.
            keys.setdefault("training.device", "auto")
        elif device is not None:
            keys["training.device"] = _choose_gpu(device)
        try:
            most = 0 if max_length is None else tokens(str(max_length), least=1)
        except ValueError as error:
            said = "is not a number of tokens; write for example 4096 or 128k"
            raise ConfigError(f"max_length = {max_length} {said}") from error
        require(
            add_bos_token in (None, True, False),
            f"add_bos_token = {add_bos_token} is neither true nor false; write one of them",
        )
        require(
            str(batch_size).isdecimal() and int(batch_size) > 0,
            f"batch_size = {batch_size} is not a positive integer; write for example 1",
        )
        self.batch_size = int(batch_size)
        try:
            self.config, step = _settings(checkpoint, pretrained, config, attention, keys)
            name = tokenizer_name(self.config)
            require(
                name != "bytes",
                'lm_eval needs a tokenizer.json, not data.tokenizer = "bytes"; write tokenizer=FOLDER',
            )
            self.tokenizer = read_tokenizer(name)
            own = open_tokenizer(self.config)
            self.tokenizer.split_special_tokens = own.split_special_tokens
            self._use_template(own)
            self.scorer = build_scorer(self.config, step, own)
            self.ends = self.scorer.ends
        except (ValueError, OSError) as error:
            raise Refusal(str(error)) from error
        as_trained = self.config.data.add_bos
        self.add_bos_token = as_trained if add_bos_token is None else add_bos_token
        self.max_length = most or self.scorer.model_config.max_positions
        if not most and (checkpoint or config):
            self.max_length = max(self.max_length, self.config.training.seq_len)
        self._device = self.scorer.device
        if dist.get_rank() != 0:
            self._rank = _Silent()

    # HFLM's own. They read tokenizer, add_bos_token, chat_template_args, and the constant here.
    custom_prefix_token_id = None
    eot_token_id = HFLM.eot_token_id
    prefix_token_id = HFLM.prefix_token_id
    tokenizer_name = HFLM.tokenizer_name
    tok_encode = HFLM.tok_encode
    apply_chat_template = HFLM.apply_chat_template

    def _use_template(self, tokenizer: Tokenizer) -> None:
        """Chats are as in training, also where another folder than the
        tokenizer's has the template."""
        data = as_prepared(self.config.data)
        self.chat_template_args = chat_template_kwargs(data)
        texts = run_texts(data, self.config.model.initial_hf, tokenizer)
        if texts:
            self.tokenizer.chat_template = texts if len(texts) > 1 else texts["default"]

    # What is asked

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding writes it."""
        requests = on_first_rank(lambda: requests)
        sequences = [self._sequence(context, answer) for _, context, answer in requests]
        # Choices that differ only in their last token need a single forward, as in HFLM.
        alike: dict[bytes, list[int]] = {}
        for place, sequence in enumerate(sequences):
            alike.setdefault(sequence.tokens.tobytes(), []).append(place)
        groups = sorted(alike.values(), key=lambda places: -len(sequences[places[0]].tokens))

        def score(groups: list[list[int]]) -> Iterator[tuple[int, tuple[float, bool]]]:
            batch: list[Sequence | None] = []
            for places in groups:
                labels = np.stack([sequences[place].labels for place in places])
                batch.append(Sequence(sequences[places[0]].tokens, labels))
            length = max((len(sequence.tokens) for sequence in batch), default=1)
            answers = self.scorer.answers(batch or [None], length)
            for place, (losses, predicted) in zip(itertools.chain(*groups), answers):
                wanted = torch.tensor(requests[place][2], device=predicted.device)
                yield place, (-losses.sum().item(), bool((predicted == wanted).all()))

        results = self._by_batch(groups, score, disable_tqdm)
        for (name, _, _), result in zip(requests, results, strict=True):
            # loglikelihood_rolling() keeps the sums of its windows itself.
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, result)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of each whole string, in windows of max_length tokens that do not overlap.

        The first token follows prefix_token_id, which does not count where the tokenizer adds it.
        """
        strings = on_first_rank(lambda: [request.args[0] for request in requests])
        windows: list[Request] = []
        numbers = []
        for number, string in enumerate(strings):
            tokens = self.tok_encode(string)
            if tokens[:1] == [self.prefix_token_id]:
                tokens = tokens[1:]
            rolling = get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            )
            for window in rolling:
                windows.append((None, *make_disjoint_window(window)))
                numbers.append(number)
        totals = [0.0] * len(strings)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (score, _) in zip(numbers, scores, strict=True):
            totals[number] += score
        for string, total in zip(strings, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (string,), total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string, the end of the text, or
        max_gen_toks."""
        asked = on_first_rank(lambda: [request.args for request in requests])
        # Only requests with the same generation options are batched together.
        groups: dict[str, list[int]] = {}
        for place, (_, arguments) in enumerate(asked):
            groups.setdefault(repr(sorted(arguments.items())), []).append(place)
        texts = [""] * len(asked)
        for places in groups.values():
            contexts = [asked[place][0] for place in places]
            found = self._generate(contexts, asked[places[0]][1], disable_tqdm)
            for place, text in zip(places, found, strict=True):
                texts[place] = text
                self.cache_hook.add_partial("generate_until", asked[place], text)
        return texts

    def _generate(
        self, contexts: list[str], arguments: dict[str, Any], disable_tqdm: bool
    ) -> list[str]:
        known = normalize_gen_kwargs(arguments, _NEW_TOKENS)
        unknown = sorted(set(known) - _GENERATION)
        require(
            not unknown,
            f"gen_kwargs: {', '.join(unknown)} is not there; write {sorted(_GENERATION)}",
        )
        require(
            not known.get("do_sample"),
            "gen_kwargs: texts are generated greedily; write do_sample=false",
        )
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(known.get("until"), eos=end)
        new_tokens = known["max_gen_toks"]
        room = self.max_length - new_tokens
        require(
            room > 0,
            f"max_gen_toks = {new_tokens} leaves no room for a context in max_length = "
            f"{self.max_length}; write fewer, or a larger max_length",
        )
        prompts = []
        for context in contexts:
            tokens = self.tok_encode(context)
            if len(tokens) > room:
                logger.warning("a context of %d tokens is cut to its last %d", len(tokens), room)
            # There is not even a begin-of-text token. HFLM would generate from nothing.
            prompts.append(np.array(tokens[-room:] or [self.prefix_token_id]))
        stop = self._stop(until)

        def write(places: list[int]) -> Iterator[tuple[int, str]]:
            batch = [prompts[place] for place in places] or [np.array([self.prefix_token_id])]
            # A rank without requests takes part until the others are done.
            ends = stop if places else lambda _: True
            found = generate(self.scorer, batch, new_tokens, ends)
            for place, tokens in zip(places, found):
                kept = [token for token in tokens.tolist() if token not in self.ends]
                text = self.tokenizer.decode(kept, skip_special_tokens=True)
                yield place, postprocess_generated_text(text, until, None)

        longest_first = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
        return self._by_batch(longest_first, write, disable_tqdm)

    def _stop(self, until: list[str]) -> Stop:
        """True if the last token ends a text or a stop string."""
        strings = [string for string in until if string]
        # A token has one byte or more, and the first of these may begin in the middle of a letter.
        tail = max((len(string.encode()) for string in strings), default=0) + 4

        def stop(tokens: np.ndarray) -> bool:
            if int(tokens[-1]) in self.ends:
                return True
            text = self.tokenizer.decode(tokens[-tail:].tolist(), skip_special_tokens=False)
            return any(string in text for string in strings)

        return stop

    # Ranks

    def _by_batch(
        self, items: list[T], answer: Callable[[list[T]], Iterable[Any]], disable_tqdm: bool
    ) -> list[Any]:
        """All answers, in the order of their requests, on every rank.

        answer: (number, answer) of the requests of one batch of items; also called for none.
        """
        starts = range(0, len(items), self.batch_size)
        batches = [items[start : start + self.batch_size] for start in starts]
        is_quiet = disable_tqdm or dist.get_rank() != 0
        with tqdm(total=len(items), disable=is_quiet, desc="titan_sparse") as bar:

            def compute(_: int, batch: list[T] | None) -> list[Any]:
                answers = list(answer(batch or []))
                bar.update(len(batch or []) * self.scorer.dp_size)
                return answers

            numbered = itertools.chain(*self.scorer.results(batches, compute))
        return [found for _, found in sorted(numbered, key=lambda pair: pair[0])]

    def set_cache_hook(self, cache_hook: Any) -> None:
        # Caches of ranks may differ: then some would wait for ever.
        if dist.get_world_size() > 1:
            raise Refusal("--use_cache needs one process; leave it out under torchrun")
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """The facts that results.json records in addition to model_args."""
        attention = self.config.attention
        return {
            "model_dtype": self.config.training.dtype,
            "attention_pattern": attention.pattern,
            "context_parallel": self.scorer.cp.size,
            "max_length": self.max_length,
        }

    # Requests

    def _sequence(self, context: list[int], continuation: list[int]) -> Sequence:
        count = len(continuation)
        require(count > 0, "a choice or target of the task has no tokens; write some text there")
        require(
            count <= self.max_length,
            f"a continuation of {count} tokens is above max_length = {self.max_length}; write a "
            "larger max_length",
        )
        # Blanks alone, which lm_eval moves into the continuation, leave no
        # context. HFLM would stop.
        context = context or [self.prefix_token_id]
        whole = np.array((context + continuation)[-(self.max_length + 1) :])
        if len(whole) < len(context) + count:
            logger.warning("a context of %d tokens loses its beginning", len(context))
        labels = np.full(len(whole) - 1, IGNORE_INDEX)
        labels[-count:] = continuation
        return Sequence(whole[:-1], labels)


def _choose_gpu(name: str) -> str:
    """training.device of lm_eval's --device; the GPU of cuda:N is the current one from now on."""
    kind, _, number = name.partition(":")
    if kind != "cuda" or not number:
        return name
    count = torch.cuda.device_count()
    require(
        number.isdecimal() and int(number) < count,
        f"--device {name} is not one of the {count} GPUs of this node; leave --device out",
    )
    require(
        "LOCAL_RANK" not in os.environ,
        f"--device {name} would be ignored, as each rank of torchrun has its own GPU; leave --device out",
    )
    torch.cuda.set_device(int(number))
    return kind


def _settings(
    checkpoint: str | None,
    pretrained: str | None,
    config: str | None,
    attention: str | None,
    keys: dict[str, Any],
) -> tuple[Config, str | None]:
    """The checked configuration that the arguments of TitanSparseLM mean, and the checkpoint to
    read (a folder step-N), or None for config.model.initial_hf."""
    require(
        (checkpoint is None) != (pretrained is None),
        "model_args: write checkpoint=RUN (its folder, or its checkpoint/step-N) or "
        "pretrained=FOLDER of Hugging Face, one of the two",
    )
    require(
        attention in (None, "dense"),
        f'model_args: attention={attention} is unknown; write "dense", or leave it out',
    )
    step = None
    if checkpoint is not None:
        step = find_checkpoint(checkpoint)
        config = config or find_config(checkpoint)
    words = [] if config is None else ["--config", str(config)]
    pretrained = None if pretrained is None else str(pretrained)
    dense = attention == "dense"
    if config is None:
        # No configuration says how the model was trained.
        dense = dense or "attention.pattern" not in keys
    words += as_words(keys)
    resolved = load_for_evaluation(words, pretrained, dense, checkpoint, reads_text=False)
    refuse_ignored(words, of_other_patterns(resolved))
    check(resolved, *world_from_environment())
    return resolved, step
