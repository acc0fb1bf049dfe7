"""A plan survives its file."""

import json
import sys

import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.pipeline import Plan


def test_plan_survives_a_file(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    assert Plan.from_json(json.loads(path.read_text())) == plan


def test_json_has_the_documented_keys(plan):
    data = plan.to_json()
    documented = sys.modules[Plan.__module__].__doc__
    assert f'"format": "{data["format"]}"' in documented
    parts = [data, data["costs"], data["prediction"], *data["tasks"], *data["baselines"]]
    for key in {key for part in parts for key in part}:
        assert f'"{key}"' in documented


def test_file_of_another_format_is_refused(plan):
    with pytest.raises(PlanningError, match="format is 'jaxmux.schedule/2'"):
        Plan.from_json(plan.schedule.to_json())
    data = plan.to_json()
    del data["shape"]
    with pytest.raises(PlanningError, match="lacks 'shape'"):
        Plan.from_json(data)
