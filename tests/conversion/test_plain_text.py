# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What files say, on the terminal and in the card: no escape sequence, no forged line, no markup, nothing endless."""

import json
import re

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from depthmix.conversion import ConversionError, convert, inspect_checkpoint
from depthmix.conversion.cli import main
from depthmix.conversion.errors import raise_problems
from depthmix.conversion.plain_text import hidden_tokens, markdown_code, markdown_text, mask_tokens, printable


pytestmark = pytest.mark.once
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\x08\x7f"
FORGED = "a\nfunction: the same\r\u2028b\u202etxt"
MARKUP = "`](https://evil) <script>alert(1)</script>\n\n# Install\n```\n![x](http://evil/x.png) www.evil.com a@b.c"
UNFIT = ESCAPES + FORGED + MARKUP
LONG = "x" * 100_000


def assert_fit(text, lines=None):
    """Nothing but printable lines of a bearable length."""
    assert all(line.isprintable() for line in text.split("\n"))
    assert max(map(len, text.split("\n"))) < 2500
    assert "\n# Install" not in text and "\nfunction" not in text
    if lines is not None:
        assert len(text.split("\n")) == lines


def test_printable():
    assert printable("läng-ä 中文 😀") == "läng-ä 中文 😀"
    assert printable(UNFIT).startswith(r"\x1b[31mred\x1b]0;title\x07\x9b2J\x08\x7fa\nfunction")
    assert printable("\ud800") == r"\ud800"
    assert_fit(printable(LONG), lines=1)
    assert "(98000 characters left out)" in printable(LONG)


@pytest.mark.parametrize("text", [UNFIT, "`", "``", "a`b``c```", "", LONG])
def test_code_span(text):
    span = markdown_code(text)
    fence = re.match("`+", span)[0]
    assert span.endswith(fence) and fence not in span[len(fence) : -len(fence)]
    assert_fit(span, lines=1)


def test_prose():
    assert markdown_text("a_plain sentence, as asked: key='before_rope' (5).") == (
        "a_plain sentence, as asked: key='before_rope' (5)."
    )
    for part in ("<b>", "[a](b)", "https://evil", "www.evil.com", "a@b.c", "`"):
        assert markdown_text(f"a {part}").startswith("`")


SECRET = "s3cr3t/p@ss.word-9"


@pytest.mark.parametrize(
    "form",
    [
        "hf_abcdefghij",
        "hf_oauth_abcdef.ghijkl.mnopqr",
        "api_org_abcdefghij",
        "http://user:{}@proxy:8080/path",
        "http://{}@proxy",
        "Authorization: Basic {}",
        "'proxy-authorization': 'Bearer {}'",
        "BEARER {}",
        "bearer%20{}",
        "Cookie: session=1; token={}",
        "https://host/file?token={}&x=1",
        "https://host/file?X-Amz-Signature=1&X-Amz-Credential={}",
        "HF_TOKEN={}",
        '{{"HUGGING_FACE_HUB_TOKEN": "{}"}}',
        # behind what Python has escaped, which ends in letters
        r"b'\nhf_abcdefghij'",
        r"'\x1bhf_abcdefghij'",
        r"'\u202ehf_abcdefghij'",
    ],
)
def test_secrets_are_masked(form):
    secret = SECRET if "{}@" not in form or ":{}" in form else "s3cr3t"
    text = mask_tokens(f"before {form.format(secret)} after")
    assert text.startswith("before ") and "hf_***" in text
    assert not any(part in text for part in (secret, "s3cr3t", "word-9", "abcdef", "mnopqr"))
    assert mask_tokens(text) == text


def test_what_is_no_secret_stays():
    for text in (
        *(
            "eos_token=5: must be below vocab_size=3",
            "token_type_ids",
            "pad_token_id: 0",
            "https://huggingface.co/a/b",
        ),
        *("a@b.c", "basic use", "key=3, token: none", "hf_hub", "surf_hf_abcdef", "tokenizer.json?download=true"),
    ):
        assert mask_tokens(text) == text


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "http_proxy"])
def test_the_password_of_a_proxy_is_hidden(name, monkeypatch):
    monkeypatch.setenv(name, f"http://user:{SECRET}@proxy:3128")
    with hidden_tokens(None):
        assert SECRET not in mask_tokens(f"refused: {SECRET}, user:{SECRET}")
    assert mask_tokens(f"refused: {SECRET}").endswith(SECRET)


def test_problems_stay_apart():
    with pytest.raises(ConversionError) as error:
        raise_problems("two\nlines", [UNFIT, LONG])
    assert_fit(str(error.value), lines=3)


@pytest.fixture
def hostile(qwen3_source, edit_config):
    """A source whose names, keys and values are unfit; it converts."""
    source = qwen3_source("source\x1b[31m\n# Install <b>`")
    edit_config(source, **{UNFIT: ["x"], "finetuning_task": UNFIT, "long": [LONG]})
    (source / f"{FORGED}.txt").write_text("")
    (source / "tokenizer_config.json").write_text(json.dumps({UNFIT: 1, LONG: 2, "tokenizer_class": UNFIT}))
    (source / "README.md").write_text(
        "---\n" + json.dumps({"license": UNFIT, "license_link": LONG, "base_model": ["acme/x", UNFIT]}) + "\n---\n"
    )
    return source


def test_card_and_report(hostile, tmp_path, capsys):
    report = convert(hostile, tmp_path / "converted", progress=False)
    assert_fit(str(report))
    text = (tmp_path / "converted" / "README.md").read_text()
    assert_fit(text)
    assert ModelCard(text).data.to_dict().keys() == {"base_model", "library_name", "pipeline_tag", "tags"}
    assert ModelCard(text).data.base_model == "acme/x"
    # outside of code there is no markup but ours
    body = re.sub("^```.*$", "", text.split("---")[-1], flags=re.MULTILINE)
    prose = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", body)
    for part in ("<", "evil", "](", "`"):
        assert part not in prose
    main(["inspect", str(hostile)])
    main(["convert", str(hostile), str(tmp_path / "plan\x1b[2J\nfunction"), "--dry-run"])
    assert_fit(capsys.readouterr().out)


@pytest.mark.parametrize("name", [UNFIT, LONG])
def test_tensor_names_in_errors(name, qwen3_source, tmp_path):
    source = qwen3_source()
    tensors = load_file(source / "model.safetensors")
    tensors[name] = tensors["model.norm.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError) as error:
        convert(source, tmp_path / "converted", progress=False)
    assert_fit(str(error.value))
    assert_fit(str(inspect_checkpoint(source)))


def test_config_values_in_errors(qwen3_source, edit_config, tmp_path):
    source = qwen3_source()
    for fields in ({"model_type": UNFIT}, {"hidden_act": UNFIT}, {"architectures": [LONG]}, {"vocab_size": LONG}):
        edit_config(source, **({"model_type": "qwen3", "vocab_size": 97} | fields))
        with pytest.raises(ConversionError) as error:
            convert(source, tmp_path / "converted", progress=False)
        assert_fit(str(error.value))


def test_errors_of_the_system(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["inspect", f"{tmp_path}/{UNFIT}"])
    assert_fit(end.value.code, lines=1)
