"""Tiny models drawn from a seed, in every form in which a checkpoint may come: which
files hold the weights under which names, and how configs say the same thing.

Beside each checkpoint a plain one is written, which transformers reads: it has the same
tensors and tokenizer, and its configs say in the usual form what the others mean.
"""

import shutil
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
import transformers
from attrs import frozen
from safetensors.torch import save_file

from tests.effects.checkpoints.tokenizers_made import write_json, write_tokenizer

VOCABULARY: Final = 420  # more than any of the tokenizers has
SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": None,
}
TYPES: Final = ("qwen2", "qwen3", "llama", "mistral")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Tensors = dict[str, torch.Tensor]
# What is done to tensors before they are written; those below need a tied model.
NAMES: Final = ("as they are", "bare", "doubled")
TIED: Final = ("head alone", "both", "head of another")
FILES: Final = (
    "one file",
    "shards",
    "shards in a folder",
    "an index that leaves a tensor out",
    "an index that lists a head that is not there",
    "a tensor in another shard",
    "a tensor in two shards",
    "a tensor of no model, not in the index",
    "pickles beside it",
    "a broken index beside it",
    "an index of missing files beside it",
)
REFUSED: Final = {
    "one file beside a whole index": "holds both model.safetensors and",
    "two shards with other values": "differs from",
    "a tensor of no model": "unexpected tensor",
    "a tensor that is missing": "missing tensor|lacks",
    "a file that ends early": "truncated or corrupt",
}


@frozen
class Made:
    """A checkpoint; `refused` is what minfer says of one that it does not load."""

    folder: Path
    plain: Path  # what transformers reads
    form: str
    refused: str | None


def make(folder: Path, seed: int) -> Made:
    """Write the checkpoint of a seed, and its plain copy."""
    draw = Random(seed)
    odd, plain = folder / "odd", folder / "plain"
    odd.mkdir()
    write_tokenizer(odd, draw)
    shutil.copytree(odd, plain)
    kind, tied = draw.choice(TYPES), draw.random() < 0.5
    config = _config(kind, tied)
    write_json(plain / "config.json", config)
    write_json(odd / "config.json", _written_otherwise(config, draw))
    if draw.random() < 0.7:
        _write_advice(odd, plain, draw)
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    tensors = dict(
        auto.from_config(transformers.AutoConfig.for_model(**config)).state_dict()
    )
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if draw.random() < 0.3:
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    plain_tensors = tensors if not tied else _without(tensors, HEAD)
    save_file(plain_tensors, plain / SINGLE, {"format": "pt"})
    names = draw.choice([*NAMES, *TIED] if tied else NAMES)
    files = draw.choice([*FILES, *REFUSED] if seed % 4 == 0 else FILES)
    written, refused = _renamed(tensors, names, tied=tied)
    _write_files(odd, written, files, draw)
    return Made(odd, plain, f"{kind}, {names}, {files}", REFUSED.get(files, refused))


def _config(kind: str, tied: bool) -> dict[str, Any]:
    config: Any = transformers.AutoConfig.for_model(kind, **SIZES)
    fields: dict[str, Any] = config.to_dict()
    model: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = model.__name__
    fields |= {"tie_word_embeddings": tied, "architectures": [name], "eos_token_id": 7}
    return {key: value for key, value in fields.items() if not key.startswith("_")}


def _written_otherwise(config: dict[str, Any], draw: Random) -> dict[str, Any]:
    """The same config, as other tools and versions write it."""
    emitted = dict(config)
    for name in SIZES:
        if isinstance(emitted[name], int) and draw.random() < 0.2:
            emitted[name] = float(emitted[name])
    (name,) = config["architectures"]
    base = [name.replace("ForCausalLM", "Model")]
    emitted["architectures"] = draw.choice([[name], None, [], name, base])
    if draw.random() < 0.3:
        del emitted["architectures"]
    emitted.pop("dtype", None)
    emitted[draw.choice(["dtype", "torch_dtype"])] = draw.choice(
        ["float32", "float64", "float8", None, "bfloat16", "torch.float16"]
    )
    rope = emitted.pop("rope_parameters")
    if draw.random() < 0.5:
        emitted["rope_theta"] = int(rope["rope_theta"])
        emitted["rope_scaling"] = None
    else:
        emitted["rope_parameters"] = {**rope, "rope_theta": int(rope["rope_theta"])}
    if not emitted["tie_word_embeddings"] and draw.random() < 0.5:
        del emitted["tie_word_embeddings"]
    for name in ("transformers_version", "use_cache", "pad_token_id", "layer_types"):
        if draw.random() < 0.3:
            emitted.pop(name, None)
    if draw.random() < 0.2:
        emitted["quantization_config"] = None
    return emitted


