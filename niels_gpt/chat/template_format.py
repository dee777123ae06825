"""The chat format of a tokenizer of others: its Jinja template, or a simple one for a base model without a template.

The ids are those of transformers' `apply_chat_template`, with two exceptions. Special strings in messages are encoded
as text, so that a message cannot forge a turn. And where a token would reach from the end of a prompt into the reply,
the text is cut there, because the model never sees that token when it replies.

Replies are found by rendering turn by turn: the prompt for a reply must be the start of the conversation with the reply
in it, which must be the start of all longer conversations. A template for which that does not hold is refused for
training; it still gives prompts.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from niels_gpt.chat.format import (
    ChatPrompt,
    EncodedChat,
    Messages,
    check_continues,
    find_replies,
    system_messages,
)
from niels_gpt.chat.template_process import TemplateProcess, TemplateRefused
from niels_gpt.chat.transcript import STOPS, escape_content, first_kept, role_and_content
from niels_gpt.tokenizer import ForeignTokenizer

TRAINING_DATE = "2024-07-26T00:00:00"
"""What `strftime_now` shows in conversations that are learned: the ids of a cache do not depend on the day."""
TURN_IDS = 8
"""Ids that a turn is assumed to take besides its content, when turns are dropped."""
CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TRANSCRIPT = """\
{{ START }}{% for message in messages %}{{ message.role }}: {{ message.content }}\
{% if message.role == 'assistant' %}{{ END }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}assistant:{% endif %}"""
"""START and END stand for string literals: the start of a document, and the token that ends a reply."""
_MARKS = [(chr(0x10_0000 + number), chr(0x10_0001 + number)) for number in range(0, 0x4000, 2)]
"""Private characters, of which two that no message contains mark special strings while a template is rendered."""


class NotMaskable(ValueError):
    """A template or a conversation in which replies cannot be told from the rest."""


class _Turns(NamedTuple):
    """How replies begin and end."""

    start: tuple[int, ...]
    ends: tuple[int, ...]


class TemplateFormat:
    """The chat format of a tokenizer of others. Raises ValueError for a template with a syntax error, when used."""

    def __init__(self, tokenizer: ForeignTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.special_token_ids().values())
        source = tokenizer.templates.get("default")
        self._variables = dict(tokenizer.special_variables)
        self.is_default = source is None
        """Whether the tokenizer has no template, so that ours is used."""
        self.stops: tuple[str, ...] = ()
        """See `ChatFormat.stops`."""
        self.start: tuple[int, ...] = ()
        """See `ChatFormat.start`."""
        if source is None and {"<|im_start|>", "<|im_end|>"} <= tokenizer.special_token_ids().keys():
            source = CHATML
        elif source is None:
            names = {i: name for name, i in tokenizer.special_token_ids().items() if name not in ("eot", "bos")}
            start = "".join(names.get(i, "") for i in tokenizer.document_start)
            source, self.stops = TRANSCRIPT, STOPS
            for name, text in (("START", start), ("END", names[tokenizer.end_ids[0]])):
                source = source.replace(f"{{{{ {name} }}}}", f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}")
        self._process = TemplateProcess(source, where=tokenizer.where)
        strings = [text for text in tokenizer.special_token_ids() if text not in ("eot", "bos")]
        self._beginnings = frozenset(text[:n] for text in strings for n in range(1, len(text)))

    @property
    def template(self) -> str:
        """The Jinja template, which other programs can render, too."""
        return self._process.source

    # --- what a reply is -------------------------------------------------------------------------

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a reply: those of the tokenizer, and what the template writes after one."""
        try:
            ends = self._turns.ends
        except NotMaskable:
            ends = ()
        return tuple(dict.fromkeys([*self._tokenizer.end_ids, *ends]))

    @property
    def reply_start(self) -> tuple[int, ...]:
        """The ids after which a reply begins. Raises ValueError for a template that cannot be masked."""
        return self._turns.start

    @property
    def reply_ends(self) -> tuple[int, ...]:
        """The ids that the template writes after a reply. Raises as `reply_start`."""
        return self._turns.ends

    @cached_property
    def _turns(self) -> _Turns:
        """How replies begin and end, from plain conversations. Raises NotMaskable.

        One question ends in a space, which can become one token with what the template writes next.
        """
        first = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine, thanks."}]
        second = [{"role": "user", "content": "Good.\nAnd now"}, {"role": "assistant", "content": "We go on."}]
        third = [{"role": "user", "content": "Go on. "}, {"role": "assistant", "content": "There is no more."}]
        prompts, ends = [], []
        for messages in (first, second, third, [*first, *second]):
            encoded = self._encode(messages)
            prompts += [encoded.ids[:begin] for begin, _ in encoded.replies]
            ends += [encoded.ids[end - 1] for _, end in encoded.replies]
        shortest = min(map(len, prompts))
        same = next((n for n in range(shortest) if len({ids[-1 - n] for ids in prompts}) > 1), shortest)
        if not same:
            raise NotMaskable(f"the chat template of {self._process.where} writes nothing before a reply to tell it by")
        return _Turns(tuple(prompts[0][len(prompts[0]) - same :]), tuple(dict.fromkeys(ends)))

    # --- conversations ---------------------------------------------------------------------------

    def check(self, text: str) -> None:
        """Raise ValueError for text that is not encodable."""
        self._tokenizer.encode_as_text(text)

    def encode(self, messages: Messages) -> EncodedChat:
        """See `ChatFormat.encode`. Raises NotMaskable if replies cannot be found, here or in the ids alone."""
        turns = self._turns
        encoded = self._encode(messages)
        if find_replies(np.array(encoded.ids), turns.start, turns.ends) != encoded.replies:
            raise NotMaskable("a message contains what the chat template writes before a reply")
        return encoded

    def _encode(self, messages: Messages) -> EncodedChat:
        """Return a conversation with the replies that turn-by-turn rendering finds."""
        marked = _Marked(messages, self)
        replies = [number for number, message in enumerate(marked.messages) if message["role"] == "assistant"]
        calls = [(marked.messages, False)]
        for number in replies:
            calls += [(marked.messages[:number], True), (marked.messages[: number + 1], False)]
        text, *others = self._render(calls, TRAINING_DATE)
        prompts, turns = others[::2], others[1::2]
        for number, prompt, turn in zip(replies, prompts, turns, strict=True):
            self._check_turn(marked.messages[number]["content"], prompt, turn, text)
        ids = marked.encode(text)
        begins = [marked.encode(prompt) for prompt in prompts]
        if any(ids[: len(begin)] != begin for begin in begins):  # a token reaches from a prompt into its reply
            ids = []
            cuts = [0, *map(len, prompts), len(text)]
            for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
                if number:
                    begins[number - 1] = list(ids)
                ids += marked.encode(text[begin:end], inside=number > 0)
        found = []
        for begin in map(len, begins):
            ends = [i + 1 for i in range(begin, len(ids)) if ids[i] in self._special_ids]
            if not ends:
                raise NotMaskable(
                    f"the chat template of {self._process.where} writes no special token after a reply, so a model "
                    "could not learn to end one"
                )
            found.append((begin, ends[0]))
        return EncodedChat(ids, found)

    def _check_turn(self, content: str, prompt: str, turn: str, text: str) -> None:
        """Raise NotMaskable unless a reply stands between the same text in all renderings."""
        where = f"the chat template of {self._process.where} cannot be masked"
        if not turn.startswith(prompt):
            raise NotMaskable(f"{where}: the prompt for a reply is not the start of the conversation with the reply")
        if not text.startswith(turn):
            raise NotMaskable(f"{where}: it writes an earlier turn differently in a longer conversation")
        written = turn[len(prompt) :].lstrip()
        if not written.startswith(content.strip()):
            between = written.partition(content.strip())[0] if content.strip() in written else written
            raise NotMaskable(f"{where}: it writes {between[:60]!r} between the prompt and the reply")

    # --- prompts ---------------------------------------------------------------------------------

    def fit(
        self, messages: Messages, limit: int, keep: int | None = None, *, continue_last: bool = False
    ) -> ChatPrompt:
        """See `ChatFormat.fit`. A conversation is cut before a user's turn: templates expect one first."""
        if continue_last:
            check_continues(messages)
        for number, message in enumerate(messages):
            role_and_content(message, number)
        system = system_messages(messages)
        prompt = self._prompt(messages, continue_last)
        if len(prompt.ids) <= limit:
            return prompt
        sizes = [len(self._tokenizer.encode_as_text(message["content"])) + TURN_IDS for message in messages]
        first = first_kept(sizes, system, limit, keep)
        last = len(messages) - (2 if continue_last and len(messages) - system > 1 else 1)
        while True:
            while first < last and messages[first]["role"] == "assistant":
                first += 1
            prompt = self._prompt([*messages[:system], *messages[first:]], continue_last)
            if len(prompt.ids) <= limit or first >= last:
                return prompt
            first += 1

    def _prompt(self, messages: Messages, continue_last: bool) -> ChatPrompt:
        marked = _Marked(messages, self)
        now = datetime.datetime.now().isoformat()
        head = marked.messages[: system_messages(messages)]
        if continue_last:
            prompt, turn = self._render([(marked.messages[:-1], True), (marked.messages, False)], now)
            content = marked.messages[-1]["content"].strip()
            end = turn.rfind(content) if content else len(prompt)
            if end < 0:
                raise ValueError(
                    f"the chat template of {self._process.where} changes the reply that is to be continued"
                )
            text = turn[: end + len(content)]
        else:
            (text,) = self._render([(marked.messages, True)], now)
        return ChatPrompt(marked.encode(text), self._pinned(marked, head, text, now))

    def _pinned(self, marked: _Marked, head: list[dict[str, str]], text: str, now: str) -> int:
        """Return the number of ids of the system message; 0 if the template does not write it alone."""
        try:
            (system,) = self._render([(head, False)], now)
        except TemplateRefused:
            return 0
        return len(marked.encode(system)) if system and text.startswith(system) else 0

    # --- rendering -------------------------------------------------------------------------------

    def _render(self, calls: Sequence[tuple[list[dict[str, str]], bool]], now: str) -> list[str]:
        """Return the text of each (messages, add_generation_prompt)."""
        variables = self._variables | {"tools": None, "documents": None}
        return self._process.render(
            [variables | {"messages": messages, "add_generation_prompt": prompt} for messages, prompt in calls], now
        )


