"""The tokenizer both demo models share: byte-level BPE, so every UTF-8 text survives a round trip."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rootward import demo

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
MAX_LENGTH = 1024
CHAT_TEMPLATE = demo.paths().target / "chat_template.jinja"  # messages as comments, answers as code

# Digits stand alone; a word takes the one sign before it (" x", ".x", "_x"); line breaks take the indentation that
# follows, because in Python "newline and eight spaces" is one decision. What no branch matches stays as it is.
PATTERN = r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\n+ *|\s+(?!\S)|\s+"


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Learn `vocab_size` tokens from `texts`: 1 special, 256 bytes, the rest merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )


def load(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder."""
    return PreTrainedTokenizerFast.from_pretrained(folder)
