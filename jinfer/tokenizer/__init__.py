"""Text to token ids and back, from every kind of file a checkpoint brings."""

from jinfer.tokenizer.detokenizer import Detokenizer
from jinfer.tokenizer.load import load_tokenizer
from jinfer.tokenizer.tokenizer_base import SpecialTokens, Tokenizer, TokenizerError

__all__ = ["Detokenizer", "SpecialTokens", "Tokenizer", "TokenizerError", "load_tokenizer"]
