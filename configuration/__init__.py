# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Configurations, one module for each method. Importing them needs transformers, not torch."""
