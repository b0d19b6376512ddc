"""Which folder a model's name means, and what is said of a name that means none."""

from pathlib import Path

import pytest

from minfer.effects.cli.main import main
from minfer.effects.setup.folders import bundled_folder, model_folder
from minfer.values.checks import ConfigError
from tests.effects.tiny_model import write_checkpoint


def test_no_name_means_the_model_that_comes_along() -> None:
    assert model_folder(None) == bundled_folder()
    assert (bundled_folder("draft") / "config.json").is_file()
    with pytest.raises(ConfigError, match="the bundled model is missing; install"):
        bundled_folder("another")


def test_a_folder_means_itself(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "model.gguf").write_bytes(b"GGUF")  # beside what is read
    assert model_folder(str(folder)) == folder


def test_a_gguf_file_means_itself(tmp_path: Path) -> None:
    path = tmp_path / "MODEL.GGUF"
    path.write_bytes(b"GGUF")
    assert model_folder(str(path)) == path


def test_a_gguf_file_that_is_not_there_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "x", "--model", "no/model-Q4_K_M.gguf"]) == 2
    err = capsys.readouterr().err
    assert "there is no such file; give the path of a GGUF file here" in err
    assert err.count("\n") == 1


def test_a_folder_of_gguf_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=f"name one of them, such as '{path}'"):
        model_folder(str(tmp_path))


def test_a_file_means_the_folder_that_it_is_in(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="is a file; give the folder that it is in"):
        model_folder(str(folder / "model.safetensors"))


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 5000])
def test_a_name_that_is_too_long_is_reported(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["plan", "--model", name]) == 2
    err = capsys.readouterr().err
    assert "File name too long; give the path of a Hugging Face checkpoint" in err
    assert len(err) < 1000
