from contextlib import closing

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.tracking import Tracker


def test_scalars_are_read_back(tmp_path):
    with closing(Tracker(tmp_path)) as tracker:
        tracker.scalars(10, {"loss/train": 0.5, "learning_rate": 0.01})
        tracker.scalars(20, {"loss/train": 0.25})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss/train", "learning_rate"}
    points = [(point.step, point.value) for point in events.Scalars("loss/train")]
    assert points == [(10, 0.5), (20, 0.25)]
