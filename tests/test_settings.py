"""Settings: four sources, one tree, and everything unknown refused by name."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from whiflash_agents.embedded import default_agent
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.settings import Settings, load_settings, sections


def load(values: dict[str, Any] | None = None, **sources: Any) -> Settings:
    return load_settings(values, **{"environment": {}, **sources})


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_command_line_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    config = toml(tmp_path, "[sampling]\nmax_tokens = 1\ntop_k = 1\ntemperature = 0.5\n")
    environment = {"WHIFLASH_MAX_TOKENS": "2", "WHIFLASH_TOP_K": "2"}
    settings = load({"max_tokens": 3, "top_k": None}, config=config, environment=environment)
    assert settings.sampling.max_tokens == 3
    assert settings.sampling.top_k == 2
    assert settings.sampling.temperature == 0.5
    assert settings.sampling.top_p == 1.0


def test_field_names_are_unique_in_the_whole_tree() -> None:
    names = Counter(
        name
        for info in Settings.model_fields.values()
        for name in info.annotation.model_fields  # type: ignore[union-attr]
    )
    assert [name for name, count in names.items() if count > 1] == []
    assert set(names) == set(sections())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[sampling]\nmax_token = 1", "[sampling] max_token is not a setting (did you mean"),
        ("[samplng]\nseed = 1", "[samplng] is not a section of the settings (did you mean"),
        ("[run]\nseed = 1", "it belongs under [sampling]"),
        ("seed = 1", "belongs under [sampling]"),
        ("sampling = 3", "must be a section"),
        ("[sampling]\nmax_tokens = '3'", "[sampling] max_tokens: '3' is not valid"),
        ("[sampling]\nmax_tokens = true", "[sampling] max_tokens: True is not valid"),
        ("[sampling", "not a valid TOML file"),
    ],
)
def test_file_is_refused_with_its_name_and_the_key(
    tmp_path: Path, text: str, expected: str
) -> None:
    config = toml(tmp_path, text)
    with pytest.raises(SettingsError) as error:
        load(config=config)
    assert str(config) in str(error.value)
    assert expected in str(error.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read the settings"):
        load(config=tmp_path / "none.toml")


def test_environment_values_are_read_by_type() -> None:
    environment = {
        "WHIFLASH_STOP": '["a", "b"]',
        "WHIFLASH_ROUNDS": "true",
        "WHIFLASH_LIMIT": "7",
        "WHIFLASH_MODE": "continue",
        "WHIFLASH_TEMPERATURE": "0.25",
        "HOME": "/somewhere",
    }
    settings = load(environment=environment)
    assert settings.sampling.stop == ["a", "b"]
    assert settings.run.rounds is True
    assert settings.run.limit == 7
    assert settings.run.mode == "continue"
    assert settings.sampling.temperature == 0.25


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("WHIFLASH_MAX_TOKEN", "1", "did you mean 'WHIFLASH_MAX_TOKENS'?"),
        ("WHIFLASH_MAX_TOKENS", "many", "WHIFLASH_MAX_TOKENS: 'many' is not valid: input should"),
        ("WHIFLASH_STOP", "END", "expected a JSON list of strings"),
        ("WHIFLASH_TOP_P", "2", "environment variable WHIFLASH_TOP_P: 2.0 is not valid: expected"),
    ],
)
def test_environment_is_refused_with_the_name_of_the_variable(
    variable: str, value: str, expected: str
) -> None:
    with pytest.raises(SettingsError) as error:
        load(environment={variable: value})
    assert variable in str(error.value)
    assert expected in str(error.value)


def test_the_cache_variable_is_not_taken_for_a_setting() -> None:
    assert load(environment={"WHIFLASH_CACHE": "/somewhere"}) == Settings()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("stop", [""]),
        ("workers", -1),
        ("concurrency", 0),
        ("limit", 0),
        ("kv_tokens", 1),
        ("mode", "resume"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("target", " "),
    ],
)
def test_value_out_of_range_is_refused_with_its_option(field: str, value: Any) -> None:
    with pytest.raises(SettingsError) as error:
        load({field: value})
    assert str(error.value).startswith("--" + field.replace("_", "-") + ": ")


def test_routers_know_their_arms_and_the_networks_that_those_need() -> None:
    both = {"target": "t", "eagle3": "e", "dflash": "d"}
    assert Settings.of(router="entropy", **both).arms == ("eagle3", "dflash")
    assert Settings.of(router="entropy", **both).networks == ("eagle3", "dflash")
    assert Settings.of(router="cost-aware", target="t").arms == ("lookup",)
    with_dflash = Settings.of(router="cost-aware", target="t", dflash="d")
    assert with_dflash.arms == ("lookup", "dflash", "ddtree")
    assert with_dflash.networks == ("dflash",)
    assert Settings.of(router="cost-aware", **both).networks == ("eagle3", "dflash")
    assert Settings.of(router="none", **both).networks == ()
    with pytest.raises(SettingsError, match="needs a trained router"):
        Settings.of(router="neural", **both)


@pytest.mark.parametrize(
    ("router", "network"), [("eagle3", "eagle3"), ("dflash", "dflash"), ("ddtree", "dflash")]
)
def test_router_needs_the_weights_that_it_drafts_with(router: str, network: str) -> None:
    with pytest.raises(SettingsError, match=rf"as {network} \(--{network}\)"):
        Settings.of(router=router, target="t")
    given = Settings.of(router=router, target="t", **{network: "somewhere"})
    assert given.networks == (network,)
    with pytest.raises(SettingsError, match="expected a folder or a hub name"):
        Settings.of(**{network: " "})


@pytest.mark.parametrize("field", ["eagle3_tokens", "ddtree_nodes"])
def test_a_tree_larger_than_what_is_verified_is_refused(field: str) -> None:
    router = field.partition("_")[0]
    asked = {"router": router, "eagle3": "e", "dflash": "d", field: 65}
    with pytest.raises(SettingsError, match=f"{field}: 65 is more than max_draft_nodes=64"):
        Settings.of(**asked)
    assert Settings.of(**asked, max_draft_nodes=65)
    assert Settings.of(
        **{field: 65}, router="lookup", max_draft_nodes=3
    )  # lookup draws no such tree


def test_a_level_wider_than_its_tree_is_refused() -> None:
    with pytest.raises(SettingsError, match="eagle3_top_k: 61 is more than eagle3_tokens=60"):
        Settings.of(router="eagle3", eagle3="e", eagle3_top_k=61)


def test_settings_without_effect_are_known() -> None:
    asked = {"eagle3": "e", "ddtree_nodes": 5, "max_draft_nodes": 70, "catch_up": "eager"}
    lookup = Settings.of(router="lookup", **asked)
    assert lookup.unused_settings() == ["catch_up", "ddtree_nodes", "eagle3"]
    asked |= {"dflash": "d", "exploration": 0.1, "entropy_threshold": 1.0}
    routed = Settings.of(router="entropy", **asked)
    assert routed.unused_settings() == ["ddtree_nodes", "exploration"]
    tree = Settings.of(router="ddtree", max_backlog=4, **asked)
    unused = ["eagle3", "entropy_threshold", "exploration", "max_backlog"]
    assert tree.unused_settings() == unused


def test_the_default_agent_comes_with_its_drafters_and_routers() -> None:
    for target in (None, default_agent.NAME):
        settings = Settings.of(target=target)
        assert settings.router == "cost-aware"
        assert settings.arms == ("lookup", "eagle3", "dflash", "ddtree")
        for network in ("eagle3", "dflash"):
            assert settings.drafter(network) == str(default_agent.drafter(network))
        for router in ("neural", "cost-aware"):
            assert settings.router_weights(router) == str(default_agent.router_weights(router))
        assert settings.router_weights("entropy") is None
        assert Settings.of(target=target, router="neural").arms == ("eagle3", "dflash")


def test_drafters_of_the_default_agent_are_no_other_targets() -> None:
    for other in ({"target": "t"}, {"target": "SmolLM2-135M-Instruct"}, {"adapter": "a"}):
        settings = Settings.of(**other)
        assert settings.router == "lookup"
        assert settings.drafter("eagle3") is settings.drafter("dflash") is None
        assert settings.router_weights("neural") is settings.router_weights("cost-aware") is None


def test_a_drafter_given_for_the_default_agent_takes_the_place_of_its_own() -> None:
    settings = Settings.of(dflash="d")
    assert settings.drafter("dflash") == "d"
    assert settings.drafter("eagle3") == str(default_agent.drafter("eagle3"))
    assert settings.router_weights("cost-aware") is None  # it was trained for the agent's own
    assert Settings.of(dflash="d", router_weights="w").router_weights("cost-aware") == "w"


@pytest.mark.parametrize(
    ("drafters", "router"),
    [({}, "lookup"), ({"eagle3": "e"}, "cost-aware"), ({"dflash": "d"}, "cost-aware")],
)
def test_the_router_is_cost_aware_where_there_are_neural_drafters(
    drafters: dict[str, str], router: str
) -> None:
    assert Settings.of(target="t", **drafters).router == router
    assert Settings.of(target="t", router="none", **drafters).router == "none"


def test_unknown_router_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"did you mean 'lookup'\?"):
        Settings.of(router="lokup")


def test_numbered_gpu_is_refused_where_ray_assigns_them() -> None:
    with pytest.raises(SettingsError, match="Ray assigns the GPUs"):
        Settings.of(device="cuda:1")
    assert Settings.of(device="cuda:1", workers=0).model.device == "cuda:1"


def test_top_logprobs_without_logprobs_is_refused_rather_than_ignored() -> None:
    with pytest.raises(SettingsError, match="has no effect without logprobs"):
        Settings.of(top_logprobs=2)


def test_settings_of_names_fields_as_python_does() -> None:
    with pytest.raises(SettingsError, match=r"^max_tokens: 0 is not valid: expected at least 1"):
        Settings.of(max_tokens=0)
    with pytest.raises(SettingsError, match="'max_token' is not a setting"):
        Settings.of(max_token=1)


def test_settings_of_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHIFLASH_MAX_TOKENS", "3")
    assert Settings.of().sampling.max_tokens == 512


@pytest.mark.parametrize(
    "load_wrong",
    [
        lambda folder: load({"max_tokens": 0}),
        lambda folder: load({"concurrency": 0}),
        lambda folder: load(environment={"WHIFLASH_MAX_TOKENS": "0"}),
        lambda folder: load(environment={"WHIFLASH_MAX_TOKENS": "x"}),
        lambda folder: load(config=toml(folder, "[sampling]\nmax_tokens = 0")),
        lambda folder: load(config=toml(folder, "[sampling]\nmax_tokens = 'x'")),
    ],
)
def test_all_refusals_of_a_value_look_alike(tmp_path: Path, load_wrong: Any) -> None:
    with pytest.raises(SettingsError) as error:
        load_wrong(tmp_path)
    source, value, why = re.fullmatch(r"(.+): (\S+) is not valid: (.+)", str(error.value)).groups()  # type: ignore[union-attr]
    assert source.endswith(("max_tokens", "MAX_TOKENS", "max-tokens", "concurrency"))
    assert value in ("0", "'x'")
    assert why.startswith(("expected", "input should"))


@pytest.mark.parametrize("name", ["prompt", "weights", "max_new", "batch_size"])
def test_a_name_that_is_near_to_none_gets_no_suggestion(name: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(environment={f"WHIFLASH_{name.upper()}": "1"})
    assert "did you mean" not in str(error.value)
    with pytest.raises(SettingsError) as error:
        load({name: 1})
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("router", ["speculative", "trees", "no", "greedy"])
def test_no_router_is_suggested_that_is_far_away(router: str) -> None:
    with pytest.raises(SettingsError, match="no router of this name") as error:
        Settings.of(router=router)
    assert "did you mean" not in str(error.value)
