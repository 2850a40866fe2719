"""Finding models: the embedded default's first start and later starts, folders, hub names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf

from whiflash_agents import models
from whiflash_agents.embedded import default_agent, default_target
from whiflash_agents.engine.errors import CheckpointError, ModelNotFoundError
from whiflash_agents.gguf_conversion import convert_gguf
from whiflash_agents.models import cache_dir, resolve_model


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    return tiny_gguf.tiny_llama()


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, tiny_model: Any) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tiny_gguf.write_gguf(path, tiny_model)
    return path


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, gguf_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(gguf_file, folder)
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, gguf_file: Path) -> Path:
    path = tmp_path_factory.mktemp("wheel") / default_target.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, default_target.GGUF_MEMBER)
    return path


@pytest.fixture
def cache(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the pinned checksum is that of the small wheel."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(default_target, "WHEEL_SHA256", digest)
    monkeypatch.setattr(default_target, "NEEDED_BYTES", 1)
    monkeypatch.setenv("WHIFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakeDownload:
    """Stands in for pip: copies `source`, after telling how far it is."""

    def __init__(self, source: Path, fails: BaseException | None = None) -> None:
        self.source, self.fails, self.calls = source, fails, 0

    def __call__(self, target: Path, scratch: Path, on_bytes: Callable[[int], None]) -> None:
        self.calls += 1
        on_bytes(1000)
        if self.fails is not None:
            (scratch / "half").write_bytes(b"x" * 1000)
            raise self.fails
        shutil.copy(self.source, target / default_target.WHEEL)


# --- conversion ---


def test_converted_weights_are_the_original_ones_in_bfloat16(
    converted: Path, tiny_model: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(
        converted, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = loaded.state_dict()
    for name, value in tiny_model.state_dict().items():
        assert torch.equal(state[name], value.to(torch.bfloat16)), name


def test_converted_model_gives_the_logits_of_the_original(converted: Path, tiny_model: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        ours, original = loaded(ids).logits, tiny_model(ids).logits
    # Rotary order, rope theta and the norm's epsilon would each shift this by far more.
    assert (ours - original).abs().max() < 0.03 * original.abs().max()


def test_conversion_agrees_with_transformers_own_reading(gguf_file: Path, converted: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = LlamaForCausalLM(AutoConfig.from_pretrained(converted))
    theirs = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)
    ours = load_file(converted / "model.safetensors")
    assert ours.keys() == theirs["tensors"].keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs["tensors"][name].to(torch.bfloat16)), name


def test_tied_embeddings_are_stored_once(converted: Path) -> None:
    from safetensors import safe_open

    with safe_open(converted / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dict
    assert json.loads((converted / "config.json").read_text())["tie_word_embeddings"] is True


def test_converted_config_keeps_context_norm_and_rope(converted: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(converted)
    assert config.max_position_embeddings == 256
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert GenerationConfig.from_pretrained(converted).eos_token_id == 2


@pytest.mark.parametrize(
    "text",
    [
        "Größe 日本語 😀 naïve",
        "  two  spaces\n\n\tand a tab ",
        "<|im_start|>user\nHi<|im_end|>\n",
        "<tool_call>\n{}\n</tool_call>",
        "",
    ],
)
def test_converted_tokenizer_round_trips(converted: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert ids == tiny_gguf.trained_tokenizer().encode(text).ids


def test_converted_tokenizer_splits_digits_and_knows_special_tokens(converted: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("in 2024: 3.14"))
    assert [token for token in tokens if token.strip("Ġ").isdigit()] == list("2024314")
    assert tokenizer.encode("<|im_end|>") == [2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"architecture": "gemma"}, "gemma"),
        ({"pre_tokenizer": "qwen2"}, "qwen2"),
        ({"leave_out": "blk.1.attn_k.weight"}, "model.layers.1.self_attn.k_proj.weight"),
    ],
)
def test_unknown_gguf_is_refused_by_name(
    tmp_path: Path, tiny_model: Any, options: dict[str, str], named: str
) -> None:
    path = tmp_path / "other.gguf"
    tiny_gguf.write_gguf(path, tiny_model, **options)
    with pytest.raises(CheckpointError, match=named):
        convert_gguf(path, tmp_path / "out")


def test_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(CheckpointError, match=r"x\.gguf is not a readable GGUF file"):
        convert_gguf(path, tmp_path / "out")


# --- the embedded default's first and later starts ---


def test_first_start_prepares_and_later_starts_fetch_nothing(
    cache: Path, wheel: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    download = FakeDownload(wheel)
    folder = default_target.install(cache, fetch=download)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors"}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "manifest.json"}
    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading (92 MB): 100 %" in err
    assert "converting: 100 %" in err
    assert default_target.install(cache, fetch=download) == folder
    assert download.calls == 1
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        folder.name,
        folder.name + ".lock",
    ]


def test_later_start_needs_no_lock_so_a_read_only_cache_works(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = default_target.install(cache, fetch=FakeDownload(wheel))

    def refuse(_: Path) -> None:
        raise AssertionError("took the lock")

    monkeypatch.setattr(default_target, "_lock", refuse)
    assert default_target.install(cache, fetch=FakeDownload(wheel)) == folder


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ModelNotFoundError("no network")])
def test_interrupted_download_leaves_nothing_and_is_done_again(
    cache: Path, wheel: Path, failure: BaseException
) -> None:
    with pytest.raises(type(failure)):
        default_target.install(cache, fetch=FakeDownload(wheel, fails=failure))
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []
    assert default_target.install(cache, fetch=FakeDownload(wheel)).is_dir()


def test_leftovers_of_a_killed_process_are_replaced(cache: Path, wheel: Path) -> None:
    partial = cache / "models" / f"smollm2-135m-instruct-v{default_target.CONVERSION}.partial"
    (partial / "ready").mkdir(parents=True)
    (partial / "ready" / "model.safetensors").write_bytes(b"half")
    folder = default_target.install(cache, fetch=FakeDownload(wheel))
    assert (folder / "model.safetensors").stat().st_size > 4
    assert not partial.exists()


def _truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def _flip_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"files": []}')


@pytest.mark.parametrize("damage", [_truncate, _flip_a_byte, _remove_tokenizer, _spoil_manifest])
def test_damaged_model_is_noticed_and_prepared_again(
    cache: Path, wheel: Path, damage: Callable[[Path], None]
) -> None:
    folder = default_target.install(cache, fetch=FakeDownload(wheel))
    sound = (folder / "model.safetensors").read_bytes()
    damage(folder)
    again = FakeDownload(wheel)
    default_target.install(cache, fetch=again)
    assert again.calls == 1
    assert (folder / "model.safetensors").read_bytes() == sound
    assert (folder / "tokenizer.json").is_file()


def test_copied_cache_is_hashed_and_accepted(cache: Path, wheel: Path) -> None:
    folder = default_target.install(cache, fetch=FakeDownload(wheel))
    os.utime(folder / "model.safetensors", (1, 1))
    again = FakeDownload(wheel)
    default_target.install(cache, fetch=again)
    assert again.calls == 0


def test_damaged_download_is_refused_with_both_checksums(
    cache: Path, wheel: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(ModelNotFoundError, match="damaged") as caught:
        default_target.install(cache, fetch=FakeDownload(damaged))
    assert default_target.WHEEL_SHA256 in str(caught.value)
    assert hashlib.sha256(damaged.read_bytes()).hexdigest() in str(caught.value)


def test_wheel_put_into_the_cache_by_hand_needs_no_pip(cache: Path, wheel: Path) -> None:
    (cache / "downloads").mkdir(parents=True)
    shutil.copy(wheel, cache / "downloads" / default_target.WHEEL)
    download = FakeDownload(wheel)
    assert default_target.install(cache, fetch=download).is_dir()
    assert download.calls == 0
    assert (cache / "downloads" / default_target.WHEEL).is_file()


def test_two_processes_at_once_prepare_once(cache: Path, wheel: Path, tmp_path: Path) -> None:
    log = tmp_path / "fetched"
    program = f"""
