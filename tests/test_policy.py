from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from rlvr_pl.errors import UserError
from rlvr_pl.model_weights import untie, weights_sha256
from rlvr_pl.policy import load_policy
from rlvr_pl.types import Question

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def make_folder(folder: Path, config: Any = None, *, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny random model with a byte tokenizer (256 bytes, then <|end|> = 256 and <|pad|> = 257)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or Qwen3Config(**SIZES, tie_word_embeddings=True), dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=[256, 7])
    model.save_pretrained(folder)
    raw = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture
def mine(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_loads_with_its_stop_ids_context_and_prompt(folder):
    policy = load_policy(folder)
    assert policy.eos_ids == (256, 7)
    assert policy.pad_id == 257
    assert policy.max_context == 64
    assert policy.default_max_new_tokens == 1024
    assert policy.template.name == "supplied"
    assert policy.head.shape == (264, 32)
    assert policy.decode((*policy.encode("ab c , d"), 256)) == "ab c , d"


def test_stop_ids_are_the_union_of_generation_config_model_config_and_tokenizer(mine):
    edit(mine / "config.json", eos_token_id=9)
    edit(mine / "generation_config.json", eos_token_id=[7, 9], max_new_tokens=33)
    policy = load_policy(mine)
    assert policy.eos_ids == (7, 9, 256)
    assert policy.default_max_new_tokens == 33


def test_a_tokenizer_without_padding_token_pads_with_a_stop_id(mine):
    edit(mine / "tokenizer_config.json", pad_token=None)
    assert load_policy(mine).pad_id == 256


@pytest.mark.parametrize("family", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_head_times_hidden_states_are_the_models_logits_on_right_padded_rows(family, attention, tmp_path):
    policy = load_policy(
        make_folder(tmp_path / "m", family(**SIZES, tie_word_embeddings=False)),
        dtype="float64",
        attn_implementation=attention,
    )
    ids = torch.randint(0, 256, (3, 11), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([11, 4, 1])
    mask = torch.arange(11) < lengths[:, None]
    logits = policy.hidden_states(ids, mask) @ policy.head.T
    # FP64: a few thousand roundings of 1e-16 in logits of order 1.
    for row, length in enumerate(lengths.tolist()):
        alone = policy.model(ids[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(logits[row, :length], alone, rtol=0, atol=1e-12)
    padded = policy.model(ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(logits[mask], padded[mask], rtol=0, atol=1e-12)
    assert torch.isfinite(logits).all()


def test_padding_before_a_token_is_refused(folder):
    with pytest.raises(ValueError, match="right"):
        load_policy(folder).hidden_states(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, 1, 1]]))


def test_untied_embeddings_move_apart_and_stay_untied_when_reloaded(folder, tmp_path):
    tied = load_policy(folder)
    assert tied.head is tied.model.get_input_embeddings().weight
    policy = load_policy(folder, untie_embeddings=True)
    embedding = policy.model.get_input_embeddings().weight
    assert torch.equal(policy.head, embedding)
    # 264 x 32 more parameters, and a gradient of the head alone leaves the embedding without one.
    assert policy.model.num_parameters() == tied.model.num_parameters() + 264 * 32
    with torch.no_grad():
        policy.head.add_(1.0)
    assert torch.equal(embedding, tied.head)
    policy.save(tmp_path / "saved")
    again = load_policy(tmp_path / "saved")
    assert torch.equal(again.head, policy.head)
    assert torch.equal(again.model.get_input_embeddings().weight, embedding)
    again.model.tie_weights()
    assert torch.equal(again.head, policy.head)


def test_untying_an_untied_model_changes_nothing(tmp_path):
    make_folder(tmp_path / "m", Qwen3Config(**SIZES, tie_word_embeddings=False))
    policy = load_policy(tmp_path / "m")
    before = weights_sha256(policy.model)
    untie(policy.model)
    assert weights_sha256(policy.model) == before


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_keeps_weights_names_ids_and_prompts(untied, dtype, tmp_path):
    make_folder(tmp_path / "m", dtype=dtype)
    edit(tmp_path / "m/generation_config.json", max_new_tokens=20)
    policy = load_policy(tmp_path / "m", untie_embeddings=untied, template="Say {problem}:")
    policy.save(tmp_path / "saved")
    again = load_policy(tmp_path / "saved")
    assert again.sha256 == policy.sha256
    assert again.head.dtype == dtype
    assert (again.eos_ids, again.pad_id, again.max_context) == (policy.eos_ids, policy.pad_id, policy.max_context)
    assert again.default_max_new_tokens == 20
    question = Question("q", "x²", "1")
    assert again.prompt_ids(question) == policy.prompt_ids(question) == policy.encode("Say x²:")
    assert not list(tmp_path.glob(".*"))  # no partial folder is left


def test_a_saved_folder_is_one_that_transformers_loads(folder, tmp_path):
    policy = load_policy(folder)
    policy.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert weights_sha256(model) == policy.sha256
    assert model.generation_config.eos_token_id == [256, 7]
    assert tokenizer.encode("abc") == list(policy.encode("abc"))
    assert sorted(p.suffix for p in (tmp_path / "saved").iterdir() if p.suffix not in (".json", ".jinja")) == [
        ".safetensors"
    ]


def test_a_saved_folder_states_the_rotary_base_where_older_transformers_look(tmp_path):
    config = Qwen3Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    load_policy(make_folder(tmp_path / "m", config)).save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["rope_theta"] == 1e6
    assert load_policy(tmp_path / "saved").model.config.rope_parameters["rope_theta"] == 1e6


def test_sampling_defaults_travel_only_when_sampling_is_on(mine, tmp_path):
    edit(mine / "generation_config.json", do_sample=False, temperature=0.6, top_k=20)
    load_policy(mine).save(tmp_path / "greedy")
    assert "temperature" not in json.loads((tmp_path / "greedy/generation_config.json").read_text())
    edit(mine / "generation_config.json", do_sample=True, temperature=0.6, top_k=20)
    load_policy(mine).save(tmp_path / "sampled")
    assert json.loads((tmp_path / "sampled/generation_config.json").read_text())["temperature"] == 0.6


def test_an_existing_folder_is_replaced_only_when_asked(folder, tmp_path):
    policy = load_policy(folder)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/old.txt").write_text("old")
    with pytest.raises(UserError, match="exists"):
        policy.save(tmp_path / "saved")
    assert (tmp_path / "saved/old.txt").read_text() == "old"
    policy.save(tmp_path / "saved", overwrite=True)
    assert not (tmp_path / "saved/old.txt").exists()
    assert load_policy(tmp_path / "saved").sha256 == policy.sha256


def test_a_failed_save_leaves_the_old_folder_and_nothing_else(folder, tmp_path, monkeypatch):
    policy = load_policy(folder)
    policy.save(tmp_path / "saved")
    before = sorted(p.name for p in (tmp_path / "saved").iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        policy.save(tmp_path / "saved", overwrite=True)
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_the_weights_hash_sees_one_changed_bit_and_nothing_else(folder):
    policy = load_policy(folder)
    assert weights_sha256(policy.model) == policy.sha256 == load_policy(folder).sha256
    with torch.no_grad():
        weight = policy.model.get_input_embeddings().weight
        weight[0, 0] = torch.nextafter(weight[0, 0], weight.new_tensor(10.0))
    assert weights_sha256(policy.model) != policy.sha256


def test_dropout_ratio(tmp_path):
    """Dropout in the checkpoint is off in train mode too, so that ratios are 1 on policy."""
    policy = load_policy(make_folder(tmp_path / "m", Qwen3Config(**SIZES, attention_dropout=0.5)))
    policy.model.train()
    ids, mask = torch.arange(12)[None], torch.ones(1, 12, dtype=torch.bool)
    assert torch.equal(policy.hidden_states(ids, mask), policy.hidden_states(ids, mask))


def test_a_frozen_copy_does_not_follow(folder):
    policy = load_policy(folder)
    frozen = policy.copy_frozen()
    with torch.no_grad():
        policy.head.zero_()
    assert weights_sha256(frozen.model) == policy.sha256
    assert not any(p.requires_grad for p in frozen.model.parameters())
    assert all(p.requires_grad for p in policy.model.parameters())


@pytest.mark.parametrize("problem", ["x" * 60, "x" * 500])
def test_prompt_too_long(folder, problem):
    """A prompt that leaves no room for a completion is refused, with its uid; one token less is accepted."""
    policy = load_policy(folder, template="{problem}    ")
    assert len(policy.prompt_ids(Question("fits", "x" * 59, "1"))) == 63
    with pytest.raises(UserError, match=r"question long: the prompt has .* context of 64"):
        policy.prompt_ids(Question("long", problem, "1"))


def damage(file: str, content: bytes | None) -> Any:
    def apply(folder: Path) -> None:
        path = folder / file
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)

    return apply


def cut(file: str, share: float) -> Any:
    def apply(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(share * len(data))])

    return apply


def set_in(file: str, **changes: Any) -> Any:
    return lambda folder: edit(folder / file, **changes)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage("config.json", None), "no config.json"),
        (damage("config.json", b"{"), "config.json:1: not JSON"),
        (damage("config.json", b"[]"), "config.json: must be a JSON object"),
        (set_in("config.json", model_type="nope"), "config.json: not usable"),
        (set_in("config.json", vocab_size=100), "do not fit config.json"),
        (set_in("config.json", num_hidden_layers=3, layer_types=None), "do not fit config.json"),
        (set_in("config.json", hidden_size="many"), "config.json: not usable"),
        (damage("tokenizer.json", None), "no tokenizer"),
        (damage("tokenizer.json", b"\0\0"), "tokenizer.json:1: holds NUL bytes"),
        (cut("tokenizer.json", 0.5), "not JSON"),
        (damage("model.safetensors", None), "no *.safetensors"),
        (damage("model.safetensors", b""), "model.safetensors: not a readable file of weights"),
        (cut("model.safetensors", 0.5), "model.safetensors: not a readable file of weights"),
        (cut("model.safetensors", 0.99), "model.safetensors: not a readable file of weights"),
        (set_in("generation_config.json", eos_token_id=999), "end-of-sequence ids"),
        (set_in("generation_config.json", eos_token_id="stop"), "end-of-sequence ids"),
        (damage("generation_config.json", b"{"), "generation_config.json:1: not JSON"),
    ],
)
def test_a_damaged_folder_is_a_one_line_error(harm, words, mine):
    harm(mine)
    with pytest.raises(UserError) as error:
        load_policy(mine)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert str(mine) in str(error.value)


FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
FILES += ["prompt_template.json"]
odd_values = st.sampled_from([None, True, -1, 0, 3, 2.5, "x", "", [], [1], {}, {"a": 1}])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_the_damage_loading_succeeds_or_is_a_user_error(folder, tmp_path, data):
    mine = tmp_path / "damaged"
    shutil.rmtree(mine, ignore_errors=True)
    shutil.copytree(folder, mine)
    (mine / "prompt_template.json").write_text('{"kind": "text", "text": "{problem}"}')
    path = mine / data.draw(st.sampled_from(FILES))
    content = path.read_bytes()
    if path.suffix == ".json" and data.draw(st.booleans()):
        fields = json.loads(content)
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(odd_values)
        path.write_text(json.dumps(fields))
    else:
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(
            content[:cut] + data.draw(st.binary(max_size=3)) + content[cut + data.draw(st.integers(0, 3)) :]
        )
    try:
        policy = load_policy(mine)
        policy.prompt_ids(Question("q", "x", "1"))
    except UserError as error:
        assert "\n" not in str(error)


def test_a_tokenizer_with_ids_beyond_the_model_is_refused(tmp_path):
    make_folder(tmp_path / "m", Qwen3Config(**SIZES | {"vocab_size": 200}))
    with pytest.raises(UserError, match="wrong tokenizer: its ids reach 257, but the model knows only 200"):
        load_policy(tmp_path / "m")


