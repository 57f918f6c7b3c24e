# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The README.md of a converted checkpoint, and the files that travel along."""

import pytest
from huggingface_hub import ModelCard

from depthmix.conversion import convert


pytestmark = pytest.mark.once


@pytest.fixture
def card_of(qwen3_source, tmp_path):
    """`card_of(source_card, **options)` converts a source that has this README.md."""

    def card_of(source_card=None, **options):
        source = qwen3_source()
        if source_card is not None:
            (source / "README.md").write_text(source_card)
        convert(source, tmp_path / "converted", progress=False, **options)
        return ModelCard.load(tmp_path / "converted" / "README.md")

    return card_of


def test_metadata(card_of):
    card = card_of(
        "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\nbase_model: acme/base\ntags: [old]\n"
        "library_name: mlx\n---\n# Private prose\n"
    )
    assert card.data.to_dict() == {
        "base_model": "acme/base",
        "library_name": "transformers",
        "license": "other",
        "license_link": "LICENSE",
        "license_name": "qwen",
        "pipeline_tag": "text-generation",
        "tags": ["depthmix", "depth-attention"],
    }
    assert "Private prose" not in card.text


@pytest.mark.parametrize("source_card", [None, "", "# No metadata", "---\nlanguage: en\n---\n"])
def test_sources_without_metadata(source_card, card_of):
    card = card_of(source_card)
    assert card.data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}
    assert "license was not carried" not in card.text


@pytest.mark.parametrize("block", ["[broken: {yaml", "- a list", "license: \udcff"])
def test_broken_metadata_is_reported(block, qwen3_source, tmp_path):
    source = qwen3_source()
    (source / "README.md").write_bytes(f"---\n{block}\n---\n".encode(errors="surrogateescape"))
    report = convert(source, tmp_path / "converted", progress=False)
    assert report.warnings == [
        "The metadata of the source's README.md is not valid, so its license was not carried over."
    ]


def test_text(card_of, tmp_path):
    text = card_of(depth_stride=3, retrofit=False).text
    assert "It starts as the method was published, or as the options say. The converted model" in text
    assert "another function than the vanilla checkpoint" in text and "Fine-tune it before use" in text
    assert 'AutoModelForCausalLM.from_pretrained("path/or/id", trust_remote_code=True)' in text
    assert 'AutoTokenizer.from_pretrained("path/or/id", trust_remote_code=True)' in text
    assert "transformers 5.16.1 to 5.24" in text
    assert "- `depth_stride: 3 (new)`" in text and "47 kept" in text
    assert str(tmp_path) not in text, "paths are nobody's business"


def test_text_of_a_retrofit(card_of):
    text = card_of(depth_stride=3).text
    assert "It is a retrofit. The converted model computes exactly what the vanilla checkpoint does: the gates" in text
    assert "- `depth_gate: True (new)`" in text and "3 new" in text and "Fine-tune" not in text


def test_text_without_mixing(card_of):
    text = card_of(depth_stride=0).text
    assert "computes exactly what the vanilla checkpoint does" in text and "Fine-tune" not in text


def test_companions_travel_and_code_does_not(qwen3_source, tmp_path):
    source = qwen3_source()
    travelling = {
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "LICENSE",
        "NOTICE.txt",
    }
    staying = {
        "evil.py",
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "LICENSE.py",
        ".env",
        "sub/x.json",
    }
    for name in travelling | staying:
        (source / name).parent.mkdir(exist_ok=True)
        key = "tokenizer_class" if name == "tokenizer_config.json" else "eos_token"
        (source / name).write_text(f'{{"{key}": "{name}"}}')
    report = convert(source, tmp_path / "converted", progress=False)
    assert travelling <= set(report.files)
    assert not staying & set(report.files)
    assert report.not_copied == sorted(staying - {"sub/x.json"} | {"sub/"})
    assert "not copied: .env, LICENSE.py, evil.py" in str(report)
    for name in travelling:
        assert (tmp_path / "converted" / name).read_text() == (source / name).read_text()
    assert report.files == sorted(
        path.relative_to(tmp_path / "converted").as_posix()
        for path in (tmp_path / "converted").rglob("*")
        if path.is_file()
    )
