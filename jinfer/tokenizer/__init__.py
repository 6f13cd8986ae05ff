"""Tokenizers: text to token ids and back, from every file format of checkpoints."""

from jinfer.tokenizer.detokenizer import Detokenizer
from jinfer.tokenizer.load import load_tokenizer
from jinfer.tokenizer.tokenizer_base import SpecialTokens, Tokenizer, TokenizerError

__all__ = ["Detokenizer", "SpecialTokens", "Tokenizer", "TokenizerError", "load_tokenizer"]