class _Marked:
    """Messages in which special strings are marked; `encode` turns text rendered from them into ids."""

    def __init__(self, messages: Messages, owner: TemplateFormat) -> None:
        self._owner, self._tokenizer = owner, owner._tokenizer
        contents = []
        for number, message in enumerate(messages):
            role, content = role_and_content(message, number)
            try:
                self._tokenizer.encode_as_text(content)
            except ValueError as err:
                raise ValueError(f"message {number} ({role}): {err}") from None
            contents.append(escape_content(content) if owner.stops else content)
        known = "".join([*contents, owner._process.source])
        self._open, self._close = next(pair for pair in _MARKS if not any(mark in known for mark in pair))
        self._any = False
        self.messages = [
            {"role": message["role"], "content": self._mark(content)}
            for message, content in zip(messages, contents, strict=True)
        ]

    def _mark(self, content: str) -> str:
        """Return a content with marks around special strings, and after what the next text could make one."""
        marked = self._tokenizer.special_pattern.sub(lambda match: f"{self._open}{match[0]}{self._close}", content)
        if self._tokenizer.normalizes_special and content.strip():
            ids = self._tokenizer.encode(content)
            if not self._owner._special_ids.isdisjoint(ids):  # by a normalizer: lower case, for example
                core = content.strip()
                begin = content.index(core)
                marked = f"{content[:begin]}{self._open}{core}{self._close}{content[begin + len(core) :]}"
        text = marked.rstrip()
        longest = max(map(len, self._owner._beginnings), default=0)
        if any(text[-n:] in self._owner._beginnings for n in range(1, min(longest, len(text)) + 1)):
            marked = f"{text}{self._open}{self._close}{marked[len(text) :]}"
        self._any = self._any or marked != content
        return marked

    def encode(self, text: str, *, inside: bool = False) -> list[int]:
        """Return the ids of rendered text: marked strings as text, all others as the tokenizer encodes them.

        Raises ValueError if the template has cut a marked string.
        """
        tokenizer = self._tokenizer
        if not self._any:
            return tokenizer.encode_inside(text) if inside else tokenizer.encode(text)
        ids: list[int] = []
        started = inside
        for number, piece in enumerate(re.split(f"{self._open}([^{self._open}{self._close}]*){self._close}", text)):
            if self._open in piece or self._close in piece:
                raise ValueError("the chat template cuts a special string out of a message: remove it from the message")
            if piece and number % 2:
                ids += tokenizer.encode_inside(piece, as_text=True) if started else tokenizer.encode_as_text(piece)
            elif piece:
                ids += tokenizer.encode_inside(piece) if started else tokenizer.encode(piece)
            started = started or bool(piece)
        return ids
