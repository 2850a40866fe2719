"""The data of the default agent (`examples/default_agent`): traces, conversion, evaluation."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny_folder

FOLDER = Path(__file__).parent.parent / "examples" / "default_agent"
sys.path.insert(0, str(FOLDER))

import bfcl  # noqa: E402
import evaluate  # noqa: E402
import make_traces  # noqa: E402
from catalogue import HELD_OUT_DOMAINS, HELD_OUT_TOOLS, TOOLS, TRAINING_TOOLS  # noqa: E402
from chains import HELD_OUT_CHAINS, TRAINING_CHAINS  # noqa: E402
from gold import gold_of_trace  # noqa: E402
from phrasing import FRESH_WRAPPERS, WRAPPERS, droppable, fill, fill_answer, named  # noqa: E402
from schema_check import equal, problems  # noqa: E402

from whiflash_agents.traces import TraceProblem, validate  # noqa: E402

Record = dict[str, Any]


@pytest.fixture(scope="module")
def train() -> list[Record]:
    return make_traces.training_traces(400, seed=3)


@pytest.fixture(scope="module")
def held_out() -> list[Record]:
    return make_traces.held_out_traces(60, seed=3)


def calls_of(record: Record) -> Iterator[tuple[int, str, Record]]:
    """(index of the message, name, arguments) of every call."""
    for at, message in enumerate(record["messages"]):
        for call in message.get("tool_calls", []):
            function = call["function"]
            yield at, function["name"], json.loads(function["arguments"])


def leaves(value: Any) -> Iterator[Any]:
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from leaves(item)
        else:
            yield item


def test_traces_depend_on_seed_and_id_only(train: list[Record], held_out: list[Record]) -> None:
    assert make_traces.training_traces(50, seed=3) == train[:50]
    assert make_traces.held_out_traces(60, seed=3) == held_out
    assert make_traces.training_traces(50, seed=4) != train[:50]


def test_every_trace_is_read_without_a_warning(
    train: list[Record], held_out: list[Record], tmp_path: Path
) -> None:
    file = tmp_path / "traces.jsonl"
    make_traces.write(file, [*train, *held_out])
    told: list[TraceProblem] = []
    report = validate([file], sink=told.append)
    assert told == []
    assert report.total("traces") == len(train) + len(held_out)


def test_calls_satisfy_the_schemas_of_their_tools(
    train: list[Record], held_out: list[Record]
) -> None:
    made = 0
    for record in (*train, *held_out):
        schemas = {tool["function"]["name"]: tool["function"] for tool in record.get("tools", [])}
        for _, name, arguments in calls_of(record):
            assert problems(arguments, schemas[name]["parameters"]) == [], record["id"]
            made += 1
    assert made > 400


def test_arguments_stand_in_the_conversation(train: list[Record], held_out: list[Record]) -> None:
    for record in (*train, *held_out):
        tools = json.dumps(record.get("tools", []), ensure_ascii=False)
        for at, _, arguments in calls_of(record):
            before = [message["content"] or "" for message in record["messages"][:at]]
            for value in leaves(arguments):
                if isinstance(value, bool):
                    continue
                text = value if isinstance(value, str) else json.dumps(value)
                said = any(text in content for content in before)
                assert said or f'"{text}"' in tools, (record["id"], text)


def test_reasoning_names_every_tool_that_is_called(
    train: list[Record], held_out: list[Record]
) -> None:
    for record in (*train, *held_out):
        for message in record["messages"]:
            if message["role"] == "assistant":
                thought = message["reasoning_content"]
                assert 4 <= len(thought.split()) <= 110, thought
                for call in message.get("tool_calls", []):
                    assert call["function"]["name"] in thought


def test_training_covers_all_kinds_and_offers_one_to_six_tools(train: list[Record]) -> None:
    assert {record["kind"] for record in train} == {*make_traces._KINDS, "chain"}
    counts = Counter(len(record.get("tools", [])) for record in train)
    assert set(counts) == set(range(7))
    plain = [record for record in train if "tools" not in record]
    assert {record["kind"] for record in plain} == {"chat"}


def test_held_out_domains_phrasings_and_kinds_are_not_in_training(
    train: list[Record], held_out: list[Record]
) -> None:
    own = {tool.does for tool in HELD_OUT_TOOLS}
    assert len(HELD_OUT_DOMAINS) >= 3
    assert not own & {tool.does for tool in TRAINING_TOOLS}
    for record in train:
        assert not own & {tool["function"]["description"] for tool in record.get("tools", [])}
    parts = {part: [r for r in held_out if r["category"] == part] for part in
             ("seen", "phrasing", "domain", "kind")}  # fmt: skip
    assert all(len(records) == 60 for records in parts.values())
    asked = {
        tool["function"]["description"] for r in parts["domain"] for tool in r.get("tools", [])
    }
    assert own <= asked
    assert not set(WRAPPERS) & set(FRESH_WRAPPERS)
    openings = tuple(text.split("{")[0] for text in FRESH_WRAPPERS if text[0] != "{")
    said = [m["content"] for r in train for m in r["messages"] if m["role"] == "user"]
    assert not any(text.startswith(openings) for text in said)
    fresh = [m["content"] for r in parts["phrasing"] for m in r["messages"] if m["role"] == "user"]
    assert any(text.startswith(openings) for text in fresh)
    assert {record["kind"] for record in parts["kind"]} == {"correction"}
    assert "correction" not in {record["kind"] for record in train}


@pytest.mark.parametrize("tool", TOOLS.values(), ids=lambda tool: tool.name)
def test_every_request_sets_the_required_parameters_and_every_answer_can_be_filled(
    tool: Any,
) -> None:
    rng = Random(1)
    assert not set(tool.requests) & set(tool.fresh)
    names = {param.name for param in tool.params}
    for template in (*tool.requests, *tool.fresh):
        assert named(template) <= names

        def draw(name: str) -> Any:
            return tool.param(name).values.draw(rng)

        def required(name: str) -> bool:
            return tool.param(name).required

        for _ in range(4):
            text, values = fill(template, draw, required, rng)
            assert set(tool.required) <= values.keys(), template
            assert not set("[]{}") & set(text)
            assert all(values[name].text in text for name in values if values[name].text)
        for name in droppable(template):
            assert name not in fill(template, draw, required, rng, drop=name)[1]
        needed = {name: values[name] for name in tool.required}
        _, facts = tool.run(needed, rng)
        for answer in tool.answers:
            assert "{" not in fill_answer(answer, needed, facts)
    for template in tool.pairs:
        sides = {side: {name[2:] for name in named(template) if name.startswith(side)}
                 for side in ("1.", "2.")}  # fmt: skip
        shared = {name for name in named(template) if "." not in name}
        assert sides["1."] == sides["2."] != set()
        assert set(tool.required) <= sides["1."] | shared <= names


@pytest.mark.parametrize("chain", [*TRAINING_CHAINS, *HELD_OUT_CHAINS], ids=lambda c: c.requests[0])
def test_every_chain_gives_both_calls_what_they_require(chain: Any) -> None:
    first, second = TOOLS[chain.first], TOOLS[chain.second]
    assert set(chain.links.values()) <= first.result.keys()
    for request in chain.requests:
        given = named(request)
        assert {f"1.{name}" for name in first.required} <= given
        known = {name[2:] for name in given if name[0] == "2"} | {*chain.links, *chain.same}
        assert set(second.required) <= known


def row_of(trace_id: str, turn: int, message: Record, invalid: int = 0) -> Record:
    choice = {"message": message, "finish_reason": "stop"}
    return {
        "custom_id": f"{trace_id}#{turn}",
        "response": {"body": {"choices": [choice]}},
        "error": None,
        "whiflash": {"invalid_tool_calls": [{"text": "{"}] * invalid},
    }


def test_recorded_turns_score_all(held_out: list[Record]) -> None:
    gold = {r["id"]: gold_of_trace(r, r["category"], r["kind"]) for r in held_out}
    verdicts = []
    for record in held_out:
        turns = [message for message in record["messages"] if message["role"] == "assistant"]
        for turn, message in enumerate(turns):
            verdicts.append(evaluate.judge(row_of(record["id"], turn, message), gold))
    scores = evaluate.report(verdicts, "category")
    assert set(scores) == {"seen", "phrasing", "domain", "kind", "all"}
    for group in scores.values():
        assert [group[name] for name in ("valid", "names", "exact", "loose")] == [1.0] * 4
    assert scores["all"]["silent"] == 1.0
    assert scores["all"]["calling"] + scores["all"]["not calling"] == len(verdicts)
    assert evaluate.table(scores).count("100.0 %") >= 20


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "place": {"type": "object", "properties": {"zip": {"type": "string"}}},
            },
            "required": ["city"],
        },
    },
}
GOLD = {
    "t": {
        "category": "x",
        "kind": "y",
        "tools": [WEATHER],
        "turns": [
            [
                {
                    "name": "get_weather",
                    "arguments": {
                        "city": ["Oslo", "Oslo, Norway"],
                        "days": [3, ""],
                        "place": [{"zip": ["0150", "0151"]}, ""],
                    },
                }
            ],
            [],
        ],
    }
}


def made(arguments: Any, name: str = "get_weather", count: int = 1) -> Record:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"function": {"name": name, "arguments": text}}
    return {"content": None, "tool_calls": [call] * count}


@pytest.mark.parametrize(
    ("message", "right"),
    [
        (made({"city": "Oslo"}), "valid names exact loose"),
        (made({"city": "Oslo, Norway", "days": 3.0}), "valid names exact loose"),
        (made({"city": "Oslo", "place": {"zip": "0151"}}), "valid names exact loose"),
        (made({"city": "oslo norway"}), "valid names loose"),
        (made({"city": "Oslo", "place": {"zip": "0152"}}), "valid names"),
        (made({"city": "Rome"}), "valid names"),
        (made({"city": "Oslo", "unit": "c"}), "valid names"),  # not asked for
        (made({"city": "Oslo"}, count=2), "valid"),
        (made({"days": 3}), "names"),
        (made({"city": "Oslo", "unit": "kelvin"}), "names"),
        (made({"city": "Oslo", "colour": "red"}), "names"),
        (made({"city": "Oslo", "days": True}), "names"),
        (made('{"city": '), ""),
        (made("[1]"), "names"),
        (made({"city": "Oslo"}, name="weather"), ""),
        ({"content": "It rains."}, ""),
    ],
)
def test_mistakes_are_counted_as_mistakes(message: Record, right: str) -> None:
    verdict = evaluate.judge(row_of("t", 0, message), GOLD)
    found = [n for n in ("valid", "names", "exact", "loose") if getattr(verdict, n)]
    assert found == right.split()
    assert verdict.expects_call


def test_a_call_where_none_is_expected_is_not_silent() -> None:
    assert evaluate.judge(row_of("t", 1, {"content": "No."}), GOLD).silent
    assert not evaluate.judge(row_of("t", 1, made({"city": "Oslo"})), GOLD).silent
    assert not evaluate.judge(row_of("t", 1, {"content": "No."}, invalid=1), GOLD).silent


def test_invalid_calls_and_failed_rows_are_wrong_and_cut_turns_are_counted() -> None:
    broken = evaluate.judge(row_of("t", 0, made({"city": "Oslo"}), invalid=1), GOLD)
    assert not any((broken.valid, broken.names, broken.exact, broken.loose))
    failed = row_of("t", 1, {}) | {"response": None, "error": {"type": "X"}, "whiflash": {}}
    assert not evaluate.judge(failed, GOLD).silent
    cut = row_of("t", 0, {"content": ""})
    cut["response"]["body"]["choices"][0]["finish_reason"] = "length"
    assert evaluate.figures([evaluate.judge(cut, GOLD)])["cut"] == 1
    with pytest.raises(SystemExit, match="row other#0 has no gold"):
        evaluate.judge(row_of("other", 0, {}), GOLD)
    with pytest.raises(SystemExit, match="row t#2 has no gold"):
        evaluate.judge(row_of("t", 2, {}), GOLD)


def test_true_is_not_one_and_lists_agree_by_element() -> None:
    assert equal([1, {"a": 2.0}], [1.0, {"a": 2}])
    assert not equal(True, 1)
    assert not equal([1], [1, 2])
    assert problems([1, "x"], {"type": "array", "items": {"type": "integer"}}, "a") == [
        "a[1]: 'x' is not of type integer"
    ]


# Three records in the form of the leaderboard, written for this test.
ONE = {
    "id": "one",
    "question": [
        [{"role": "user", "content": "Heat the sauna to 80.5 degrees for Mia, mode eco."}]
    ],
    "function": [
        {
            "name": "sauna.heat",
            "description": "Heats the sauna. It takes a while.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "degrees": {"type": "float"},
                    "who": {"type": "String", "optional": True},
                    "mode": {"type": "string", "default": "full"},
                    "steam": {"type": "Boolean"},
                    "options": {"type": "HashMap", "properties": {"wood": {"type": "any"}}},
                    "times": {"type": "tuple", "items": {"type": "long"}},
                },
                "required": ["degrees"],
            },
        }
    ],
}
ONE_TRUTH = [
    {
        "sauna.heat": {
            "degrees": [80.5, 80],
            "who": ["", "Mia"],
            "mode": ["eco", ""],
            "steam": [True, ""],
            "options": [{"wood": ["birch"]}],
            "times": [[1.0, 2]],
        }
    }
]
TWO = {
    "id": "two",
    "question": [
        [
            {"role": "system", "content": "You count."},
            {"role": "user", "content": "Count the sheep and the goats."},
        ]
    ],
    "function": [
        {
            "name": "count",
            "description": "Count animals",
            "parameters": {"type": "dict", "properties": {"animal": {"type": "string"}}},
        }
    ],
}
TWO_TRUTH = [{"count": {"animal": ["sheep"]}}, {"count": {"animal": ["goats", "goat"]}}]
THREE = {**TWO, "id": "three", "question": [[{"role": "user", "content": "Sing a song."}]]}


def test_leaderboard_records_become_traces_with_json_schemas_and_gold() -> None:
    example = bfcl.convert(ONE, ONE_TRUTH, "live_simple", 0)
    assert isinstance(example, bfcl.Example)
    function = example.trace["tools"][0]["function"]
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "degrees": {"type": "number"},
            "who": {"type": "string"},
            "mode": {"type": "string", "default": "full"},
            "steam": {"type": "boolean"},
            "options": {"type": "object", "properties": {"wood": {}}},
            "times": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["degrees"],
    }
    turn = example.trace["messages"][-1]
    [call] = turn["tool_calls"]
    # `steam` may be missing and the request does not say it; 1.0 is written as the integer it is.
    assert json.loads(call["function"]["arguments"]) == {
        "degrees": 80.5, "who": "Mia", "mode": "eco", "options": {"wood": "birch"}, "times": [1, 2],
    }  # fmt: skip
    assert "1.0" not in call["function"]["arguments"]
    assert "sauna.heat" in turn["reasoning_content"]
    assert "heats the sauna." in turn["reasoning_content"]
    assert "Not given: steam." in turn["reasoning_content"]
    gold = {example.gold["id"]: example.gold}
    verdict = evaluate.judge(row_of("bfcl-one", 0, turn), gold)
    assert verdict.exact
    other = made({"degrees": 80, "options": {"wood": "birch"}, "times": [1, 2]}, "sauna.heat")
    assert evaluate.judge(row_of("bfcl-one", 0, other), gold).exact


def test_leaderboard_records_with_several_calls_or_none() -> None:
    two = bfcl.convert(TWO, TWO_TRUTH, "parallel", 0)
    three = bfcl.convert(THREE, [], "irrelevance", 0)
    assert isinstance(two, bfcl.Example)
    assert isinstance(three, bfcl.Example)
    assert [message["role"] for message in two.trace["messages"]] == ["system", "user", "assistant"]
    assert [arguments for _, _, arguments in calls_of(two.trace)] == [
        {"animal": "sheep"},
        {"animal": "goats"},
    ]
    assert "two calls" in two.trace["messages"][-1]["reasoning_content"]
    turn = three.trace["messages"][-1]
    assert "tool_calls" not in turn
    assert "none of my functions fits" in turn["content"]
    swapped = {"content": None, "tool_calls": two.trace["messages"][-1]["tool_calls"][::-1]}
    assert evaluate.judge(row_of("bfcl-two", 0, swapped), {"bfcl-two": two.gold}).exact
    assert evaluate.judge(row_of("bfcl-three", 0, turn), {"bfcl-three": three.gold}).silent


def test_every_one_of_several_calls_has_to_be_right() -> None:
    two = bfcl.convert(TWO, TWO_TRUTH, "parallel", 0)
    assert isinstance(two, bfcl.Example)
    for animals, right in (("goat sheep", True), ("sheep cows", False), ("sheep sheep", False)):
        calls = [made({"animal": name}, "count")["tool_calls"][0] for name in animals.split()]
        message = {"content": None, "tool_calls": calls}
        verdict = evaluate.judge(row_of("bfcl-two", 0, message), {"bfcl-two": two.gold})
        assert verdict.names
        assert verdict.exact is right


def test_leaderboard_records_that_cannot_be_used_tell_why() -> None:
    answered = {
        **TWO,
        "question": [[{"role": "assistant", "content": "Hm."}, TWO["question"][0][1]]],
    }
    assert bfcl.convert(answered, TWO_TRUTH, "parallel", 0) == "holds answers of another assistant"
    wrong = [{"count": {"animal": [7]}}]
    assert bfcl.convert(TWO, wrong, "parallel", 0) == "gold does not satisfy the schema"
    assert "not offered" in str(bfcl.convert(TWO, [{"sum": {}}], "parallel", 0))


def test_a_tenth_of_ids_and_three_categories_are_held_out() -> None:
    ids = [f"simple_{n}" for n in range(2000)]
    by_hash = [int(hashlib.sha1(id.encode()).hexdigest(), 16) % 10 == 0 for id in ids]
    assert [bfcl.is_held_out(id, "simple_python") for id in ids] == by_hash
    assert 150 < sum(by_hash) < 250
    for category in ("live_parallel", "live_parallel_multiple", "multi_turn_long_context"):
        assert all(bfcl.is_held_out(id, category) for id in ids[:30])


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """An archive with the files of the wheel, which hold the records above."""
    files: dict[str, list[Record]] = {
        f"{folder}BFCL_v4_{category}": []
        for category in (*bfcl.WITH_CALLS, *bfcl.WITHOUT_CALLS)
        for folder in ("", "possible_answer/")
    }
    files["BFCL_v4_parallel"] = [TWO]
    files["possible_answer/BFCL_v4_parallel"] = [{"id": "two", "ground_truth": TWO_TRUTH}]
    files["BFCL_v4_irrelevance"] = [THREE, {**THREE, "id": "four", "function": []}]
    long = {**TWO, "id": "long", "path": ["MathAPI.count", "MathAPI.count"]}
    long["question"] = [[{"role": "user", "content": "How many sheep, how many goats?"}], []]
    long["involved_classes"] = ["MathAPI"]
    quiet = {**long, "id": "quiet"}
    files["BFCL_v4_multi_turn_long_context"] = [long, quiet]
    files["possible_answer/BFCL_v4_multi_turn_long_context"] = [
        {"id": "long", "ground_truth": [["count('sheep')", "count(animal='goats')"], []]},
        {"id": "quiet", "ground_truth": [[], ["count('sheep')"]]},
    ]
    files |= {f"multi_turn_func_doc/{file}": [] for file in bfcl._CLASS_FILES.values()}
    files["multi_turn_func_doc/math_api"] = TWO["function"]
    path = tmp_path / bfcl.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        for name, records in files.items():
            text = "\n".join(json.dumps(record) for record in records)
            archive.writestr(f"bfcl_eval/data/{name}.json", text)
    return path


def test_first_turns_of_long_conversations_are_read_without_running_them(wheel: Path) -> None:
    conversion = bfcl.convert_wheel(wheel, 0)
    assert [example.trace["id"] for example in conversion.examples] == [
        "bfcl-two", "bfcl-three", "bfcl-long",
    ]  # fmt: skip
    assert conversion.left_out == {
        "no functions, or two of the same name": 1,
        "nothing to call": 1,
    }
    long = conversion.examples[-1]
    assert long.held_out
    assert [arguments["animal"] for _, _, arguments in calls_of(long.trace)] == ["sheep", "goats"]


def test_questions_of_held_out_prompts_are_not_trained_on(wheel: Path) -> None:
    held_out = next(f"x{n}" for n in range(99) if bfcl.is_held_out(f"x{n}", "irrelevance"))
    shouted = [[{"role": "user", "content": "SING  a song."}]]
    again = {**THREE, "id": held_out, "question": shouted}
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["bfcl_eval/data/BFCL_v4_live_irrelevance.json"] = json.dumps(again).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    conversion = bfcl.convert_wheel(wheel, 0)
    ids = [example.trace["id"] for example in conversion.examples]
    assert "bfcl-three" not in ids
    assert f"bfcl-{held_out}" in ids
    assert conversion.left_out["asked in a held-out prompt too"] == 1


def test_a_wheel_with_another_hash_is_refused(wheel: Path) -> None:
    with pytest.raises(SystemExit, match=f"expected {bfcl.SHA256}"):
        bfcl.fetch_wheel(wheel.parent)


def test_scripts_write_the_three_files_and_score_them(
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bfcl, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    target = str(tiny_folder.save(tmp_path / "tiny"))
    data = tmp_path / "data"
    options = ["--train", "30", "--held-out", "3", "--target", target, "--bfcl", str(wheel.parent)]
    limits = ["--max-prompt-tokens", "1500", "--max-response-tokens", "400"]
    for output in (data, tmp_path / "again"):
        argv = ["make_traces.py", "--output", str(output), *options, *limits]
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(str(FOLDER / "make_traces.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "prompt tokens: mean" in told
    for name in ("train.jsonl", "held_out.jsonl", "gold.jsonl"):
        assert (data / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    held_out = evaluate.read_lines(data / "held_out.jsonl")
    train = evaluate.read_lines(data / "train.jsonl")
    dropped = int(told.split(" traces dropped")[0].split("\n")[-1])
    assert 0 < dropped < 30
    assert len(train) + len(held_out) + dropped == 30 + 12 + 3
    rows = []
    for record in held_out:
        turns = [message for message in record["messages"] if message["role"] == "assistant"]
        rows += [row_of(record["id"], turn, message) for turn, message in enumerate(turns)]
    make_traces.write(tmp_path / "rows.jsonl", rows)
    argv = ["evaluate.py", str(tmp_path / "rows.jsonl"), "--gold", str(data / "gold.jsonl")]
    monkeypatch.setattr(sys, "argv", [*argv, "--json", str(tmp_path / "figures.json")])
    runpy.run_path(str(FOLDER / "evaluate.py"), run_name="__main__")
    [scores] = json.loads((tmp_path / "figures.json").read_text()).values()
    assert scores["all"]["exact"] == 1.0
    assert scores["bfcl multi_turn_long_context"]["calling"] == 1
    assert "bfcl multi_turn_long_context" in capsys.readouterr().out
