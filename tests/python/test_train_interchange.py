"""train/interchange/: tiny Llama and Qwen3 models both ways, tokenizers, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train import checkpoint
from train.cli import main
from train.config import AttentionConfig, Config, ModelConfig, TrainConfig
from train.interchange import decoder_from_transformers, export, import_model, load_transformers, tokenizer_files
from train.model import Decoder
from train.text import tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

OURS = ModelConfig(width=48, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=40, rope_theta=5000.0, context=64)
VOCABULARY = 61


def scatter(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that every one of them, gains included, shows in the logits."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.3 * noise)
    return model.eval()


def ids(length: int = 40, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def same_logits(ours: torch.nn.Module, theirs: torch.nn.Module, vocabulary: int = VOCABULARY) -> None:
    got, wanted = ours(ids(vocabulary=vocabulary)), theirs(input_ids=ids(vocabulary=vocabulary)).logits
    assert wanted.abs().max() > 1  # or nothing is compared
    assert (got - wanted[..., : got.shape[-1]]).abs().max() <= 1e-5 * wanted.abs().max()


def theirs(kind: str, tie: bool = False, **others) -> torch.nn.Module:
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-4, "tie_word_embeddings": tie, "pad_token_id": None,
    } | others  # fmt: skip
    if kind == "llama":
        return scatter(transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)))
    return scatter(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values)))


# --- Out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("others", [{}, {"qk_norm": True}, {"mlp_bias": True}, {"kv_heads": 1}, {"kv_heads": None}])
def test_exported_logits(tmp_path, tie, others):
    model = scatter(Decoder(dataclasses.replace(OURS, tie=tie, norm_eps=1e-3, **others), AttentionConfig(), VOCABULARY))
    folder = export(model, None, tmp_path / "out")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded).__name__ == ("Qwen3ForCausalLM" if "qk_norm" in others else "LlamaForCausalLM")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    same_logits(model, loaded)
    back, config = decoder_from_transformers(folder)
    assert config == dataclasses.replace(model.config, kv_heads=model.config.kv)
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


def test_export_keeps_the_dtype(tmp_path):
    model = scatter(Decoder(OURS, AttentionConfig(), VOCABULARY)).bfloat16()
    folder = export(model, None, tmp_path / "out")
    assert transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    assert decoder_from_transformers(folder)[0].embed.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "field, others",
    [
        ("position: expected rope, all that Transformers' Llama has, got learned", {"position": "learned"}),
        ("position: expected rope, all that Transformers' Llama has, got none", {"position": "none"}),
        ("norm: expected rmsnorm, all that Transformers' Llama has, got layernorm", {"norm": "layernorm"}),
        ("mlp: expected swiglu, all that Transformers' Llama has, got gelu", {"mlp": "gelu"}),
        ("mlp: expected swiglu, all that Transformers' Llama has, got silu", {"mlp": "silu"}),
        ("hybrid_every: expected 0, all that Transformers' Llama has, got 2", {"hybrid_every": 2}),
        ("mlp_bias: expected False, all that Transformers' Qwen3 has, got True", {"qk_norm": True, "mlp_bias": True}),
    ],
)
def test_what_cannot_be_exported(tmp_path, field, others):
    model = Decoder(dataclasses.replace(OURS, **others), AttentionConfig(), VOCABULARY)
    with pytest.raises(ValueError) as refused:
        export(model, None, tmp_path / "out")
    assert str(refused.value) == f"export: model.{field}"
    assert os.listdir(tmp_path) == []


def test_export_leaves_other_folders_alone(tmp_path):
    model = Decoder(OURS, AttentionConfig(), VOCABULARY)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"^out: expected a folder that is new or empty, got .*used$"):
        export(model, None, tmp_path / "used")
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"^out: cannot write .*: Not a directory$"):
        export(model, None, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    export(model, None, tmp_path / "empty")
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "used"]
    assert os.listdir(tmp_path / "used") == ["thesis.tex"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **others):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer_files, "write", full)
    model = Decoder(OURS, AttentionConfig(), 256)
    with pytest.raises(RuntimeError, match=r"^out: cannot write .*out: No space left on device$"):
        export(model, tokens.ByteTokens(), tmp_path / "out")
    assert os.listdir(tmp_path) == []


TEXT = "Grüße,\n\n  the end: <|end|> 😀 ok?\tยินดี\r\n"


def every_kind() -> list[tokens.Tokens]:
    return [
        tokens.ByteTokens(),
        tokens.make_characters([TEXT, "abc"]),
        tokens.make_characters([TEXT, "more than fits"], 16),
        tokens.make_bpe([TEXT * 3, "the end of the end"], 270),
    ]


@pytest.mark.parametrize("texts", every_kind(), ids=["bytes", "characters", "few", "bpe"])
def test_exported_tokenizer(tmp_path, texts):
    model = Decoder(OURS, AttentionConfig(), texts.size)
    folder = export(model, texts, tmp_path / "out")
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    probe = TEXT.replace("<|end|>", "")
    encoded = loaded(probe, add_special_tokens=False)["input_ids"]
    assert encoded == texts.encode(probe).tolist()
    if texts.size != 16:  # that one knows no more than its characters
        assert loaded.decode(encoded) == probe
    assert loaded.eos_token_id == texts.end
    assert transformers.AutoConfig.from_pretrained(folder).eos_token_id == texts.end


def test_every_byte_keeps_its_id(tmp_path):
    """All bytes that UTF-8 has: two-byte characters hold 80 to BF and C2 to DF, a few longer ones the rest."""
    text = "".join(map(chr, range(0x800))) + "".join(map(chr, range(0x800, 0xD800, 0x800))) + "\ue000\uf000"
    text += "".join(map(chr, range(0x10000, 0x110000, 0x10000)))
    folder = export(Decoder(OURS, AttentionConfig(), 256), tokens.ByteTokens(), tmp_path / "out")
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert set(text.encode()) == set(range(0x100)) - {0xC0, 0xC1} - set(range(0xF5, 0x100))
    assert loaded(text)["input_ids"] == list(text.encode())
    assert loaded.decode(list(text.encode())) == text


def test_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^tokens: expected 61 ids, the model's vocabulary, got 256$"):
        export(Decoder(OURS, AttentionConfig(), VOCABULARY), tokens.ByteTokens(), tmp_path / "out")


# --- In --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_imported_logits(tmp_path, kind, tie):
    model = theirs(kind, tie)
    model.save_pretrained(tmp_path / "theirs")
    for source in (model, tmp_path / "theirs"):
        decoder, config = decoder_from_transformers(source)
        assert (config.qk_norm, config.tie, config.kv, config.norm_eps) == (kind == "qwen3", tie, 2, 1e-4)
        same_logits(decoder, model)
    again = export(decoder, None, tmp_path / "again")
    same_logits(decoder, transformers.AutoModelForCausalLM.from_pretrained(again))


def test_a_file_in_pieces(tmp_path):
    model = theirs("llama")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    same_logits(decoder_from_transformers(tmp_path / "theirs")[0], model)


def test_fewer_ids(tmp_path):
    model = theirs("llama")
    decoder, _ = decoder_from_transformers(model, vocabulary=50)
    assert decoder(ids(vocabulary=50)).shape[-1] == 50
    same_logits(decoder, model, vocabulary=50)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"model_type": []}, "model_type: expected one of llama, qwen3, got []"),
        ({"model_type": "gpt2"}, "model_type: expected one of llama, qwen3, got 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, all that a Decoder has, got 'gelu'"),
        ({"attention_bias": True}, "attention_bias: expected False, all that a Decoder has, got True"),
        ({"use_sliding_window": True}, "use_sliding_window: expected False, all that a Decoder has, got True"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            "rope_parameters.rope_type: expected default, all that a Decoder has, got 'llama3'",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected weights that are not quantised"),
        ({"num_hidden_layers": 4096}, "weight model.layers.2.input_layernorm.weight: missing"),
        ({"num_hidden_layers": 2**31 - 1}, "model.layers: expected 1 to 4096, got 2147483647"),
        ({"num_hidden_layers": 1}, "weight model.layers.1.input_layernorm.weight: not one that this architecture has"),
        (
            {"intermediate_size": 9**7},
            "weight model.layers.0.mlp.gate_proj.weight: expected [4782969, 48], floating, got [40, 48] torch.float32",
        ),
        ({"hidden_size": "48"}, "hidden_size: expected a number above 0, got '48'"),
        ({"hidden_size": None}, "hidden_size: expected a number above 0, got None"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a number above 0, got 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number above 0, got nan"),
        ({"num_key_value_heads": 3}, "model.kv_heads: expected a divisor of 4 heads, got 3"),
        ({"rope_parameters": 7}, "rope_parameters.rope_type: expected default, all that a Decoder has, got 7"),
        ({"layer_types": 7}, "layer_types: expected a list, got 7"),
    ],
)
def test_folders_that_are_refused(tmp_path, change, line):
    folder = tmp_path / "theirs"
    theirs("llama").save_pretrained(folder)
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(body | change))
    with pytest.raises(ValueError) as refused:
        decoder_from_transformers(folder)
    assert str(refused.value) == f"{folder}: {line}"


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"{" * 100)


def damage_list(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"[1]")


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def escape(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')


def no_map(folder: Path) -> None:
    no_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')


def integers(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.norm.weight"] = torch.ones(48, dtype=torch.int32)
    safetensors.torch.save_file(weights, path)


@pytest.mark.parametrize(
    "damage, part",
    [
        (damage_config, "config.json: "), (damage_list, "config.json: expected a JSON object"),
        (damage_weights, "model.safetensors: "), (damage_header, "model.safetensors: "),
        (no_weights, "expected the file 'model.safetensors' in it"),
        (escape, "expected the file '../other.safetensors' in it"), (no_map, "expected a weight_map of file names"),
        (integers, "weight model.norm.weight: expected [48], floating, got [48] torch.int32"),
    ],
)  # fmt: skip
def test_damaged_folders(tmp_path, damage, part):
    folder = tmp_path / "theirs"
    theirs("llama").save_pretrained(folder)
    damage(folder)
    with pytest.raises(ValueError) as refused:
        decoder_from_transformers(folder)
    line = str(refused.value)
    assert line.startswith(str(folder)) and part in line and "\n" not in line


def test_sizes_that_no_tensor_has(tmp_path):
    folder = tmp_path / "theirs"
    theirs("llama").save_pretrained(folder)
    body = json.loads((folder / "config.json").read_text())
    most = {"num_attention_heads": 2**30, "num_key_value_heads": 2**30, "head_dim": 2**30}
    (folder / "config.json").write_text(json.dumps(body | most))
    with pytest.raises(ValueError, match=r"^[^\n]*theirs: [^\n]+$"):
        decoder_from_transformers(folder)


def test_sources_that_are_none(tmp_path):
    for source in (tmp_path / "nowhere", "HuggingFaceTB/SmolLM2-135M"):
        with pytest.raises(ValueError, match=r"^source: expected a folder of Transformers or a \.gguf file, got '.*'$"):
            decoder_from_transformers(source)
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        decoder_from_transformers(path)
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


def test_gguf_without_its_packages(tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"missing: pip install transformers gguf accelerate$"):
        decoder_from_transformers(path)


def gguf_of(model: torch.nn.Module, path: Path) -> None:
    """A GGUF file as llama.cpp writes it: rows of q and k in its own order of rotary pairs."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (
        ("context_length", config.max_position_embeddings), ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers), ("feed_forward_length", config.intermediate_size),
        ("head_count", config.num_attention_heads), ("head_count_kv", config.num_key_value_heads),
        ("rope_dimension_count", config.head_dim), ("vocab_size", config.vocab_size),
    ):  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in model.state_dict().items():
        inside = name.removesuffix(".weight")
        if inside.startswith("model.layers."):
            _, _, at, inside = inside.split(".", 3)
            own = f"blk.{at}.{names[inside]}.weight"
        else:
            own = f"{names[inside]}.weight"
        if inside in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = tensor.shape[0] // config.head_dim
            tensor = tensor.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(own, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("ignore")
def test_gguf(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    # Transformers knows heads of width / heads in such files.
    model = theirs("llama", hidden_size=64, num_attention_heads=4, head_dim=16)
    gguf_of(model, tmp_path / "tiny.gguf")
    decoder, config = decoder_from_transformers(tmp_path / "tiny.gguf")
    assert (config.width, config.kv, config.dim, config.tie) == (64, 2, 16, False)
    same_logits(decoder, model)


# --- Other architectures ---------------------------------------------------------------------------------------------


def test_another_architecture_trains_as_it_is(tmp_path):
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=None,
    )  # fmt: skip
    model = scatter(transformers.Qwen2ForCausalLM(config))
    model.save_pretrained(tmp_path / "theirs")
    foreign, none = load_transformers(tmp_path / "theirs")
    assert none is None
    with torch.no_grad():
        wanted = model(input_ids=ids()).logits
        assert torch.allclose(foreign(ids()), wanted, atol=1e-5 * float(wanted.abs().max()))
    stale, _ = load_transformers(tmp_path / "theirs", AttentionConfig(mode="stale"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(stale(ids()).float().flatten(0, 1), ids().flatten())
    loss.backward()
    assert stale.model.config._attn_implementation == "delta_matching_stale"
    assert all(torch.isfinite(p.grad).all() for p in stale.parameters())
    with pytest.raises(ValueError, match=r"^attention: expected one of exact, .* not simulated"):
        load_transformers(tmp_path / "theirs", AttentionConfig(mode="stale", numerics="paper"))


def test_what_another_architecture_lacks_is_not_made_up(tmp_path):
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=None,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["model.norm.weight"]
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"theirs: weight model\.norm\.weight: missing$"):
        load_transformers(tmp_path / "theirs")


def test_a_known_architecture_becomes_a_decoder(tmp_path):
    theirs("qwen3").save_pretrained(tmp_path / "theirs")
    model, config = load_transformers(tmp_path / "theirs", AttentionConfig(mode="matched"))
    assert isinstance(model, Decoder) and config == model.config
    assert model.attention_layers()[0][1].config.mode == "matched"


# --- Weights to start from -------------------------------------------------------------------------------------------


def test_import_and_export_by_command(tmp_path, capsys):
    """Transformers' folder -> weights to start from -> Transformers' folder, with the tokenizer, by commands."""
    texts = tokens.make_bpe([TEXT * 3, "the end of the end"], 270)
    model = theirs("qwen3", vocab_size=300)  # 30 rows that no id has
    first = tmp_path / "first"
    model.save_pretrained(first)
    tokenizer_files.write(texts, first, 64)
    assert main(["import", str(first), "--out", str(tmp_path / "start")]) == 0
    said = capsys.readouterr().out
    assert "30 rows of the vocabulary that no id of the tokenizer has: left out" in said and "qk_norm = true" in said
    state = checkpoint.load(checkpoint.found(tmp_path / "start"))
    kept = tokens.load(tmp_path / "start" / "tokens.json")
    assert state.meta["tokens"] == kept.fingerprint and kept.size == 270
    assert kept.encode("the end").tolist() == texts.encode("the end").tolist()
    assert main(["export", str(tmp_path / "start"), "--out", str(tmp_path / "second")]) == 0
    second = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert second.config.vocab_size == 270
    with torch.no_grad():
        wanted = model(input_ids=ids(vocabulary=270)).logits[..., :270]
        assert torch.allclose(
            second(input_ids=ids(vocabulary=270)).logits, wanted, atol=1e-5 * float(wanted.abs().max())
        )
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "second").eos_token_id == 269


def test_the_table_it_prints_is_the_model(tmp_path):
    theirs("llama", tie=True).save_pretrained(tmp_path / "theirs")
    saved, lines = import_model(tmp_path / "theirs", tmp_path / "start")
    assert lines == ["no tokenizer in the source: ids must come from elsewhere"]
    from train.config import load

    config = load(tmp_path / "start" / "model.toml", ["train.context=64"])
    assert dataclasses.asdict(config.model) == checkpoint.load(saved).meta["config"]["model"]


def test_commands_say_one_line(tmp_path, capsys):
    assert main(["import", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: source: expected a folder of Transformers or a .gguf file, got ")
    model = Decoder(dataclasses.replace(OURS, position="none"), AttentionConfig(), VOCABULARY)
    document = Config(model=model.config, train=TrainConfig(context=8)).document()
    checkpoint.save(tmp_path / "run", 3, checkpoint.State(model.state_dict(), [], {}, {"config": document}))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said == "error: export: model.position: expected rope, all that Transformers' Llama has, got none\n"
    assert not (tmp_path / "out").exists()