def test_a_broken_chat_template_is_found_when_loading(mine):
    (mine / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="prompt template 'chat' cannot be used"):
        load_policy(mine)


def test_pickled_weights_are_not_read(mine):
    (mine / "model.safetensors").unlink()
    (mine / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(UserError, match="safetensors"):
        load_policy(mine)


def test_code_in_a_folder_is_not_run(mine):
    edit(mine / "config.json", model_type="custom", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (mine / "evil.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(UserError, match=r"custom code"):
        load_policy(mine)


def test_a_model_whose_logits_are_scaled_after_the_head_is_refused(tmp_path):
    from transformers import CohereConfig

    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    make_folder(tmp_path / "m", CohereConfig(**sizes, logit_scale=0.25, bos_token_id=1, pad_token_id=0))
    with pytest.raises(UserError, match="logit_scale"):
        load_policy(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("embedded:nope", "embedded:base, embedded:start"),
        ("no/such/folder", "no such folder"),
        ("./absent", "no such folder"),
        ("", "the name is empty"),
        ("owner/absent", "nor could the hub be asked"),
        ("not a hub name\0", "the hub has no model of that name"),
        ("SmolLM2-135M", "`rlvr-pl import-gguf` makes a folder of a GGUF file"),
        ("model.pth", "rlvr-pl import-supplied"),
        ("model.gguf", "rlvr-pl import-gguf"),
    ],
)
def test_an_unknown_name_says_what_is_known(name, words):
    with pytest.raises(UserError) as error:
        load_policy(name)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_symlink_loop_is_a_user_error(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError):
        load_policy(tmp_path / "loop")


def test_an_unknown_dtype_is_refused(folder):
    with pytest.raises(UserError, match="float8"):
        load_policy(folder, dtype="float8")


def test_a_hub_name_is_found_in_the_cache_when_offline(folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--tiny/snapshots/0123"
    shutil.copytree(folder, snapshot)
    (tmp_path / "models--owner--tiny/refs").mkdir()
    (tmp_path / "models--owner--tiny/refs/main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_policy("owner/tiny").sha256 == load_policy(folder).sha256
