"""Token ids of minfer and of transformers, as `minfer verify` compares them."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minfer.effects.cli.verify.tokens import check_tokenizer
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer


def test_a_text_that_transformers_refuses_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = bundled_folder()
    reference = AutoTokenizer.from_pretrained(folder)

    def encode(_reference: object, _text: str) -> list[int]:
        raise RuntimeError("Unk token `<unk>` not found in the vocabulary")

    monkeypatch.setattr(PreTrainedTokenizerFast, "encode", encode)
    [check] = check_tokenizer(folder, Tokenizer(folder), reference)
    assert check.state == "fail"
    assert "is refused by transformers: Unk token" in str(check)
