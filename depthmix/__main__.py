# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""`python -m depthmix` is the `depthmix` command."""

import sys

from depthmix.late_import import import_late


def main() -> None:
    """Runs the command in a process of its own, in which torch is loaded by what needs it only."""
    try:
        import_late("torch")
        # what configurations of the host library import from it to check the name of an activation
        import_late("transformers.activations", ACT2FN=USUAL_ACTIVATIONS)
        from depthmix.conversion.cli import main
    # the imports take a second, in which the command does not handle signals yet
    except KeyboardInterrupt:
        print("depthmix: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


USUAL_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "swish")

if __name__ == "__main__":
    main()
