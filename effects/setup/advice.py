"""A model's recommended sampling parameters, in its generation_config.json.

The file never stops a model from loading: `do_sample: false` means temperature 0, whole
floats are taken as whole numbers, and invalid values are left out with one warning. A
user's values have priority. transformers' `generate` reads more fields than minfer:
fields of `NOT_APPLIED` change its texts, and `minfer verify` names those that a
checkpoint sets.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minfer.effects.models.config_reader import whole_to_int
from minfer.effects.models.json_files import read_optional
from minfer.records.request import ParameterError, SamplingParams
from minfer.sampling.params import ADVISED, ROW_FIELDS

# transformers' fields that minfer does not apply, and their values without effect.
NOT_APPLIED: Final[Mapping[str, tuple[Any, ...]]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "max_length": (20,),
    "max_new_tokens": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
}
_log = logging.getLogger("minfer.model")


def recommended_params(path: Path, *, warns: bool = True) -> Mapping[str, float]:
    """Returns the sampling parameters in generation_config.json. Raises CorruptFileError
    for a file that is not JSON.
    """
    file = read_optional(path)
    params: dict[str, float] = {}
    left_out = []
    for name in ADVISED:
        value = file.get(name)
        if ROW_FIELDS[name].word == "int32":
            value = whole_to_int(value)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
            params[name] = value
        except ParameterError as error:
            left_out.append(str(error))
    if file.get("do_sample") is False:
        params["temperature"] = 0
    if left_out and warns:
        _log.warning("%s: left out what cannot be used: %s", path, "; ".join(left_out))
    return params


def unapplied_fields(path: Path) -> list[str]:
    """Returns the fields of generation_config.json that transformers applies and minfer
    does not.
    """
    file = read_optional(path)
    return [
        name
        for name, no_effect_values in NOT_APPLIED.items()
        if file.get(name) is not None and file[name] not in no_effect_values
    ]