import shutil
from pathlib import Path
from whiflash_agents.embedded import default_agent, default_target
default_target.WHEEL_SHA256 = {default_target.WHEEL_SHA256!r}
default_target.NEEDED_BYTES = 1
def fetch(target, scratch, on_bytes):
    with open({str(log)!r}, "a") as out:
        out.write("x")
    shutil.copy({str(wheel)!r}, target / default_target.WHEEL)
print(default_target.install(Path({str(cache)!r}), fetch=fetch))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    assert log.read_text() == "x"


def test_missing_pip_is_named_with_the_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="has no pip") as caught:
        default_target.install(cache)
    assert "ensurepip" in str(caught.value)
    assert "--target" in str(caught.value)


def test_failing_pip_is_quoted_with_the_remedy(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelNotFoundError, match="No matching distribution found") as caught:
        default_target.install(cache)
    assert "downloads/" in str(caught.value)
    assert "network" in str(caught.value)


def test_full_disk_is_named_before_the_download(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_target, "NEEDED_BYTES", 10**18)
    download = FakeDownload(wheel)
    with pytest.raises(ModelNotFoundError, match="MB are free") as caught:
        default_target.install(cache, fetch=download)
    assert "WHIFLASH_CACHE" in str(caught.value)
    assert download.calls == 0


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, wheel: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(ModelNotFoundError, match="could not be written") as caught:
        default_target.install(blocked, fetch=FakeDownload(wheel))
    assert str(blocked) in str(caught.value)


# --- names ---


def test_no_name_and_its_own_name_are_the_default_agent(cache: Path, wheel: Path) -> None:
    folder = default_target.install(cache, fetch=FakeDownload(wheel))
    for name in (None, default_agent.NAME):
        files = resolve_model(name)
        assert files.path == folder
        assert files.name == default_agent.NAME
        assert files.adapter == default_agent.adapter()
        assert files.chat_template is not None
        assert "<tool_call>" in files.chat_template
        assert files.response_template is not None


