"""Convert between chat messages and the text or ids that a model continues."""

from niels_gpt.chat.transcript import extract_assistant_reply, format_chat

__all__ = ["extract_assistant_reply", "format_chat"]
