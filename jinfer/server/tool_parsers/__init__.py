"""Tool calling and reasoning parsers: one module per tool-call format, read incrementally.

The parser of a format is a generator that pauses wherever it needs more text (`ToolCallParser` runs
it). So it reads like a parser of a whole text, and its result does not depend on how the text is
split into pieces.

- `incremental_reader`, `parsed_deltas`: a generator's input and output
- `incremental_json`, `json_calls`, `xml_tags`: streamed JSON, and calls in JSON or in tags
- `hermes`, `qwen_coder`, `llama`, `mistral`, `deepseek`, `dsml`, `harmony`, and in `json_list`
Granite, Phi and Command R: the formats, each with the grammar of its calls
- `reasoning`: reasoning between marks
- `parser_registry`: the table of formats, and which of them a chat template uses
- `lark_grammar`: building blocks of grammars
- `template_shape`, `prompted_tools`: earlier calls as a template reads them; tools for templates
without them
"""
