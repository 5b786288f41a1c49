import threading
import time
from contextlib import closing

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.config.errors import RunError
from app.runs.tracker import Tracker, quiet_writer_thread


def test_scalars_are_read_back(tmp_path):
    with closing(Tracker(tmp_path)) as tracker:
        tracker.scalars(10, {"loss/train": 0.5, "learning_rate": 0.01})
        tracker.scalars(20, {"loss/train": 0.25})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss/train", "learning_rate"}
    points = [(point.step, point.value) for point in events.Scalars("loss/train")]
    assert points == [(10, 0.5), (20, 0.25)]


def test_points_after_the_checkpoint_are_purged(tmp_path):
    with closing(Tracker(tmp_path)) as tracker:
        tracker.scalars(1, {"x": 1.0})
        tracker.flush()
        tracker.scalars(2, {"x": 2.0})
    with closing(Tracker(tmp_path, 1)) as tracker:
        tracker.scalars(2, {"x": 3.0})
        tracker.flush()
    with closing(Tracker(tmp_path, 1)) as tracker:  # resume again from the same checkpoint
        tracker.scalars(2, {"x": 4.0})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("x")] == [(1, 1.0), (2, 4.0)]


def values(folder, name="x"):
    """Return the steps and values of a curve in TensorBoard."""
    events = EventAccumulator(str(folder)).Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


@pytest.mark.parametrize("seconds", [-86400, 0, 86400])
def test_curves_are_in_the_order_of_writing(tmp_path, monkeypatch, seconds):
    """If the clock is set back, if it stands still, and if it goes on."""
    now = time.time()
    clock = [now]
    monkeypatch.setattr("time.time", lambda: clock[0])
    expected = []
    for start in range(
        0, 60, 5
    ):  # more than ten files of one second: TensorBoard reads 10 before 9
        with closing(Tracker(tmp_path, start)) as tracker:
            for step in range(start + 1, start + 8):
                tracker.scalars(step, {"x": float(step)})
                if step == start + 5:
                    tracker.flush()
        expected += range(start + 1, start + 6)
        clock[0] += seconds
    assert values(tmp_path)[:60] == [(step, step) for step in expected]


def test_full_disk_raises(tmp_path, limited_files):
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        (tmp_path / "file").touch()
        Tracker(tmp_path / "file" / "x")
    with quiet_writer_thread(), closing(Tracker(tmp_path)) as tracker:
        tracker.scalars(1, {"x": 1.0})
        with limited_files(), pytest.raises(RunError, match="cannot be written: File too large"):
            tracker.scalars(2, {"x": 1.0})
            tracker.flush()


def test_full_disk_prints_nothing(tmp_path, monkeypatch, limited_files):
    """Expect no traceback of TensorBoard's thread, as the next call raises its error."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: printed.append(failure.exc_type))
    with quiet_writer_thread(), limited_files(), pytest.raises(RunError, match="File too large"):
        Tracker(tmp_path)
    assert printed == []
    with quiet_writer_thread():
        threading.excepthook(threading.ExceptHookArgs((ValueError, None, None, None)))
    assert printed == [ValueError]
