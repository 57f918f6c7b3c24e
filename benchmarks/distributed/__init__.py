# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Several GPUs of one host; see `python -m benchmarks.distributed --help`."""
