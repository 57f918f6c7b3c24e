# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""A converted folder gives the tokenizer that the host makes of the source, whatever class the files declare."""

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, MistralConfig

from depthmix import MHCConfig
from depthmix.conversion import ConversionError, convert, inspect_checkpoint
from depthmix.conversion.source_tokenizer import resolve_tokenizer, verify_tokenizer
from depthmix.families import FAMILIES


TARGETS = {"qwen3": "attnres", "qwen2": "denseformer", "llama": "mhc", "olmo2": "moda_olmo2"}
DECLARED = (
    None,
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "Qwen2Tokenizer",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)
TEXT = "In 1234567 years, a\u0301 b 42,000 <|endoftext|> tokens\n\n  12"


def digits_in_threes():
    """A byte-level BPE whose own pre-tokenizer splits digits in groups of three, as that of OLMo2 does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("12", "3"), ("3", "4"), ("4", "5"), ("45", "6"), ("6", "7"), ("0", "0"), ("00", "0")]
    words = ["<|endoftext|>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    split = pre_tokenizers.Split(Regex(r"\d{1,3}|\D+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces():
    """A BPE as old Llamas have it, with spaces as a letter and bytes for what it does not know."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abI1234567890nyears,tok", "12", "123"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = [("1", "2"), ("12", "3")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


# these differ most in what the host does by their type
OFTEN = [("olmo2", digits_in_threes), ("qwen2", digits_in_threes), ("llama", sentence_pieces)]
PAIRS = [
    pytest.param(kind, make, marks=[] if (kind, make) in OFTEN else [pytest.mark.exhaustive])
    for kind in TARGETS
    for make in (digits_in_threes, sentence_pieces)
]


@pytest.mark.parametrize(("kind", "make"), PAIRS)
def test_ids_stay_the_same(kind, make, stock_source, tmp_path):
    source = stock_source(kind)
    make().save(str(source / "tokenizer.json"))
    keys = json.loads((source / "config.json").read_text())
    classes = set()
    for declared in DECLARED:
        for in_model_config in (False, True):
            (source / "tokenizer_config.json").unlink(missing_ok=True)
            if declared and not in_model_config:
                (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared}))
            more = {"tokenizer_class": declared} if declared and in_model_config else {}
            (source / "config.json").write_text(json.dumps(keys | more))
            report = convert(source, tmp_path / "converted", to=TARGETS[kind], overwrite=True, progress=False)
            expected, loaded = (AutoTokenizer.from_pretrained(each) for each in (source, tmp_path / "converted"))
            assert type(loaded) is type(expected), declared
            assert loaded(TEXT)["input_ids"] == expected(TEXT)["input_ids"], declared
            assert loaded.decode(loaded(TEXT)["input_ids"]) == expected.decode(expected(TEXT)["input_ids"])
            assert not report.warnings
            classes.add(type(expected).__name__)
            assert inspect_checkpoint(source).tokenizer == type(expected).__name__
    # the control: the host chooses between several, but for these two, where it goes by the model type alone
    assert len(classes) > 1 or kind in ("qwen2", "olmo2")


def test_one_that_is_named_wrongly_is_named_rightly(stock_source, tmp_path):
    source = stock_source("olmo2")
    digits_in_threes().save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "model_max_length": 99}')
    report = convert(source, tmp_path / "converted", to="moda_olmo2", progress=False)
    change = "tokenizer_class: 'GPT2Tokenizer' -> 'TokenizersBackend' (in tokenizer_config.json)"
    assert change in report.config_changes
    written = json.loads((tmp_path / "converted" / "tokenizer_config.json").read_text())
    assert written == {"tokenizer_class": "TokenizersBackend", "model_max_length": 99}
    assert "tokenizer: TokenizersBackend" in str(inspect_checkpoint(source))


def test_one_that_cannot_be_loaded_is_copied_with_a_warning(stock_source, tmp_path):
    source = stock_source("llama")
    (source / "tokenizer.json").write_text('{"model": {"type": "of tomorrow"}}')
    report = convert(source, tmp_path / "converted", to="mhc", progress=False)
    assert "cannot load the source's tokenizer here" in " ".join(report.warnings)
    assert (tmp_path / "converted" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_paths_in_a_tokenizer_config_are_not_followed(stock_source, tmp_path):
    source = stock_source("llama")
    (tmp_path / "elsewhere.json").write_text("{}")
    digits_in_threes().save(str(tmp_path / "elsewhere.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_file": str(tmp_path / "elsewhere.json")}))
    report = convert(source, tmp_path / "converted", to="mhc", progress=False)
    assert "cannot load the source's tokenizer here" in " ".join(report.warnings)


@pytest.mark.parametrize("hub_id", [None, "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "somebody/else"])
def test_repositories_that_the_host_knows_by_name(hub_id, tmp_path):
    sentence_pieces().save(str(tmp_path / "tokenizer.json"))
    content = {"tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    stock = LlamaConfig()
    chosen = resolve_tokenizer({path.name: path for path in tmp_path.iterdir()}, content, stock, MHCConfig(), hub_id)
    stock._name_or_path = hub_id or ""
    expected = type(AutoTokenizer.from_pretrained(tmp_path, config=stock)).__name__
    assert chosen.class_name == expected
    # by that name it is not the one that the files declare, and the converted folder does not have the name
    assert chosen.written == (None if expected == "LlamaTokenizer" else expected)


def test_a_key_that_is_lost_on_the_way_is_noticed(tmp_path):
    digits_in_threes().save(str(tmp_path / "tokenizer.json"))
    content = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    companions = {path.name: path for path in tmp_path.iterdir()}
    chosen = resolve_tokenizer(companions, content, LlamaConfig(), MHCConfig(), None)
    assert chosen.written is None
    for kept, is_lost in ((content, False), ({"tokenizer_class": "TokenizersBackend"}, True)):
        texts = {"tokenizer_config.json": json.dumps(kept)}
        if is_lost:
            with pytest.raises(ConversionError, match="another one without what does not travel"):
                verify_tokenizer(chosen, companions, texts, MHCConfig())
        else:
            verify_tokenizer(chosen, companions, texts, MHCConfig())


def test_the_version_by_which_the_host_corrects_tokenizers_of_mistral(tmp_path):
    """`fix_mistral_regex` is followed for a Mistral of an older version, and never for what is converted."""
    made = json.loads(digits_in_threes().to_str())
    vocabulary = made["model"]["vocab"]
    # smaller ones it does not look at
    vocabulary.update({f"<{i}>": len(vocabulary) + i for i in range(100_001)})
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    content = {"tokenizer_class": "TokenizersBackend", "fix_mistral_regex": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    companions = {path.name: path for path in tmp_path.iterdir()}
    config = FAMILIES["moda_mistral"].find_class("Config")()
    with pytest.raises(ConversionError, match="The tokenizer cannot be kept: .* Save the tokenizer of the source"):
        resolve_tokenizer(companions, content, MistralConfig(), config, None, "4.46.0")
