"""Scripted workloads for routers: who drafts best where, and what that costs."""

from __future__ import annotations

from dataclasses import replace

from routing_simulation import ScriptedArm, Workload

GPU = {1: 20.0, 64: 24.0, 512: 60.0}  # milliseconds of a forward, by tokens: the weights dominate
CPU = {1: 30.0, 65: 190.0}  # every token costs
EAGLE = ScriptedArm(9.0, 0.5, nodes=60, depth=8)
FLASH = ScriptedArm(4.0, 0.3, nodes=15, depth=15)
TREE = ScriptedArm(5.0, 0.6, nodes=32, depth=15)
LOOKUP = ScriptedArm(0.1, 0.1, nodes=10, depth=10)
TWO = {"eagle3": EAGLE, "dflash": FLASH}
THREE = {"eagle3": EAGLE, "dflash": FLASH, "lookup": LOOKUP}
FOUR = {"eagle3": EAGLE, "dflash": FLASH, "ddtree": TREE, "lookup": LOOKUP}

PROSE = {"eagle3": 4.2, "dflash": 2.4, "ddtree": 2.8, "lookup": 1.2}
JSON = {"eagle3": 5.5, "dflash": 7.0, "ddtree": 7.6, "lookup": 3.5}
COPY = {"eagle3": 5.0, "dflash": 5.0, "ddtree": 5.5, "lookup": 8.0}
NOISE = {"eagle3": 1.3, "dflash": 1.2, "ddtree": 1.25, "lookup": 1.02}


def _networks(**own: str) -> dict[str, ScriptedArm]:
    return {name: replace(arm, network=own.get(name)) for name, arm in FOUR.items()}


NEURAL = _networks(eagle3="eagle3", dflash="dflash", ddtree="dflash")
CHEAP = {"eagle3": (0.5, 0.01), "dflash": (0.5, 0.01)}
DEAR = {"eagle3": (4.0, 0.03), "dflash": (4.0, 0.03)}


def _one(regime: str) -> list[list[tuple[str, float]]]:
    return [[(regime, 1000.0)]]


