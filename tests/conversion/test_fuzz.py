# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""
Damaged and hostile checkpoints from a seed: each converts to what the stock model computes, or ends in one error.

`make fuzz` runs thousands, with `FUZZ_COUNT` inputs of each kind from `FUZZ_SEED`, for at most `FUZZ_SECONDS`.
"""

import copy
import json
import math
import os
import random
import resource
import shutil
import struct
import time

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from depthmix.conversion import ConversionError, convert, inspect_checkpoint


COUNT = int(os.environ.get("FUZZ_COUNT", 20))
SEED = int(os.environ.get("FUZZ_SEED", 0))
SECONDS = float(os.environ.get("FUZZ_SECONDS", 240))
# of one input, in seconds of CPU and bytes
TIME_LIMIT, MEMORY_LIMIT = 20, 2**30

SECRET = b"what lies outside of the checkpoint's folder"
KEEPING = {
    "depth_qwen3": {"depth_stride": 0},
    "attnres": {},
    "denseformer": {},
    "mhc": {},
}
VALUES = (
    *(math.nan, math.inf, -math.inf, -1, 0, 1, 2, 7, 4096, 10**9, 2**63, 10**40, -(10**40), 0.5, 1e-30, 1e308),
    *(True, False, None, "", "x", "NaN", "a\nb", "\x1b[31mred", "../../etc/passwd", "#" * 5000, [], {}, [None], [[]]),
    *({"": {}}, {"rope_type": "linear"}, {"rope_type": "yarn", "factor": 0}, {"type": "dynamic", "factor": -2.0}),
    *({"rope_type": "default", "rope_theta": 1e-300}, ["full_attention"], ["chunked_attention"] * 2, [1, 2], "gelu"),
)
KEYS = (
    *("num_labels", "id2label", "label2id", "rope_scaling", "rope_theta", "partial_rotary_factor", "torch_dtype"),
    *("is_causal", "per_layer_config", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "quantization_config", "auto_map"),
    *("save_pretrained", "to_dict", "__class__", "validate", "get_text_config", "text_config", "attribute_map"),
    *("use_p2n", "baseline_mode", "cross_layer_pattern", "use_qk_norm", "layer_kv_reuse_map", "transformers_weights"),
    *("max_length", "temperature", "do_sample", "eos_token_id", "pad_token_id", "tokenizer_class", "model_name"),
    *("architectures", "problem_type", "return_dict", "output_attentions", "dtype", "", "a\nb", "\x1b[2J", "9" * 3000),
)
CARDS = (
    *("1: integer key", "tags: 5", "tags: {a: b}", "license: [mit, apache]", "license: 2020-01-01", "to_dict: 1"),
    *("get: 1", "model-index: 3", "a: " + "[" * 3000, "base_model: {x: y}", "license: *nowhere", "? [a]\n: b", "- a"),
    *("license: !!python/object/apply:os.system [true]", "x: " + "9" * 9000, "license: \x00", "license: 'a\n\n# b'"),
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\nlicense: *d",
    "? {a: b}\n: c",
)
DEEP = ('{"a":' * 1100 + "1" + "}" * 1100, "[" * 90_000, '{"a": ' + "[" * 150 + "]" * 150 + "}")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n"


def damage_bytes(chance, content):
    """What can happen to any file."""
    kind = chance.randrange(8)
    if kind == 0:
        return content[: chance.randrange(len(content) + 1)]
    if kind == 1:
        place = chance.randrange(len(content))
        return content[:place] + chance.randbytes(chance.randrange(1, 9)) + content[place + 1 :]
    if kind == 2:
        return content + chance.choice([b"\0", b"}", b"\xff\xfe", b" " * 99])
    if kind == 3:
        return chance.choice([b"", LFS, b"\xef\xbb\xbf" + content, chance.randbytes(64), b"null", b"[]", b"5", b'"a"'])
    if kind == 4:
        return chance.choice(DEEP).encode()
    return content


def damage_json(chance, content):
    """Values of another kind and size, anywhere; keys that are there twice, or should not be."""
    tree = json.loads(content)
    for _ in range(chance.randrange(1, 4)):
        node = tree
        while True:
            places = list(node) if isinstance(node, dict) else range(len(node))
            if not places:
                break
            place = chance.choice(list(places))
            if isinstance(node[place], (dict, list)) and chance.random() < 0.8:
                node = node[place]
                continue
            # a copy, which the next change may fall into
            node[place] = copy.deepcopy(chance.choice(VALUES))
            break
    return json.dumps(tree).encode()


def config(chance, files):
    keys = json.loads(files["config.json"])
    for _ in range(chance.randrange(1, 4)):
        key = chance.choice([*keys, *KEYS])
        if chance.random() < 0.1:
            keys.pop(key, None)
        elif chance.random() < 0.1:
            keys["model_type"] = chance.choice(["llama", "qwen2", "olmo2", "mhc", "attnres", "moda_olmo2", 5, None])
        else:
            keys[key] = chance.choice(VALUES)
    content = json.dumps(keys).encode()
    files["config.json"] = damage_bytes(chance, content) if chance.random() < 0.25 else content


def header(chance, files):
    name = chance.choice([name for name in files if name.endswith(".safetensors")])
    content = files[name]
    (length,) = struct.unpack("<Q", content[:8])
    entries, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(chance.randrange(1, 3)):
        tensor = chance.choice([key for key in entries if key != "__metadata__"] or ["none"])
        if tensor not in entries or not isinstance(entries[tensor], dict):
            break
        kind = chance.randrange(7)
        if kind == 0:
            entries[tensor]["shape"] = chance.choice([[], [0], [-1], [2**62, 4], [1.5], ["a"], None, [64, 64, 1]])
        elif kind == 1:
            entries[tensor]["dtype"] = chance.choice(["F16", "I8", "F8_E4M3", "bogus", None, 4])
        elif kind == 2:
            entries[tensor]["data_offsets"] = chance.choice([[0, 0], [0, 2**63], [8, 4], [-4, 4], [], "x", [0, 4, 8]])
        elif kind == 3:
            names = [
                "../up",
                "\x1b[31m",
                "a\nb",
                "x" * 100_000,
                "",
                "model.layers.4000.mlp.up_proj.weight",
                tensor + "x",
            ]
            entries[chance.choice(names)] = entries.pop(tensor)
        elif kind == 4:
            del entries[tensor]
        elif kind == 5:
            entries["__metadata__"] = chance.choice([{"format": 5}, [], None, {"a": "b" * 1000}])
        else:
            entries[tensor] = chance.choice(VALUES)
    text = json.dumps(entries).encode()
    if chance.random() < 0.1:
        text = chance.choice(DEEP).encode()
    length = len(text) if chance.random() < 0.9 else chance.choice([0, 7, 2**40, 2**63 + 5, len(text) + 8])
    files[name] = struct.pack("<Q", length) + text + (data if chance.random() < 0.9 else data[:-5])


def index(chance, files):
    name = "model.safetensors.index.json"
    tree = json.loads(files[name])
    tensor = chance.choice(list(tree["weight_map"]))
    wrong = [
        "../outside.safetensors",
        "/etc/passwd",
        5,
        None,
        [],
        "model.bin",
        "a\0.safetensors",
        "no.safetensors",
        ".",
    ]
    if chance.random() < 0.7:
        tree["weight_map"][chance.choice([tensor, "x", ""])] = chance.choice(wrong)
    content = json.dumps(tree).encode()
    files[name] = damage_json(chance, content) if chance.random() < 0.3 else damage_bytes(chance, content)


def card(chance, files):
    text = f"---\n{chance.choice(CARDS)}\n{chance.choice(['---', '', '--- '])}\n# Title\n".encode()
    files["README.md"] = damage_bytes(chance, text) if chance.random() < 0.3 else text


def tokenizer(chance, files):
    name = chance.choice(
        ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"]
    )
    files[name] = chance.choice([damage_json, damage_bytes])(chance, files[name])
    if chance.random() < 0.3:
        classes = [
            "AutoModel",
            "Qwen3ForCausalLM",
            "../evil.Class",
            "GPT2Tokenizer",
            "BertTokenizer",
            "T5Tokenizer",
            5,
        ]
        more = {"tokenizer_class": chance.choice(classes), chance.choice(KEYS): chance.choice(VALUES)}
        files["tokenizer_config.json"] = json.dumps(more).encode()


def links(chance, files):
    name = chance.choice([*files, "LICENSE", "NOTICE", "additional_chat_templates", "model.safetensors"])
    files[name] = chance.choice([name, "../outside.txt", "/etc/passwd", "nowhere", ".", "..", None])


@pytest.fixture(scope="module")
def plain_files(tmp_path_factory):
    """A small sharded checkpoint with all files that travel, by name."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    shape = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3))
    model.save_pretrained(folder, max_shard_size="8KB")
    words = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 9}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "b"}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Title\n")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder, files):
    folder.mkdir()
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        elif isinstance(content, str):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content)


