"""Prompts that stay prefixes of one another, and turns read back from tokens (kinds 13, 15, 16)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whiflash_agents.chat import Chat, Turn
from whiflash_agents.engine.errors import CheckpointError, RequestError
from whiflash_agents.models import embedded_template
from whiflash_agents.traces.schema import Message, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für einen Ort",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_", "<|endoftext|>")


@pytest.fixture(scope="session")
def chat() -> Chat:
    return Chat(
        tiny_gguf.fast_tokenizer(),
        chat_template=embedded_template("chat_template.jinja"),
        response_template=json.loads(embedded_template("response_template.json")),
    )


def other_chat(template: str, **attributes: Any) -> Chat:
    tokenizer = tiny_gguf.fast_tokenizer()
    tokenizer.chat_template = template
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return Chat(tokenizer)


def encode(chat: Chat, text: str) -> list[int]:
    return chat.tokenizer.encode(text, add_special_tokens=False)


def parse(chat: Chat, text: str, *, ended: bool = True, **options: Any) -> Turn:
    prompt = chat.prompt_ids([Message(role="user", content="hi")])
    ids = encode(chat, text) + ([2] if ended else [])
    turn = chat.parse(prompt, ids, **options)
    check_spans(turn, len(ids))
    return turn


def check_spans(turn: Turn, tokens: int) -> None:
    edges = [0, *(span.end for span in turn.spans)]
    assert [span.start for span in turn.spans] == edges[:-1]
    assert edges[-1] == tokens
    assert all(span.end > span.start for span in turn.spans)
    assert turn.reasoning_tokens <= tokens


def span_texts(chat: Chat, text: str, *, ended: bool = True) -> list[tuple[str, str]]:
    ids = encode(chat, text) + ([2] if ended else [])
    turn = chat.parse(chat.prompt_ids([Message(role="user", content="hi")]), ids)
    return [(span.kind, chat.decode(ids[span.start : span.end])) for span in turn.spans]


def call_text(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


# --- prompts ---


CONVERSATION = [
    Message(role="system", content="Sei höflich."),
    Message(role="user", content="Wie wird das Wetter?"),
    Message(
        role="assistant",
        content="\n\n  Ich sehe nach.",
        reasoning_content="Two cities.",
        tool_calls=[
            ToolCall(name="weather", arguments={"city": "Zürich", "days": 2}),
            ToolCall(name="weather", arguments="{broken"),
        ],
    ),
    Message(role="tool", content="sunny", tool_call_id="1"),
    Message(role="tool", content="日本語", tool_call_id="2"),
    Message(role="assistant", content="Sonnig."),
    Message(role="user", content="Danke"),
]


def test_prompt_shows_system_text_tools_reasoning_calls_and_results(chat: Chat) -> None:
    text = chat.decode(chat.prompt_ids(CONVERSATION, TOOLS))
    assert text.startswith("<|im_start|>system\nSei höflich.\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in text
    assert "Wetter für einen Ort" in text
    assert (
        "<|im_start|>assistant\n<think>\nTwo cities.\n</think>\n\n\n  Ich sehe nach.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {broken}\n</tool_call><|im_end|>\n'
    ) in text
    assert (
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\n日本語\n</tool_response><|im_end|>\n"
    ) in text
    assert text.endswith("<|im_start|>user\nDanke<|im_end|>\n<|im_start|>assistant\n")


def test_prompt_has_no_hidden_system_text(chat: Chat) -> None:
    text = chat.decode(chat.prompt_ids([Message(role="user", content="Hi")]))
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_without_a_system_message_get_a_system_turn(chat: Chat) -> None:
    text = chat.decode(chat.prompt_ids([Message(role="user", content="Hi")], TOOLS))
    assert text.startswith("<|im_start|>system\nYou can call these functions")


def assert_prefix_stable(
    chat: Chat, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> None:
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    later = chat.prompt_ids(messages, tools)
    for index in reversed(turns):
        earlier = chat.prompt_ids(messages[:index], tools)
        turn = chat.turn_ids(messages[:index], tools, messages[index])
        assert turn[-1] == 2
        assert later[: len(earlier) + len(turn)] == earlier + turn
        later = earlier


def test_prompt_of_a_turn_and_the_turn_begin_the_next_prompt(chat: Chat) -> None:
    assert_prefix_stable(chat, CONVERSATION, TOOLS)
    assert_prefix_stable(chat, CONVERSATION, [])


def test_white_space_at_the_beginning_of_a_turn_stays_apart_from_the_prompt(chat: Chat) -> None:
    joined = chat.tokenizer.encode("<|im_start|>assistant\n\n\n  x")
    assert joined[:3] != chat.tokenizer.encode("<|im_start|>assistant\n")  # it would merge
    messages = [
        Message(role="user", content="hi"),
        Message(role="assistant", content="\n\n  x"),
        Message(role="user", content="more"),
    ]
    assert_prefix_stable(chat, messages, [])


plain_text = st.text(
    alphabet=st.one_of(
        st.sampled_from(" \n\t<>/|{}\"'\\0123abc"), st.characters(exclude_categories=["Cs"])
    ),
    max_size=30,
).filter(lambda text: not any(mark in text for mark in MARKUP))
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from(["</tool_call>", "<tool_call>", "<think>", "</think>x", "<|im_"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abü", max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
calls = st.builds(
    ToolCall,
    name=st.text('abcé_"\\', min_size=1, max_size=8),
    arguments=st.dictionaries(st.text("abü", max_size=6), json_values, max_size=3),
)
turns = st.builds(
    Message,
    role=st.just("assistant"),
    content=st.one_of(st.none(), plain_text),
    reasoning_content=st.one_of(st.none(), plain_text),
    tool_calls=st.lists(calls, max_size=3),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=st.lists(st.tuples(turns, plain_text, st.sampled_from(["user", "tool"])), max_size=4),
    system=st.one_of(st.none(), plain_text),
    tools=st.booleans(),
)
def test_prompts_are_prefix_stable_for_any_conversation(
    chat: Chat, turns: list[tuple[Message, str, str]], system: str | None, tools: bool
) -> None:
    messages = [] if system is None else [Message(role="system", content=system)]
    messages.append(Message(role="user", content="begin"))
    for turn, answer, role in turns:
        messages += [turn, Message(role=role, content=answer)]  # type: ignore[arg-type]
    assert_prefix_stable(chat, messages, TOOLS if tools else [])


# --- reading turns back ---


def expected_reading(turn: Message) -> tuple[str | None, str | None]:
    """Content and reasoning as they come back: white space beside markers is not kept, and white
    space alone is nothing there. Text that holds markers cannot be expressed at all."""
    reasoning = (turn.reasoning_content or "").strip() or None
    content = turn.content or ""
    if turn.reasoning_content:
        content = content.lstrip()
    if turn.tool_calls:
        content = content.rstrip()
    return content or None, reasoning


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turn=turns)
def test_rendered_turn_reads_back_the_same(chat: Chat, turn: Message) -> None:
    before = [Message(role="user", content="hi")]
    ids = chat.turn_ids(before, [], turn)
    read = chat.parse(chat.prompt_ids(before), ids)
    assert (read.content, read.reasoning_content) == expected_reading(turn)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [
        (call.name, call.arguments) for call in turn.tool_calls
    ]
    assert read.invalid_tool_calls == []
    check_spans(read, len(ids))
    kinds = [span.kind for span in read.spans]
    assert kinds.count("tool_call") == len(turn.tool_calls)
    assert kinds.count("reasoning") == bool(turn.reasoning_content)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(
        st.one_of(
            st.sampled_from(
                [
                    *MARKUP,
                    '{"name": "f", "arguments": {"a": "',
                    '"}}',
                    "{",
                    "[" * 3000,
                    "9" * 5000,
                    '{"name": "f", "arguments": {"n": 1e999}}',
                    '{"name": "f", "arguments": {"s": "\\ud800"}}',
                    '{"name": ["f"]}',
                    "<|im_end|>",
                    "\n",
                    "<tool_ca",
                ]
            ),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        ),
        max_size=10,
    ),
    ended=st.booleans(),
)
def test_any_text_gives_a_turn_with_spans_that_cover_it(
    chat: Chat, pieces: list[str], ended: bool
) -> None:
    turn = parse(chat, "".join(pieces), ended=ended)
    for call in turn.tool_calls:
        json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
    assert "<|im_end|>" not in (turn.content or "")


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 600), max_size=40))
def test_any_tokens_give_a_turn_and_the_tokenizers_own_text(chat: Chat, ids: list[int]) -> None:
    check_spans(chat.parse([], ids), len(ids))
    known = [token for token in ids if token < len(chat.tokenizer)]
    assert chat.decode(known) == chat.tokenizer.decode(known, skip_special_tokens=False)
    assert chat.decode(ids) == chat.decode(known)  # beyond the vocabulary: no text


def test_text_before_between_and_after_calls_is_kept(chat: Chat) -> None:
    text = f"Erst.\n{call_text('a', {'x': 1})}\nDann.\n{call_text('b', {'y': [2]})}\nFertig."
    turn = parse(chat, text)
    assert turn.content == "Erst.\n\nDann.\n\nFertig."
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [
        ("a", {"x": 1}),
        ("b", {"y": [2]}),
    ]


def test_markers_inside_json_strings_are_text(chat: Chat) -> None:
    value = "say </tool_call> and <tool_call> and </think>|<|im_end"
    turn = parse(chat, call_text("a", {"x": value}) + "\nOK")
    assert turn.tool_calls[0].arguments == {"x": value}
    assert turn.content == "OK"


def test_arguments_as_json_text_in_a_string_are_unwrapped(chat: Chat) -> None:
    turn = parse(chat, call_text("a", '{"city": "Zürich"}'))
    assert turn.tool_calls[0].arguments == {"city": "Zürich"}


def test_call_without_arguments_is_valid(chat: Chat) -> None:
    turn = parse(chat, '<tool_call>{"name": "now"}</tool_call>')
    assert turn.tool_calls == [ToolCall(name="now", arguments={})]


def test_non_ascii_is_kept_everywhere(chat: Chat) -> None:
    turn = parse(
        chat, f"<think>\nÜberlegung 思考\n</think>\n答え 😀\n{call_text('é', {'k': '日本'})}"
    )
    assert turn.reasoning_content == "Überlegung 思考"
    assert turn.content == "答え 😀"
    assert turn.tool_calls == [ToolCall(name="é", arguments={"k": "日本"})]


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ('{"name": "bad", "arguments": {oops}}', "property name"),
        ('{"name": "bad", "arguments": [1]}', "arguments must be a JSON object"),
        ('{"name": "bad", "arguments": "text"}', "Expecting value"),
        ('{"arguments": {}}', "name must be a non-empty string"),
        ('["bad"]', "expected an object"),
        ('{"name": "bad", "arguments": {"x": NaN}}', "not JSON compliant"),
        ('{"name": "bad", "arguments": {"x": "\\ud800"}}', "surrogates"),
        ('{"name": "bad", "arguments": {"x": 123456789012345678901}}', "64-bit"),
        ('{"name": "bad", "arguments": {"x": "line\nbreak"}}', "control character"),
        ('{"name": "bad", "arguments": {}}} trailing', "Extra data"),
        ("[" * 3000, "deep"),
        ("", "Expecting value"),
    ],
)
def test_malformed_call_is_reported_beside_what_parsed(chat: Chat, inside: str, said: str) -> None:
    text = (
        f"<think>hm</think>before {call_text('good', {'a': 1})} between "
        f"<tool_call>{inside}</tool_call> after {call_text('fine', {'b': 2})}"
    )
    turn = parse(chat, text)
    assert [call.name for call in turn.tool_calls] == ["good", "fine"]
    assert turn.reasoning_content == "hm"
    assert turn.content == "before  between  after"
    (invalid,) = turn.invalid_tool_calls
    assert invalid.text == inside.strip()
    assert said in invalid.error
    assert invalid.name == ("bad" if '"bad",' in inside else None)


def test_broken_call_with_a_closing_tag_in_its_string_leaves_no_tag_behind(chat: Chat) -> None:
    text = '<tool_call>{"name": "a" "x": "</tool_call> y"}</tool_call>\nDone'
    turn = parse(chat, text)
    assert turn.content == "Done"
    assert len(turn.invalid_tool_calls) == 1


def test_forgotten_closing_tag_costs_neither_call(chat: Chat) -> None:
    turn = parse(chat, '<tool_call>{"name": "a"}\n' + call_text("b", {}))
    assert [call.name for call in turn.tool_calls] == ["a", "b"]
    assert turn.content is None


@pytest.mark.parametrize("length", range(1, 60))
def test_output_cut_anywhere_leaves_no_markup_in_content(chat: Chat, length: int) -> None:
    ids = encode(chat, f"<think>\nhm, yes\n</think>\nOK {call_text('a', {'x': '</tool_call>'})}")
    turn = chat.parse(chat.prompt_ids([Message(role="user", content="x")]), ids[:length])
    check_spans(turn, min(length, len(ids)))
    written = chat.decode(ids[:length])
    for text in (turn.content or "", turn.reasoning_content or ""):
        assert "think" not in text
        assert "tool" not in text
    if len(ids) > length and "{" in written and "}}" not in written:
        assert turn.tool_calls == []
        assert len(turn.invalid_tool_calls) == 1


def test_cut_call_says_that_it_is_cut_and_keeps_name_and_arguments(chat: Chat) -> None:
    turn = parse(chat, '<tool_call>\n{"name": "a", "arguments": {"city": "Pa', ended=False)
    (invalid,) = turn.invalid_tool_calls
    assert (invalid.name, invalid.arguments) == ("a", '{"city": "Pa')
    assert "cut off" in invalid.error


def test_cut_reasoning_is_reasoning(chat: Chat) -> None:
    turn = parse(chat, "<think>\nI wonder", ended=False)
    assert (turn.content, turn.reasoning_content) == (None, "I wonder")
    assert [span.kind for span in turn.spans] == ["reasoning"]


def test_nothing_after_the_end_of_turn_is_part_of_the_message(chat: Chat) -> None:
    ids = encode(chat, "Hi<|im_end|>\n<|im_start|>user\n" + call_text("a", {}))
    turn = chat.parse(chat.prompt_ids([Message(role="user", content="x")]), ids)
    assert (turn.content, turn.tool_calls) == ("Hi", [])
    assert [(span.kind, span.start, span.end) for span in turn.spans] == [("content", 0, len(ids))]


def test_content_without_markers_is_kept_to_the_letter(chat: Chat) -> None:
    assert parse(chat, "  indented\n").content == "  indented\n"
    assert parse(chat, "").content is None


def test_spans_hold_markers_and_the_end_of_turn(chat: Chat) -> None:
    call = call_text("weather", {"city": "Paris"})
    spans = span_texts(chat, f"<think>\nI should look.\n</think>\nFine.\n{call}\n{call}")
    assert [kind for kind, _ in spans] == ["reasoning", "content", "tool_call", "tool_call"]
    assert spans[0][1].startswith("<think>")
    assert spans[0][1].rstrip().endswith("</think>")
    assert "Fine." in spans[1][1]
    assert spans[2][1].strip() == call
    assert spans[3][1].strip() == call + "<|im_end|>"


def test_spans_of_markers_that_begin_inside_a_token_or_are_split(chat: Chat) -> None:
    whole = encode(chat, " <tool_call>")
    assert chat.tokenizer.convert_ids_to_tokens(whole)[0].startswith("Ġ<")  # begins inside a token
    spans = span_texts(chat, "a <tool_call>, x.", ended=False)
    assert spans[0] == ("content", "a")
    assert spans[1][1].startswith(" <tool_call>")
    shared = chat.tokenizer.convert_tokens_to_ids("><")  # ends one marker and begins the next
    ids = encode(chat, "<think>x</think><tool_call>{}</tool_call>")
    assert shared in ids
    token_spans = chat.parse([], ids).spans
    assert [(span.kind, span.end) for span in token_spans] == [
        ("reasoning", ids.index(shared) + 1),
        ("tool_call", len(ids)),
    ]
    # One token for each byte: the markers are split, and so are the characters around them.
    text = "日<think>語</think>😀" + call_text("é", {})
    ids = [chat.tokenizer.convert_tokens_to_ids(byte) for byte in _byte_tokens(text)]
    turn = chat.parse([], [*ids, 2])
    check_spans(turn, len(ids) + 1)
    parts = [bytes_of(text, span.start, span.end) for span in turn.spans]
    assert parts == ["日", "<think>語</think>", "😀", call_text("é", {})]
    assert (turn.content, turn.reasoning_content) == ("日😀", "語")
    assert turn.reasoning_tokens == len("<think>語</think>".encode())


def _byte_tokens(text: str) -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list(itertools.chain.from_iterable(piece for piece, _ in pieces))


def bytes_of(text: str, start: int, end: int) -> str:
    return text.encode()[start:end].decode()


def test_parsing_300_tokens_takes_less_than_5_ms(chat: Chat) -> None:
    text = "<think>\nhm, yes\n</think>\nOK\n" + call_text("weather", {"city": "Paris </tool_call>"})
    ids = (encode(chat, text) * 20)[:300]
    prompt = chat.prompt_ids(CONVERSATION, TOOLS)
    chat.parse(prompt, ids)  # fills the table of token bytes
    seconds = []
    for _ in range(20):
        begin = time.process_time()
        chat.parse(prompt, ids)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.005


# --- other models' templates ---


def test_template_that_opens_the_reasoning_itself_is_honoured() -> None:
    chat = other_chat(CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    turn = parse(chat, "I wonder\n</think>\n\nYes.")
    assert (turn.content, turn.reasoning_content) == ("Yes.", "I wonder")
    assert [span.kind for span in turn.spans] == ["reasoning", "content"]
    assert parse(chat, "cut", ended=False).reasoning_content == "cut"


def test_template_that_closes_the_reasoning_itself_leaves_content() -> None:
    empty = "assistant\n<think>\n\n</think>\n\n{% endif"
    turn = parse(other_chat(CHATML.replace("assistant\n{% endif", empty)), "\n Yes.")
    assert (turn.content, turn.reasoning_content) == ("Yes.", None)
    assert [span.kind for span in turn.spans] == ["content"]


def test_hermes_template_without_response_template_gets_ours() -> None:
    turn = parse(other_chat("{# <tool_call> #}" + CHATML), "Hm. " + call_text("a", {"x": "ü"}))
    assert turn.tool_calls == [ToolCall(name="a", arguments={"x": "ü"})]
    assert turn.content == "Hm."


def test_xml_like_calls_are_read_and_typed_by_the_tools() -> None:
    chat = other_chat("{# <tool_call>\n<function=name> #}" + CHATML)
    body = (
        "<function=weather>\n<parameter=city>\n7 ü\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>"
    )
    text = f"Look:\n<tool_call>\n{body}\n</tool_call>"
    turn = parse(chat, text, tools=TOOLS)
    assert turn.tool_calls == [ToolCall(name="weather", arguments={"city": "7 ü", "days": 2})]
    assert turn.content == "Look:"
    cut = parse(chat, text[:-30], ended=False, tools=TOOLS)
    assert (cut.tool_calls, len(cut.invalid_tool_calls)) == ([], 1)
    assert "cut off" in cut.invalid_tool_calls[0].error


def test_tokenizers_own_response_template_comes_first() -> None:
    own = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "[T]", "close": "[/T]", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\[CALL\](?P<name>\w+)\[ARGS\]",
                "close": "[/CALL]",
                "content": "json",
                "repeats": True,
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    }
    chat = other_chat(CHATML, response_template=own)
    turn = parse(chat, '[T]hm[/T]Erst [CALL]f[ARGS]{"a": "ü"}[/CALL] dann [CALL]g[ARGS]{x}[/CALL]')
    assert turn.reasoning_content == "hm"
    assert turn.content == "Erst  dann"  # such a template would lose "Erst" by itself
    assert turn.tool_calls == [ToolCall(name="f", arguments={"a": "ü"})]
    assert len(turn.invalid_tool_calls) == 1


def test_template_without_tool_markup_reads_plain_content() -> None:
    text = f"a <think> {call_text('x', {})}"
    assert parse(other_chat(CHATML), text).content == text


def test_arguments_reach_each_template_in_the_form_it_prints() -> None:
    call = "{{ m.tool_calls[0].function.arguments }}"
    prints_text = CHATML.replace("{{ m.content }}", f"{{% if m.tool_calls %}}{call}{{% endif %}}")
    prints_json = prints_text.replace("arguments }}", "arguments | tojson }}")
    messages = [
        Message(role="user", content="x"),
        Message(role="assistant", tool_calls=[ToolCall(name="f", arguments={"k": "ü"})]),
    ]
    for template in (prints_text, prints_json):
        chat = other_chat(template)
        assert '<|im_start|>assistant\n{"k": "ü"}<|im_end|>' in chat.decode(
            chat.prompt_ids(messages)
        )


def test_missing_content_is_never_printed_as_none() -> None:
    chat = other_chat(CHATML)
    messages = [
        Message(role="user", content="x"),
        Message(role="assistant", tool_calls=[ToolCall(name="f", arguments={})]),
    ]
    assert "None" not in chat.decode(chat.prompt_ids(messages))


def test_reasoning_reaches_the_template_under_its_own_name() -> None:
    chat = other_chat(CHATML.replace("{{ m.content }}", "{{ m.thinking }}|{{ m.content }}"))
    turn = Message(role="assistant", content="a", reasoning_content="why")
    assert "why|a" in chat.decode(chat.prompt_ids([Message(role="user", content="x"), turn]))


REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + CHATML
)


def test_refused_role_is_told_in_the_templates_words() -> None:
    chat = other_chat(REFUSES_SYSTEM)
    with pytest.raises(RequestError, match="System role not supported") as caught:
        chat.prompt_ids([Message(role="system", content="x"), Message(role="user", content="y")])
    assert "Roles: system, user" in str(caught.value)


def test_turn_ids_never_raise() -> None:
    chat = other_chat(REFUSES_SYSTEM)
    turn = Message(role="assistant", content="ok")
    assert chat.turn_ids([Message(role="system", content="x")], [], turn) == []


def test_turn_ids_of_a_template_that_rewrites_history_are_the_turn_alone() -> None:
    counting = "{{ messages | length }}" + CHATML
    chat = other_chat(counting)
    turn = Message(role="assistant", content="ok then")
    ids = chat.turn_ids([Message(role="user", content="x")], [], turn)
    assert chat.decode(ids) == "ok then<|im_end|>"


def test_tokenizer_without_chat_template_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no chat template.*chat_template\.jinja"):
        Chat(tiny_gguf.fast_tokenizer())


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML + "\n{% if x %}", r"line 5: [^.]*\.[^.]*\. "),
        ("{{ messages | unheard_of }}", "line 1: No filter named 'unheard_of'"),
        ("{% if tools %}{{ tools }}", "line 1: "),
    ],
)
def test_chat_template_that_cannot_be_compiled_is_refused_at_load(template: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"chat template of .* not valid: {said}.*Correct"):
        other_chat(template)


def test_broken_template_for_tools_alone_is_refused_at_load() -> None:
    with pytest.raises(CheckpointError, match="not valid: line 1"):
        other_chat({"default": CHATML, "tool_use": "{% for %}"})  # type: ignore[arg-type]


def test_template_that_refuses_a_lone_question_is_no_broken_one() -> None:
    picky = "{% if messages | length < 2 %}{{ raise_exception('two, please') }}{% endif %}"
    chat = other_chat(picky + CHATML)
    assert chat.shows_tools
    assert chat.prompt_ids([Message(role=role, content="x") for role in ("system", "user")])


def test_chat_knows_whether_its_template_shows_tools(chat: Chat) -> None:
    assert chat.shows_tools
    assert not other_chat(CHATML).shows_tools


def test_broken_tokenizer_is_named_by_its_file(tmp_path: Path) -> None:
    tokenizer = tiny_gguf.fast_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json is not valid JSON.*again"
    ) as caught:
        Chat.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "unheard-of"}}')
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*Fetch tokenizer"):
        Chat.from_pretrained(tmp_path)


def test_invalid_response_template_is_refused() -> None:
    with pytest.raises(CheckpointError, match="response template"):
        Chat(tiny_gguf.fast_tokenizer(), chat_template=CHATML, response_template={"fields": {}})


def test_chat_is_loaded_from_a_folder_with_the_models_end_tokens(tmp_path: Path) -> None:
    tokenizer = tiny_gguf.fast_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    chat = Chat.from_pretrained(tmp_path)
    assert chat.end_token_ids == {0, 2}
    assert chat.parse([], [*encode(chat, "Hi"), 0, 5]).content == "Hi"


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be loaded: there is no tokenizer\.json"):
        Chat.from_pretrained(tmp_path)


def test_vocabulary_that_is_not_byte_level_gives_the_same_message() -> None:
    """SentencePiece-like: a space before each word, bytes as tokens of their own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁Hi", "▁there", "<think>", "hm", "</think>", "▁", "▁x"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    chat = Chat(fast, chat_template="{# <think> #}" + CHATML)
    emoji = [f"<0x{byte:02X}>" for byte in "😀".encode()]
    tokens = ["<think>", "hm", *emoji, "</think>", "▁Hi", *emoji, "▁there", "</s>"]
    turn = chat.parse([], fast.convert_tokens_to_ids(tokens))
    check_spans(turn, len(tokens))
    assert (turn.reasoning_content, turn.content) == ("hm😀", "Hi😀 there")
    assert [(span.kind, span.start, span.end) for span in turn.spans] == [
        ("reasoning", 0, 7),
        ("content", 7, len(tokens)),
    ]
