import csv
import json

import pytest
import torch

from app.inference.output import accuracy_line, format_confusion, format_pictures, to_csv, to_json

PROBABILITIES = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.012346, 0.987654]])
CLASSES = ["no", "maybe", "yes"]


def test_confusion_matrix_counts_mistakes(predictions):
    assert predictions.mistakes.tolist() == [False, False, False, True, False, True]
    assert predictions.confusion.tolist() == [[2, 0, 0], [0, 1, 1], [1, 0, 1]]
    assert accuracy_line(predictions) == "66.67% of 6 images right, 2 wrong"
    assert format_confusion(predictions).splitlines() == [
        "is             cat  a long n       dog  <- predicted",
        "cat              2         .         .",
        "a long n         .         1         1",
        "dog              1         .         1",
    ]


def test_csv_has_a_line_an_image(predictions):
    rows = list(csv.reader(to_csv(predictions).splitlines()))
    assert rows[0] == ["index", "label", "predicted", "probability"]
    assert rows[4] == ["3", "a long name", "dog", "0.600000"]
    assert len(rows) == 7


def test_json_has_accuracy_and_confusion_matrix(predictions):
    about = json.loads(to_json(predictions, "pets"))
    assert about["accuracy"] == pytest.approx(4 / 6)
    assert about["confusion"] == [[2, 0, 0], [0, 1, 1], [1, 0, 1]]
    assert (about["dataset"], about["images"], about["wrong"]) == ("pets", 6, 2)


def test_pictures_format_as_table():
    text = format_pictures(["a.png", "longer.png"], PROBABILITIES, CLASSES, "table")
    assert text.splitlines() == [
        "a.png       no    50.00%",
        "longer.png  yes   98.77%",
    ]


def test_pictures_format_as_csv():
    text = format_pictures(["a, b.png", "longer.png"], PROBABILITIES, CLASSES, "csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert rows[0] == {"file": "a, b.png", "predicted": "no", "probability": "0.500000"}
    assert [row["predicted"] for row in rows] == ["no", "yes"]


def test_pictures_format_as_json():
    text = format_pictures(["ä.png", "longer.png"], PROBABILITIES, CLASSES, "json")
    first, second = json.loads(text)
    assert (first["file"], first["predicted"], first["probability"]) == ("ä.png", "no", 0.5)
    assert second["probabilities"] == {"no": 0.0, "maybe": 0.012346, "yes": 0.987654}
