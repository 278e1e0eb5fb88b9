"""Turn samples of chats into tokens, and mark which of them are learned.

What the assistant writes is in {% generation %} blocks of the template. If the template has none,
we render the messages up to an answer, and separately the messages before it with the generation
prompt. The difference is the answer. This is correct if both texts are prefixes of the whole chat,
which is checked for each answer. A token with letters of both the prompt and the answer is learned,
as in transformers and TRL.
"""

import json
import os
import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_sparse.config.sections import Data
from titan_sparse.data.chat_template import ChatTemplate, load_template
from titan_sparse.data.rows import BadSample, Message, with_argument
from titan_sparse.data.tokenizer import Encoded, SampleFormat, Tokenizer, begun

Letters = tuple[int, int]
"""[start, stop) in a text."""


class Turn(NamedTuple):
    """Letters of a text that are learned."""

    start: int
    stop: int
    written: int | None
    """where what the row gives for the message ends, before what ends the turn; None for a part of
    an answer that continues in another part"""
    is_marked: bool
    """whether the template says where it stops"""


class ChatEncoder:
    """Encodes the samples of one part of data.source; `data` is the [data] section of that part.

    model_folder: model.initial_hf. Raises ValueError, naming the key, if there is no template.
    prompt_completion needs a template only for samples of messages, so encode() raises the error
    then.
    """

    def __init__(self, data: Data, tokenizer: Tokenizer, model_folder: str = "") -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.model_folder = model_folder
        self.skipped: Counter[str] = Counter()
        """rows left out for data.bad_rows = "skip", by what is wrong with them"""
        self.notice = ""
        """a line about a template that is not used as published"""
        self._template: ChatTemplate | None = None
        self._training: ChatTemplate | None = None
        try:
            self._load()
        except ValueError:
            if data.format == "messages" or data.chat_template or data.chat_template_kwargs:
                raise
        digests = [template.digest for template in (self._template, self._training) if template]
        self.sample_format = SampleFormat(data.format, data.loss_on, "+".join(digests))

    def encode(self, text: str) -> Encoded:
        """The tokens of a sample (JSON of rows.py), closed by the end-of-document token.

        An empty text is a row that was skipped. If the template refuses the sample or does not show
        what is learned, data.bad_rows decides: the sample is skipped, or ValueError is raised that
        names the file and the row.
        """
        sample = json.loads(text) if text else {}
        try:
            if isinstance(sample.get("prompt"), str):
                return self._strings(sample["prompt"], sample["completion"])
            if sample:
                return self._messages(sample)
        except ValueError as error:
            problem = f"{sample['where']}: {error}"
            if not isinstance(error, BadSample):
                raise ValueError(problem) from error
            if self.data.bad_rows == "refuse":
                raise ValueError(
                    f'{problem}; data.bad_rows = "skip" leaves such rows out'
                ) from error
            self.skipped[re.sub(r"\[\d+\]", "", str(error))] += 1
        return self._closed(np.empty(0, dtype=np.int32), np.empty(0, dtype=bool), False)

    def _load(self) -> None:
        self._template = load_template(self.data, self.model_folder, self.tokenizer)
        for_training = self._template.for_training()
        if for_training is None:
            return
        template, family = for_training
        if family.only_marks:
            self._template = template
        elif self.data.loss_on == "assistant":
            self._training = template
        else:
            return
        self.notice = (
            f"chats are rendered by a form of {family.name}'s chat template for training, which marks "
            "what the assistant writes and keeps the reasoning of earlier answers (docs/data.md)"
        )

    def _template_for(self, taught: list[bool]) -> ChatTemplate:
        """The template of a chat. The published one is used if only the last message is learned."""
        if self._template is None:
            self._load()
        return self._training if self._training and any(taught[:-1]) else self._template

    def _strings(self, prompt: str, completion: str) -> Encoded:
        """Tokenize the prompt alone, as it is at inference. The completion is what follows."""
        begin = self.tokenizer.begin if self.data.add_bos else self.tokenizer.begin[:0]
        head = begun(self.tokenizer.encode(prompt), begin)
        whole = begun(self.tokenizer.encode(prompt + completion), begin)
        if not np.array_equal(whole[: len(head)], head):
            # A token crosses the boundary between prompt and completion.
            whole = np.concatenate([head, self.tokenizer.encode(completion)])
        learned = (np.arange(len(whole)) >= len(head)) | (self.data.loss_on == "all")
        # A completion may spell out the token that ends it, but a prompt that does goes on.
        return self._closed(whole, learned, True, start=len(head))

    def _messages(self, sample: dict[str, Any]) -> Encoded:
        messages, taught = self._taught(sample)
        chat = _Chat(self._template_for(taught), messages, sample.get("tools", []))
        rendered = _Rendered(chat.text, self.tokenizer)
        ends_open = False
        if self.data.loss_on == "all":
            learned = np.ones(len(rendered.ids), dtype=bool)
            for number, is_taught in enumerate(taught):
                if not is_taught:
                    learned[rendered.tokens_of(chat.message(number))] = False
            written = chat.written(len(messages) - 1)
            ends_open = taught[-1] and rendered.turn_end((written, len(chat.text))) is None
        else:
            learned = np.zeros(len(rendered.ids), dtype=bool)
            for turn in chat.turns(taught):
                ends_open |= rendered.learn(turn, learned)
        return self._closed(rendered.ids, learned, ends_open)

    def _taught(self, sample: dict[str, Any]) -> tuple[list[Message], list[bool]]:
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
        self, ids: NDArray[np.int32], learned: NDArray[np.bool_], learns_end: bool, start: int = 0
    ) -> Encoded:
        """Append the end-of-document token, unless it is the last one of ids[start:]."""
        end = self.tokenizer.end_of_document
        if len(ids) > start and ids[-1] == end:
            return Encoded(ids, learned)
        return Encoded(np.append(ids, np.int32(end)), np.append(learned, learns_end))


