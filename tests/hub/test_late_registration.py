# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`import depthmix` imports nothing of the host library, and everything is registered when it is needed."""

import subprocess
import sys

import pytest


SIZES = (
    "vocab_size=19, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, "
    "num_key_value_heads=1, head_dim=8"
)
CODE = {
    "an Auto class after it": (
        "import depthmix\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
        f"config = AutoConfig.for_model('attnres', {SIZES})\n"
        "assert type(AutoModelForCausalLM.from_config(config)) is depthmix.AttnResForCausalLM\n"
    ),
    "an Auto class before it": (
        "from transformers import AutoConfig, AutoModel, PreTrainedModel, Trainer\nimport depthmix\n"
        f"config = AutoConfig.for_model('mhc', {SIZES})\n"
        "assert type(AutoModel.from_config(config)) is depthmix.MHCModel\n"
    ),
    "several threads at once": (
        "import threading, depthmix\nfrom transformers import AutoConfig, AutoModelForCausalLM\nmade = []\n"
        "def make():\n"
        f"    config = AutoConfig.for_model('depth_olmo2', {SIZES})\n"
        "    made.append(type(AutoModelForCausalLM.from_config(config)))\n"
        "threads = [threading.Thread(target=make) for _ in range(6)]\n"
        "for each in threads: each.start()\n"
        "for each in threads: each.join()\n"
        "assert made == 6 * [depthmix.DepthOlmo2ForCausalLM], made\n"
    ),
    "only a configuration, from its own module": (
        "from depthmix.configuration.configuration_attnres import AttnResConfig\n"
        "import os, sys\nAttnResConfig().save_pretrained(sys.argv[1])\n"
        "assert {'modeling_attnres.py', 'depthmix_code.json'} <= set(os.listdir(sys.argv[1]))\n"
    ),
    "only a model, from its own module": (
        "from depthmix.modeling.modeling_attnres import AttnResForCausalLM as Model\n"
        "import os, sys\nfrom transformers import AutoModelForCausalLM\n"
        f"Model(Model.config_class({SIZES})).save_pretrained(sys.argv[1])\n"
        "assert 'modeling_attnres.py' in os.listdir(sys.argv[1])\n"
        "assert type(AutoModelForCausalLM.from_pretrained(sys.argv[1])) is Model\n"
    ),
    "tables are pickled whole": (
        "import pickle, depthmix\nfrom transformers import AutoModelForCausalLM\n"
        "table = pickle.loads(pickle.dumps(AutoModelForCausalLM._model_mapping))\n"
        "assert table[depthmix.AttnResConfig] is depthmix.AttnResForCausalLM\n"
    ),
}


# each is a process that imports the host library, so on the oldest transformers these are the two orders of imports
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=[] if name.startswith("an Auto class") else [pytest.mark.once])
        for name, code in CODE.items()
    ],
)
def test_order_of_imports(code, fresh_python, tmp_path):
    run = fresh_python.run(code, tmp_path / "saved")
    assert run.returncode == 0, run.stderr


@pytest.mark.once
def test_nothing_is_imported():
    code = "import sys, depthmix\nassert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()\n"
    subprocess.run([sys.executable, "-c", code], check=True)