STATIONARY = [
    Workload("chains of drafts", FOUR, {"copy": COPY}, _one("copy"), chains=True, steps=4000),
    Workload("chains on a CPU", FOUR, {"noise": NOISE}, _one("noise"), verify=CPU, chains=True),
    Workload("prose", FOUR, {"prose": PROSE}, _one("prose")),
    Workload("json", FOUR, {"json": JSON}, _one("json"), steps=4000),
    Workload("copy", FOUR, {"copy": COPY}, _one("copy"), steps=4000),
    Workload("nothing helps on a CPU", FOUR, {"noise": NOISE}, _one("noise"), verify=CPU),
    Workload("nothing helps on a GPU", FOUR, {"noise": NOISE}, _one("noise"), GPU, steps=9000),
    Workload("trees cost on a CPU", FOUR, {"prose": PROSE}, _one("prose"), verify=CPU),
    Workload("one arm", {"lookup": LOOKUP}, {"copy": COPY}, _one("copy"), steps=2000),
    Workload(
        "wrong table",
        FOUR,
        {"json": JSON},
        _one("json"),
        wrong={"eagle3": 0.3, "ddtree": 4.0, "verify": 0.5},
    ),
]
TOLD = [
    Workload(
        "spans told by entropy",
        TWO,
        {"prose": PROSE, "json": JSON},
        [[("prose", 120.0), ("json", 120.0)]],
        steps=9000,
        entropy={"prose": 3.0, "json": 0.3},
    ),
    Workload(
        "short spans told by entropy",
        FOUR,
        {"prose": PROSE, "copy": COPY},
        [[("prose", 30.0), ("copy", 30.0)]],
        steps=9000,
        entropy={"prose": 3.0, "copy": 0.3},
    ),
    Workload(
        "three kinds told by entropy",
        THREE,
        {"prose": PROSE, "json": JSON, "copy": COPY},
        [[("prose", 200.0), ("copy", 80.0), ("json", 150.0)]],
        steps=9000,
        entropy={"prose": 3.0, "json": 0.3, "copy": 0.03},
    ),
    Workload(
        "drafting helps where entropy is low",
        {"dflash": FLASH, "lookup": LOOKUP},
        {"noise": NOISE, "copy": COPY},
        [[("noise", 60.0), ("copy", 300.0)]],
        verify=CPU,
        steps=9000,
        entropy={"noise": 3.0, "copy": 0.05},
    ),
    Workload(
        "entropy that tells nothing",
        FOUR,
        {"a": JSON, "b": JSON},
        [[("a", 40.0), ("b", 40.0)]],
        steps=5000,
        entropy={"a": 0.05, "b": 2.5},
    ),
]
UNTOLD = [
    Workload(
        "long spans",
        THREE,
        {"prose": PROSE, "copy": COPY},
        [[("prose", 24000.0), ("copy", 100000.0)]],
        steps=14000,
    ),
    Workload(
        "long spans where drafting helps in one",
        THREE,
        {"noise": NOISE, "json": JSON},
        [[("noise", 2500.0), ("json", 98000.0)]],
        verify=CPU,
        steps=14000,
    ),
    Workload(
        "an arm gets slow",
        FOUR,
        {"json": JSON},
        _one("json"),
        slowed={"ddtree": 4.0},
    ),
    Workload(
        "two arms get slow",
        FOUR,
        {"prose": PROSE},
        _one("prose"),
        steps=8000,
        slowed={"eagle3": 5.0, "ddtree": 3.0},
    ),
]
BATCHES = [
    Workload(
        "four alike",
        FOUR,
        {"json": JSON},
        [[("json", 900.0)]] * 4,
        steps=2500,
    ),
    Workload(
        "three of different kinds",
        THREE,
        {"prose": PROSE, "copy": COPY, "noise": NOISE},
        [[(kind, 900.0)] for kind in ("prose", "copy", "noise")],
        steps=5000,
    ),
    Workload(
        "four on a CPU",
        FOUR,
        {"prose": PROSE, "copy": COPY},
        [[("prose", 900.0)], [("copy", 900.0)]] * 2,
        verify=CPU,
        steps=3000,
    ),
    Workload(
        "four with spans told by entropy",
        TWO,
        {"prose": PROSE, "json": JSON},
        [[("prose", 150.0 + 20 * i), ("json", 150.0)] for i in range(4)],
        entropy={"prose": 3.0, "json": 0.3},
        steps=4000,
    ),
    Workload(
        "short sequences",
        FOUR,
        {"prose": PROSE},
        [[("prose", 900.0)]] * 2,
        lifetime=400.0,
        steps=4000,
    ),
]
LAGGING = [
    Workload(
        "cheap switches",
        NEURAL,
        {"prose": PROSE, "json": JSON},
        [[("prose", 100.0), ("json", 100.0)]],
        catch_up=CHEAP,
        steps=6000,
        entropy={"prose": 3.0, "json": 0.3},
    ),
    Workload(
        "switches too dear for short spans",
        NEURAL,
        {"prose": PROSE, "json": JSON},
        [[("prose", 30.0), ("json", 30.0)]],
        catch_up={"eagle3": (60.0, 0.1), "dflash": (1.0, 0.05)},
        steps=6000,
        entropy={"prose": 3.0, "json": 0.3},
    ),
    Workload(
        "dear switches worth their while",
        NEURAL,
        {"prose": PROSE, "json": JSON},
        [[("prose", 800.0), ("json", 800.0)]],
        catch_up=DEAR,
        steps=9000,
        entropy={"prose": 3.0, "json": 0.3},
    ),
    Workload(
        "long spans with dear switches",
        NEURAL,
        {"prose": PROSE, "json": JSON},
        [[("prose", 16000.0), ("json", 30000.0)]],
        catch_up=DEAR,
        steps=10000,
    ),
]
EVIDENT = [
    Workload(
        "quotes told by evidence, too short to be learnt",
        THREE,
        {"prose": PROSE | {"lookup": 1.0}, "copy": COPY},
        [[("prose", 24.0), ("copy", 16.0)]],
        verify=CPU,
        evidence={"lookup": {"prose": 0, "copy": 4}},
        steps=6000,
    ),
    Workload(
        "weak and strong evidence for two sequences",
        THREE,
        {"noise": NOISE | {"lookup": 1.2}, "copy": COPY},
        [[("noise", 9.0), ("copy", 24.0)], [("copy", 40.0), ("noise", 12.0)]],
        evidence={"lookup": {"noise": 2, "copy": 4}},
        steps=8000,
    ),
]
WORKLOADS = [*STATIONARY, *TOLD, *UNTOLD, *BATCHES, *LAGGING, *EVIDENT]