class _Chat:
    def __init__(self, template: ChatTemplate, messages: list[Message], tools: list[Any]) -> None:
        self.template = template
        self.messages = messages
        self.tools = tools
        self.is_marked = template.marks_answers(tools)
        self.text, self.marks = template.render(messages, tools)

    def turns(self, taught: list[bool]) -> list[Turn]:
        """The parts to learn of the messages that are `taught`."""
        turns = []
        marked = self._marked_answers(taught) if self.is_marked else {}
        for number, is_taught in enumerate(taught):
            if not is_taught:
                continue
            is_answer = self.messages[number]["role"] == "assistant"
            is_marked = number in marked
            if is_marked:
                parts = marked[number]
            elif is_answer:
                parts = [(self._prefix(number, True), self._prefix(number + 1, False))]
            else:
                parts = [self.message(number)]
            if is_answer:
                self._check_answer(number, parts)
            written = max(self.written(number), parts[0][0])
            last = max(start for start, _ in parts if start <= written)
            for start, stop in parts:
                ends = min(written, stop) if start == last else None
                turns.append(Turn(start, stop, ends, is_marked))
        return turns

    def written(self, number: int) -> int:
        """Letters of the text up to the end of what the row gives for a message.

        More content, another tool call, or another argument changes the text from there on. All are
        tried, because templates order them differently, and leave out some of them next to others.
        Raises BadSample if a call is left out.
        """
        letter = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in self.text)
        message = self.messages[number]
        texts = [self._with(number, content=message.get("content", "") + letter)]
        calls = message.get("tool_calls", [])
        for place, call in enumerate(calls):
            changed = [*calls]
            changed[place] = with_argument(call, letter, letter)
            texts.append(self._with(number, tool_calls=changed))
            if texts[-1] == self.text:
                raise _left_out("tool calls", number)
        if calls:
            texts.append(self._with(number, tool_calls=[*calls, calls[-1]]))
        places = [
            len(os.path.commonprefix([self.text, text])) for text in texts if text != self.text
        ]
        if calls and texts[-1] in (self.text, ""):
            # The template writes one call only. An answer without any ends in the same way.
            plain = self._with(number, content=letter, tool_calls=None)
            # Empty where the template refuses the answers to the calls without them.
            if plain:
                ending = os.path.commonprefix([self.text[::-1], plain[::-1]])
                places.append(len(self.text) - len(ending))
        return max(places, default=0)

    def _with(self, number: int, **changes: Any) -> str:
        """The text with changes in a message; empty if the template refuses them. None leaves a key
        out."""
        changed = {**self.messages[number], **changes}
        changed = {key: value for key, value in changed.items() if value is not None}
        others = [*self.messages[:number], changed, *self.messages[number + 1 :]]
        try:
            return self.template.render(others, self.tools)[0]
        except BadSample:
            return ""

    def message(self, number: int) -> Letters:
        """The place of a message, its header included."""
        start = self._prefix(number, False) if number else 0
        return start, self._prefix(number + 1, False)

    def _prefix(self, count: int, asks: bool) -> int:
        """Letters of the first `count` messages, with the generation prompt where the chat `asks`.

        Raises BadSample if they are not a prefix of the whole chat.
        """
        if count == len(self.messages) and not asks:
            return len(self.text)
        part, _ = self.template.render(self.messages[:count], self.tools, asks)
        if not self.text.startswith(part):
            # Some templates (Phi-3) close a chat wherever it ends.
            part = part.removesuffix(self.template.special_tokens.get("eos_token", ""))
        if not self.text.startswith(part):
            raise BadSample(
                f"the chat template renders the chat up to messages[{count if asks else count - 1}] "
                "otherwise alone than in the whole, so what would be learned is not what a model is "
                "asked for (templates that drop earlier reasoning do so); write data.chat_template = a "
                "file without that or with {% generation %}, data.chat_template_kwargs if the template "
                'can keep it, or data.loss_on = "last_assistant"'
            )
        return len(part)

    def _check_answer(self, number: int, turns: list[Letters]) -> None:
        """Raises BadSample if the learned part does not contain the whole answer."""
        message = self.messages[number]
        written = "".join(self.text[start:stop] for start, stop in turns)
        # Some templates take reasoning out of the content and write it anew.
        *thoughts, content = re.split("</?think>", message.get("content", ""))
        calls = [call.get("function", call) for call in message.get("tool_calls", [])]
        needed = {
            "reasoning": [str(message.get("reasoning_content", "")), *thoughts],
            "tool calls": [call["name"] for call in calls],
            "content": [content],
        }
        for name, texts in needed.items():
            if not all(text.strip() in written for text in texts):
                raise _left_out(name, number)

    def _marked_answers(self, taught: list[bool]) -> dict[int, list[Letters]]:
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(self.marks) == len(answers):
            return {answer: [mark] for answer, mark in zip(answers, self.marks, strict=True)}
        if not self.marks:
            raise BadSample(
                "the chat template has {% generation %}, but marks nothing in it; write another "
                "data.chat_template"
            )
        # If all answers are learned, it does not matter which block belongs to which answer.
        if all(taught[answer] for answer in answers):
            return dict.fromkeys(answers, self.marks)
        raise BadSample(
            f"the chat template marks {len(self.marks)} {{% generation %}} blocks in {len(answers)} "
            'answers, so that one cannot be left out; write data.loss_on = "assistant" and no '
            '"train": false'
        )


