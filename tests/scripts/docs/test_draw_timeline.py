"""The picture of scripts.docs.draw_timeline: its bars end when the planner says that a schedule ends."""

import pytest
from matplotlib.figure import Figure

from scripts.docs import draw_timeline


def test_bars_end_with_the_planned_pass(tmp_path):
    plans = draw_timeline.plans_of(65536, 0.05)
    assert list(plans) == list(draw_timeline.SCHEDULE_NAMES)
    for name, plan in plans.items():
        axes = Figure().subplots()
        draw_timeline.draw(axes, name, plan)
        ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
        assert max(ends) == pytest.approx(1e3 * plan.forward.seconds)
    out = tmp_path / "new" / "timeline.png"
    draw_timeline.main(["--tokens", "65536", "--out", str(out)])
    assert out.stat().st_size > 10_000