def test_what_the_agent_is_made_from_has_a_name_too(cache: Path, wheel: Path) -> None:
    folder = default_target.install(cache, fetch=FakeDownload(wheel))
    agent = resolve_model(None)
    for name in ("SmolLM2-135M-Instruct", str(folder)):
        files = resolve_model(name)
        assert files == replace(agent, name="SmolLM2-135M-Instruct", adapter=None)


def test_another_adapter_takes_the_place_of_the_agents_own(
    cache: Path, wheel: Path, tmp_path: Path
) -> None:
    default_target.install(cache, fetch=FakeDownload(wheel))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text("{}")
    for name in (None, default_agent.NAME, "SmolLM2-135M-Instruct"):
        files = resolve_model(name, str(tmp_path / "mine"))
        assert files.name == "SmolLM2-135M-Instruct+mine"
        assert files.adapter == tmp_path / "mine"


def test_local_folder_keeps_its_own_templates(converted: Path) -> None:
    files = resolve_model(str(converted))
    assert files.path == converted
    assert files.name == converted.name
    assert files.chat_template is None
    assert files.response_template is None


def test_incomplete_folder_is_named_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="weights") as caught:
        resolve_model(str(tmp_path))
    assert "tokenizer" in str(caught.value)
    assert "config.json," not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "there is no folder ./nowhere: target .--target. takes"),
        ("/nowhere/at/all", "there is no folder"),
        ("a/b/c", "there is no folder"),
        ("", "name is empty"),
    ],
)
def test_wrong_paths_never_reach_the_hub(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_from_hub", lambda _: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError, match=said):
        resolve_model(name)


def test_file_is_refused_where_a_folder_is_expected(gguf_file: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve_model(str(gguf_file))


def test_hub_name_is_downloaded_by_the_hub_library(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[str] = []

    def snapshot(name: str, **_: Any) -> str:
        asked.append(name)
        return str(converted)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = resolve_model("owner/model")
    assert (asked, files.path, files.name) == (["owner/model"], converted, "owner/model")


def test_hub_that_cannot_be_reached_is_told_without_the_names_of_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError(
            "Got: ConnectError: [Errno -2] Name or service not known\nAn error happened."
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelNotFoundError, match=r"model: Name or service not known\. Check"):
        resolve_model("owner/model")


@pytest.mark.parametrize("failure", ["offline", "gone"])
def test_hub_failure_is_told_with_the_remedy(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    errors = {"offline": LocalEntryNotFoundError("no connection"), "gone": OSError("404")}

    def snapshot(name: str, **_: Any) -> str:
        raise errors[failure]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelNotFoundError, match="owner/model") as caught:
        resolve_model("owner/model")
    assert str(errors[failure]) in str(caught.value)
    assert "network" in str(caught.value)


def test_invalid_hub_name_is_told_as_such() -> None:
    with pytest.raises(ModelNotFoundError, match="valid hub name"):
        resolve_model("what is this?")


def test_cache_folder_is_the_platforms_unless_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHIFLASH_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("WHIFLASH_CACHE", "relative")
    assert cache_dir().is_absolute()
    monkeypatch.delenv("WHIFLASH_CACHE")
    assert cache_dir().name == "whiflash-agents"


# --- the real model (from the real cache, or fetched if the index can be reached) ---


@pytest.fixture(scope="session")
def default_model() -> models.ModelFiles:
    try:
        return resolve_model(None)
    except ModelNotFoundError as error:
        pytest.skip(f"the default model is not here and cannot be fetched: {error}")


def test_default_model_has_the_expected_shape_and_tokens(default_model: models.ModelFiles) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(default_model.path)
    assert (config.max_position_embeddings, config.vocab_size) == (8192, 49152)
    tokenizer = AutoTokenizer.from_pretrained(default_model.path)
    assert len(tokenizer) == 49152
    text = "<|im_start|>user\nCost: 1234 € — 日本語 😀?<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (ids[0], ids[-2]) == (1, 2)
    for digit in "1234":
        assert tokenizer.convert_tokens_to_ids(digit) in ids


def test_default_model_answers_in_sensible_english(default_model: models.ModelFiles) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from whiflash_agents.chat import Chat
    from whiflash_agents.traces.schema import Message

    chat = Chat.from_pretrained(
        default_model.path,
        chat_template=default_model.chat_template,
        response_template=default_model.response_template,
    )
    prompt = chat.prompt_ids([Message(role="user", content="What is the capital of France?")])
    model = AutoModelForCausalLM.from_pretrained(default_model.path, dtype=torch.bfloat16)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )[0, len(prompt) :].tolist()
    turn = chat.parse(prompt, output)
    assert turn.content is not None
    assert "Paris" in turn.content
    assert output[-1] in chat.end_token_ids
