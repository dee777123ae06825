"""The Modelfile with which Ollama runs an exported GGUF file as a chat model."""

from __future__ import annotations

from niels_gpt.chat.formats import template_format
from niels_gpt.chat.own_formats import ROLE_NAMES
from niels_gpt.tokenizer import SPECIAL_TOKENS, AnyTokenizer, ByteTokenizer, ForeignTokenizer


def modelfile(gguf: str, tokenizer: AnyTokenizer, T: int, *, learned_chat: bool = False) -> str:
    """Return a Modelfile for the GGUF file of this name, in the same folder.

    Ollama has Go templates: it does not render the Jinja template of the file. A template of others is not written:
    Ollama has those of well-known models. learned_chat: as for `hugging_face.write_hf`.
    """
    lines = [f"FROM ./{gguf}", f"PARAMETER num_ctx {T}", "PARAMETER temperature 0.7"]
    if isinstance(tokenizer, ForeignTokenizer):
        chat = template_format(tokenizer) if learned_chat else None
        if chat is None or not chat.is_default:
            return "\n".join(lines) + "\n"
        end = tokenizer.token_bytes[chat.reply_ends[0]].decode("utf-8")
        if chat.stops:  # a transcript; llama.cpp itself writes the start of the document
            turn, prompt = '{{ .Role }}: {{ .Content }}{{ if eq .Role "assistant" }}END{{ end }}\n', "assistant:"
        else:
            turn, prompt = "<|im_start|>{{ .Role }}\n{{ .Content }}END\n", "<|im_start|>assistant\n"
        template, stops = "{{- range .Messages }}" + turn.replace("END", end) + "{{ end }}" + prompt, [end]
    elif isinstance(tokenizer, ByteTokenizer):
        template = "{{- range .Messages }}{{ .Role }}: {{ .Content }}\n{{ end }}assistant: "
        stops = [f"{role}: " for role in ROLE_NAMES]
    else:
        system, user, assistant, end = SPECIAL_TOKENS
        role = '{{ if eq .Role "system" }}' + system + '{{ else if eq .Role "user" }}' + user + "{{ else }}" + assistant
        turn = role + "{{ end }}{{ .Content }}" + end
        template, stops = "{{- range .Messages }}" + turn + "{{ end }}" + assistant, [end]
    lines += [f'TEMPLATE """{template}"""', *(f'PARAMETER stop "{stop}"' for stop in stops)]
    return "\n".join(lines) + "\n"
