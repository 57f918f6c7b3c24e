# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`depthmix serve`, which is `transformers serve` with these models."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

from depthmix import AttnResConfig
from depthmix.auto import AUTO_MAPS, auto_classes, register
from depthmix.families import FAMILIES


def test_look_ups_of_the_server():
    """By name in `transformers`, and in the table of names; for every model that the Auto classes know."""
    manager = pytest.importorskip("transformers.cli.serving.model_manager")
    for model_type in AUTO_MAPS:
        classes = auto_classes(model_type)
        for auto_class in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
            name = classes[auto_class].__name__
            assert getattr(manager.transformers, name) is classes[auto_class]
        head = object.__new__(classes["AutoModelForCausalLM"])
        assert manager.ModelManager.get_model_modality(head) is manager.Modality.LLM
    register()


def test_response_templates_are_those_of_the_stock_models():
    """The server goes by the model type for them; a Qwen without one shows tool calls and thoughts as plain text."""
    serving = pytest.importorskip("transformers.cli.serving.utils")

    def template_of(config, processor=None):
        return serving.get_response_template(processor, SimpleNamespace(config=config))

    for model_type in AUTO_MAPS:
        backbone = FAMILIES[model_type].backbone.model_type
        stock_type = "qwen3" if backbone == "dense" else backbone
        config = auto_classes(model_type)["AutoConfig"]()
        assert template_of(config) == template_of(SimpleNamespace(model_type=stock_type)), model_type
        assert (template_of(config) is not None) == stock_type.startswith("qwen"), model_type
    # the dense decoder as Qwen2 and as Llama
    assert template_of(AttnResConfig(use_qk_norm=False, attention_bias=True, attention_output_bias=False))
    assert template_of(AttnResConfig(use_qk_norm=False)) is None
    assert template_of(AttnResConfig(use_qk_norm=False, attention_bias=True)) is None
    # the tokenizer's own comes first, and other models stay
    assert template_of(AttnResConfig(), SimpleNamespace(response_template="its own")) == "its own"
    assert template_of(SimpleNamespace(model_type="llama")) is None


def test_stock_names_stay():
    assert transformers.Qwen3ForCausalLM.__module__.startswith("transformers.")


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


@pytest.fixture
def serve(tmp_path):
    """`serve(folder)` starts the server and gives its address."""
    processes = []

    def serve(folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "depthmix", "serve", str(folder), "--port", str(port), "--device", "cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(tmp_path / "log", "w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                return f"http://127.0.0.1:{port}/v1"
            except (urllib.error.URLError, OSError):
                assert processes[-1].poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.5)
        raise AssertionError((tmp_path / "log").read_text())

    yield serve
    for process in processes:
        process.terminate()
        process.wait()


@pytest.mark.skipif(not is_serve_available(), reason="needs transformers[serving]")
@pytest.mark.long
def test_server(family, build_awake, tmp_path, serve):
    model, folder = build_awake(family), str(tmp_path / "model")
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, model.config.vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = tokenizer("w5 w80 w7", return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(
        model.generate(ids, max_new_tokens=5, do_sample=False)[0, 3:], skip_special_tokens=True
    )

    address = serve(folder)
    settings = {"model": folder, "max_tokens": 5, "temperature": 0}
    messages = [{"role": "user", "content": "w5 w80 w7"}]
    answer = json.loads(post(f"{address}/chat/completions", messages=messages, stream=False, **settings))
    assert answer["choices"][0]["message"]["content"].split() == expected.split()
    answer = post(f"{address}/chat/completions", messages=messages, stream=True, **settings)
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text.split() == expected.split()
