# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""Models, one module for each method. Their classes are made when they are asked for by name."""
