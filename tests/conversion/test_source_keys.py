# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Every key of a source's config.json is carried, without effect, or refused: measured against the stock model."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from vanilla_models import STOCK

from depthmix.conversion import ConversionError, convert, inspect_checkpoint
from depthmix.conversion.source_configs import unknown_keys
from depthmix.conversion.source_keys import REFUSED_KEYS


# every source and target, with the options that keep the function
PAIRS = [
    *(("qwen3", to) for to in ("depth_qwen3", "attnres", "denseformer", "mhc")),
    *((source, to) for source in ("qwen2", "llama") for to in ("attnres", "denseformer", "mhc")),
    ("olmo2", "moda_olmo2"),
]
KEEPING = {"depth_qwen3": {"depth_stride": 0}, "moda_olmo2": {"moda_attn_slots": False, "moda_ffn_slots": False}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 64, "factor": 2.0}
# what a stock model computes with these is what the converted one computes
CARRIED = {
    "theta": {"rope_theta": 77.0, "rope_parameters": ...},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0, "rope_parameters": ...},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
        }
    },
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
    "longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG}},
    "activation": {"hidden_act": "gelu"},
    "epsilon": {"rms_norm_eps": 0.5},
    "names": {"my_own_key": 5, "custom_layers": ["a"], "logits_scaling": 1.0, "num_experts": 0, "is_causal": True},
    "execution": {"_attn_implementation": "flash_attention_2", "attn_implementation": "somebody/kernel"},
}
WINDOWS = {
    "window": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "layer_types": ...},
    "kinds": {
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
SAMPLES = {
    "is_causal": False,
    "use_rope": False,
    "per_layer_config": {"0": {"rms_norm_eps": 0.5}},
    "sliding_window": 3,
    "attention_chunk_size": 4,
    "layer_types": ["chunked_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "dense"],
    "kv_sharing_modes": ["reuse", "own"],
    "transformers_weights": "other.safetensors",
    "position_embedding_type": "alibi",
    "no_rope_layers": [0, 1],
    "text_config": {"hidden_size": 8},
}


def set_keys(folder, keys, fields):
    merged = {key: value for key, value in (keys | fields).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(merged))


@torch.no_grad()
def logits_of(folder, ids, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()(ids).logits


# what is carried is a matter of the source: with each version one target, and all of them from one source
EACH_SOURCE = [("qwen3", "depth_qwen3"), ("qwen2", "attnres"), ("llama", "denseformer"), ("olmo2", "moda_olmo2")]


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        pytest.param(
            *pair,
            marks=[] if pair in EACH_SOURCE else [pytest.mark.once if pair[0] == "qwen3" else pytest.mark.exhaustive],
        )
        for pair in PAIRS
    ],
)
def test_what_is_carried_computes_the_same(kind, to, stock_source, tmp_path, token_ids):
    source, ids = stock_source(kind), token_ids(2, 12)
    keys = json.loads((source / "config.json").read_text())
    plain = logits_of(source, ids)
    for name, fields in (CARRIED | (WINDOWS if "qwen" in kind else {})).items():
        # what the host itself cannot run here is put in place after its logits are taken
        readable = {} if name == "execution" else fields
        set_keys(source, keys, readable)
        expected = logits_of(source, ids)
        if name not in ("names", "execution", "dynamic", "longrope"):
            assert (expected - plain).abs().max() > 1e-3, name
        set_keys(source, keys, fields)
        report = convert(source, tmp_path / "converted", to=to, overwrite=True, progress=False, **KEEPING.get(to, {}))
        assert (logits_of(tmp_path / "converted", ids) - expected).abs().max() < 1e-5, name
        assert ("'custom_layers', 'my_own_key'" in " ".join(report.warnings)) == (name == "names")
        written = json.loads((tmp_path / "converted" / "config.json").read_text())
        assert not [key for key in written if "attn_implementation" in key or key == "custom_layers"]


# the refusals are those of the source, whatever it is converted to
OFTEN = [("qwen3", "depth_qwen3"), ("llama", "mhc"), ("olmo2", "moda_olmo2")]


@pytest.mark.once
@pytest.mark.parametrize(
    ("kind", "to"), [pytest.param(*pair, marks=[] if pair in OFTEN else [pytest.mark.exhaustive]) for pair in PAIRS]
)
def test_what_changes_the_function_is_refused(kind, to, stock_source, tmp_path):
    source = stock_source(kind)
    keys = json.loads((source / "config.json").read_text())
    # values of fields that this model type declares are a matter of the configuration
    declared = STOCK[kind][0].__dataclass_fields__.keys() - {"is_encoder_decoder", "chunk_size_feed_forward"}
    accepted = []
    for key in sorted(REFUSED_KEYS.keys() - declared):
        set_keys(source, keys, {key: SAMPLES.get(key, 7 if key.startswith(("num", "scale")) else 0.25)})
        try:
            convert(source, tmp_path / "converted", to=to, dry_run=True, progress=False, **KEEPING.get(to, {}))
        except ConversionError as error:
            assert f"{key}=" in str(error)
        else:
            accepted.append(key)
    assert not accepted


def test_a_mistral_that_the_host_takes_for_a_ministral(tiny, tmp_path, token_ids, edit_config):
    """For the key that it has, and of which it follows the entries."""
    source, dest, ids = tmp_path / "source", tmp_path / "converted", token_ids(2, 12)
    config = MistralConfig(**tiny, sliding_window=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(source)
    full, sliding = (config.num_hidden_layers * [f"{kind}_attention"] for kind in ("full", "sliding"))
    for kinds, kept in ((sliding, True), (full, False), (None, True)):
        edit_config(source, layer_types=kinds)
        if kept:
            convert(source, dest, overwrite=True, progress=False)
            assert (logits_of(dest, ids) - logits_of(source, ids)).abs().max() < 1e-5, kinds
        else:
            with pytest.raises(
                ConversionError, match=r"^layer_types=\['full_attention'.*: stands for layers of a Minist"
            ):
                convert(source, dest, overwrite=True, progress=False)


@pytest.mark.parametrize("key", ["save_pretrained", "to_dict", "validate", "__class__", "get_text_config"])
def test_keys_that_are_names_of_methods(key, stock_source, edit_config):
    source = stock_source("qwen3")
    edit_config(source, **{key: 5})
    assert all(f"a key {key}, which is the name of a method" in reason for to, reason in attempts(source).items())


def attempts(source):
    return {
        to: text
        for to, text in inspect_checkpoint(source).conversions.items()
        if to in ("depth_attention", "attnres", "denseformer", "mhc")
    }


# the host's code that a stock model of these types runs, and what it calls a configuration there
RUN = ("masking_utils", "cache_utils", "modeling_rope_utils", "modeling_utils", "modeling_layers", "utils.generic")
RUN += tuple(f"integrations.{name}" for name in ("sdpa_attention", "flash_attention", "flex_attention"))
RUN += tuple(f"models.{kind}.modeling_{kind}" for kind in STOCK) + ("models.auto.tokenization_auto",)
CONFIGS = {"config", "self.config", "module.config", "layer_config", "decoder_config", "text_config", "model.config"}
CONFIGS |= {"effective_config", "config.get_text_config()", "self.config.get_text_config()"}
# of other models, which share these files: multi-token prediction, encoders with decoders, and attributes of instances
OTHERS = {"chain_hidden_post_norm", "mtp_hidden_states_first", "number_of_conv_states", "token_classification_bias"}
OTHERS |= {"_is_quantized", "mask_token_id"}


def names_read(module):
    """Names that a module of the host reads from configurations: as attributes, and by `getattr` and `hasattr`."""
    tree = ast.parse(Path(find_spec(f"transformers.{module}").origin).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in CONFIGS:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            holder, name = node.args[:2]
            if ast.unparse(holder) in CONFIGS and isinstance(name, ast.Constant):
                yield name.value


def test_every_name_that_stock_code_reads_is_known():
    read = {name for module in RUN if find_spec(f"transformers.{module}") for name in names_read(module)}
    assert {"is_causal", "attention_chunk_size", "tokenizer_class", "hidden_act"} <= read
    for config_class, _ in STOCK.values():
        unknown = [name for name in unknown_keys(config_class, dict.fromkeys(read)) if not hasattr(config_class, name)]
        assert not set(unknown) - OTHERS, config_class
