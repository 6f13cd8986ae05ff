"""Conversations and queries to prompts: Jinja chat templates, and Inferflow's template language."""

from jinfer.template.chat import ChatTemplate, find_chat_template
from jinfer.template.errors import TemplateError
from jinfer.template.prompt import PromptTemplate

__all__ = ["ChatTemplate", "PromptTemplate", "TemplateError", "find_chat_template"]
