"""Checkpoints that are odd but legal load and equal transformers; those that are not, and wrong arguments, are one sentence."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import load, load_config
from common.config import EngineConfig, UserError
from common.tokenizer import load_tokenizer
from stage1_naive.generate import generate
from stage2_req.build import build_engine as build_stage2
from stage2_req.params import SamplingParams
from stage3_kvcache.build import build_engine as build_stage3
from stage4_batch.build import build_engine as build_stage4
from stage5_paged.build import build_engine as build_stage5
from tests.conftest import Checkpoint, make_checkpoint, reference
from tests.ranks import build_ranks

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def edit(file, **changes) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | changes))


def texts(checkpoint: Checkpoint, build, prompts: int = 3) -> list[list[int]]:
    ids = [checkpoint.prompt(5 + 7 * i, i) for i in range(prompts)]
    return [req.output_ids for req in build(checkpoint.config()).generate(ids, GREEDY)]


def expected(checkpoint: Checkpoint, prompts: int = 3) -> list[list[int]]:
    return [reference(checkpoint, checkpoint.prompt(5 + 7 * i, i), 8) for i in range(prompts)]


# --- ends of a text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "generation", "tokenizer", "ends"), [
    (3, [7, 8], None, {3, 7, 8}),
    (3, None, None, {3}),
    (None, 5, None, {5}),
    (None, None, None, set()),
    ([3, 4], [], "<end>", {3, 4, 90}),
    (None, None, {"content": "<end>", "special": True}, {90}),
    (0, 0, "<end>", {0, 90}),
    (0, 0, "not in the vocabulary", {0}),
])  # fmt: skip
def test_all_that_a_checkpoint_knows_ends_a_text(config, generation, tokenizer, ends, tiny_checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama").path, folder)
    edit(folder / "config.json", eos_token_id=config)
    edit(folder / "generation_config.json", eos_token_id=generation)
    if tokenizer:
        edit(folder / "tokenizer_config.json", eos_token=tokenizer)
        edit(folder / "tokenizer.json", added_tokens=[{"id": 90, "content": "<end>"}])
    assert load_config(str(folder))[0].eos_ids == ends


def test_ids_of_the_tokenizers_older_form(tiny_checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama").path, folder)
    edit(folder / "tokenizer_config.json", eos_token="</s>", added_tokens_decoder={"2": {"content": "</s>"}})
    assert 2 in load_config(str(folder))[0].eos_ids


def test_a_chat_turn_of_the_default_model_ends_whatever_its_configs_say(default_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(default_model, folder, copy_function=lambda source, target: target)  # folders only
    for file in default_model.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=0)
    prompt = load_tokenizer(str(folder)).chat([{"role": "user", "content": "What is the capital of France?"}])
    engine = build_stage3(EngineConfig(str(folder), "cpu", max_model_len=128))
    (req,) = engine.generate([prompt], SamplingParams(max_tokens=40))
    assert (req.finish_reason, req.output_ids[-1]) == ("eos", 2)


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "changes"), [
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
])  # fmt: skip
def test_biases(name, changes, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", name, **changes)
    want = expected(checkpoint)
    assert texts(checkpoint, build_stage2) == want
    assert texts(checkpoint, partial(build_ranks, world=2)) == want, "the bias of a summed projection counts once"


def test_a_head_of_its_own_counts_though_embeddings_are_said_to_be_tied(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path / "model", "qwen2").path
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(96, 48, generator=torch.Generator().manual_seed(1)) * 0.4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    checkpoint = Checkpoint(folder, AutoModelForCausalLM.from_pretrained(folder).eval())
    assert texts(checkpoint, build_stage2) == expected(checkpoint)


def test_a_head_that_equals_the_embeddings(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "qwen2")
    weights = load_file(checkpoint.path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, checkpoint.path / "model.safetensors", metadata={"format": "pt"})
    assert texts(checkpoint, build_stage2) == expected(checkpoint)


@pytest.mark.parametrize("changes", [
    {"head_dim": 6},
    {"num_attention_heads": 1, "num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 1, "intermediate_size": 1},
    {"vocab_size": 97, "tie_word_embeddings": True},
    {"rms_norm_eps": 0.1},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10}},
    {"hidden_size": 20, "head_dim": 2},
    {"max_position_embeddings": 64},
])  # fmt: skip
def test_odd_but_legal_sizes(changes, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "llama", **changes)
    want = expected(checkpoint)
    for build in (build_stage2, lambda config: build_stage5(replace(config, page_size=3))):
        assert texts(checkpoint, build) == want
    loaded = load(checkpoint.config())
    assert list(generate(loaded.model, loaded.kernels, checkpoint.prompt(5, 0), 8)) == want[0]


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_quantized_weights_are_named_as_such(method, tiny_checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama").path, folder)
    edit(folder / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(UserError, match=f"config.json: weights quantized by {method} are not supported"):
        load_config(str(folder))


# --- what is wrong, in one sentence -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "value"), [
    ("intermediate_size", "16"), ("rope_theta", None), ("num_attention_heads", 0), ("num_attention_heads", 1.5),
    ("num_attention_heads", -1), ("hidden_size", [32]), ("vocab_size", True), ("head_dim", 3), ("head_dim", 0),
    ("num_key_value_heads", 3), ("rms_norm_eps", "a"), ("tie_word_embeddings", "yes"), ("hidden_act", None),
    ("eos_token_id", "x"), ("attention_bias", None), ("sliding_window", "a"), ("max_position_embeddings", {}),
    ("num_hidden_layers", "2"), ("rope_theta", "1e4"), ("rope_theta", -1),
])  # fmt: skip
def test_a_value_of_the_wrong_kind(key, value, tiny_checkpoint, tmp_path):
    """The sentence names the file, the key and the value (of a message of transformers: at least the first two)."""
    folder = tmp_path / "model"
    name = "mistral" if key == "sliding_window" else "llama"
    shutil.copytree(tiny_checkpoint(name).path, folder)
    edit(folder / "config.json", **{key: value})
    if key == "rope_theta":
        edit(folder / "config.json", rope_parameters=None)
    with pytest.raises(UserError) as error:
        load(EngineConfig(str(folder), "cpu", "float32"))
    message = str(error.value)
    assert "config.json" in message
    assert key in message
    assert "\n" not in message


@pytest.fixture(scope="module")
def engine():
    return build_stage2(EngineConfig("dummy:tiny", "cpu", "float32", max_model_len=64))


@pytest.mark.parametrize(("prompt", "params", "uid", "reason"), [
    ("hello", GREEDY, None, "the prompt must be token ids, which are whole numbers, not 'hello'"),
    ([1.9, 2], GREEDY, None, "must be token ids"),
    (["1"], GREEDY, None, "must be token ids"),
    (None, GREEDY, None, "must be token ids"),
    (5, GREEDY, None, "must be token ids"),
    ([], GREEDY, None, "the prompt is empty"),
    ([-1], GREEDY, None, "outside 0 to 511"),
    ([1], {"max_tokens": 1}, None, "it must be SamplingParams"),
    ([1], None, None, "it must be SamplingParams"),
    ([1], GREEDY, "a", "uid is 'a'; it must be a whole number"),
])  # fmt: skip
def test_what_a_caller_of_add_can_get_wrong(prompt, params, uid, reason, engine):
    with pytest.raises(UserError, match=reason):
        engine.add(prompt, params, uid)
    assert not engine.has_work()


def test_numbers_of_numpy_and_pytorch_are_numbers(engine):
    want = [req.output_ids for req in engine.generate([[1, 2, 3]], GREEDY)]
    for ids in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3)):
        assert [req.output_ids for req in engine.generate([ids], GREEDY)] == want


@pytest.mark.parametrize(("prompts", "params"), [("hello", GREEDY), (None, GREEDY), ([[1]], None), ([[1]], [None])])
def test_what_a_caller_of_generate_can_get_wrong(prompts, params, engine):
    with pytest.raises(UserError):
        engine.generate(prompts, params)
    assert not engine.has_work()


@pytest.mark.parametrize("wrong", [
    {"logit_bias": {"5": 1}}, {"logit_bias": {5: "1"}}, {"logit_bias": [5]}, {"logit_bias": None},
    {"logit_bias": {5: float("nan")}}, {"stop_token_ids": "ab"}, {"stop_token_ids": 5}, {"stop_token_ids": [1.5]},
    {"temperature": "1"}, {"temperature": None}, {"max_tokens": 1.5}, {"max_tokens": "4"}, {"top_k": None},
])  # fmt: skip
def test_what_sampling_params_refuse(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("wrong", [
    {"page_size": "4"}, {"page_size": 1.5}, {"max_running": 0}, {"tp": None}, {"seed": "a"}, {"kv_tokens": -1},
    {"memory_fraction": "a"}, {"memory_fraction": 1.5}, {"graph_max_tokens": -1},
])  # fmt: skip
def test_what_the_engines_configuration_refuses(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_more_memory_than_there_is():
    with pytest.raises(UserError, match=r"1,000,000,000,000 KV tokens take .* GiB, and cpu has .*; lower --kv-tokens"):
        build_stage5(EngineConfig("dummy:tiny", "cpu", kv_tokens=10**12))
    with pytest.raises(UserError, match="no memory for a KV pool of 4,096,000,000 tokens"):
        build_stage4(EngineConfig("dummy:tiny", "cpu", max_running=10**6, max_model_len=4096))
