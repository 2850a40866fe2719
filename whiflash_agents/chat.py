"""Messages to prompt tokens, and generated tokens back to a message.

`Chat` joins a tokenizer with its chat template (`prompt_format.py`) and its response template
(`response_format.py`, `turn.py`). It knows nothing of the model's weights, and needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import regex  # type: ignore[import-untyped]

from whiflash_agents.engine.errors import CheckpointError, RequestError

from .models import embedded_template
from .prompt_format import PromptFormat
from .response_format import ResponseFormat
from .token_text import TokenTexts
from .traces.schema import Message
from .turn import InvalidToolCall, Span, Turn, read_turn

__all__ = ["Chat", "InvalidToolCall", "Span", "Turn"]

_TAIL_TOKENS = 64  # a generation prompt is a few tokens; more of the prompt is read if need be


class Chat:
    """The conversation format of one model.

    `end_token_ids` are the tokens that end a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str = "the model",
        chat_template: str | None = None,
        response_template: dict[str, Any] | None = None,
        end_token_ids: Collection[int] = (),
    ) -> None:
        """`end_token_ids` are added to the tokenizer's EOS; the rest is as in `from_pretrained`."""
        self.tokenizer = tokenizer
        self._prompts = PromptFormat(tokenizer, name, chat_template)
        if response_template is None:
            response_template = getattr(tokenizer, "response_template", None)
        if response_template is None:
            response_template = _matching_response_template(self._prompts)
        try:
            self._format = ResponseFormat(response_template, tokenizer)
        except (ValueError, KeyError, TypeError, AttributeError, regex.error) as error:
            raise CheckpointError(
                f"the response template of {name} is not valid: {error}"
            ) from error
        own_end = getattr(tokenizer, "eos_token_id", None)
        self.end_token_ids = frozenset(end_token_ids) | ({own_end} - {None})
        self._texts = TokenTexts(tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        chat_template: str | None = None,
        response_template: dict[str, Any] | None = None,
    ) -> Chat:
        """Load the tokenizer in the folder `path`.

        A template that is not given is the tokenizer's own. Without a response template of its own
        it gets the one that fits its chat template: JSON between `<tool_call>` tags, the XML-like
        `<function=...>` form, or plain text (with `<think>` where the chat template knows it).

        Raises:
            CheckpointError: no tokenizer can be loaded, it has no chat template, or a template is
                not valid.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Exception as error:  # tokenizers raises plain Exceptions
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = _broken_tokenizer_file(Path(path)) or lines[0].rstrip(".: ")
            raise CheckpointError(
                f"the tokenizer in {path} cannot be loaded: {reason}. Fetch tokenizer.json and "
                "tokenizer_config.json again, or save them with save_pretrained"
            ) from error
        return cls(
            tokenizer,
            name=Path(path).name,
            chat_template=chat_template,
            response_template=response_template,
            end_token_ids=_end_tokens_in(Path(path)),
        )

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template writes tools into the prompt; some models know none."""
        return self._prompts.shows_tools

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """The prompt for the assistant's next turn after `messages`.

        Where the template allows it, the prompt of one turn is a prefix of the prompt of the next.

        Raises:
            RequestError: the model's chat template refuses the conversation.
        """
        return self._encode(self._prompts.render(messages, tools, generation_prompt=True))

    def turn_ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], turn: Message
    ) -> list[int]:
        """The tokens of the recorded assistant `turn`, as the model would have produced them after
        `prompt_ids(messages, tools)`, with the end-of-turn token. Empty if the template gives no
        way to tell; never raises, because it only feeds drafters."""
        try:
            before = self._prompts.render(messages, tools, generation_prompt=True)
            after = self._prompts.render([*messages, turn], tools, generation_prompt=False)
        except RequestError:
            return []
        opening, anchor = self._prompts.generation_prompt, self._prompts.turn_anchor
        if after.startswith(before):
            text = after[len(before) :]
        elif anchor and anchor in after:
            # The template rewrites history; at least the turn itself can be told apart.
            text = after[after.rindex(anchor) + len(anchor) :].removeprefix(opening[len(anchor) :])
        else:
            return []
        ids = self._ids(text)
        ends = [index for index, token_id in enumerate(ids) if token_id in self.end_token_ids]
        return ids[: ends[0] + 1] if ends else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of the tokens; special tokens are kept."""
        return self._texts.decode(token_ids).text

    def parse(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        *,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Turn:
        """The message that the tokens generated after `prompt_ids` hold; any tokens give one.

        What follows the first end-of-turn token is not part of the message. `tools` types the
        arguments of formats that write them as bare text; JSON arguments are left as they are.
        White space around markers is dropped; content without markers is kept to the letter.
        """
        end = next((i for i, token in enumerate(token_ids) if token in self.end_token_ids), None)
        written = self._texts.decode(token_ids)
        return read_turn(written, self._turn_beginning(prompt_ids), end, self._format, tools)

    def _turn_beginning(self, prompt_ids: Sequence[int]) -> str:
        """What the template wrote of this turn before the model did, such as `<think>`."""
        size = _TAIL_TOKENS
        while True:
            tail = self._texts.decode(prompt_ids[-size:]).text
            beginning = self._format.turn_beginning(tail)
            if beginning is not None or size >= len(prompt_ids):
                return beginning or ""
            size *= 8

    def _encode(self, text: str) -> list[int]:
        """Tokens of a rendered prompt. It is cut after each generation prompt, because that is
        where a prompt ended when the turn behind it was generated: a newline of the template and
        white space at the beginning of a turn must not become one token."""
        cut = self._prompts.generation_prompt
        parts = [text]
        if cut and self._cutting_is_harmless:
            parts = text.split(cut)
            parts = [part + cut for part in parts[:-1]] + parts[-1:]
        ids: list[int] = []
        for part in parts:
            if part:
                ids += self._ids(part)
        return ids

    @cached_property
    def _cutting_is_harmless(self) -> bool:
        """Whether text after a cut is encoded as it is in the middle (SentencePiece vocabularies
        put a space before it)."""
        cut = self._prompts.generation_prompt
        return self._ids(cut) + self._ids("x") == self._ids(cut + "x")

    def _ids(self, text: str) -> list[int]:
        # Not verbose: a prompt beyond the model's context is refused by the engine, by name.
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)


def _matching_response_template(prompts: PromptFormat) -> dict[str, Any]:
    text = prompts.template_text
    if "<tool_call>" in text:
        file = "response_template_xml.json" if "<function=" in text else "response_template.json"
        template = json.loads(embedded_template(file))
    else:
        plain = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
        template = {"fields": {"content": plain}}
        if "<think>" in text:
            thinking = {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"}
            template["fields"]["reasoning_content"] = thinking
    template.pop("start_anchor", None)
    if prompts.turn_anchor:
        template["start_anchor"] = prompts.turn_anchor
    else:
        template["start_anchor_pattern"] = r"\Z"  # the prompt holds nothing of the turn
    return template


def _broken_tokenizer_file(folder: Path) -> str | None:
    """What is wrong with the first file of a tokenizer that is missing or no JSON, if any is."""
    if not (folder / "tokenizer.json").is_file() and not any(folder.glob("*.model")):
        return "there is no tokenizer.json"
    for path in (*folder.glob("tokenizer*.json"), *folder.glob("*tokens*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return f"{path.name} is not valid JSON: {error}"
    return None


def _end_tokens_in(folder: Path) -> set[int]:
    """End-of-turn tokens beside the tokenizer's EOS, from the model's own files."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue  # a tokenizer without a model beside it
        values = value if isinstance(value, list) else [value]
        found |= {token for token in values if isinstance(token, int)}
    return found
