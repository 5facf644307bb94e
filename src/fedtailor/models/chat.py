"""Chat templates: how a conversation becomes a text. They mark what the assistant says."""

from __future__ import annotations

from ..errors import unknown

_ANSWER = "{% generation %}{{ message.content }}{{ END }}{% endgeneration %}"
TEMPLATES = {
    "alpaca": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        + _ANSWER.replace("END", "eos_token")
        + "{% elif message.role == 'system' %}{{ message.content }}\n\n"
        "{% else %}### Instruction:\n{{ message.content }}\n\n### Response:\n{% endif %}"
        "{% endfor %}"
    ),
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}"
        + _ANSWER.replace("END", "'<|im_end|>'")
        # a newline after a block is cut where templates are rendered
        + "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def chat_template(name: str) -> str:
    """Return the template of that name, or the Jinja template itself; InputError if it is neither.

    >>> "### Response:" in chat_template("alpaca")
    True
    """
    if "{" in name:
        return name
    if name not in TEMPLATES:
        raise unknown("model.chat_template", name, TEMPLATES)
    return TEMPLATES[name]