def _left_out(name: str, number: int) -> BadSample:
    return BadSample(
        f"the chat template leaves out the {name} of messages[{number}]; write a "
        'data.chat_template that has them, or "train": false in that message'
    )


class _Rendered:
    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.text = text
        self.tokenizer = tokenizer
        # int32 [n], and int64 [n, 2]: the letters of each
        self.ids, self.offsets = tokenizer.encode_with_offsets(text)
        self.is_special = np.isin(self.ids, list(tokenizer.special_ids))

    def tokens_of(self, letters: Letters) -> slice:
        """The tokens that hold any of these letters."""
        start, stop = letters
        first = np.searchsorted(self.offsets[:, 1], start, side="right")
        return slice(int(first), int(np.searchsorted(self.offsets[:, 0], stop, side="left")))

    def learn(self, turn: Turn, learned: NDArray[np.bool_]) -> bool:
        """Set `learned` [n] for a turn and for the token that ends it.

        What follows that token, such as a line break, is learned only where the template marks it.
        A turn without an end token ends with the next special token, even if that begins the next
        message (as in GLM's). Returns whether nothing but the end-of-document token can end it.
        """
        tokens = self.tokens_of((turn.start, turn.stop))
        learned[tokens] = True
        if turn.written is None:
            return False
        end = self.turn_end((turn.written, turn.stop))
        if end is not None:
            learned[end : tokens.stop] &= turn.is_marked
            return False
        end = tokens.stop
        while end < len(self.ids) and self._is_blank(end):
            end += 1
        is_last = end == len(self.ids)
        if is_last or self.is_special[end]:
            learned[tokens.stop : end + 1] = True
        return is_last

    def turn_end(self, letters: Letters) -> int | None:
        """The place after the first special tokens among the letters that follow what was written;
        None if there are none.

        There can be several of them in a row, as in DeepSeek's tool calls.
        """
        tokens = self.tokens_of(letters)
        for place in range(tokens.start, tokens.stop):
            if self.is_special[place] and self._last_letter(place) >= letters[0]:
                break
        else:
            return None
        while place < tokens.stop and self.is_special[place]:
            place += 1
        return place

    def _last_letter(self, place: int) -> int:
        """The place in the text of the last letter of a token. A special token may hold the blanks
        around it."""
        start, stop = self.offsets[place].tolist()
        return start + len(self.text[start:stop].rstrip()) - 1

    def _is_blank(self, place: int) -> bool:
        start, stop = self.offsets[place].tolist()
        return not self.text[start:stop].strip()
