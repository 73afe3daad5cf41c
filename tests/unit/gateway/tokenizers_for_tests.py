"""Small real tokenizers, made in memory: byte-level BPE (GPT style) and SentencePiece style with byte fallback."""

from functools import cache

from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gateway.tokenizer import HuggingFaceTokenizer

END = "<|end|>"
TEXT = [
    "def f(x): return x + 1",
    "the stop string stops here. END",
    "naïve café 😀 हिन्दी 日本語 ☃️ e\u0301",
    "a b c aa ab abc",
]


def _wrap(fast: Fast) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END, bos_token=END))


@cache
def byte_level() -> HuggingFaceTokenizer:
    """Every byte is a token, so random ids spell broken UTF-8."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(TEXT, trainer)
    return _wrap(fast)


@cache
def sentence_piece() -> HuggingFaceTokenizer:
    """Words with a blank mark in front, unknown characters as bytes; decoding drops a leading blank."""
    words = ["▁the", "▁cat", "▁sat", "s", "▁", "a", "b", "."]
    pieces = [END, "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    fast = Fast(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([END])
    return _wrap(fast)
