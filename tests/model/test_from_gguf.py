"""GGUF files written by this test, and the real one if `make model` has fetched it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from etude.commands.import_weights import import_model
from etude.core.errors import EtudeError
from etude.model.attention import CausalAttention
from etude.model.files import build_model, hf_state_dict, read_directory
from etude.model.from_gguf import convert
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import ModelConfig, init_from_scratch

TEXTS = [
    "def area(a, b):\n    return a * b  # 1234\n",
    "the end of 5 or 77 things",
    "don't  stop",
] * 5
UINT32 = b"\4\0\0\0"
"""Type tag of a number in a file."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)
SMALL_MODELS = {
    "llama": CONFIG,
    "qwen2": replace(CONFIG, model_type="qwen2", tie_word_embeddings=False),
    "qwen3": replace(CONFIG, model_type="qwen3", head_dim=32),
}


def tokenizer(pre: str) -> Tokenizer:
    """Tokenizer that the file is made from, with the split written out independently."""
    made = Tokenizer(models.BPE())
    cut = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre == "smollm":
        cut = [pre_tokenizers.Digits(individual_digits=True), *cut]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(cut), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return made


def rotated(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of a `llama`'s queries and keys in llama.cpp's order: the halves of a head alternate."""
    heads = tensor.view(-1, head_dim, *tensor.shape[1:])
    order = [row for pair in range(head_dim // 2) for row in (pair, pair + head_dim // 2)]
    return heads[:, order].reshape(tensor.shape)


def write(
    path: Path, config: ModelConfig, pre: str = "smollm", quantised: bool = False, **change: Any
) -> Any:
    """Write the file, and return the expected result: the tensors and the tokenizer."""
    made = tokenizer(pre)
    vocabulary, merges = (
        json.loads(made.to_str())["model"]["vocab"],
        json.loads(made.to_str())["model"]["merges"],
    )
    size = made.get_vocab_size()
    config = replace(config, vocab_size=size)
    tokens = [made.id_to_token(number) for number in range(size)]
    kinds = [3 if token in SPECIAL else 1 if token in vocabulary else 4 for token in tokens]
    writer = gguf.GGUFWriter(path, change.get("arch", config.model_type))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if rope := change.get("rope"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope))
    writer.add_tokenizer_model(change.get("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    if change.get("bos"):
        writer.add_add_bos_token(True)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    expected = hf_state_dict(init_from_scratch(config, 0), torch.float32)
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in expected.items():
        values = tensor
        if config.model_type == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = rotated(tensor, config.head_dim)
        key = theirs.get_name(name, try_suffixes=(".weight", ".bias"))
        assert key is not None
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(key, gguf.quantize(values.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, values.numpy())
    if extra := change.get("extra"):
        writer.add_tensor(extra, torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected, made


@pytest.mark.parametrize("family", SMALL_MODELS)
def test_a_file_becomes_the_model_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    expected, made = write(tmp_path / "m.gguf", SMALL_MODELS[family])
    import_model(tmp_path / "m.gguf", tmp_path / "m", Console(file=io.StringIO()))
    small, tensors = read_directory(tmp_path / "m")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name].to(torch.bfloat16)) for name in expected)
    config = ModelConfig.from_json(small["config.json"])
    assert config == replace(SMALL_MODELS[family], vocab_size=made.get_vocab_size())
    build_model(small, tensors)
    read = ChatTokenizer(small)
    for text in (
        *TEXTS,
        "a  5 b   77x",
        "Grüße 日本\t\n\n x",
        "<|im_start|>user\n<tool_call>1 2<|im_end|>",
    ):
        assert read.encode(text) == made.encode(text, add_special_tokens=False).ids
        assert read.decode(read.encode(text)) == text
    assert (read.eos_token_id, read.eos_token) == (2, "<|im_end|>")
    assert read.render([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n"
    assert json.loads(small["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    assert json.loads(small["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": 2}
    assert json.loads(small["config.json"])["eos_token_id"] == 2
    card = (tmp_path / "m" / "README.md").read_text()
    assert card == "# m.gguf\n\nConverted from `m.gguf` to bf16.\n"


def test_quantised_weights_stand_for_their_values(tmp_path: Path) -> None:
    expected, _ = write(tmp_path / "m.gguf", CONFIG, quantised=True)
    told: list[tuple[int, int]] = []
    tensors = convert(tmp_path / "m.gguf", lambda done, total: told.append((done, total))).tensors
    for name, tensor in expected.items():
        assert (tensors[name].float() - tensor).abs().max() <= tensor.abs().max() / 64
        assert tensors[name].dtype == torch.bfloat16
    assert told == [(n, len(expected)) for n in range(len(expected) + 1)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"arch": "mamba"},
            r"architecture 'mamba' is not supported; supported: llama, qwen2, qwen3",
        ),
        ({"rope": "yarn"}, r"rope scaling 'yarn' is not supported"),
        ({"model": "t5"}, r"tokenizer 't5' \('smollm'\) is not supported"),
        ({"pre": "poro-chat"}, r"tokenizer 'gpt2' \('poro-chat'\)"),
        ({"extra": "rope_freqs.weight"}, r"unknown tensor 'rope_freqs.weight'"),
        (
            {"extra": "blk.7.attn_norm.weight"},
            r"unknown \['model.layers.7.input_layernorm.weight'\]",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", CONFIG, **change)
    with pytest.raises(EtudeError, match=said):
        import_model(tmp_path / "m.gguf", tmp_path / "m", Console(file=io.StringIO()))
    with pytest.raises(EtudeError, match="is a folder: pass the path of a GGUF file"):
        import_model(tmp_path, tmp_path / "m", Console(file=io.StringIO()))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("pre", "digits", "is_composed"),
    [
        ("qwen2", ["1", "2", "3", "4"], True),
        ("llama-bpe", ["123", "4"], False),
        ("smollm", ["1", "2", "3", "4"], False),
        ("gpt-2", ["1234"], False),
    ],
)
def test_texts_are_cut_as_the_file_says(
    pre: str, digits: list[str], is_composed: bool, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", CONFIG, pre=pre)
    read = Tokenizer.from_buffer(convert(tmp_path / "m.gguf").small["tokenizer.json"])
    assert read.pre_tokenizer is not None
    found = [piece.replace("Ġ", " ") for piece, _ in read.pre_tokenizer.pre_tokenize_str("a1234 b")]
    assert found == ["a", *digits, " b"]
    assert read.decode(read.encode("e\u0301").ids) == ("é" if is_composed else "e\u0301")


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_begins_with_the_token_that_the_file_wants(bos: bool, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", CONFIG, bos=bos)
    read = Tokenizer.from_buffer(convert(tmp_path / "m.gguf").small["tokenizer.json"])
    own = read.encode("hi", add_special_tokens=False).ids
    assert read.encode("hi").ids == ([1, *own] if bos else own)


@pytest.mark.parametrize("length", [0, 3, 4, 20, 400, 30_000])
def test_junk_and_cut_files_are_refused(length: int, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", CONFIG)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:length])
    with pytest.raises(EtudeError, match=r"cut.gguf is (not a GGUF file|damaged or incomplete)"):
        convert(tmp_path / "cut.gguf")
    with pytest.raises(EtudeError, match="cannot read"):
        convert(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("found", "put", "error"),
    [
        (b"<|im_end|>", b"<|im_\xffnd|>", "is damaged or incomplete"),  # not valid text
        (
            b"attention.head_count" + UINT32 + b"\4",
            b"attention.head_count" + UINT32 + b"\0",
            "zero",
        ),
        (b"eos_token_id" + UINT32 + b"\2\0", b"eos_token_id" + UINT32 + b"\0\x7f", "out of range"),
        ("Ġ t".encode(), b"\0\0 t", "use tokens that are not in its vocabulary"),
        (b"key_length" + UINT32 + b"\x10", b"key_length" + UINT32 + b"\x22", "cannot be imported"),
    ],
)
def test_one_damaged_byte_is_one_sentence(
    found: bytes, put: bytes, error: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", CONFIG)
    whole = (tmp_path / "m.gguf").read_bytes()
    assert found in whole and len(found) == len(put)
    (tmp_path / "m.gguf").write_bytes(whole.replace(found, put, 1))
    with pytest.raises(EtudeError, match=f"m.gguf .*{error}"):
        convert(tmp_path / "m.gguf")


def test_a_file_of_another_kind_is_not_called_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4" + bytes(1000))
    with pytest.raises(
        EtudeError, match="m.gguf is not a GGUF file: it does not begin with 'GGUF'"
    ):
        convert(tmp_path / "m.gguf")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="m.gguf does not exist: pass the path of a GGUF file"):
        import_model(tmp_path / "m.gguf", tmp_path / "m", Console(file=io.StringIO()))
    with pytest.raises(EtudeError, match="already exists"):
        import_model(tmp_path / "m.gguf", tmp_path, Console(file=io.StringIO()))


REAL = Path(__file__).parents[2] / "models" / "smollm2-135m"


@pytest.mark.skipif(not REAL.is_dir(), reason="`make model` has not been run")
def test_the_real_model_is_the_one_that_transformers_reads() -> None:
    import transformers

    small, tensors = read_directory(REAL)
    model, mine = build_model(small, tensors).requires_grad_(False), ChatTokenizer(small)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32)
    reference = transformers.AutoTokenizer.from_pretrained(REAL)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = mine.render(messages, answer=True)
    assert text == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids = mine.encode(text)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits
    logits = model.logits(
        model(torch.tensor([ids]), torch.arange(len(ids))[None], CausalAttention())
    )
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    for _ in range(8):
        hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], CausalAttention())
        ids.append(int(model.logits(hidden[:, -1]).argmax()))
    assert mine.decode(ids).endswith("The capital of France is Paris.<|im_end|>")
    assert mine.encode("a  5 b   77x") == [81, 256, 37, 278, 333, 39, 39, 104]
    for path in sorted(Path(__file__).parents[2].glob("docs/*.md")):
        assert mine.encode(path.read_text()) == reference.encode(
            path.read_text(), add_special_tokens=False
        )
