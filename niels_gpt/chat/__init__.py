"""Messages to the text a model continues, and back."""

from niels_gpt.chat.transcript import extract_assistant_reply, format_chat

__all__ = ["extract_assistant_reply", "format_chat"]
