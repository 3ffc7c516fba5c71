import subprocess
import sys

import pydantic
import pytest

from maxstack.schema.rewards import AnyReward

REWARD = pydantic.TypeAdapter(AnyReward)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"kind": "regex", "pattern": "("}, "is not a regular expression"),
        ({"kind": "function", "call": "module.function"}, "should match pattern"),
        ({"kind": "length", "most": 4, "buffer": 5}, "5 is more than most=4; make it smaller"),
    ],
)
def test_invalid_sections_are_refused(section, problem):
    with pytest.raises(pydantic.ValidationError, match=problem):
        REWARD.validate_python(section)


@pytest.mark.parametrize(
    ("section", "label"),
    [
        ({"kind": "exact"}, "exact"),
        ({"kind": "function", "call": "my.rewards:brevity"}, "brevity"),
        ({"kind": "function", "call": "my.rewards:brevity", "name": "short"}, "short"),
    ],
)
def test_a_reward_is_named_by_its_name_function_or_kind(section, label):
    assert REWARD.validate_python(section).label == label


def test_a_worker_imports_nothing_but_the_standard_library():
    code = """if True:
        import sys
        before = {*sys.modules}
        import maxstack.rewards.worker, maxstack.rewards.built_in
        found = {name.partition(".")[0] for name in {*sys.modules} - before}
        assert not found - sys.stdlib_module_names - {"maxstack"}, found
    """
    subprocess.run([sys.executable, "-c", code], check=True)
