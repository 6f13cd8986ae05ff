"""Text to token ids and back, from every kind of file a checkpoint brings."""

from jinfer.tokenizer.base import SpecialTokens, Tokenizer, TokenizerError
from jinfer.tokenizer.detokenizer import Detokenizer
from jinfer.tokenizer.load import load_tokenizer

__all__ = ["Detokenizer", "SpecialTokens", "Tokenizer", "TokenizerError", "load_tokenizer"]
