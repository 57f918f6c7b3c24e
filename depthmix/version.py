# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The one place of the version number; free of imports, so that packaging can read it without torch."""

__version__ = "0.3.0"
