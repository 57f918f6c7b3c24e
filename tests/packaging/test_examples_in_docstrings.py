# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""The examples in the documentation of the configurations, which is put together when a class is made."""

import doctest
import re

import pytest

from depthmix.families import METHODS, configurations


@pytest.mark.parametrize("method", METHODS)
def test_examples_of_a_configuration_run(method):
    classes = configurations(method)
    made = [classes.of(backbone) for backbone in classes.backbones.values() if backbone.is_available]
    # on a backbone with fields of its own the text is another one
    texts = {documentation.split("\n", 1)[1] for documentation in (each.__doc__ for each in made)}
    examples = {block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)}
    assert examples
    for block in examples:
        test = doctest.DocTestParser().get_doctest(block, {}, method, None, None)
        assert len(test.examples) > 1
        assert doctest.DocTestRunner().run(test).failed == 0
