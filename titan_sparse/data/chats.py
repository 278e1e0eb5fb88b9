"""Samples of chats -> tokens, and which of them are learned.

What the assistant writes lies in {% generation %} blocks of the template. Where it marks none, it
is what the rendering of the messages up to an answer has beyond the generation prompt before it.
That holds if both are prefixes of the whole chat, in text and in tokens: checked for each answer.
"""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_sparse.config.sections import Data
from titan_sparse.data.chat_rows import Message
from titan_sparse.data.chat_template import ChatTemplate, load_template
from titan_sparse.data.formats import Encoded, SampleFormat
from titan_sparse.data.tokenizer import Tokenizer

Letters = tuple[int, int]
"""[start, stop) in a text."""


class ChatEncoder:
    """Encodes the samples of one part of data.source; `data` is the [data] section of that part.

    model_folder: model.initial_hf. Raises ValueError, naming the key, for a template that is not
    there. prompt_completion needs one only for a sample of messages: then encode() raises it.
    """

    def __init__(self, data: Data, tokenizer: Tokenizer, model_folder: str = "") -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.model_folder = model_folder
        self._template: ChatTemplate | None = None
        try:
            self._template = self._load()
        except ValueError:
            if data.format == "messages" or data.chat_template:
                raise
        digest = self._template.digest if self._template else ""
        self.sample_format = SampleFormat(data.format, data.loss_on, digest)

    def encode(self, text: str) -> Encoded:
        """The tokens of a sample (JSON of chat_rows), closed by the end-of-document token.

        An empty text is a row that was skipped. Raises ValueError, naming file and row, where the
        template refuses the sample or does not tell what is learned.
        """
        if not text:
            return self._closed(np.empty(0, dtype=np.int32), np.empty(0, dtype=bool), False)
        sample = json.loads(text)
        try:
            if isinstance(sample.get("prompt"), str):
                return self._strings(sample["prompt"], sample["completion"])
            return self._messages(sample)
        except ValueError as error:
            raise ValueError(f"{sample['where']}: {error}") from error

    def _load(self) -> ChatTemplate:
        return load_template(self.data.chat_template, self.data.tokenizer, self.model_folder)

    def _strings(self, prompt: str, completion: str) -> Encoded:
        """The prompt is tokenized as it is when a model is asked; the completion is what follows."""
        head = self.tokenizer.encode(prompt)
        whole = self.tokenizer.encode(prompt + completion)
        if not np.array_equal(whole[: len(head)], head):
            # A token goes over the seam.
            whole = np.concatenate([head, self.tokenizer.encode(completion)])
        learned = np.arange(len(whole)) >= len(head)
        if self.data.loss_on == "all":
            learned[:] = True
        # Not _closed(): a completion that spells the end-of-document token is not its end.
        tokens = np.append(whole, np.int32(self.tokenizer.end_of_document))
        return Encoded(tokens, np.append(learned, True))

    def _messages(self, sample: dict[str, Any]) -> Encoded:
        messages, taught = self._taught(sample)
        chat = _Chat(self._template or self._load(), messages, sample.get("tools", []))
        rendered = _Rendered(chat.text, self.tokenizer)
        ends_open = False
        if self.data.loss_on == "all":
            learned = np.ones(len(rendered.ids), dtype=bool)
            for number, is_taught in enumerate(taught):
                if not is_taught:
                    learned[rendered.tokens_of(chat.message(number))] = False
            ends_open = taught[-1] and rendered.turn_end(slice(0, len(learned))) is None
        else:
            learned = np.zeros(len(rendered.ids), dtype=bool)
            for letters in chat.turns(taught, rendered):
                ends_open |= rendered.learn(letters, learned, trims=not chat.is_marked)
        return self._closed(rendered.ids, learned, ends_open)

    def _taught(self, sample: dict[str, Any]) -> tuple[list[Message], list[bool]]:
        """All messages of a sample, and whether each is learned."""
        prompt = sample.get("prompt", [])
        messages = prompt + (sample["completion"] if "completion" in sample else sample["messages"])
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [i for i in answers if i >= len(prompt)]
        wanted = {
            "assistant": answers,
            "last_assistant": answers[-1:],
            "all": range(len(messages)),
        }[self.data.loss_on]
        return messages, [
            message.get("train", number in wanted) for number, message in enumerate(messages)
        ]

    def _closed(
        self, ids: NDArray[np.int32], learned: NDArray[np.bool_], learns_end: bool
    ) -> Encoded:
        """With the end-of-document token behind, unless the template has written it."""
        end = self.tokenizer.end_of_document
        if len(ids) and ids[-1] == end:
            return Encoded(ids, learned)
        return Encoded(np.append(ids, np.int32(end)), np.append(learned, learns_end))


