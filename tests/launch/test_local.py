"""The small decisions of a run on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.core.events import Event, Launched, WeightsLive
from etude.core.stages import RopeScalingConfig
from etude.launch.local import RunDirectory, seconds_at_work
from etude.model.files import hf_state_dict, write_directory
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.store.codec import Stamped
from etude.store.runs import Run
from etude.train.start import initial_model
from etude.trainer.data import check_fits
from etude.trainer.prepare import pretrained_files
from tests.small_model import small_files


def test_pauses_do_not_count() -> None:
    times = [
        (10.0, True),
        (15.0, False),
        (18.0, False),
        (500.0, True),
        (501.0, False),
        (900.0, True),
    ]
    events: list[Stamped[Event]] = [
        Stamped(t, Launched(resumed=False) if launch else WeightsLive(version=1))
        for t, launch in times
    ]
    assert seconds_at_work(events) == 9.0
    assert seconds_at_work([]) == 0.0


def test_looking_for_a_checkpoint_makes_nothing(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path / "r")
    assert not place.has_checkpoint and list(tmp_path.iterdir()) == []
    Run.open(place.store).put_checkpoint("000001.000000", b"")
    assert place.has_checkpoint


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"embed_tokens", b"embed_tokenz"),
    ],
)
def test_a_damaged_model_is_named(tmp_path: Path, damage: object) -> None:
    files = small_files()
    write_directory(
        tmp_path,
        files,
        hf_state_dict(init_from_scratch(ModelConfig.from_json(files["config.json"]), 0)),
    )
    initial_model(tmp_path, files["config.json"], 0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(
        EtudeError, match=f"the model in {tmp_path} cannot be read .* fetch it again"
    ):
        initial_model(tmp_path, files["config.json"], 0)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    files, other = small_files(), small_files(vocab_size=310)
    write_directory(
        tmp_path,
        files,
        hf_state_dict(init_from_scratch(ModelConfig.from_json(files["config.json"]), 0)),
    )
    with pytest.raises(EtudeError, match="cannot be read"):
        initial_model(tmp_path, other["config.json"], 0)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_model_without_a_shape_is_named(tmp_path: Path, text: str) -> None:
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EtudeError, match=r"config\.json does not describe a model"):
        pretrained_files(str(tmp_path), 512)


def test_a_demonstration_must_fit() -> None:
    check_fits([([1] * 8, [True] * 8)], 8)
    with pytest.raises(
        EtudeError, match="a demonstration has 9 tokens, .* set model.max_context to 9 or more"
    ):
        check_fits([([1], [True]), ([1] * 9, [True] * 9)], 8)


def test_a_model_is_stretched_for_more_context(tmp_path: Path) -> None:
    files = small_files(context=128)
    write_directory(
        tmp_path,
        files,
        hf_state_dict(init_from_scratch(ModelConfig.from_json(files["config.json"]), 0)),
    )
    yarn = RopeScalingConfig(type="yarn", factor=4.0)

    def shape(max_context: int, stretch: RopeScalingConfig | None) -> ModelConfig:
        return ModelConfig.from_json(
            pretrained_files(str(tmp_path), max_context, stretch)["config.json"]
        )

    assert shape(512, None).max_position_embeddings == 128
    assert [shape(context, yarn).max_position_embeddings for context in (300, 512, 9999)] == [
        300,
        512,
        512,
    ]
    scaling = shape(300, yarn).rope_scaling
    assert scaling is not None and scaling.original_max_position_embeddings == 128
    assert (scaling.rope_type, scaling.factor) == ("yarn", 4.0)
    assert (
        initial_model(
            tmp_path, pretrained_files(str(tmp_path), 512, yarn)["config.json"], 0
        ).rope.shape[0]
        == 512
    )

    stretched = pretrained_files(str(tmp_path), 512, yarn)["config.json"]
    (tmp_path / "config.json").write_bytes(stretched)
    with pytest.raises(EtudeError, match="is stretched already"):
        pretrained_files(str(tmp_path), 1024, yarn)
