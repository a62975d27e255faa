"""Text in and out of the engine: tokenizer, chat template, incremental detokenizer, stops."""

from __future__ import annotations

from hotbatch.text.chat_template import ChatTemplate
from hotbatch.text.detokenizer import IncrementalDetokenizer
from hotbatch.text.stop_strings import StopStringMatcher
from hotbatch.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopStringMatcher", "Tokenizer"]