class _Chat:
    """A chat's text, and where its messages lie in it."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: list[Any]) -> None:
        self.template = template
        self.messages = messages
        self.tools = tools
        self.is_marked = template.marks_answers(tools)
        if self.is_marked:
            self.text, self.marks = template.render_with_marks(messages, tools)
        else:
            self.text = template.render(messages, tools)

    def turns(self, taught: list[bool], rendered: "_Rendered") -> list[Letters]:
        """What is learned of the messages that are `taught`."""
        turns = []
        marked = self._marked_answers(taught) if self.is_marked else {}
        for number, is_taught in enumerate(taught):
            if not is_taught:
                continue
            if number in marked:
                turns += marked[number]
                self._check_answer(number, marked[number])
            elif self.messages[number]["role"] == "assistant":
                start = self._prefix(number, True)
                stop = self._prefix(number + 1, False)
                rendered.check_prefix(start, number)
                rendered.check_prefix(stop, number)
                turns.append((start, stop))
                self._check_answer(number, [(start, stop)])
            else:
                turns.append(self.message(number))
        return turns

    def message(self, number: int) -> Letters:
        """Where a message lies, its header included."""
        start = self._prefix(number, False) if number else 0
        return start, self._prefix(number + 1, False)

    def _prefix(self, count: int, asks: bool) -> int:
        """Letters of the first `count` messages, with the generation prompt where the chat `asks`.

        Raises ValueError if they are no prefix of the whole.
        """
        if count == len(self.messages) and not asks:
            return len(self.text)
        part = self.template.render(self.messages[:count], self.tools, add_generation_prompt=asks)
        if not self.text.startswith(part):
            # Some close a chat, wherever it ends (Phi-3).
            part = part.removesuffix(self.template.special_tokens.get("eos_token", ""))
        if not self.text.startswith(part):
            raise _no_prefix(count if asks else count - 1)
        return len(part)

    def _check_answer(self, number: int, turns: list[Letters]) -> None:
        """Raises ValueError where the template leaves out an answer's reasoning or tool calls."""
        message = self.messages[number]
        written = "".join(self.text[start:stop] for start, stop in turns)
        needed = {"reasoning": [str(message.get("reasoning_content", "")).strip()]}
        calls = [call.get("function", call) for call in message.get("tool_calls", [])]
        needed["tool calls"] = [call["name"] for call in calls]
        for name, texts in needed.items():
            if not all(text in written for text in texts):
                raise ValueError(
                    f"the chat template leaves out the {name} of messages[{number}]; write a "
                    'data.chat_template that has them, or "train": false in that message'
                )

    def _marked_answers(self, taught: list[bool]) -> dict[int, list[Letters]]:
        """The {% generation %} blocks of each answer."""
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(self.marks) == len(answers):
            return {answer: [mark] for answer, mark in zip(answers, self.marks, strict=True)}
        if not self.marks:
            raise ValueError(
                "the chat template has {% generation %}, but marks nothing in it; write another "
                "data.chat_template"
            )
        # Which block is whose does not matter where all are learned.
        if all(taught[answer] for answer in answers):
            return dict.fromkeys(answers, self.marks)
        raise ValueError(
            f"the chat template marks {len(self.marks)} {{% generation %}} blocks in {len(answers)} "
            'answers, so that one cannot be left out; write data.loss_on = "assistant" and no '
            '"train": false'
        )


class _Rendered:
    """The tokens of a chat's text and their letters."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.text = text
        self.tokenizer = tokenizer
        # int32 [n], and int64 [n, 2]: the letters of each
        self.ids, self.offsets = tokenizer.encode_with_offsets(text)
        self.is_special = np.isin(self.ids, list(tokenizer.special_ids))
        self._specials = np.flatnonzero(self.is_special)

    def tokens_of(self, letters: Letters) -> slice:
        """The tokens that hold any of these letters."""
        start, stop = letters
        first = np.searchsorted(self.offsets[:, 1], start, side="right")
        return slice(int(first), int(np.searchsorted(self.offsets[:, 0], stop, side="left")))

    def learn(self, letters: Letters, learned: NDArray[np.bool_], trims: bool) -> bool:
        """Set `learned` [n] for a turn and for the token that ends it.

        What follows that token within the turn, such as a line break, is not learned if `trims`. A
        turn without one ends with the next special token, even if the template writes that as the
        beginning of the next message (GLM does). Returns whether the turn is the chat's last and
        nothing ends it: the end-of-document token does then.
        """
        tokens = self.tokens_of(letters)
        end = self.turn_end(tokens)
        if end is not None:
            learned[tokens.start : (end if trims else tokens.stop)] = True
            return False
        learned[tokens] = True
        if tokens.stop == len(self.ids):
            return True
        if self.is_special[tokens.stop]:
            learned[tokens.stop] = True
        return False

    def turn_end(self, tokens: slice) -> int | None:
        """The place behind the special tokens that end a turn; None where it has none at its end.

        They follow what is written last, and are several in a row for DeepSeek's tool calls.
        """
        place = tokens.stop
        while place > tokens.start and (self.is_special[place - 1] or self._is_blank(place - 1)):
            place -= 1
        while place < tokens.stop and not self.is_special[place]:
            place += 1
        if place == tokens.stop:
            return None
        while place < tokens.stop and self.is_special[place]:
            place += 1
        return place

    def check_prefix(self, letters: int, message: int) -> None:
        """Raises ValueError unless the text up to there has the same tokens alone as in the whole.

        Special tokens are split off before anything else, so that it is enough to look at what is
        behind the last of them.
        """
        count = int(np.searchsorted(self.offsets[:, 0], letters, side="left"))
        place = int(np.searchsorted(self._specials, count)) - 1
        first = int(self._specials[place]) if place >= 0 else 0
        start = int(self.offsets[first, 0]) if count else 0
        alone = self.tokenizer.encode(self.text[start:letters])
        if not np.array_equal(alone, self.ids[first:count]):
            raise ValueError(
                f"at the beginning or end of messages[{message}] a token goes over the seam, so that "
                "a model is asked with other tokens; write a data.chat_template with a line break or "
                "special token there"
            )

    def _is_blank(self, place: int) -> bool:
        start, stop = self.offsets[place].tolist()
        return not self.text[start:stop].strip()


def _no_prefix(message: int) -> ValueError:
    return ValueError(
        f"the chat template renders the chat up to messages[{message}] otherwise alone than in the "
        "whole, so what would be learned is not what a model is asked for (templates that drop earlier "
        "reasoning do so); write data.chat_template = a file without that or with {% generation %}, "
        'or data.loss_on = "last_assistant"'
    )
