"""Prompt templates: chat templates (Jinja), and Inferflow's template language."""

from jinfer.template.chat_template import ChatTemplate, find_chat_template
from jinfer.template.inferflow_template import PromptTemplate
from jinfer.template.template_errors import TemplateError

__all__ = ["ChatTemplate", "PromptTemplate", "TemplateError", "find_chat_template"]