@torch.no_grad()
def logits_of(folder):
    """None where tensors and model do not fit: stock Llama ignores norms that the released code has, for one."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    fits = not any(info.values())
    return model.eval()(torch.tensor([[3, 4, 5, 6, 7]]), return_dict=True).logits if fits else None


def attempt(source, converted, to):
    """Whether a source converts; what the command shows as one error is none here."""
    try:
        str(inspect_checkpoint(source))
        str(convert(source, converted, to=to, progress=False, **KEEPING[to]))
    except (ConversionError, OSError) as error:
        assert str(error)
        return False
    return True


# configurations and tokenizers are read by the host too
OURS = [pytest.param(damage, marks=pytest.mark.once) for damage in (header, index, card, links)]


@pytest.mark.once
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("damage", [config, tokenizer, *OURS], ids=lambda damage: damage.__name__)
def test_fuzz(damage, plain_files, tmp_path):
    (tmp_path / "outside.txt").write_bytes(SECRET)
    shutil.copyfile(tmp_path / "outside.txt", tmp_path / "outside.safetensors")
    started, count = time.monotonic(), 0
    outcomes = {True: 0, False: 0}
    for number in range(COUNT):
        chance = random.Random(f"{SEED} {damage.__name__} {number}")
        source, converted = tmp_path / "source", tmp_path / "converted"
        files = dict(plain_files)
        damage(chance, files)
        write(source, files)
        to = chance.choice(list(KEEPING))
        place = f"seed {SEED}, {damage.__name__} {number} to {to}"
        before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            converts = attempt(source, converted, to)
            assert time.process_time() - before < TIME_LIMIT
            assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < MEMORY_LIMIT
            assert converted.exists() == converts
            if converts:
                check_result(source, converted)
        except BaseException as error:
            error.add_note(place)
            raise
        outcomes[converts] += 1
        shutil.rmtree(converted, ignore_errors=True)
        shutil.rmtree(source)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"outside.txt", "outside.safetensors"}, place
        count += 1
        if time.monotonic() - started > SECONDS:
            break
    print(f"{damage.__name__}: {count} inputs, {outcomes[True]} converted, {outcomes[False]} refused")
    # the controls: the damage is not such that nothing converts, nor that everything does, but for cards
    assert count < 15 or (outcomes[True] and (outcomes[False] or damage is card))


def check_result(source, converted):
    for path in converted.rglob("*"):
        assert not path.is_symlink()
        assert path.is_dir() or SECRET not in path.read_bytes()
    result = logits_of(converted)
    assert result.isfinite().all()
    try:
        expected = logits_of(source)
    # a source that stock transformers cannot load
    except Exception:
        return
    assert expected is None or (result - expected).abs().max() < 1e-4