def _write_advice(odd: Path, plain: Path, draw: Random) -> None:
    """generation_config.json, with values out of range that the plain one has not."""
    ends = draw.sample(range(8, VOCABULARY), 40)
    advice: dict[str, Any] = {"eos_token_id": [7, *ends]}
    if draw.random() < 0.6:
        advice["repetition_penalty"] = draw.choice([1.8, 1.1, 0.5, 2.0])
    if draw.random() < 0.5:
        advice["do_sample"] = draw.choice([True, False])
    write_json(plain / "generation_config.json", advice)
    odder = dict(advice)
    for name, values in (
        ("top_k", (50.0, 50, -7, "all", 1e30)),
        ("top_p", (0.0, 0.9, 1.5, True)),
        ("min_p", (0.1, -1, float("nan"))),
        ("temperature", (0.7, 0.0, -1, 1000, None)),
        ("typical_p", (1.0, 0)),
        ("presence_penalty", (9, "none")),
    ):
        if draw.random() < 0.4:
            odder[name] = draw.choice(values)
    if draw.random() < 0.3:
        odder["eos_token_id"] = [7.0, *map(float, ends)]
    if advice.get("repetition_penalty") == 2.0:
        odder["repetition_penalty"] = 2
    if "repetition_penalty" not in advice and draw.random() < 0.3:
        odder["repetition_penalty"] = draw.choice([0, -1.0, 7.5, float("inf")])
    write_json(odd / "generation_config.json", odder)


def _renamed(tensors: Tensors, naming: str, *, tied: bool) -> tuple[Tensors, str | None]:
    """The tensors under other names, and what minfer says if it does not take them."""
    if naming == "bare":
        tensors = {name.removeprefix("model."): t for name, t in tensors.items()}
        return _without(tensors, HEAD) if tied else tensors, None
    if naming == "doubled":
        tensors = {f"model.{name}": t for name, t in tensors.items()}
        return _without(tensors, f"model.{HEAD}") if tied else tensors, None
    if naming == "head alone":
        return _without(tensors, EMBED), None
    if naming == "head of another":
        return {**tensors, HEAD: tensors[HEAD] + 1}, "although config.json ties them"
    if naming == "both" or not tied:
        return tensors, None
    return _without(tensors, HEAD), None


def _without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def _write_files(folder: Path, tensors: Tensors, form: str, draw: Random) -> None:
    names = sorted(tensors)
    odd_name = draw.choice(names)
    if draw.random() < 0.2:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    if form == "a tensor of no model":
        tensors["model.layers.0.extra.weight"] = torch.ones(4)
    if form == "a tensor that is missing":
        odd_name = next(name for name in names if "layers.1" in name)
        tensors = _without(tensors, odd_name)
    if "beside" in form or form in ("one file", "a file that ends early"):
        save_file(tensors, folder / SINGLE, {"format": "pt"})
    else:
        _write_shards(folder, tensors, form, odd_name, draw)
    if form == "a file that ends early":
        data = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(data[: len(data) // 2])
    if form == "pickles beside it":
        (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    if form == "a broken index beside it":
        (folder / INDEX).write_text(draw.choice(["{", "[]", "{}", '{"weight_map": {}}']))
    if form == "an index of missing files beside it":
        write_json(
            folder / INDEX, {"weight_map": dict.fromkeys(names, "gone.safetensors")}
        )
    if form == "one file beside a whole index":
        _write_shards(folder, tensors, "shards", odd_name, draw)


def _write_shards(
    folder: Path, tensors: Tensors, form: str, odd_name: str, draw: Random
) -> None:
    """Several files and their index, which is not quite right in some forms."""
    place = "weights/" if form == "shards in a folder" else ""
    (folder / place).mkdir(exist_ok=True)
    files = [f"{place}model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    file_of = {name: draw.choice(files) for name in tensors}
    index = dict(file_of)
    shards: dict[str, Tensors] = {file: {} for file in file_of.values()}
    for name, file in file_of.items():
        shards[file][name] = tensors[name]
    other_file = next(
        (file for file in shards if file != file_of.get(odd_name)), files[0]
    )
    if form == "an index that leaves a tensor out" and len(shards[file_of[odd_name]]) > 1:
        del index[odd_name]
    if form == "an index that lists a head that is not there":
        index.setdefault(HEAD, other_file)
    if form == "a tensor in another shard":
        index[odd_name] = other_file
    if form == "a tensor in two shards":
        shards[other_file][odd_name] = tensors[odd_name].clone()
    if form == "two shards with other values":
        shards[other_file][odd_name] = tensors[odd_name] + 1
    if form == "a tensor of no model, not in the index":
        shards[other_file]["model.more"] = torch.ones(1)
    for file, shard in shards.items():
        save_file(shard, folder / file, {"format": "pt"})
    write_json(folder / INDEX, {"metadata": {"total_size": 1}, "weight_map": index})
