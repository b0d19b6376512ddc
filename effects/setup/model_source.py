"""Where a model's files come from: its checkpoint, its tokenizer, and changes to its
configuration that the settings ask for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import model_folder
from minfer.sampling.params import ADVISED, ROW_FIELDS, SamplingParams
from minfer.values.checks import ConfigError, ParameterError

GENERATION_FILE: Final = "generation_config.json"
FROM_MODEL: Final = "auto"  # of `generation_config`: what comes with the model
NO_ADVICE: Final = "vllm"  # of `generation_config`: none, as in vLLM


def checkpoint_folder(args: EngineArgs) -> Path:
    """Returns the folder of a model's checkpoint, downloaded if necessary. Raises
    ConfigError.
    """
    model = _with_revision(args.model, args.revision, "model", "revision")
    return model_folder(model, args.download_dir)


def tokenizer_folder(args: EngineArgs, folder: Path) -> Path:
    """Returns the folder of a model's tokenizer: by default the checkpoint's `folder`.
    Raises ConfigError.
    """
    if args.tokenizer is None:
        if args.tokenizer_revision not in (None, args.revision):
            raise ConfigError(
                "tokenizer_revision is of another tokenizer than the model's; name that "
                "by tokenizer, or leave it out"
            )
        return folder
    name = _with_revision(
        str(args.tokenizer), args.tokenizer_revision, "tokenizer", "tokenizer_revision"
    )
    return model_folder(name, args.download_dir)


def _with_revision(
    model: str | None, revision: str | None, setting: str, revision_setting: str
) -> str | None:
    """Returns a name of the hub with its revision. Raises ConfigError for a revision of
    anything else.
    """
    if revision is None:
        return model
    if model is None or Path(model).exists() or "@" in str(model):
        raise ConfigError(
            f"{revision_setting} {revision!r} is of a checkpoint on the hub, named "
            f"without an @, and {setting} is {model!r}; leave one of both out"
        )
    return f"{model}@{revision}"


def with_overrides(
    config: Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns a checkpoint's configuration with the changes of `hf_overrides`; objects in
    it are merged.
    """
    merged = dict(config)
    for name, value in (overrides or {}).items():
        own = merged.get(name)
        is_object = isinstance(own, Mapping) and isinstance(value, Mapping)
        merged[name] = with_overrides(own, value) if is_object else value  # type: ignore[arg-type]  # `own` is a mapping, then
    return merged


def generation_file(args: EngineArgs, folder: Path) -> Path | None:
    """Returns the path of the file with the recommended sampling parameters, which need
    not exist; None: none are used. Raises ConfigError.
    """
    if args.generation_config == NO_ADVICE:
        return None
    if args.generation_config == FROM_MODEL:
        return folder / GENERATION_FILE
    path = Path(args.generation_config) / GENERATION_FILE
    if not path.is_file():
        raise ConfigError(
            f"generation_config: there is no file {str(path)!r}; give a folder that has "
            f"one, {FROM_MODEL!r} for the model's own, or {NO_ADVICE!r} for none"
        )
    return path


def check_generation_overrides(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the sampling parameters of `override_generation_config`. Raises
    ConfigError.
    """
    given = dict(overrides or {})
    for name, value in given.items():
        if name not in ADVISED:
            raise ConfigError(
                f"override_generation_config: {name!r} is not supported; it may set "
                f"{', '.join(ADVISED)}"
            )
        whole = ROW_FIELDS[name].word == "int32"
        if isinstance(value, float) and whole and value.is_integer():
            given[name] = int(value)
    try:
        SamplingParams(**given)
    except ParameterError as error:
        raise ConfigError(f"override_generation_config: {error}") from None
    return given
