"""Tokenizers read from GGUF files against SentencePiece itself, and the BOS the file asks for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.data.special_tokens import text_prefix
from headrace.errors import ConfigError
from headrace.models.gguf_tokenizer import SPACE, Vocabulary, repair_gguf_tokenizer

TEXT = Path(gguf.__file__).with_name("constants.py").read_text(encoding="utf-8")[:60_000]
SENTENCES = [
    "The weather in Natalia's town was surprisingly warm, although nobody had expected it.",
    "tokenizer scores and merges of the general architecture",
    "two  spaces,   three    four\n\nand a new line",
    "unknown: 你 🙂",
]


USER_DEFINED = ["\n\n", "\n", "  ", "   "]


@pytest.fixture(scope="module")
def processor() -> Any:
    """A SentencePiece BPE model trained on source text, with byte fallback and no prefix space (as Gemma's)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=[s.replace(" ", SPACE) for s in USER_DEFINED],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def raw_pieces(processor: Any) -> list[str]:
    """Pieces by id; user-defined ones with plain spaces, as converters write them."""
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    plain = {s.replace(" ", SPACE): s for s in USER_DEFINED}
    return [plain.get(p, p) for p in pieces]


def write_gguf(
    path: Path, processor: Any, *, add_bos: bool | None = True, model: str = "llama"
) -> dict[str, float]:
    """The vocabulary as converters write it: pieces, scores, kinds of token."""
    ids = range(processor.vocab_size())
    pieces = raw_pieces(processor)
    scores = [processor.get_score(i) for i in ids]
    kinds = []
    for i in ids:
        control, user = processor.is_control(i), pieces[i] in USER_DEFINED
        kinds.append(
            3
            if control
            else 2
            if processor.is_unknown(i)
            else 6
            if processor.is_byte(i)
            else 4
            if user
            else 1
        )
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_tokenizer_model(model)
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_add_space_prefix(False)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(zip(pieces, scores, strict=True))


def wrong_tokenizer(scores: dict[str, float]) -> Any:
    """What transformers 5.17 makes of such a file: a Unigram model over scores that only rank merges; no BOS."""
    backend = Tokenizer(models.Unigram(list(scores.items()), unk_id=3, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def test_pieces_are_sentencepieces_own(tmp_path: Path, processor: Any) -> None:
    scores = write_gguf(tmp_path / "m.gguf", processor)
    tokenizer = wrong_tokenizer(scores)
    wanted = [processor.encode(s) for s in SENTENCES]
    assert [tokenizer(s, add_special_tokens=False).input_ids for s in SENTENCES] != wanted
    repair_gguf_tokenizer(tokenizer, tmp_path / "m.gguf")
    assert [tokenizer(s, add_special_tokens=False).input_ids for s in SENTENCES] == wanted
    assert [tokenizer.decode(ids) for ids in wanted] == SENTENCES
    before = tokenizer.backend_tokenizer.to_str()
    repair_gguf_tokenizer(tokenizer, tmp_path / "m.gguf")
    assert tokenizer.backend_tokenizer.to_str() == before


def test_the_reference_is_sentencepieces_algorithm(processor: Any) -> None:
    pieces = raw_pieces(processor)
    kinds = {p: 4 if p in USER_DEFINED else 1 for p in pieces}
    scores = {p: processor.get_score(i) for i, p in enumerate(pieces)}
    for sentence in SENTENCES:
        assert Vocabulary(scores, kinds, space_prefix=False).encode(sentence) == processor.encode(sentence)


def test_what_cannot_be_made_right_is_refused(tmp_path: Path, processor: Any) -> None:
    scores = write_gguf(tmp_path / "m.gguf", processor)
    tokenizer = wrong_tokenizer(scores)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ConfigError, match=r"model\.path: the tokenizer in .* set model\.tokenizer"):
        repair_gguf_tokenizer(tokenizer, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("flag", "model", "adds"),
    [
        (True, "llama", True),
        (False, "llama", False),
        (None, "llama", True),
        (None, "gpt2", False),
        (True, "gemma4", False),
    ],
)
def test_the_file_says_whether_bos_is_added(
    tmp_path: Path, processor: Any, flag: bool | None, model: str, adds: bool
) -> None:
    tokenizer = wrong_tokenizer(write_gguf(tmp_path / "m.gguf", processor, add_bos=flag, model=model))
    for _ in range(2):  # a second repair changes nothing
        repair_gguf_tokenizer(tokenizer, tmp_path / "m.gguf")
        assert text_prefix(tokenizer) == ((2,) if adds else ())
