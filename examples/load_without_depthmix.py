# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What somebody without depthmix does with a saved model: load it by the code that it carries, score, generate.

    python -S examples/load_without_depthmix.py MODEL PROMPT NEW_TOKENS RESULT

Writes the prompt's logits and the generated tokens to the safetensors file RESULT. With `-S` Python ignores editable
installs, so depthmix is usually not importable; where it still is, it is hidden.
"""

import importlib.util
import sys

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, logging


class DepthmixHidden:
    """An import finder that finds depthmix missing."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "depthmix":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(folder: str, prompt: str, new_tokens: str, result: str) -> None:
    if importlib.util.find_spec("depthmix") is not None:
        sys.meta_path.insert(0, DepthmixHidden)
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=int(new_tokens), do_sample=False)
    save_file({"logits": model(**inputs).logits.detach(), "tokens": tokens}, result)

    assert "depthmix" not in sys.modules
    print(f"{type(model).__name__} from {type(model).__module__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
