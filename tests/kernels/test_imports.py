# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What importing the operations costs."""

import subprocess
import sys


def test_the_compiler_is_not_imported():
    code = (
        "import sys, depthmix.kernels\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules\n"
        "assert 'torch._dynamo' not in sys.modules, 'it takes more than a second'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
