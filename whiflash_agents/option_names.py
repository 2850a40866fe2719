"""Messages of training in the words of its command line.

The engine and the plan of a training name their own fields, as they must in Python. Who typed a
command knows options: `peak_learning_rate=0.0` is told as `--learning-rate=0.0`, and a fingerprint
that differs as the texts or the target that it is of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from whiflash_agents.engine.errors import Change, ChangedError, SettingsError, WhiFlashError
from whiflash_agents.settings import Settings, option_name, sections

# Fields whose options have another name.
_OTHERWISE = {
    "peak_learning_rate": "--learning-rate",
    "num_layers": "--layers",
    "mask_token_id": "--mask-token",
    "draft_vocab_size": "--draft-vocab",
    "autocast": "--dtype",
}
_ALIKE = (
    *("epochs", "texts_per_batch", "learning_rate", "minutes", "checkpoint_minutes", "held_out"),
    *("max_length", "concurrency", "responses", "features", "feature_layers", "init"),
    *("warm_start", "steps", "draft_vocab", "block_size", "mask_token", "anchors", "objective"),
    *("state_size", "rank", "weight", "unigram_weight", "bottleneck", "seed"),
)
_KIND, _OF_KIND = "drafter.kind", ("drafter.", "network.")
_BEGINNINGS = {"warm start": "--warm-start", "random weights": "--no-warm-start"}
_ANOTHER = ": another drafter"
_TEXTS = {"texts": "the texts", "turns": "the turns that texts are made of"}
# What is told by a fingerprint or a name, and is no single option.
_THINGS = {
    "target": "the target (--target, --adapter, --dtype)",
    "fingerprint": "the target's config or weights",
    "layers": "--feature-layers",
    _KIND: "the kind of drafter",
}
_VOCABULARY = "a draft vocabulary of "
_OTHER_KIND = re.compile(r"give it as \w+ \(--[^)]*\), or give the folder of another drafter")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


def in_options(
    error: WhiFlashError, *, family: str, head: bool, settings: Settings | None = None
) -> WhiFlashError:
    """`error` with a message that names options.

    Args:
        family: `eagle3` or `dflash`: what drafter is trained, or begun with.
        head: whether a head is trained, whose drafter is given as `--dflash`.
        settings: those of the run, if they could be loaded: who set a field of them is told.
    """
    begin = option_name(family) if head else "--init"
    names = {**{field: option_name(field) for field in _ALIKE}, **_OTHERWISE, "init": begin}
    if isinstance(error, ChangedError):
        lines = change_lines(error.changes, names)
        if head and len(lines) > 1:
            # A head begins as its sizes, the seed and the texts have it: what else changed is why.
            lines = [line for line in lines if line != f"{begin}{_ANOTHER}"]
        return WhiFlashError(error.worded(lines))
    origin = None if settings is None else settings.origin_of("mode")
    names["mode"] = "--mode" if origin in (None, "--mode") else f"{origin}: mode"
    text = str(error)
    if isinstance(error, SettingsError):  # others tell of files, which may hold any word
        text = _spelled(text, names)
    if text.startswith(_VOCABULARY):
        text = f"--draft-vocab: {text}"
    # A drafter that is looked for is named by the option that other commands have for it, and one
    # of the other kind is offered to them.
    text = _OTHER_KIND.sub(f"name the folder of another drafter ({begin})", text)
    return WhiFlashError(text.replace(f"{family} ({option_name(family)})", begin, 1))


def change_lines(changes: Sequence[Change], names: Mapping[str, str]) -> list[str]:
    """What changed, one line for each thing that the user can change.

    Args:
        names: of options, by field.
    """
    lines, follows = [], []
    if any(change.name == _KIND for change in changes):  # all else of it differs with the kind
        changes = [c for c in changes if c.name == _KIND or not c.name.startswith(_OF_KIND)]
    for change in changes:
        first, _, field = change.name.partition(".")
        last = field.rpartition(".")[2] or first
        if first in _TEXTS:
            lines.append(f"{_TEXTS[first]}: {_other_texts(first, changes)}")
        elif first == "begin":
            lines.append(_other_beginning(change, names["init"]))
        elif first == "network" and last not in names:
            follows.append(f"the drafter's {last}: {change.then!r}, now {change.now!r}")
        else:
            thing = _THINGS.get(change.name) or names.get(last)
            if thing is None:
                thing = option_name(last) if last in sections() else change.name
            lines.append(f"{thing}: {_values(change)}")
    return list(dict.fromkeys(lines or follows))


def _other_texts(kind: str, changes: Sequence[Change]) -> str:
    for change in changes:
        if change.name == f"{kind}.count":
            return f"{change.then}, now {change.now}"
    return "as many, but others"


def _other_beginning(change: Change, init: str) -> str:
    then, now = (_BEGINNINGS.get(value, init) for value in (change.then, change.now))
    return f"{init}{_ANOTHER}" if then == now else f"{then}, now {now}"


def _values(change: Change) -> str:
    values = (change.then, change.now)
    if any(isinstance(value, str) and _FINGERPRINT.fullmatch(value) for value in values):
        return "another"
    then, now = (
        ",".join(map(str, value)) if isinstance(value, list) else str(value) for value in values
    )
    return f"{then}, now {now}"


def _spelled(text: str, names: Mapping[str, str]) -> str:
    """`text` with options for fields, where these are: before `=`, or anywhere if the name can be
    no word of a sentence. Parts of paths are left as they are."""
    fields = "|".join(sorted(names, key=len, reverse=True))
    found = re.compile(rf"(?<![\w/.\\'\"-])({fields})(?![\w/\\-]|\.\w)(=?)")

    def spell(match: re.Match[str]) -> str:
        field, equals = match.groups()
        return names[field] + equals if equals or "_" in field else match.group()

    text = found.sub(spell, text)
    return re.sub(r"(?<=--feature-layers=)\[([\d, -]*)\]", _without_spaces, text)


def _without_spaces(match: re.Match[str]) -> str:
    return match.group(1).replace(" ", "")
