"""Tool parsers and reasoning parsers, which read streamed text incrementally.

The parser of a format is a generator that pauses where it needs more text (`ToolCallParser` runs
it). So it reads like a parser of a whole text, and its result does not depend on how the text is
split into pieces.

- `incremental_reader`, `output_deltas`: a generator's input, streamed JSON, and its output
- `json_calls`: calls in JSON
- `call_format`: the interface of a format, and building blocks of grammars
- `json_formats`, `tag_formats`, `harmony`: the formats, each with the grammar of its calls
- `parser_registry`: the table of formats, the formats of reasoning, and their selection by template
- `template_shape`: earlier calls as a template reads them; tools for templates without them
"""
